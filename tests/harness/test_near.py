"""Is a small case of a GPU judged on the CPU as it would be there?

`is_far` is replaced, so that tensors of the CPU take the way of those of a GPU; `tests/gpu/test_near_gpu.py` takes it
with real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from harness.checks import case, near
from harness.checks.case import check_case
from harness.checks.facts import Facts
from harness.checks.near import is_small, judged_from, on_cpu
from harness.problems.profiles import PROFILES
from harness.problems.tensors import build_inputs
from harness.subjects.base import PrefillOutcome
from harness.subjects.ours import OurLayer
from reports.records import CaseRecord
from tests.harness.traced import MANY, batch

DTYPES = (torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool, torch.float32, torch.int32)


@dataclass(frozen=True)
class Leaf:
    tensor: torch.Tensor | None
    number: int = 3


@dataclass
class Tree:
    leaves: list[Leaf]
    named: dict[str, torch.Tensor]
    pair: tuple[torch.Tensor, str]


def _tensors() -> list[torch.Tensor]:
    bits = torch.arange(7 * 6 * 16, dtype=torch.int64).mul(2654435761).view(torch.uint8)
    shapes = [(3, 5), (7,), (2, 2), (0, 4), (1, 3, 2), (6,), (2,)]
    made = []
    for dtype, shape in zip(DTYPES, shapes, strict=True):
        size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
        made.append(bits[:size].view(dtype).view(shape) if dtype is not torch.bool else bits[:size].bool().view(shape))
    return [*made, torch.tensor(2.5, dtype=torch.float64), torch.arange(12.0).view(3, 4).t()]


@pytest.mark.parametrize("far", [set(), set(range(9)), {0, 3, 8}])
def test_is_every_tensor_copied_bit_for_bit(far: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors()
    ids = {id(tensors[i]) for i in far}
    monkeypatch.setattr(near, "is_far", lambda tensor: id(tensor) in ids)
    tree = Tree([Leaf(tensors[0]), Leaf(None), *map(Leaf, tensors[1:6])], {"a": tensors[6]}, (tensors[7], "text"))
    copied = on_cpu((tree, tensors[8], tensors[0]))
    found = [leaf.tensor for leaf in copied[0].leaves if leaf.tensor is not None]
    found += [copied[0].named["a"], copied[0].pair[0], copied[1]]
    for old, new in zip(tensors, found, strict=True):
        assert (new.dtype, new.shape, new.is_contiguous()) == (old.dtype, old.shape, True)
        assert torch.equal(new.reshape(-1).view(torch.uint8), old.contiguous().reshape(-1).view(torch.uint8))
    assert copied[2] is copied[0].leaves[0].tensor, "one tensor in two places stays one"
    assert copied[0].leaves[1].tensor is None
    assert copied[0].pair[1] == "text"
    assert tree.leaves[0].tensor is tensors[0], "the original is left as it is"


def test_do_copies_lose_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "is_far", lambda tensor: True)
    leaf = Leaf(torch.zeros(4))
    copied = on_cpu(leaf)
    assert leaf.tensor is not None
    leaf.tensor.fill_(1)
    assert copied.tensor.tolist() == [0, 0, 0, 0]


def test_are_the_same_objects_judged_on_the_cpu_and_for_large_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build_inputs(MANY)
    facts = Facts(MANY, inputs, OurLayer("triton").contract)
    outcome = PrefillOutcome(inputs.out, torch.zeros(2, MANY.num_tokens), None)
    assert judged_from(facts, outcome) == (facts, outcome)
    monkeypatch.setattr(near, "is_far", lambda tensor: True)
    assert judged_from(facts, outcome)[0] is not facts
    monkeypatch.setattr(near, "is_small", lambda problem: False)
    assert judged_from(facts, outcome) == (facts, outcome)


def test_which_cases_are_small() -> None:
    largest = PROFILES["ci"]
    ci = batch((largest.max_context, largest.max_query))
    assert is_small(ci.replace(dims=ci.dims.model_copy(update={"heads": 8, "kv_lora_rank": 32, "nope": 16, "v": 16})))
    full = batch((8192, 1024))
    assert not is_small(full.replace(dims=full.dims.model_copy(update={"heads": 16, "kv_lora_rank": 512})))
    assert not is_small(batch((1, 1)).replace(paging=MANY.paging.model_copy(update={"spare_blocks": 2**20})))


def _judged(problem: Any, monkeypatch: pytest.MonkeyPatch, *, far: bool) -> tuple[CaseRecord, int]:
    calls: list[Facts] = []

    def counted(facts: Facts, outcome: PrefillOutcome) -> tuple[Facts, PrefillOutcome]:
        seen = judged_from(facts, outcome)
        calls.append(seen[0])
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(near, "is_far", lambda tensor: far)
        patched.setattr(case, "judged_from", counted)
        record = check_case(problem, "ours[triton]")
    return record.model_copy(update={"seconds": 0.0}), sum(not facts.inputs.buffers for facts in calls)


@pytest.mark.parametrize("seed", range(4))
def test_is_the_verdict_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MANY.replace(data=MANY.data.model_copy(update={"seed": seed}))
    there, copies = _judged(problem, monkeypatch, far=True)
    here, none = _judged(problem, monkeypatch, far=False)
    assert copies > 0
    assert none == 0
    assert there == here


def test_is_a_wrong_kernel_explained_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read-out of a failed call must reach the kernel with the tensors of its own device, not with copies."""
    prefill, made = OurLayer.prefill, []

    def wrong(self: OurLayer, problem: Any, inputs: Any, *, traced: bool) -> PrefillOutcome:
        outcome = prefill(self, problem, inputs, traced=traced)
        if outcome.trace is None:
            return outcome
        events = [replace(e, lse=e.lse + 1) if hasattr(e, "key_starts") else e for e in outcome.trace.events]
        outcome.trace.events[:] = events
        made.extend(id(e) for e in events)
        return outcome

    seen: list[int] = []

    def noted(check: Any, event: Any, attend: Any) -> Any:
        seen.append(id(event))
        return check

    monkeypatch.setattr(OurLayer, "prefill", wrong)
    monkeypatch.setattr(case, "explain_attend", noted)
    monkeypatch.setattr(near, "is_far", lambda tensor: True)
    assert check_case(MANY, "ours[triton]").stage == "attend"
    assert seen
    assert set(seen) <= set(made)
