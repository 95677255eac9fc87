"""From a wrong attention call to its cause: did it attend the wrong keys, or compute the right ones wrongly?

The call is repeated as read-outs (`readout.py`) with the same structure and mask. If the output does not even show a
V that all keys share, or does not show the keys that LSE counts, it is the output that is wrong. Else, if the named
sets differ from the mask, the kernel or its mask mod read the mask wrongly, and row, key, word and bit are known; if
they agree, each key through one head, but LSE counts another number of keys in some head, all keys are named through
that head: it alone read another mask, or LSE is misplaced. Else the fault is in the arithmetic.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from harness.checks.attend import allowed_of_call
from harness.checks.readout import (
    COUNT_ERROR,
    Attend,
    AttendShape,
    SetDifference,
    count_attended,
    first_difference,
    name_attended,
    shown_wrongly,
)
from optimized.trace import AttendEvent
from reports.records import CheckRecord
from reports.text import said

MAX_READOUT_LAUNCHES = 64


def shape_of(event: AttendEvent) -> AttendShape:
    """The structure of a traced call."""
    return AttendShape(
        cu_seqlens_q=event.cu_seqlens_q,
        cu_seqlens_k=event.cu_seqlens_k,
        max_seqlen_q=event.max_seqlen_q,
        max_seqlen_k=event.max_seqlen_k,
        heads=event.q.shape[1],
        qk_width=event.q.shape[2],
        v_width=event.v.shape[2],
        dtype=event.q.dtype,
        device=event.q.device,
        scale=event.scale,
        mask=event.mask,
        offset=event.offset,
        causal=event.causal,
    )


def explain_attend(record: CheckRecord, event: AttendEvent, attend: Attend) -> CheckRecord:
    """The failed record of a traced call, with the wrong key named where a read-out shows one.

    A read-out that fails itself (the kernel crashes or refuses) leaves the record as it is.
    """
    shape = shape_of(event)
    if event.max_seqlen_k > MAX_READOUT_LAUNCHES * shape.heads * shape.v_width:
        return record
    try:
        mixed = shown_wrongly(attend, shape)
        counts = count_attended(attend, shape)
        named = name_attended(attend, shape)
    except Exception as error:
        return record.model_copy(update={"message": f"{record.message}; the read-out failed: {said(error)}"})
    if mixed is not None:
        row, head, column = mixed
        note = f"with one V for all keys, row {row} of the call shows another in head {head}, column {column}"
        return record.model_copy(update={"message": f"{record.message}; {note}: rows, heads or columns are mixed up"})
    wrong = _first_difference(event, named)
    if wrong is not None:
        request, difference = wrong
        right = int(allowed_of_call(event, request)[difference.row].sum())
        shown = right + len(difference.attended) - len(difference.missed)
        counted = counts[:, event.cu_seqlens_q[request] + difference.row]
        if shown != right and bool((counted.round() == right).all()):
            note = f"in row {difference.row} LSE counts {right} keys, as it must, and the output shows {shown}"
            return record.model_copy(update={"message": f"{record.message}; {note}: the output is wrong, not the set"})
        return _other_set(record, event, request, difference, None)
    other = _other_count(event, counts)
    if other is not None:
        row, head, found = other
        note = f"row {row} of the call {found}"
        if event.max_seqlen_k > MAX_READOUT_LAUNCHES * shape.v_width:
            return record.model_copy(update={"message": f"{record.message}; {note}: another mask, or LSE misplaced"})
        try:
            wrong = _first_difference(event, name_attended(attend, shape, head))
        except Exception as error:
            return record.model_copy(update={"message": f"{record.message}; the read-out failed: {said(error)}"})
        if wrong is not None:
            return _other_set(record, event, *wrong, head)
        note = f"{note}, and the output shows the right keys: the LSE is wrong, not the set"
        return record.model_copy(update={"message": f"{record.message}; {note}"})
    note = "; every row attended exactly its keys: the arithmetic is wrong (scores, exponentials, P, V or stores)"
    return record.model_copy(update={"message": record.message + note})


def _first_difference(event: AttendEvent, named: list[torch.Tensor]) -> tuple[int, SetDifference] | None:
    """The first request of the call whose named set is not the one asked for, and its first wrong row."""
    for request, attended in enumerate(named):
        difference = first_difference(attended, allowed_of_call(event, request))
        if difference is not None:
            return request, difference
    return None


def _other_set(
    record: CheckRecord, event: AttendEvent, request: int, difference: SetDifference, head: int | None
) -> CheckRecord:
    """The record of a call that attended other keys; `head` where that one alone did."""
    start = event.key_starts[request] if event.key_starts is not None else 0
    place = record.place.model_copy(
        update={
            "request": event.first_request + request,
            "token": event.first_token + event.cu_seqlens_q[request] + difference.row,
            "head": head,
            "column": None,
            **difference.place(start),
        }
    )
    stage = "mask_mod" if event.mask is not None else record.stage
    where = f"request {place.request}" if head is None else f"request {place.request}, head {head} alone"
    message = f"{event.call}, {where}: {difference.describe(start)}; {record.message}"
    return record.model_copy(update={"stage": stage, "place": place, "message": message})


def _other_count(event: AttendEvent, counts: torch.Tensor) -> tuple[int, int, str] | None:
    """(row of the call, head, description) of the first wrong number of keys; counts `[H, Tq]`.

    Only whole numbers are counts: anything else is a wrong LSE. So is a one in a row without keys, an LSE of 0.
    """
    for request, (start, stop) in enumerate(pairwise(event.cu_seqlens_q)):
        found = counts[:, start:stop]
        right = allowed_of_call(event, request).sum(dim=1)
        whole = found.isfinite() & ((found - found.round()).abs() < COUNT_ERROR)
        wrong = whole & (found.round() != right) & ~((right == 0) & (found.round() == 1))
        if bool(wrong.any()):
            row, head = (int(i) for i in wrong.t().nonzero()[0])
            counted = f"counts {int(found[head, row].round())} keys in head {head}, must be {int(right[row])}"
            return start + row, head, counted
    return None
