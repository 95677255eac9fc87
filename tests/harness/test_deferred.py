"""Are copies that run late really late, and does code that forgets it get noticed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch

import optimized.chunks
from harness.checks.deferred import DEVICE, DelayedCopies
from harness.checks.facts import Facts
from harness.checks.prefill import raw_reference
from harness.checks.relations import RELATIONS, Base
from harness.problems.problem import Problem
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer
from optimized.mask import build_topk_mask
from reports.records import Status
from tests.harness.traced import PROBLEMS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU copies are late by themselves")


def lengths() -> torch.Tensor:
    """A host tensor, if it is made in the context."""
    return torch.tensor([3, 1, 4], dtype=torch.int32)


@pytest.fixture
def late() -> Iterator[DelayedCopies]:
    with DelayedCopies() as mode:
        yield mode


def test_tensors_know_their_side(late: DelayedCopies) -> None:
    on_device = torch.tensor([1, 2], device=DEVICE)
    assert on_device.device == DEVICE
    assert (on_device + 1)[:1].device == on_device.new_empty(2).device == DEVICE
    assert torch.zeros_like(on_device).device == DEVICE
    assert torch.tensor([1, 2]).device == torch.empty(2, device="cpu").device == on_device.cpu().device
    assert on_device.cpu().device.type == "cpu"
    assert (
        lengths().to(DEVICE).device
        == lengths().to(on_device).device
        == lengths().to(DEVICE, torch.int64).device
        == DEVICE
    )
    assert lengths().to(torch.int64).device.type == "cpu"


def test_a_pinned_source_must_stay_until_the_next_wait(late: DelayedCopies) -> None:
    staging = lengths().pin_memory()
    copied = staging.to(DEVICE, non_blocking=True)
    staging.fill_(0)
    assert copied.tolist() == [3, 1, 4]
    (hazard,) = late.hazards
    assert str(hazard).startswith("a queued copy reads pinned memory that is overwritten")
    assert hazard.where.startswith("test_deferred.py:")


@pytest.mark.parametrize("wait", [torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.max, torch.Tensor.clone])
def test_only_a_wait_lets_a_pinned_source_go(wait: Callable[[torch.Tensor], Any], late: DelayedCopies) -> None:
    staging = torch.empty(3, dtype=torch.int32, pin_memory=True)
    staging.copy_(lengths())
    copied = torch.empty(3, dtype=torch.int32, device=DEVICE)
    copied.copy_(staging, non_blocking=True)
    wait(copied)
    staging.fill_(0)
    copied.tolist()
    waits = wait in (torch.Tensor.tolist, torch.Tensor.cpu)
    assert bool(late.hazards) is not waits


def test_what_cuda_copies_before_it_returns_may_be_overwritten(late: DelayedCopies) -> None:
    pageable = lengths().clone()
    copied = pageable.to(DEVICE, non_blocking=True)
    pageable.fill_(0)
    pinned = lengths().pin_memory()
    other = pinned.to(DEVICE)
    pinned.fill_(0)
    freed = lengths().pin_memory().to(DEVICE, non_blocking=True)
    assert copied.tolist() == other.tolist() == freed.tolist() == [3, 1, 4]
    assert not late.hazards


def test_the_host_sees_garbage_until_a_late_copy_has_run(late: DelayedCopies) -> None:
    on_device = lengths().to(DEVICE)
    host = on_device.to("cpu", non_blocking=True)
    on_device.fill_(9)
    assert 3 not in host.tolist()
    on_device.tolist()
    assert host.tolist() == [3, 1, 4]
    assert on_device.cpu().tolist() == [9, 9, 9]


def test_a_host_tensor_is_no_argument_of_a_kernel(late: DelayedCopies) -> None:
    rows = torch.zeros((2, 4), dtype=torch.int32)
    build_topk_mask([rows.to(DEVICE)], [2], 2, 32, torch.empty(128 * 4, dtype=torch.int32, device=DEVICE))
    assert not late.hazards
    build_topk_mask([rows], [2], 2, 32, torch.empty(128 * 4, dtype=torch.int32))
    assert "host memory" in str(late.hazards[0])


def test_leaving_the_context_is_a_wait_and_takes_the_patch_away() -> None:
    with DelayedCopies() as mode:
        staging = lengths().pin_memory()
        host = staging.to(DEVICE, non_blocking=True).to("cpu", non_blocking=True)
        staging.fill_(0)
        assert not mode.hazards
    assert len(mode.hazards) == 1
    assert host.tolist() == [3, 1, 4]
    assert torch.ones(1).device.type == "cpu"


# our layer


DELAYED = next(relation for relation in RELATIONS if relation.name == "delayed_copies")


def base_of(problem: Problem, *, sharing: bool = False) -> Base:
    """A batch that our layer has run; `sharing` as a call of a sequence, whose metadata outlive it."""
    inputs = build_inputs(problem)
    subject = OurLayer("triton")
    if sharing:
        subject = subject.sharing([problem], inputs.q.device)
    outcome = subject.prefill(problem, inputs, traced=False)
    out = outcome.out.view(-1, problem.dims.heads, problem.dims.v)
    facts = Facts(problem, inputs, subject.contract)
    return Base(
        facts, subject, problem.expected_path(), out, outcome.lse, raw_reference(facts, problem.expected_path())
    )


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("name", ["global_mask", "remap", "dense", "mqa", "fp8"])
def test_our_layer_does_not_depend_on_when_copies_run(name: str, sharing: bool) -> None:
    base = base_of(PROBLEMS[name], sharing=sharing)
    assert DELAYED.applies(base)
    record = DELAYED.check(base)
    assert record.status is Status.PASS, record.message


def query_starts_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask builder's pinned copy of the query offsets is used again right after the copy is queued."""

    def build(rows: Any, q_lens: list[int], longest: int, keys: int, out: torch.Tensor, *args: Any) -> torch.Tensor:
        staging = torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32).pin_memory()
        starts = staging.to(out.device, non_blocking=True)
        staging.fill_(-1)
        return build_topk_mask(rows, q_lens, longest, keys, out, *args, query_start_loc=starts)

    monkeypatch.setattr("optimized.mha_path.build_topk_mask", build)


