"""On a GPU: is a small case judged from copies on the CPU, with the verdict that the GPU gives?"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from harness.checks import near
from harness.checks.case import check_case
from harness.checks.facts import Facts
from harness.checks.near import judged_from
from harness.checks.stage_case import check_stage
from harness.problems.problem import Problem
from harness.problems.tensors import build_inputs
from harness.subjects.api import StageSubject
from harness.subjects.ours import OurLayer
from optimized.trace import AttendEvent, Trace
from reports.records import CaseRecord
from tests.harness.stage_problems import CASES, PLAIN, RIGHT
from tests.harness.traced import MANY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _drawn(seed: int) -> Problem:
    return MANY.replace(data=MANY.data.model_copy(update={"seed": seed}))


def test_are_all_tensors_of_a_small_case_copied() -> None:
    inputs, layer = build_inputs(MANY, "cuda"), OurLayer("triton")
    outcome = layer.prefill(MANY, inputs, traced=True)
    facts, seen = judged_from(Facts(MANY, inputs, layer.contract), outcome)
    assert isinstance(outcome.trace, Trace)
    assert isinstance(seen.trace, Trace)
    assert facts.inputs.q.device.type == seen.out.device.type == seen.lse.device.type == "cpu"
    assert torch.equal(seen.out, outcome.out.cpu())
    for there, here in zip(outcome.trace.of(AttendEvent), seen.trace.of(AttendEvent), strict=True):
        for field in fields(there):
            old, new = getattr(there, field.name), getattr(here, field.name)
            if isinstance(old, torch.Tensor):
                assert old.is_cuda
                assert not new.is_cuda
                assert torch.equal(new.view(torch.uint8), old.contiguous().cpu().view(torch.uint8))


@pytest.mark.parametrize("seed", range(6))
def test_is_the_verdict_that_of_the_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged() -> CaseRecord:
        return check_case(_drawn(seed), "ours[triton]")

    near_by = judged()
    with monkeypatch.context() as patched:
        patched.setattr(near, "is_small", lambda problem: False)
        there = judged()
    assert near_by.status == there.status
    assert [check.check for check in near_by.checks] == [check.check for check in there.checks]
    for one, other in zip(near_by.checks, there.checks, strict=True):
        assert one.margin == pytest.approx(other.margin, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("stage", RIGHT)
@pytest.mark.parametrize("case", ["ragged", "empty rows", "many requests", "very low", "nothing"])
def test_is_the_verdict_of_a_single_stage_that_of_the_gpu(
    stage: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judged() -> CaseRecord:
        return check_stage(CASES[case], StageSubject("it", stage, RIGHT[stage], PLAIN), torch.device("cuda"))

    near_by = judged()
    monkeypatch.setattr(near, "is_small", lambda problem: False)
    there = judged()
    assert not near_by.status.is_finding, near_by.message
    assert near_by.status == there.status
    assert [check.check for check in near_by.checks] == [check.check for check in there.checks]


def test_does_a_call_of_a_small_case_get_tensors_of_the_gpu() -> None:
    devices: set[str] = set()

    def noted(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        devices.update(x.device.type for x in (q, k, v, cu_seqlens_q, cu_seqlens_k, allowed))
        return RIGHT["attend"](q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    record = check_stage(CASES["ragged"], StageSubject("it", "attend", noted, PLAIN), torch.device("cuda"))
    assert not record.status.is_finding, record.message
    assert devices == {"cuda"}
