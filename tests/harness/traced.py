"""Traces of our layer on a few small batches, and copies of them with one thing changed.

A batch is run once a session; a test changes a copy of its trace and walks it again, so that no kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from harness.checks.facts import Facts
from harness.checks.link import first_bad
from harness.checks.walk_mha import MhaWalk
from harness.checks.walk_mqa import MqaWalk
from harness.problems.names import TopkKind
from harness.problems.problem import Chunks, DataSpec, Dims, Layout, Paging, Problem, Request, TopkSpec
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer
from optimized.trace import Trace
from reports.records import CheckRecord

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits

DIMS = Dims(heads=2, kv_lora_rank=16, nope=8, rope=4, v=8, topk=12)


def batch(*lengths: tuple[int, int], **fields: Any) -> Problem:
    """A problem with these (context, query) lengths and random top-k rows."""
    random: TopkKind = "random"
    given: dict[str, Any] = {
        "dims": DIMS,
        "scale": 0.3,
        "requests": tuple(Request(context_len=c, query_len=q) for c, q in lengths),
        "paging": Paging(block_size=4, order="permuted", spare_blocks=2, seed=1),
        "chunks": Chunks(row_budget=32, max_context_chunk=32, split_alignment=4),
        "topk": TopkSpec(kinds=(random,) * len(lengths), seed=3),
        "layout": Layout(num_decode_tokens=2, out_pad=3),
    }
    return Problem(**{**given, **fields})


MIXED = TopkSpec(
    kinds=("future", "random", "duplicates", "past_end"), holes="spread", any_negative=True, order="descending", seed=3
)
MANY = batch((40, 5), (0, 3), (19, 4), (9, 3), topk=MIXED)
"""Three chunks: the start of request 0, its rest, requests 2 and 3; request 1 has no context."""
PROBLEMS: dict[str, Problem] = {
    "global_mask": MANY,
    "remap": MANY.replace(force="masked_remap"),
    "no_context": batch((0, 19), (0, 4), (0, 1)),
    "one_chunk": batch((20, 5), (7, 3)),
    "one_request": batch((90, 6)),
    "bit_31": batch((90, 6), topk=TopkSpec(kinds=("bit_31",), seed=3)),
    "bit_31_remap": batch((90, 6), topk=TopkSpec(kinds=("bit_31",), seed=3), force="masked_remap"),
    "dense": MANY.replace(force="dense"),
    "mqa": MANY.replace(force="mqa"),
    "mqa_no_context": batch((0, 9), (0, 4), force="mqa"),
    "fp8": batch(
        (40, 5), (19, 4), force="dense", paging=Paging(block_size=4, kv_cache_dtype="fp8_e4m3", kv_cache_scale=0.5)
    ),
    "fp16": MANY.replace(dtype="fp16"),
    "empty_rows": batch(
        (40, 5), (0, 3), (19, 4), topk=TopkSpec(kinds=("some_empty", "all_empty", "all_empty"), seed=5)
    ),
    "idle_requests": batch((40, 0), (9, 0), (0, 2), (20, 3), (0, 0)),
    "exact": MANY.replace(data=DataSpec(weights="exact", seed=4)),
}


@dataclass(frozen=True)
class Traced:
    """One batch that was run."""

    facts: Facts
    trace: Trace
    out: torch.Tensor
    """`[T, H * v]`"""
    lse: torch.Tensor

    def walk(self, trace: Trace | None = None) -> list[CheckRecord]:
        """The records of a trace, the batch's own if none is given."""
        trace = self.trace if trace is None else trace
        return (MqaWalk if trace.path == "mqa" else MhaWalk)(self.facts, trace).run()

    def event(self, kind: type[Any], call: str | None = None) -> Any:
        """The first event of this type, of this call if one is named."""
        return next(event for event in self.trace.of(kind) if call is None or event.call == call)

    def with_event(self, kind: type[Any], call: str | None = None, /, **fields: Any) -> Trace:
        """The trace with some fields of that event replaced."""
        old = self.event(kind, call)
        events = [replace(old, **fields) if event is old else event for event in self.trace.events]
        return replace(self.trace, events=events)

    def accused(self, trace: Trace) -> CheckRecord:
        """The first record that accuses; fails the test if none does."""
        bad = first_bad(self.walk(trace))
        assert bad is not None, "nobody was accused"
        return bad


@cache
def traced(name: str) -> Traced:
    """One of `PROBLEMS`, run by our Triton layer."""
    problem = PROBLEMS[name]
    inputs = build_inputs(problem)
    subject = OurLayer("triton")
    outcome = subject.prefill(problem, inputs, traced=True)
    assert outcome.trace is not None
    return Traced(Facts(problem, inputs, subject.contract), outcome.trace, outcome.out, outcome.lse)


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A copy on which `change` was called."""
    copy = tensor.clone()
    change(copy)
    return copy


def put(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """A copy with one entry, row or slice replaced."""
    copy = tensor.clone()
    copy[index] = value
    return copy


def nudged(tensor: torch.Tensor, index: Any, ulps: int) -> torch.Tensor:
    """A copy of a 16-bit or float32 tensor with one entry moved by that many units in its last place."""
    copy = tensor.clone()
    words = copy.view(torch.int32 if copy.dtype == torch.float32 else torch.int16)
    words[index] += ulps
    return copy
