"""Stage `chunk_loop`: every attention call gets the tensors that belong to it.

Stages are judged on the inputs that they were really given. What a call was given is checked here, against the
outputs of the stages before it: a chunk that is attended with the K of another, a mask of the wrong requests, a
key start off by one. Everything is a copy or an integer, so the comparison is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.checks.guards import same_bits
from harness.checks.verdict import failed, passed
from optimized.trace import AttendEvent, MaskEvent
from reports.records import CheckRecord, Place

STAGE = "chunk_loop"


@dataclass(frozen=True)
class ExpectedCall:
    """What one attention call must be given."""

    call: str
    chunk: int | None
    first_request: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    scale: float
    causal: bool
    key_starts: list[int] | None
    mask: MaskEvent | None
    """The build whose mask this call reads; None on the dense path."""

    @property
    def requests(self) -> slice:
        return slice(self.first_request, self.first_request + len(self.cu_seqlens_q) - 1)


def longest(offsets: list[int]) -> int:
    """Longest segment of cumulative offsets."""
    return max((b - a for a, b in itertools.pairwise(offsets)), default=0)


def check_tensor_link(
    name: str, actual: torch.Tensor, expected: torch.Tensor, call: str, chunk: int | None, source: str
) -> CheckRecord:
    """`actual` must be a bitwise copy of `expected`, which `source` made."""
    if same_bits(actual, expected):
        return passed(STAGE, f"chunk_loop.{name}")
    place = Place(call=call, chunk=chunk)
    if actual.shape != expected.shape:
        message = f"{name} of the call has shape {tuple(actual.shape)}, must be {tuple(expected.shape)} from {source}"
        return failed(STAGE, f"chunk_loop.{name}", message, place)
    if actual.dtype != expected.dtype:
        message = f"{name} of the call is {actual.dtype}, must be {expected.dtype} from {source}"
        return failed(STAGE, f"chunk_loop.{name}", message, place)
    wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    where = wrong.nonzero()
    count = where.shape[0]
    if count == 0:  # same numbers, other bits: a sign of zero or a NaN payload
        return passed(STAGE, f"chunk_loop.{name}")
    first = tuple(where[0].tolist())
    message = f"{name} of the call is not what {source} gave: {count} elements differ, the first at {first}"
    return failed(STAGE, f"chunk_loop.{name}", message, place)


def check_call(event: AttendEvent, must: ExpectedCall) -> list[CheckRecord]:
    """Every argument of one attention call."""
    records: list[CheckRecord] = []
    place = Place(call=must.call, chunk=must.chunk)
    integers: dict[str, tuple[Any, Any]] = {
        "first_request": (event.first_request, must.first_request),
        "cu_seqlens_q": (event.cu_seqlens_q, must.cu_seqlens_q),
        "cu_seqlens_k": (event.cu_seqlens_k, must.cu_seqlens_k),
        "max_seqlen_q": (event.max_seqlen_q, longest(must.cu_seqlens_q)),
        "max_seqlen_k": (event.max_seqlen_k, longest(must.cu_seqlens_k)),
        "scale": (event.scale, must.scale),
        "causal": (event.causal, must.causal),
        "mask": (event.mask is not None, must.mask is not None),
    }
    for name, (got, want) in integers.items():
        if got != want:
            message = f"{name} of the call is {got}, must be {want}"
            records.append(failed(STAGE, f"chunk_loop.{name}", message, place))
    records.append(check_tensor_link("q", event.q, must.q, must.call, must.chunk, "the batch"))
    records.append(check_tensor_link("k", event.k, must.k, must.call, must.chunk, "the projection"))
    records.append(check_tensor_link("v", event.v, must.v, must.call, must.chunk, "the projection"))
    if event.mask is not None and must.mask is not None:
        records += _check_mask_of_call(event, event.mask, must, must.mask)
    return records


def _check_mask_of_call(
    event: AttendEvent, mask: torch.Tensor, must: ExpectedCall, built: MaskEvent
) -> list[CheckRecord]:
    place = Place(call=must.call, chunk=must.chunk)
    if event.offset != built.reserved:
        message = f"the call reads its mask with offset={event.offset}, must be {built.reserved}"
        return [failed(STAGE, "chunk_loop.offset", message, place)]
    records: list[CheckRecord] = []
    if must.key_starts is not None and event.key_starts != must.key_starts:
        got = event.key_starts or []
        slot = next((i for i, (a, b) in enumerate(zip(got, must.key_starts, strict=False)) if a != b), 0)
        where = place.model_copy(update={"request": must.first_request + slot})
        message = f"key start is {got[slot] if slot < len(got) else None}, must be {must.key_starts[slot]}"
        records.append(failed(STAGE, "chunk_loop.key_start", message, where))
    expected = built.mask[must.requests] if built.reserved else built.mask
    found = mask
    if built.reserved:  # the reserved word is the call's own
        expected, found = expected.clone(), mask.clone()
        expected[:, 0, -1] = 0
        found[:, 0, -1] = 0
    records.append(check_tensor_link("mask_bits", found, expected, must.call, must.chunk, "the mask builder"))
    return records


def first_bad(records: list[CheckRecord]) -> CheckRecord | None:
    """The first record that accuses."""
    return next((record for record in records if record.status.is_finding), None)


Check = Callable[[], list[CheckRecord]]