def one_staging_buffer_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's index tensors go through one pinned buffer, without a wait between two of them."""
    real = torch.tensor
    held: list[torch.Tensor] = []

    def through_staging(values: Any, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        if device is None:
            return real(values, dtype=dtype)
        if not held:
            held.append(torch.empty(4096, dtype=torch.int32).pin_memory())
        staging = held[0][: len(values)]
        staging.copy_(real(values, dtype=dtype))
        return staging.to(device, non_blocking=True)

    class Torch:
        tensor = staticmethod(through_staging)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(optimized.chunks, "torch", Torch())


def lengths_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads a chunk's lengths out of a copy from the device that may not have run."""
    real = optimized.chunks._materialise

    def materialise(*args: Any) -> Any:
        chunk = real(*args)
        on_device = chunk.seq_lens.to(chunk.starts.device)
        object.__setattr__(chunk, "seq_lens", on_device.to("cpu", non_blocking=True))
        object.__setattr__(chunk, "max_seq_len", int(max(chunk.seq_lens.tolist())))
        return chunk

    monkeypatch.setattr(optimized.chunks, "_materialise", materialise)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (query_starts_overwritten, "overwritten before the copy has run"),
        (one_staging_buffer_for_all_chunks, "overwritten before the copy has run"),
        (lengths_read_too_early, "with late copies the call fails"),
    ],
)
def test_a_fault_that_only_late_copies_show_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of(PROBLEMS["remap"])
    plant(monkeypatch)
    record = DELAYED.check(base)
    assert record.status is Status.GUARD
    assert message in record.message
