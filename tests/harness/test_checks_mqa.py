"""Absorption, slots, sparse MQA calls, their merge and W_UV: is the stage that went wrong accused, with the place?"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from optimized.trace import AbsorbEvent, MergeEvent, MqaEvent, UnprojectEvent
from reports.records import Status
from tests.harness.traced import nudged, put, traced

LORA = 16


def test_a_wrong_absorbed_query_is_named() -> None:
    case = traced("mqa")
    q = case.event(AbsorbEvent).q_absorbed
    bad = case.accused(case.with_event(AbsorbEvent, q_absorbed=nudged(q, (3, 1, 5), 2)))
    assert (bad.stage, bad.check) == ("absorb", "absorb.out")
    assert (bad.place.token, bad.place.head, bad.place.column) == (3, 1, 5)
    bad = case.accused(case.with_event(AbsorbEvent, q_absorbed=nudged(q, (3, 1, LORA + 2), 1)))
    assert (bad.check, bad.place.token, bad.place.head) == ("absorb.q_rope", 3, 1)
    bad = case.accused(case.with_event(AbsorbEvent, q_absorbed=q[:, [1, 0]].contiguous()))
    assert bad.stage == "absorb"
    assert case.accused(case.with_event(AbsorbEvent, q_absorbed=q[..., :-1])).status is Status.SHAPE


@pytest.mark.parametrize("call", ["suffix", "context"])
def test_one_wrong_slot_is_named(call: str) -> None:
    case = traced("mqa")
    indices = case.event(MqaEvent, call).indices
    token, slot = (int(i) for i in (indices >= 0).nonzero()[7])
    for wrong in (int(indices[token, slot]) + 1, -1):
        bad = case.accused(case.with_event(MqaEvent, call, indices=put(indices, (token, slot), wrong)))
        assert (bad.stage, bad.check, bad.place.call) == ("slots", "slots.rows", call)
        assert (bad.place.token, bad.place.column) == (token, slot)
        assert bad.place.request == case.facts.request_of(token)
    free = int((indices[token] < 0).nonzero()[0])
    bad = case.accused(case.with_event(MqaEvent, call, indices=put(indices, (token, free), 0)))
    assert (bad.stage, bad.place.column) == ("slots", free)


@pytest.mark.parametrize("call", ["suffix", "context"])
@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        ({"lse": lambda e: e.lse / math.log(2)}, "mqa.lse", Status.FAIL),
        ({"lse": lambda e: e.lse + 0.01}, "mqa.lse", Status.FAIL),
        ({"lse": lambda e: put(e.lse, (1, 2), math.nan)}, "mqa.lse", Status.NONFINITE),
        ({"lse": lambda e: e.lse.T.contiguous()}, "mqa.lse", Status.SHAPE),
        ({"out": lambda e: put(e.out, 2, 0.0)}, "mqa.out", Status.FAIL),
        ({"out": lambda e: e.out[:, [1, 0]].contiguous()}, "mqa.out", Status.FAIL),
        ({"out": lambda e: e.out.float()}, "mqa.out", Status.SHAPE),
    ],
)
def test_a_wrong_call_is_accused(call: str, change: dict[str, Any], check: str, status: Status) -> None:
    case = traced("mqa")
    event = case.event(MqaEvent, call)
    trace = case.with_event(MqaEvent, call, **{name: make(event) for name, make in change.items()})
    bad = case.accused(trace)
    assert (bad.stage, bad.check, bad.status) == ("mqa", check, status)
    if status is not Status.SHAPE:
        assert bad.place.call == call


def test_a_doubled_key_shows_in_lse() -> None:
    """Duplicates count once: what a kernel that counts slots would give is accused."""
    case = traced("mqa")
    event = case.event(MqaEvent, "context")
    token = 8  # request 2 lists its keys more than once
    counted = event.lse[0, token] + math.log(2)
    bad = case.accused(case.with_event(MqaEvent, "context", lse=put(event.lse, (0, token), counted)))
    assert (bad.check, bad.place.request, bad.place.row) == ("mqa.lse", 2, 0)


def test_an_empty_row_of_a_call_is_exact() -> None:
    case = traced("mqa")
    event = case.event(MqaEvent, "context")
    assert bool(event.lse[:, 5].isinf().all())  # request 1 has no context
    bad = case.accused(case.with_event(MqaEvent, "context", lse=put(event.lse, (0, 5), -1e30)))
    assert bad.status is Status.NONFINITE
    bad = case.accused(case.with_event(MqaEvent, "context", out=put(event.out, (5, 0, 0), 1e-30)))
    assert bad.status is Status.FAIL


@pytest.mark.parametrize("side", ["prefix_out", "prefix_lse", "suffix_out", "suffix_lse"])
def test_what_is_merged_must_be_what_the_calls_gave(side: str) -> None:
    case = traced("mqa")
    event = case.event(MergeEvent)
    bad = case.accused(case.with_event(MergeEvent, **{side: getattr(event, side) * 1.5}))
    assert bad.check == f"chunk_loop.{side}"


def test_a_wrong_merge_and_a_wrong_up_projection_are_accused() -> None:
    case = traced("mqa")
    merge = case.event(MergeEvent)
    assert case.accused(case.with_event(MergeEvent, lse=merge.lse + 1e-4)).check == "merge.lse"
    assert case.accused(case.with_event(MergeEvent, out=merge.suffix_out)).check == "merge.out"
    last = case.event(UnprojectEvent)
    bad = case.accused(case.with_event(UnprojectEvent, latent=last.latent.roll(1, dims=0)))
    assert bad.check == "chunk_loop.latent"
    bad = case.accused(case.with_event(UnprojectEvent, out=nudged(last.out, (4, 1, 2), 2)))
    assert (bad.stage, bad.place.token, bad.place.head, bad.place.column) == ("unproject", 4, 1, 2)
    bad = case.accused(case.with_event(UnprojectEvent, out=last.out[:, [1, 0]].contiguous()))
    assert bad.stage == "unproject"


@pytest.mark.parametrize("kind", [MqaEvent, MergeEvent, AbsorbEvent, UnprojectEvent])
def test_a_step_left_out_is_accused(kind: type[Any]) -> None:
    case = traced("mqa")
    event = case.event(kind)
    events = [e for e in case.trace.events if e is not event]
    bad = case.accused(type(case.trace)(**{**vars(case.trace), "events": events}))
    assert bad.stage == ("merge" if kind is MergeEvent else "mqa")


def test_queries_of_a_call_are_the_absorbed_ones() -> None:
    case = traced("mqa")
    q = case.event(MqaEvent, "context").q
    bad = case.accused(case.with_event(MqaEvent, "context", q=nudged(q, (0, 0, 0), 1)))
    assert bad.check == "chunk_loop.q"


def test_without_context_there_is_one_call_and_no_merge() -> None:
    case = traced("mqa_no_context")
    assert [event.call for event in case.trace.of(MqaEvent)] == ["suffix"]
    assert not torch.isnan(case.out.float()).any()
    event = case.event(MqaEvent)
    assert case.accused(case.with_event(MqaEvent, "suffix", lse=event.lse + 0.1)).stage == "mqa"
