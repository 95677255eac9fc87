"""Is a mask builder judged by a launch of thousands of rows, and what is said of a wrong one? Small launches here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from harness.checks import case, stage_small
from harness.checks.case import check_case
from harness.checks.crowd import check_crowd, crowd_requests
from harness.checks.stage_case import check_stage
from harness.subjects.api import NotRunnable, StageSubject
from harness.subjects.contract import Contract
from harness.subjects.ours import OurLayer
from optimized.mask import build_topk_mask
from reports.records import CheckRecord, Status
from tests.harness.engine_fakes import problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"rows": 48, "context": 64, "topk": 24}
Edit = Callable[[torch.Tensor, int], torch.Tensor]


def crowd(edit: Edit | None = None, *, requests: int = 2, seed: int = 3) -> CheckRecord:
    """What is said of our builder, after `edit(mask, number of the launch)`."""
    calls = 0

    def build(given: Mapping[str, Any]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        mask = build_topk_mask(**given)
        return mask if edit is None else edit(mask, calls)

    return check_crowd(build, CPU, seed, requests, **SMALL)


def flip(mask: torch.Tensor, *at: int, bit: int) -> torch.Tensor:
    mask[at] ^= 1 << bit
    return mask


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_a_right_builder_passes(requests: int) -> None:
    for seed in range(3):
        record = crowd(requests=requests, seed=seed)
        assert (record.status, record.stage, record.check) == (Status.PASS, "mask", "mask.crowd")


def test_each_row_lists_different_keys() -> None:
    given: list[Mapping[str, Any]] = []

    def build(inputs: Mapping[str, Any]) -> torch.Tensor:
        given.append(inputs)
        assert bool((inputs["out"] != 0).all()), "the workspace is dirty"
        return build_topk_mask(**inputs)

    check_crowd(build, CPU, 1, 2, **SMALL)
    (inputs,) = given
    rows = torch.cat(inputs["topk_indices_per_req"])
    assert rows.shape == (48, 24)
    assert all(len(set(row.tolist())) == 24 for row in rows)
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 64
    assert len({tuple(row.tolist()) for row in rows}) == 48


def test_wrong_bits_are_named() -> None:
    record = crowd(lambda mask, _: flip(mask, 1, 30, 3, bit=7))
    assert record.status is Status.FAIL
    assert record.place.model_dump(exclude_none=True) == {"request": 1, "row": 30, "key": 103, "word": 3, "bit": 7}
    assert "for 2 x 24 rows of 24 keys: padded row 30 has key 103 (word 3, bit 7); 1 wrong bits" in record.message
    assert "the same in a second launch" in record.message


def test_missing_bits_are_named() -> None:
    def lose_all(mask: torch.Tensor, _: int) -> torch.Tensor:
        mask[1, 5] = 0
        return mask

    record = crowd(lose_all)
    assert record.place.request == 1
    assert record.place.row == 5
    assert f"row 5 misses key {record.place.key} " in record.message
    assert "; 24 wrong bits" in record.message


def test_bits_of_the_sign_count() -> None:
    record = crowd(lambda mask, _: flip(mask, 0, 40, 0, bit=31))
    assert (record.place.word, record.place.bit) == (0, 31)


def test_other_bits_each_time_are_a_race() -> None:
    record = crowd(lambda mask, launch: flip(mask, 0, launch, 0, bit=0))
    assert record.status is Status.RACY
    assert "others in a second launch" in record.message


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda mask, _: mask[:, :24], "shape (2, 24, 4), torch.int32, must be (2, 128, 4) int32"),
        (lambda mask, _: mask.long(), "torch.int64, must be"),
        (lambda mask, _: None, "the mask is NoneType"),
    ],
)
def test_another_shape_is_told(edit: Edit, said: str) -> None:
    record = crowd(edit)
    assert record.status is Status.FAIL or record.status is Status.RACY
    assert said in record.message


def test_what_the_builder_raises_is_a_finding() -> None:
    def build(_: Mapping[str, Any]) -> torch.Tensor:
        raise ValueError("at most 64 rows")

    record = check_crowd(build, CPU, 1, 1, **SMALL)
    assert record.status is Status.CONTRACT
    assert "one launch for 48 rows of 24 keys: the builder raised ValueError: at most 64 rows" in record.message


@pytest.mark.parametrize("error", [NotRunnable("no"), MemoryError(), torch.OutOfMemoryError()])
def test_what_is_no_verdict_goes_through(error: Exception) -> None:
    def build(_: Mapping[str, Any]) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)):
        check_crowd(build, CPU, 1, 1, **SMALL)


def test_one_case_of_four_on_a_gpu_makes_it() -> None:
    ids = [f"{number:016x}" for number in range(16)]
    assert [crowd_requests(i, CUDA) for i in ids[:8]] == [None, None, 8, None, None, None, 1, None]
    assert [crowd_requests(i, CUDA, 3) for i in ids if crowd_requests(i, CUDA)] == [3, 1, 3, 1]
    assert not any(crowd_requests(i, CPU) for i in ids)


def test_the_layer_and_builders_are_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(check_crowd, **SMALL)
    for module in (case, stage_small):
        monkeypatch.setattr(module, "crowd_requests", lambda case_id, device, most=None: 1)
        monkeypatch.setattr(module, "check_crowd", small)
    judged = problem((5, 3))
    assert "mask.crowd" in [check.check for check in check_case(judged, "ours[triton]").checks]

    def crowd_loses_a_row(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
        mask = build_topk_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)
        if max_q_len == 48:
            mask[0, 47] = 0
        return mask

    subject = StageSubject("mine", "mask", crowd_loses_a_row, Contract())
    record = check_stage(judged, subject, CPU)
    assert (record.status, record.stage) == (Status.FAIL, "mask")
    assert "row 47 misses key" in record.message
    monkeypatch.setattr(OurLayer, "build_mask", lambda self, given: 1 / 0)
    record = check_case(judged, "ours[triton]")
    assert (record.status, record.stage) == (Status.CONTRACT, "mask")
