"""Does a call that is made on another device get the same arguments, and does what it writes come back?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.checks.guards import guarded, same_bits, storage_of
from harness.checks.stage_case import StageRun
from harness.checks.there import ALIGNMENT, GAP_BYTE, There
from harness.problems.problem import Problem
from reports.records import CaseRecord
from tests.harness.stage_problems import RAGGED, judge, problem
from tests.harness.test_stage_cases import ATTEND_FAULTS, CASES, OTHER_FAULTS, PLAIN, RIGHT

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool, torch.float32, torch.int32)


def _views() -> dict[str, Any]:
    base = torch.arange(7 * 11 * 3, dtype=torch.float32).view(7, 11, 3)
    flat = guarded(21, torch.int32, CPU)
    made: dict[str, Any] = {f"{dtype}": torch.arange(5).to(dtype) for dtype in DTYPES}
    return made | {
        "rows": base[1:5, 2:9, :2],
        "transposed": base[2:4].transpose(0, 2),
        "whole": base,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "workspace": flat.view,
        "nothing": torch.empty(0, 4),
        "nobody": base[3:3],
        "list": [base[0], None, torch.tensor(2.5, dtype=torch.float64)],
        "number": 3,
        "none": None,
    }


def _pairs(there: Any, here: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(here, torch.Tensor):
        return [(there, here)]
    if isinstance(here, list):
        return [pair for a, b in zip(there, here, strict=True) for pair in _pairs(a, b)]
    assert there == here
    return []


def test_is_every_argument_what_it_was() -> None:
    here = _views()
    there = There(here, CPU).arguments
    assert there.keys() == here.keys()
    pairs = _pairs(list(there.values()), list(here.values()))
    assert len(pairs) == len(DTYPES) + 9
    for moved, old in pairs:
        assert (moved.dtype, moved.shape, moved.stride()) == (old.dtype, old.shape, old.stride())
        assert same_bits(moved, old)
        if old.numel():
            assert moved.data_ptr() != old.data_ptr()
            assert (moved.data_ptr() - moved.untyped_storage().data_ptr()) % ALIGNMENT == (
                old.storage_offset() * old.element_size() % ALIGNMENT
            )
    assert there["list"][2].item() == 2.5


def test_do_views_of_one_memory_stay_views_of_one_memory() -> None:
    there = There(_views(), CPU).arguments
    there["whole"].fill_(-1)
    assert bool((there["rows"] == -1).all())
    assert bool((there["list"][0] == -1).all())
    assert bool((there["expanded"] == 1).all())


def test_is_what_was_written_brought_back_with_what_stands_around_it() -> None:
    here = _views()
    call = There(here, CPU)
    call.arguments["rows"][0, 0, 0] = 99
    workspace = call.arguments["workspace"]
    workspace.fill_(7)
    around = workspace.as_strided((1,), (1,), workspace.storage_offset() - 1)
    around.fill_(5)
    before = {name: storage_of(value).clone() for name, value in here.items() if isinstance(value, torch.Tensor)}
    call.bring_back()
    assert here["whole"][1, 2, 0] == here["rows"][0, 0, 0] == 99
    assert here["workspace"].tolist() == [7] * 21
    assert here["workspace"].as_strided((1,), (1,), here["workspace"].storage_offset() - 1).tolist() == [5]
    changed = {name for name, old in before.items() if not torch.equal(storage_of(here[name]), old)}
    assert changed == {"rows", "transposed", "whole", "workspace", "nobody"}


def test_is_there_poison_between_two_memories() -> None:
    there = There({"a": torch.zeros(3), "b": torch.zeros(4)}, CPU).arguments
    gap = (there["b"].data_ptr() - there["a"].data_ptr()) // 4
    behind = there["a"].as_strided((gap - 3,), (1,), 3).view(torch.uint8)
    assert behind.numel() >= ALIGNMENT
    assert bool((behind == GAP_BYTE).all())
    assert bool(there["a"].as_strided((1,), (1,), 3).isnan())


def _judged(stage: str, function: Any, case: Problem) -> CaseRecord:
    return judge(stage, function, case, PLAIN).model_copy(update={"seconds": 0.0})


@pytest.mark.parametrize(
    ("stage", "function", "case"),
    [
        *((stage, function, case) for stage, function in RIGHT.items() for case in ("ragged", "empty rows", "nothing")),
        *(("attend", function, "ragged") for function, _, _ in ATTEND_FAULTS.values()),
        *((stage, function, "future") for stage, function, _, _ in OTHER_FAULTS.values()),
    ],
)
def test_is_the_verdict_the_same(stage: str, function: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = problem((45, 20), (0, 2), (33, 4), kinds=("future",) * 3) if case == "future" else CASES[case]
    calls: list[int] = []
    made = There.__init__

    def counted(self: There, *given: Any) -> None:
        calls.append(1)
        made(self, *given)

    monkeypatch.setattr(There, "__init__", counted)
    here = _judged(stage, function, drawn)
    assert not calls
    monkeypatch.setattr(StageRun, "is_elsewhere", True)
    there = _judged(stage, function, drawn)
    assert calls or case == "nothing"
    assert there == here


def test_is_a_result_that_is_a_view_of_an_argument_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[torch.Tensor] = []
    right = RIGHT["attend"]

    def returns_its_own(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = right(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        if held and held[0].shape == out.shape:
            held[0].copy_(out)
            return held[0], lse
        held[:] = [out]
        return out, lse

    monkeypatch.setattr(StageRun, "is_elsewhere", True)
    assert not judge("attend", returns_its_own, RAGGED, PLAIN).status.is_finding
