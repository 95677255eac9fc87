"""From a wrong attention call to its cause: did it attend the wrong keys, or compute the right ones wrongly?

The call is repeated as read-outs (`readout.py`) with the same structure and mask. If the output does not even show a
V that all keys share, or does not show the keys that LSE counts, it is the output that is wrong. Else, if the named
sets differ from the mask, the kernel or its mask mod read the mask wrongly, and row, key, word and bit are known; if
they agree, each key through one head, but some head counts another number of keys, that head read another mask; else
the fault is in the arithmetic.
"""

from __future__ import annotations

import torch

from harness.checks.attend import allowed_of_call
from harness.checks.readout import (
    Attend,
    AttendShape,
    count_attended,
    first_difference,
    name_attended,
    shown_wrongly,
)
from optimized.trace import AttendEvent
from reports.records import CheckRecord

MAX_READOUT_LAUNCHES = 64
COUNT_ERROR = 0.01
"""So far may `exp(LSE)` be from the number of keys; the float32 error of LSE gives 1e-6 of the number."""


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
        return record.model_copy(update={"message": f"{record.message}; the read-out failed: {error}"})
    if mixed is not None:
        row, head, column = mixed
        note = f"with one V for all keys, row {row} of the call shows another in head {head}, column {column}"
        return record.model_copy(update={"message": f"{record.message}; {note}: rows, heads or columns are mixed up"})
    for request, attended in enumerate(named):
        allowed = allowed_of_call(event, request)
        difference = first_difference(attended, allowed)
        if difference is None:
            continue
        shown, right = int(attended[difference.row].sum()), int(allowed[difference.row].sum())
        counted = counts[:, event.cu_seqlens_q[request] + difference.row]
        if shown != right and bool((counted.round() == right).all()):
            note = f"in row {difference.row} LSE counts {right} keys, as it must, and the output shows {shown}"
            return record.model_copy(update={"message": f"{record.message}; {note}: the output is wrong, not the set"})
        start = event.key_starts[request] if event.key_starts is not None else 0
        key = difference.key
        place = record.place.model_copy(
            update={
                "request": event.first_request + request,
                "row": difference.row,
                "token": event.first_token + event.cu_seqlens_q[request] + difference.row,
                "key": key,
                "word": (key + start) // 32,
                "bit": (key + start) % 32,
                "head": None,
                "column": None,
            }
        )
        stage = "mask_mod" if event.mask is not None else record.stage
        message = f"{event.call}, request {place.request}: {difference.describe(start)}; {record.message}"
        return record.model_copy(update={"stage": stage, "place": place, "message": message})
    other = _other_count(event, counts)
    if other is not None and event.mask is not None:
        at_head, note = other
        where = record.place.model_copy(update={**at_head, "column": None})
        return record.model_copy(update={"stage": "mask_mod", "place": where, "message": f"{note}; {record.message}"})
    note = "; every row attended exactly its keys: the arithmetic is wrong (scores, exponentials, P, V or stores)"
    return record.model_copy(update={"message": record.message + note})


def _other_count(event: AttendEvent, counts: torch.Tensor) -> tuple[dict[str, int], str] | None:
    """Place and description of the first row and head which count a wrong number of keys; counts `[H, Tq]`.

    Only whole numbers are counts: anything else is a wrong LSE. So is a one in a row without keys, an LSE of 0.
    """
    for request in range(len(event.cu_seqlens_q) - 1):
        rows = slice(event.cu_seqlens_q[request], event.cu_seqlens_q[request + 1])
        found = counts[:, rows]
        right = allowed_of_call(event, request).sum(dim=1)
        whole = found.isfinite() & ((found - found.round()).abs() < COUNT_ERROR)
        wrong = whole & (found.round() != right) & ~((right == 0) & (found.round() == 1))
        if not bool(wrong.any()):
            continue
        row, head = (int(i) for i in wrong.t().nonzero()[0])
        place = {"request": event.first_request + request, "row": row, "head": head}
        place["token"] = event.first_token + rows.start + row
        note = f"row {row} counts {int(found[head, row].round())} keys in head {head}, must be {int(right[row])}"
        return place, f"{event.call}, request {place['request']}: {note}: this head reads another mask"
    return None
