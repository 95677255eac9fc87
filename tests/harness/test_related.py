"""Does a relation that fails name the stage at fault, and does a merge stand other layouts and poison?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.checks import relations
from harness.checks.case import RELATION_EVERY, check_case
from harness.checks.merge import check_merge_alone
from harness.problems.problem import Problem
from optimized import mha_path
from optimized.mask import remap_topk_to_ranges
from optimized.merge import merge_attn_states
from optimized.trace import MergeEvent
from reports.records import Status
from tests.harness.traced import MANY


def _related_case() -> Problem:
    """A batch on the global mask whose number asks for a relation, and for nothing else."""
    for seed in range(200):
        case = MANY.replace(data=MANY.data.model_copy(update={"seed": seed}))
        number = int(case.case_id, 16)
        if number % RELATION_EVERY == 1:
            return case
    raise AssertionError("no seed asks for a relation")


@pytest.fixture
def only_remap(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(r for r in relations.RELATIONS if r.name == "remap_equals_global")
    monkeypatch.setattr(relations, "RELATIONS", kept)


@pytest.mark.usefixtures("only_remap")
def test_does_a_right_layer_pass_its_relation() -> None:
    record = check_case(_related_case(), "ours[triton]")
    assert not record.status.is_finding, record.message
    assert "relation.remap_equals_global" in {check.check for check in record.checks}
    assert "merge.alone" in {check.check for check in record.checks}


@pytest.mark.usefixtures("only_remap")
def test_is_the_wrong_stage_of_the_changed_run_named(monkeypatch: pytest.MonkeyPatch) -> None:
    remap = remap_topk_to_ranges

    def late(rows: Any, starts: Any, lens: Any) -> Any:
        return remap(rows, [start + 1 for start in starts], lens)

    monkeypatch.setattr(mha_path, "remap_topk_to_ranges", late)
    record = check_case(_related_case(), "ours[triton]")
    bad = [check.check for check in record.checks if check.status.is_finding]
    assert record.stage == "remap"
    assert bad[0] == "remap.rows"
    assert bad[-1] == "relation.remap_equals_global"


@pytest.mark.usefixtures("only_remap")
def test_is_an_exception_of_the_changed_run_the_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(mha_path, "remap_topk_to_ranges", refuses)
    record = check_case(_related_case(), "ours[triton]")
    assert record.status is Status.CONTRACT
    assert "planted" in record.message


@pytest.mark.usefixtures("only_remap")
def test_is_an_exception_of_the_relation_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("a fault of the relation")

    monkeypatch.setattr(relations, "_bitwise", broken)
    with pytest.raises(ValueError, match="a fault of the relation"):
        check_case(_related_case(), "ours[triton]")


def _merged() -> MergeEvent:
    """Five tokens: both sides, the prefix alone, the suffix alone, none, both."""
    generator = torch.Generator().manual_seed(5)
    sides = [torch.randn(5, 2, 8, generator=generator).to(torch.bfloat16) for _ in range(2)]
    lses = [torch.randn(2, 5, generator=generator) for _ in range(2)]
    for lse, out, empty in zip(lses, sides, ([2, 3], [1, 3]), strict=True):
        lse[:, empty] = -torch.inf
        out[empty] = 0
    out, lse = torch.empty_like(sides[0]), torch.empty_like(lses[0])
    merge_attn_states(out, sides[0], lses[0], sides[1], lses[1], lse)
    return MergeEvent("final", 0, sides[0], lses[0], sides[1], lses[1], out, lse)


def _reads_empty_side(*args: torch.Tensor) -> None:
    output, prefix, prefix_lse, suffix, suffix_lse, _ = args
    merge_attn_states(*args)
    weight = (prefix_lse - torch.logaddexp(prefix_lse, suffix_lse)).exp().nan_to_num().t().unsqueeze(-1)
    output += (0 * weight * prefix + 0 * suffix).to(output.dtype)


def _suffix_by_prefix_strides(*args: torch.Tensor) -> None:
    output, prefix, prefix_lse, suffix, suffix_lse, lse = args
    merge_attn_states(output, prefix, prefix_lse, suffix.as_strided(suffix.shape, prefix.stride()), suffix_lse, lse)


def _raises(*args: torch.Tensor) -> None:
    raise ValueError("stride")


def test_does_a_right_merge_stand_alone() -> None:
    record = check_merge_alone(_merged(), merge_attn_states)
    assert not record.status.is_finding, record.message


@pytest.mark.parametrize("merge", [_reads_empty_side, _suffix_by_prefix_strides, _raises])
def test_is_a_merge_that_reads_what_it_must_not_found(merge: Any) -> None:
    record = check_merge_alone(_merged(), merge)
    assert record.status.is_finding
    assert (record.stage, record.check) == ("merge", "merge.alone")


def test_is_a_wrong_lse_of_the_second_merge_found() -> None:
    event = _merged()
    record = check_merge_alone(replace(event, lse=event.lse + 1), merge_attn_states)
    assert record.status is Status.FAIL
