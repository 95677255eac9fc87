"""Does a call that is made on another device get the same arguments, and does what it writes come back?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.checks.guards import guarded, same_bits, storage_of
from harness.checks.stage_case import StageRun
from harness.checks.there import There
from harness.problems.problem import Problem
from reports.records import CaseRecord
from tests.harness.stage_problems import CASES, PLAIN, RAGGED, RIGHT, broken, judge, problem
from tests.harness.test_stage_attend import ATTEND_FAULTS
from tests.harness.test_stage_cases import OTHER_FAULTS

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
            assert moved.storage_offset() == old.storage_offset()
            assert moved.untyped_storage().nbytes() == old.untyped_storage().nbytes()
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


def test_has_each_memory_one_of_its_own_there() -> None:
    here = _views()
    there = There(here, CPU).arguments
    pairs = _pairs(list(there.values()), list(here.values()))
    of = {old.untyped_storage().data_ptr(): moved.untyped_storage().data_ptr() for moved, old in pairs if old.numel()}
    assert len(set(of.values())) == len(of) > 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda given: given["numbers"].append(4), ([1, 2, 4], (2, 3))),
        (lambda given: given["numbers"].sort(reverse=True), ([2, 1], (2, 3))),
        (lambda given: given["tensor"].transpose_(0, 1), ([1, 2], (3, 2))),
        (lambda given: given["tensor"].unsqueeze_(0), ([1, 2], (1, 2, 3))),
        (lambda given: given["tensor"].resize_(0), ([1, 2], (0,))),
        (lambda given: given["tensor"].resize_(50, 50), ([1, 2], (50, 50))),
        (lambda given: given["tensor"].t_().add_(1), ([1, 2], (3, 2))),
    ],
)
def test_is_a_changed_shape_or_list_brought_back(change: Any, expected: Any) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    here: dict[str, Any] = {"numbers": [1, 2], "tensor": tensor, "of": [tensor, tensor[0]], "pair": (tensor, 1)}
    alike = {"numbers": [1, 2], "tensor": torch.arange(6.0).view(2, 3)}
    call = There(here, CPU)
    assert call.arguments["pair"][1] == 1
    assert call.arguments["pair"][0] is call.arguments["tensor"]
    change(call.arguments)
    change(alike)
    call.bring_back()
    for values in (here, alike):
        assert (values["numbers"], tuple(values["tensor"].shape)) == expected
    if expected[1] != (50, 50):
        assert torch.equal(here["tensor"], alike["tensor"])
        assert here["of"][0] is tensor


def test_is_what_a_call_put_into_a_list_brought_back() -> None:
    rows = [torch.zeros(2), torch.ones(2)]
    call = There({"rows": rows}, CPU)
    given = call.arguments["rows"]
    given[0], given[1] = given[1].flip(0), given[0]
    before = list(rows)
    call.bring_back()
    assert rows[1] is before[0]
    assert rows[0].tolist() == [1, 1]


def _bad_plan(context_lens, row_budget, max_context_chunk, split_alignment):  # type: ignore[no-untyped-def]
    chunks = RIGHT["plan"](list(context_lens), row_budget, max_context_chunk, split_alignment)
    context_lens.append(1)
    return chunks


def _bad_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    mask = RIGHT["mask"](list(topk_indices_per_req), list(q_lens), max_q_len, max_seq_len, out, first_query_pos)
    topk_indices_per_req[0] = topk_indices_per_req[0].flip(1)
    return mask


def _bad_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
    result = RIGHT["attend"](q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
    q.transpose_(0, 1)
    return result


def _careful_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, allowed)
    full = [x.untyped_storage().data_ptr() for x in tensors if x.numel()]
    assert len(set(full)) == len(full), "two arguments share a memory"
    return RIGHT["attend"](q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)


def _judged(stage: str, function: Any, case: Problem) -> CaseRecord:
    return judge(stage, function, case, PLAIN).model_copy(update={"seconds": 0.0})


@pytest.mark.parametrize(
    ("stage", "function", "case"),
    [
        *((stage, function, case) for stage, function in RIGHT.items() for case in ("ragged", "empty rows", "nothing")),
        *(("attend", function, "ragged") for function, _, _ in ATTEND_FAULTS.values()),
        *((stage, function, "future") for stage, function, _, _ in OTHER_FAULTS.values()),
        ("plan", _bad_plan, "ragged"),
        ("mask", _bad_mask, "future"),
        ("attend", _bad_attend, "ragged"),
        ("attend", _careful_attend, "ragged"),
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
    assert here.status.is_finding == (function not in (*RIGHT.values(), _careful_attend))


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


def _spoils(stage: str, name: str, spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    """A right function that does something to an input after it has answered."""
    right = RIGHT[stage]

    @functools.wraps(right)
    def function(*args: Any, **given: Any) -> Any:
        own = {key: list(value) if isinstance(value, list) else value for key, value in given.items()}
        result = right(*args, **own)
        if len(given[name]):
            spoil(given[name])
        return result

    return function


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("stage", "name", "spoil"),
    [
        ("gather", "src_cache", lambda x: x.resize_(0)),
        ("gather", "block_table", lambda x: x.add_(1)),
        ("gather", "cu_seq_lens", lambda x: x.zero_()),
        ("prefill", "q", lambda x: x.unsqueeze_(0)),
        ("mask", "topk_indices_per_req", lambda x: x.__setitem__(0, None)),
        ("mask", "q_lens", lambda x: x.clear()),
        ("attend", "q", lambda x: setattr(x, "data", x * 2)),
        ("attend", "cu_seqlens_k", lambda x: x.set_(torch.zeros(3, dtype=torch.int32))),
        ("merge", "prefix_lse", lambda x: setattr(x, "data", x.clone().fill_(1.0))),
    ],
)
def test_does_a_spoilt_input_accuse_the_subject_and_not_break_the_judge(
    stage: str, name: str, spoil: Any, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageRun, "is_elsewhere", elsewhere)
    record = judge(stage, _spoils(stage, name, spoil), RAGGED, PLAIN)
    assert broken(record) == ["guard.inputs"], record.message
    assert f"changed its input {name}" in record.message
