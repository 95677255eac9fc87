"""Do the measurements measure: right kernels in bounds, wrong keys noticed, oracles and masks in agreement?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from harness.cli import main
from harness.measure import agreement, masks, sensitivity, tightness
from harness.measure.families import FAMILIES, ORDINARY, exact_case, make_case, split_evenly
from harness.measure.kernels import MODELS, Kernel, kernel, pack_mask
from harness.measure.tightness import EXACT_KINDS, Shape
from harness.subjects.base import SubjectError
from reference import oracle

SMALL = (Shape(4, 2, 96, 40, 32, 8),)


def damaged(by: float) -> Kernel:
    """A float model whose LSE is too high."""
    right = kernel("model")

    def attend(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right.attend(*args, **kwargs)  # type: ignore[arg-type]
        return out, lse + by

    return replace(right, attend=attend)


@pytest.mark.parametrize("name", ["model[sm90]", "model[triton]", "ours[triton]"])
def test_right_kernels_stay_in_their_bounds(name: str) -> None:
    rows = 8 * len(FAMILIES) * 8 if name != "ours[triton]" else 8 * 40
    found = tightness.measure(kernel(name), rows, shapes=SMALL)
    assert found.sound
    assert found.inexact == []
    assert found.rows == rows
    assert found.exact_cases == 3 * len(EXACT_KINDS)
    cells = [cell for row in found.cells.values() for cell in row.values() if cell.rows]
    assert sum(sum(cell.out_bins) for cell in cells) == rows
    assert all(sum(cell.out_bins) == sum(cell.lse_bins) == cell.rows for cell in cells)
    if name != "ours[triton]":
        for family in ORDINARY:
            assert max(cell.out_max for cell in found.cells[family].values()) >= 0.15


def test_a_wrong_kernel_is_not_called_sound() -> None:
    found = tightness.measure(damaged(1e-3), 800, shapes=SMALL)
    assert not found.sound
    assert max(cell.lse_max for row in found.cells.values() for cell in row.values()) > 10
    assert sum(cell.lse_bins[-1] for row in found.cells.values() for cell in row.values()) > 400


@pytest.mark.parametrize("shapes", [tightness.GPU_SHAPES, tightness.CPU_SHAPES, tightness.INTERPRETED_SHAPES])
def test_one_sweep_meets_every_family_chunk_count_and_shape(shapes: tuple[Shape, ...]) -> None:
    total = len(shapes) * len(FAMILIES) * len(tightness.CHUNKS)
    rows = sum(shape.n * shape.heads for shape in shapes) * len(FAMILIES) * len(tightness.CHUNKS)
    combinations = [entry[1:] for entry in tightness.plan(rows, shapes, seed=3)]
    assert len(combinations) == len(set(combinations)) == total
    half = {entry[1] for entry in tightness.plan(rows // 2, shapes, seed=0)}
    assert half == set(FAMILIES)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_exact_cases_are_exact_and_notice_one_bit(kind: str) -> None:
    case, lead = exact_case(kind, 1, n=4, heads=2, keys=50, dim=16, v_dim=6)
    model = kernel("model")
    for parts in (1, 3):
        segments = split_evenly(50, parts)
        exact = tightness.reference(case, model.numerics, segments)
        out, lse = model.run(case, segments)
        assert tightness.is_exact(case, lead, out, lse, exact)
        out.view(torch.int16)[2, 1, 3] += 1
        assert not tightness.is_exact(case, lead, out, lse, exact)
    with pytest.raises(ValueError, match="kind is 'other'"):
        exact_case("other", 1, n=4, heads=2, keys=50, dim=16, v_dim=6)


def test_masks_are_packed_as_the_kernels_read_them() -> None:
    allowed = torch.rand(5, 70, generator=torch.Generator().manual_seed(1)) < 0.5
    for reserve in (False, True):
        mask = pack_mask(allowed, reserve=reserve)
        assert mask.shape == (1, 128, 4)
        assert np.array_equal(masks.unpack(mask)[0, :5, :70], allowed.numpy())
        assert not masks.unpack(mask)[0, 5:].any()


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(SubjectError, match="no kernel is called 'theirs'"):
        kernel("theirs")
    assert kernel("model").name in MODELS


# sensitivity


def test_one_wrong_key_in_a_row_is_noticed_by_bound_and_read_out() -> None:
    found = sensitivity.measure(kernel("model"), 64, sizes=((256, 1024),), n=16, heads=2, dim=64, v_dim=16)
    assert found.met
    assert {cell.family for cell in found.cells} == set(sensitivity.FAMILIES)
    for cell in found.cells:
        assert cell.trials >= 64
        assert cell.accused == 0
        assert cell.named == cell.rows_read > 0
        assert cell.share >= 0.99


def test_a_bound_that_sees_nothing_misses_its_target() -> None:
    model = kernel("model")
    blind = replace(model, numerics=replace(model.numerics, eps_exp=0.1))
    found = sensitivity.measure(blind, 32, sizes=((256, 1024),), n=16, heads=2, dim=64, v_dim=16)
    assert not found.met
    assert max(cell.share for cell in found.cells) < 0.5
    assert all(cell.named == cell.rows_read for cell in found.cells)  # a read-out needs no bound


def test_exactly_one_key_is_wrong() -> None:
    case = make_case("flat", 1, n=6, heads=1, keys=40, topk=15, dim=8, v_dim=4)
    g = torch.Generator().manual_seed(3)
    for dropped, count in ((True, 14), (False, 16)):
        wrong = sensitivity.with_one_wrong_key(case, g, dropped=dropped)
        assert (wrong.allowed != case.allowed).sum(dim=1).tolist() == [1] * 6
        assert wrong.allowed.sum(dim=1).tolist() == [count] * 6


# agreement of oracles and of masks


def test_both_oracles_agree_with_each_other_and_with_sixty_digits() -> None:
    found = agreement.measure(40, 50)
    assert found.met
    assert (found.attend_cases, found.prefill_cases, found.spots) == (40, 40, 50)
    assert 0 < found.spot_out < 1
    assert 0 < found.attend_out < 1


def test_a_wrong_oracle_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oracle.allowed_matrix
    monkeypatch.setattr(agreement, "allowed_matrix", lambda rows, context: right(rows - (rows > 0).int(), context))
    assert not agreement.measure(8, 8).met


def test_global_and_remapped_masks_agree_on_a_thousand_batches() -> None:
    found = masks.measure(1000)
    assert found.wrong == []
    assert found.batches == 1000
    assert found.pieces > 5000
    assert found.bits > 5_000_000


@pytest.mark.parametrize("road", ["from_global_mask", "from_remapped_masks", "from_sets"])
def test_one_bit_of_difference_between_masks_is_named(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(masks, road)

    def wrong(batch: masks.Batch) -> masks.Bits:
        bits: masks.Bits = right(batch)
        biggest = max(bits, key=lambda x: x.size)
        biggest[0, 0] ^= True
        return bits

    monkeypatch.setattr(masks, road, wrong)
    found = masks.measure(3)
    assert found.wrong
    assert all("differ in row 0, key 0" in line for line in found.wrong)


# the commands


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tightness", "--rows", "400"], "largest err / tol of model[sm90]"),
        (["agreement", "--cases", "3", "--spots", "3"], "60 digits"),
        (["masks", "--batches", "5"], "5 batches"),
    ],
)
def test_commands_print_a_table_and_one_json_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["measure", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert words in result.output
    numbers = json.loads(result.output.strip().splitlines()[-1])
    assert numbers.get("met", numbers.get("sound")) is True


def test_commands_that_cannot_run_say_so() -> None:
    result = CliRunner().invoke(main, ["measure", "tightness", "--subject", "theirs"])
    assert result.exit_code == 2
    assert "no kernel is called 'theirs'" in result.output
