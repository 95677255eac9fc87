"""Gather, projection, calls, attention, merges: is the stage that went wrong accused, with the place?

Each test changes one tensor of a right trace; what comes later in the pipeline stays as it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from harness.checks.attend import allowed_of_call, unpack_bits
from harness.checks.link import first_bad, longest
from optimized.trace import AttendEvent, GatherEvent, MaskEvent, MergeEvent, PartialEvent, ProjectEvent
from reports.records import Status
from tests.harness.traced import PROBLEMS, changed, nudged, put, traced

Change = Callable[[torch.Tensor], Any]


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_trace_is_not_accused(name: str) -> None:
    records = traced(name).walk()
    assert [r for r in records if r.status.is_finding] == []
    assert len(records) > 5


# gather


@pytest.mark.parametrize("name", ["global_mask", "fp8"])
def test_one_wrong_gathered_number_is_named(name: str) -> None:
    case = traced(name)
    rows = case.event(GatherEvent, "chunk[0]").rows
    bad = case.accused(case.with_event(GatherEvent, "chunk[0]", rows=nudged(rows, (17, 3), 1)))
    assert (bad.stage, bad.check) == ("gather", "gather.rows")
    assert (bad.place.request, bad.place.key, bad.place.column) == (0, 17, 3)


def test_the_key_of_a_gathered_row_is_a_position_in_the_request() -> None:
    case = traced("global_mask")
    rows = case.event(GatherEvent, "chunk[1]").rows  # request 0 from position 32 on
    bad = case.accused(case.with_event(GatherEvent, "chunk[1]", rows=put(rows, (2, 0), 9.0)))
    assert (bad.place.request, bad.place.key) == (0, 34)
    rows = case.event(GatherEvent, "chunk[2]").rows  # requests 2 and 3
    bad = case.accused(case.with_event(GatherEvent, "chunk[2]", rows=put(rows, (20, 0), 9.0)))
    assert (bad.place.request, bad.place.key) == (3, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.copy_(rows.roll(1, dims=0)),
        lambda rows: rows.__setitem__([4, 5], rows[[5, 4]]),
        lambda rows: rows[8:12].zero_(),
        lambda rows: rows[3].fill_(math.nan),
        lambda rows: rows[:, 16:].neg_(),
    ],
    ids=["rows shifted", "two rows swapped", "a block of zeros", "nan", "rope negated"],
)
def test_wrong_gathered_rows_are_accused(change: Change) -> None:
    case = traced("global_mask")
    rows = changed(case.event(GatherEvent, "chunk[0]").rows, change)
    assert case.accused(case.with_event(GatherEvent, "chunk[0]", rows=rows)).stage == "gather"


def test_gathered_rows_of_a_wrong_shape_or_type_are_accused() -> None:
    case = traced("global_mask")
    rows = case.event(GatherEvent, "chunk[0]").rows
    for wrong in (rows[:-1], rows.half(), rows[:, :-1]):
        assert case.accused(case.with_event(GatherEvent, "chunk[0]", rows=wrong)).status is Status.SHAPE


# projection


@pytest.mark.parametrize("call", ["suffix", "chunk[1]"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_projected_number_two_units_off_is_named(call: str, part: str) -> None:
    case = traced("global_mask")
    tensor = getattr(case.event(ProjectEvent, call), part)
    bad = case.accused(case.with_event(ProjectEvent, call, **{part: nudged(tensor, (1, 1, 6), 2)}))
    assert (bad.stage, bad.check, bad.place.call) == ("project", f"project.{part}", call)
    assert (bad.place.token, bad.place.head, bad.place.column) == (1, 1, 6)
    assert bad.terms is not None
    assert "store" in bad.terms


def truncate(exact: torch.Tensor) -> torch.Tensor:
    """float32 -> bf16 towards zero."""
    words: torch.Tensor = exact.float().view(torch.int32) & -65536
    return words.view(torch.float32).bfloat16()


def test_truncated_projections_are_accused() -> None:
    case = traced("global_mask")
    event, dims = case.event(ProjectEvent, "suffix"), case.facts.problem.dims
    exact = (event.kv_c.double() @ case.facts.inputs.w_kv_b.double()).view(-1, dims.heads, dims.nope + dims.v)
    bad = case.accused(case.with_event(ProjectEvent, "suffix", v=truncate(exact[..., dims.nope :])))
    assert bad.check == "project.v"
    assert bad.margin is not None
    assert bad.margin < 2.5


@pytest.mark.parametrize(
    ("part", "change", "check"),
    [
        ("k", lambda k: k.copy_(k[:, [1, 0]]), "project.k"),
        ("v", lambda v: v.copy_(v[..., [1, 0, *range(2, 8)]]), "project.v"),
        ("k", lambda k: k[..., 8:].copy_(k[..., 8:].roll(1, dims=-1)), "project.k_rope"),
        ("k", lambda k: k[2, 0, 9:10].mul_(1.01), "project.k_rope"),
        ("v", lambda v: v[3].zero_(), "project.v"),
        ("v", lambda v: v[3, 1, 2].fill_(math.nan), "project.v"),
    ],
)
def test_wrong_projections_are_accused(part: str, change: Change, check: str) -> None:
    case = traced("global_mask")
    tensor = changed(getattr(case.event(ProjectEvent, "suffix"), part), change)
    bad = case.accused(case.with_event(ProjectEvent, "suffix", **{part: tensor}))
    assert (bad.stage, bad.check) == ("project", check)


# what each call is given


@pytest.mark.parametrize(
    ("kind", "field", "check"),
    [
        (ProjectEvent, "kv_c", "chunk_loop.kv_c"),
        (ProjectEvent, "k_pe", "chunk_loop.k_pe"),
        (AttendEvent, "q", "chunk_loop.q"),
        (AttendEvent, "k", "chunk_loop.k"),
        (AttendEvent, "v", "chunk_loop.v"),
    ],
)
def test_tensors_of_another_stage_or_token_are_accused(kind: type[Any], field: str, check: str) -> None:
    case = traced("global_mask")
    tensor = getattr(case.event(kind, "chunk[0]"), field)
    for wrong in (tensor.roll(1, dims=0), nudged(tensor, (0,) * tensor.dim(), 1), tensor.float(), tensor[:-1]):
        bad = case.accused(case.with_event(kind, "chunk[0]", **{field: wrong}))
        assert (bad.stage, bad.check, bad.place.call) == ("chunk_loop", check, "chunk[0]")


def test_keys_of_two_chunks_swapped_are_accused() -> None:
    case = traced("global_mask")
    k = case.event(AttendEvent, "chunk[0]").k
    bad = case.accused(case.with_event(AttendEvent, "chunk[1]", k=k[:8]))
    assert (bad.stage, bad.check, bad.place.chunk) == ("chunk_loop", "chunk_loop.k", 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_request", 1),
        ("cu_seqlens_q", [0, 3, 7]),
        ("cu_seqlens_k", [0, 18, 28]),
        ("max_seqlen_q", 3),
        ("max_seqlen_k", 28),
        ("scale", 0.30001),
        ("causal", True),
        ("mask", None),
        ("offset", False),
    ],
)
def test_every_integer_and_flag_of_a_call_is_checked(field: str, value: object) -> None:
    case = traced("global_mask")
    bad = case.accused(case.with_event(AttendEvent, "chunk[2]", **{field: value}))
    assert (bad.stage, bad.check) == ("chunk_loop", f"chunk_loop.{field}")
    assert (bad.place.call, bad.place.chunk) == ("chunk[2]", 2)


@pytest.mark.parametrize(("call", "slot", "culprit"), [("suffix", 2, 2), ("chunk[1]", 0, 0), ("chunk[2]", 1, 3)])
def test_a_key_start_off_by_one_is_named(call: str, slot: int, culprit: int) -> None:
    case = traced("global_mask")
    event = case.event(AttendEvent, call)
    starts = list(event.key_starts)
    right = starts[slot]
    starts[slot] += 1
    bad = case.accused(case.with_event(AttendEvent, call, key_starts=starts))
    assert (bad.check, bad.place.request) == ("chunk_loop.key_start", culprit)
    assert f"key start is {right + 1}, must be {right}" in bad.message


def test_the_mask_of_other_requests_is_accused() -> None:
    case = traced("global_mask")
    mask = case.event(MaskEvent).mask
    bad = case.accused(case.with_event(AttendEvent, "chunk[2]", mask=mask[1:3].contiguous()))
    assert bad.check == "chunk_loop.mask_bits"


def test_signs_of_zeros_and_nan_payloads_do_not_matter_on_the_way() -> None:
    case = traced("global_mask")
    v = put(case.event(ProjectEvent, "suffix").v, (0, 0, 0), 0.0)
    assert longest([0, 3, 3, 9]) == 6
    trace = case.with_event(AttendEvent, "suffix", v=put(v, (0, 0, 0), -0.0))
    assert case.accused(trace).check == "chunk_loop.v"  # the projection itself gave another number


def test_missing_and_extra_calls_are_accused() -> None:
    case = traced("global_mask")
    for kind in (AttendEvent, ProjectEvent):
        event = case.event(kind, "chunk[1]")
        events = [e for e in case.trace.events if e is not event]
        bad = case.accused(type(case.trace)(**{**vars(case.trace), "events": events}))
        assert bad.check == "chunk_loop.calls"
    bad = case.accused(case.with_event(AttendEvent, "suffix", call="chunk[7]"))
    assert bad.check == "chunk_loop.calls"
    event = case.event(GatherEvent, "chunk[1]")
    events = [e for e in case.trace.events if e is not event]
    assert case.accused(type(case.trace)(**{**vars(case.trace), "events": events})).stage == "gather"


# one attention call


def test_bits_are_unpacked_from_any_start() -> None:
    words = torch.tensor([[1 | 1 << 5, -(2**31), 6]]).int()
    keys = [k for k in range(96) if k in (0, 5, 63, 65, 66)]
    for start in (0, 1, 31, 32, 40, 63, 95):
        for length in (1, 20, 60):
            found = unpack_bits(words, start, length)[0].nonzero().flatten().tolist()
            assert found == [k - start for k in keys if start <= k < start + length]


def test_what_a_call_asks_for_is_its_mask_or_causality() -> None:
    case, dense = traced("global_mask"), traced("dense")
    rows = case.facts.topk_rows
    for call, start in (("chunk[0]", 0), ("chunk[1]", 32), ("suffix", 40)):
        event = case.event(AttendEvent, call)
        allowed = allowed_of_call(event, 0)
        for i in range(5):
            wanted = {t - start for t in rows[i].tolist() if start <= t <= 40 + i and t - start < allowed.shape[1]}
            assert set(allowed[i].nonzero().flatten().tolist()) == wanted
    assert allowed_of_call(dense.event(AttendEvent, "suffix"), 0).sum(dim=1).tolist() == [1, 2, 3, 4, 5]
    assert bool(allowed_of_call(dense.event(AttendEvent, "chunk[0]"), 0).all())


LSE_LAWS = {
    "base 2": (lambda lse: lse.div_(math.log(2)), "base-2 LSE"),
    "constant": (lambda lse: lse.add_(0.25), "constant +0.25"),
    "doubled": (lambda lse: lse.add_(math.log(2)), "a factor 2 on the row sum"),
    "shifted": (lambda lse: lse.copy_(lse.roll(1, dims=1)), "rows are shifted by 1"),
    "transposed": (lambda lse: lse.copy_(lse.T.reshape(lse.shape)), "transposed"),
}


@pytest.mark.parametrize("law", LSE_LAWS)
def test_a_wrong_lse_is_accused_and_its_law_named(law: str) -> None:
    change, words = LSE_LAWS[law]
    case, call = traced("one_request"), "chunk[0]"
    event = case.event(AttendEvent, call)
    bad = case.accused(case.with_event(AttendEvent, call, lse=changed(event.lse, change)))
    assert (bad.stage, bad.check, bad.place.call) == ("attend", "attend.lse", call)
    assert words in bad.message
    assert bad.terms is not None


@pytest.mark.parametrize("name", ["one_chunk", "dense"])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda out: out[1].zero_(), Status.FAIL),
        (lambda out: out[1, 0, 3].fill_(math.nan), Status.NONFINITE),
        (lambda out: out[1, 0, 3].fill_(math.inf), Status.NONFINITE),
        (lambda out: out[1].copy_(out[1].flip(0)), Status.FAIL),
        (lambda out: out[1].copy_(out[1].flip(1)), Status.FAIL),
        (lambda out: out[1].mul_(1.05), Status.FAIL),
        (lambda out: out.__setitem__([0, 1], out[[1, 0]]), Status.FAIL),
    ],
    ids=["zeroed row", "nan", "inf", "heads swapped", "columns swapped", "scaled", "rows swapped"],
)
def test_a_wrong_output_is_accused(name: str, change: Change, status: Status) -> None:
    case = traced(name)
    out = changed(case.event(AttendEvent, "suffix").out, change)
    bad = case.accused(case.with_event(AttendEvent, "suffix", out=out))
    assert (bad.stage, bad.check, bad.status) == ("attend", "attend.out", status)
    assert bad.place.call == "suffix"
    assert bad.place.row in (0, 1)
    assert bad.place.token == bad.place.row


def test_a_row_is_named_by_request_row_and_token() -> None:
    case = traced("global_mask")
    lse = case.event(AttendEvent, "chunk[2]").lse
    bad = case.accused(case.with_event(AttendEvent, "chunk[2]", lse=put(lse, (1, 5), lse[1, 5] + 0.01)))
    # tokens 0-4 are request 0's, 5-7 request 1's; chunk 2 holds requests 2 (4 rows) and 3
    assert (bad.place.request, bad.place.row, bad.place.token) == (3, 1, 13)
    assert (bad.place.head, bad.place.chunk) == (1, 2)


@pytest.mark.parametrize(
    "fields",
    [{"out": lambda e: e.out.float()}, {"lse": lambda e: e.lse.double()}, {"lse": lambda e: e.lse.T.contiguous()}],
    ids=["out float32", "lse float64", "lse [T, H]"],
)
def test_results_of_a_wrong_shape_or_type_are_accused(fields: dict[str, Callable[[AttendEvent], torch.Tensor]]) -> None:
    case = traced("global_mask")
    event = case.event(AttendEvent, "suffix")
    trace = case.with_event(AttendEvent, "suffix", **{name: make(event) for name, make in fields.items()})
    assert case.accused(trace).status is Status.SHAPE


def test_empty_rows_are_exact() -> None:
    case = traced("empty_rows")
    event = case.event(AttendEvent, "suffix")
    head, token = (int(i) for i in event.lse.isinf().nonzero()[0])
    for lse in (-1e30, math.inf, math.nan, 0.0):
        bad = case.accused(case.with_event(AttendEvent, "suffix", lse=put(event.lse, (head, token), lse)))
        assert (bad.check, bad.status) == ("attend.lse", Status.NONFINITE)
        assert (bad.place.token, bad.place.head) == (token, head)
    for value, status in ((1e-30, Status.FAIL), (math.nan, Status.NONFINITE)):
        bad = case.accused(case.with_event(AttendEvent, "suffix", out=put(event.out, (token, head, 2), value)))
        assert (bad.check, bad.status) == ("attend.out", status)


# merges


def test_the_final_merge_is_checked_on_its_actual_partials() -> None:
    case = traced("global_mask")
    event = case.event(MergeEvent)
    for change in (
        {"lse": nudged(event.lse, (0, 4), 60)},
        {"out": nudged(event.out, (11, 1, 3), 2)},
        {"out": event.suffix_out},
        {"lse": event.suffix_lse},
        {"out": event.out.roll(1, dims=0)},
        {"lse": event.lse / math.log(2)},
        {"out": put(event.out, (2, 0, 0), math.nan)},
    ):
        bad = case.accused(case.with_event(MergeEvent, "final", **change))
        assert bad.stage == "merge"
        assert bad.check == f"merge.{next(iter(change))}"
        assert bad.place.call == "final"


def test_a_side_without_keys_is_copied_bit_for_bit() -> None:
    case = traced("global_mask")
    event = case.event(MergeEvent)
    token = 5  # request 1 has no context
    assert bool(event.prefix_lse[:, token].isinf().all())
    bad = case.accused(case.with_event(MergeEvent, "final", out=nudged(event.out, (token, 0, 0), 1)))
    assert (bad.check, bad.place.token) == ("merge.out", token)
    bad = case.accused(case.with_event(MergeEvent, "final", lse=nudged(event.lse, (1, token), 1)))
    assert (bad.check, bad.place.token, bad.place.head) == ("merge.lse", token, 1)


@pytest.mark.parametrize("side", ["prefix_out", "prefix_lse", "suffix_out", "suffix_lse"])
def test_partials_that_are_not_those_of_the_calls_are_accused(side: str) -> None:
    case = traced("global_mask")
    event = case.event(MergeEvent)
    bad = case.accused(case.with_event(MergeEvent, "final", **{side: getattr(event, side).roll(1, dims=0)}))
    assert (bad.stage, bad.check) == ("chunk_loop", f"chunk_loop.{side}")


@pytest.mark.parametrize(
    ("call", "token", "check"),
    [
        ("chunk[0]", 2, "merge.partial_out"),  # copied
        ("chunk[1]", 2, "merge.out"),  # merged: a continuation
        ("chunk[1]", 9, "merge.partial_out"),  # outside the chunk
        ("chunk[2]", 13, "merge.partial_out"),  # copied
        ("chunk[2]", 6, "merge.partial_out"),  # a request without context
    ],
)
def test_running_partials_are_merged_copied_or_left_alone(call: str, token: int, check: str) -> None:
    case = traced("global_mask")
    event = case.event(PartialEvent, call)
    bad = case.accused(case.with_event(PartialEvent, call, out=put(event.out, (token, 1, 0), 0.5)))
    assert (bad.stage, bad.check) == ("merge", check)
    assert (bad.place.call, bad.place.token) == (call, token)
    bad = case.accused(case.with_event(PartialEvent, call, lse=put(event.lse, (1, token), 0.5)))
    assert bad.check == check.replace("out", "lse")


def test_missing_merges_are_accused() -> None:
    case = traced("global_mask")
    for kind, check in ((PartialEvent, "merge.partial"), (MergeEvent, "merge.final")):
        event = case.event(kind)
        events = [e for e in case.trace.events if e is not event]
        bad = case.accused(type(case.trace)(**{**vars(case.trace), "events": events}))
        assert bad.check == check


def test_a_merge_in_base_two_is_accused() -> None:
    case = traced("one_chunk")
    event = case.event(MergeEvent)
    a, b = (
        torch.exp2(lse - torch.maximum(event.prefix_lse, event.suffix_lse))
        for lse in (event.prefix_lse, event.suffix_lse)
    )
    weight = (a / (a + b)).nan_to_num().T[..., None]
    out = (weight * event.prefix_out.float() + (1 - weight) * event.suffix_out.float()).bfloat16()
    assert case.accused(case.with_event(MergeEvent, "final", out=out)).check == "merge.out"


LABELS = {"max_query_len", "max_key_len", "first_query_pos", "range_starts", "range_lens", "first_token", "chunk"}
"""Fields that say where a result belongs or what was asked for: what was done shows in the tensors."""


def damaged(value: Any, r: random.Random) -> Any:
    """A copy with one random number wrong; None if there is none."""
    if isinstance(value, torch.Tensor) and value.numel():
        flat = value.flatten().clone()
        at = r.randrange(len(flat))
        if flat.is_floating_point():
            flat[at] = 1.5 * flat[at] + 0.25 if bool(flat[at].isfinite()) else 0.5
        else:
            flat[at] ^= 1 << r.randrange(31)
        return flat.view(value.shape)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list) and value:
        at = r.choice([i for i, part in enumerate(value) if not isinstance(part, torch.Tensor) or part.numel()])
        return [damaged(part, r) if i == at else part for i, part in enumerate(value)]
    return None


@pytest.mark.parametrize("name", ["global_mask", "remap", "mqa", "fp8"])
def test_every_number_of_a_trace_is_looked_at(name: str) -> None:
    case, r = traced(name), random.Random(4)
    overlooked = []
    for event in case.trace.events:
        for field in fields(event):
            value = damaged(getattr(event, field.name), r)
            if value is None or field.name in LABELS or (field.name == "offset" and getattr(event, "mask", 0) is None):
                continue
            changed_event = replace(event, **{field.name: value})
            events = [changed_event if e is event else e for e in case.trace.events]
            if first_bad(case.walk(replace(case.trace, events=events))) is None:
                overlooked.append(f"{event.call} {type(event).__name__}.{field.name}")
    assert overlooked == []
