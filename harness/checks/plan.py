"""Stage `plan`: context chunks and their metadata, against a planner written from the rules alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from harness.checks.verdict import failed, passed
from reports.records import CheckRecord, Place

STAGE = "plan"


@dataclass(frozen=True)
class ExpectedChunk:
    """One chunk: requests `first .. first + len(lengths)`, each with a range of its context."""

    first: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def expected_plan(
    context_lens: list[int], row_budget: int, max_context_chunk: int, split_alignment: int
) -> list[ExpectedChunk]:
    """The greedy plan of SPEC 2.5, one context at a time.

    A context that does not fit whole gives an aligned prefix (a positive multiple of the alignment, at most
    `max_context_chunk` and at most `remaining - 1` rounded down) and closes the chunk.
    """
    chunks: list[ExpectedChunk] = []
    first, starts, lengths, used = 0, list[int](), list[int](), 0

    def close() -> None:
        nonlocal starts, lengths, used
        if lengths:
            chunks.append(ExpectedChunk(first, tuple(starts), tuple(lengths)))
        starts, lengths, used = [], [], 0

    for request, context in enumerate(context_lens):
        if context == 0:
            close()
            continue
        done = 0
        while done < context:
            if not lengths:
                first = request
            remaining, room = context - done, row_budget - used
            whole = remaining <= room
            if whole:
                take = remaining
            else:
                take = min(room, max_context_chunk, remaining - 1) // split_alignment * split_alignment
            if take > 0:
                starts.append(done)
                lengths.append(take)
                used += take
                done += take
            if not whole:
                close()
    close()
    return chunks


def check_plan(
    chunked: Any,
    *,
    context_lens: list[int],
    query_lens: list[int],
    row_budget: int,
    max_context_chunk: int,
    split_alignment: int,
) -> list[CheckRecord]:
    """Every chunk and every derived field of an actual `ChunkedContext` (None iff no request has context)."""
    expected = expected_plan(context_lens, row_budget, max_context_chunk, split_alignment)
    if chunked is None or not expected:
        if (chunked is None) != (not expected):
            found = "missing" if chunked is None else "present"
            return [failed(STAGE, "plan.chunks", f"chunked context is {found} for contexts {context_lens}")]
        return [passed(STAGE, "plan.chunks")]
    actual_chunks = [
        ExpectedChunk(chunk.request_slice.start, tuple(chunk.starts.tolist()), tuple(chunk.seq_lens.tolist()))
        for chunk in chunked.chunks
    ]
    for index, (got, must) in enumerate(zip(actual_chunks, expected, strict=False)):
        if got != must:
            return [failed(STAGE, "plan.chunks", f"chunk is {got}, must be {must}", Place(chunk=index))]
    if len(actual_chunks) != len(expected):
        message = f"the plan has {len(actual_chunks)} chunks, must have {len(expected)}"
        return [failed(STAGE, "plan.chunks", message)]
    records = [passed(STAGE, "plan.chunks")]
    token_starts = [0, *accumulate(query_lens)]
    for index, (chunk, must) in enumerate(zip(chunked.chunks, expected, strict=True)):
        records += _check_fields(chunk, must, index, query_lens, token_starts)
    device_lens = chunked.context_lens.tolist()
    if device_lens != context_lens or list(chunked.context_lens_list) != context_lens:
        message = (
            f"context_lens is {device_lens} on the device and {chunked.context_lens_list} on the host, "
            f"must be {context_lens}"
        )
        records.append(failed(STAGE, "plan.context_lens", message))
    covered = sorted(token for part in chunked.empty_token_slices for token in range(part.start, part.stop))
    empty = [b for b, context in enumerate(context_lens) if context == 0]
    tokens = [token for b in empty for token in range(token_starts[b], token_starts[b + 1])]
    if covered != tokens:
        message = f"empty_token_slices cover tokens {covered}, must cover {tokens}: those of requests without context"
        records.append(failed(STAGE, "plan.empty_token_slices", message))
    return records


def _check_fields(
    chunk: Any, must: ExpectedChunk, index: int, query_lens: list[int], token_starts: list[int]
) -> list[CheckRecord]:
    stop = must.first + len(must.lengths)
    q_lens = query_lens[must.first : stop]
    continuation = must.starts[0] > 0
    fields: dict[str, tuple[object, object]] = {
        "index": (chunk.index, index),
        "request_slice": (chunk.request_slice, slice(must.first, stop)),
        "token_slice": (chunk.token_slice, slice(token_starts[must.first], token_starts[stop])),
        "is_continuation": (chunk.is_continuation, continuation),
        "num_context_tokens": (chunk.num_context_tokens, sum(must.lengths)),
        "query_start_loc": (chunk.query_start_loc.tolist(), [0, *accumulate(q_lens)]),
        "max_query_len": (chunk.max_query_len, max(q_lens)),
        "cu_seq_lens": (chunk.cu_seq_lens.tolist(), [0, *accumulate(must.lengths)]),
        "max_seq_len": (chunk.max_seq_len, max(must.lengths)),
        "token_to_seq": (
            chunk.token_to_seq.tolist(),
            [slot for slot, length in enumerate(must.lengths) for _ in range(length)],
        ),
    }
    if continuation:
        fields["continuation_token_end"] = (
            chunk.continuation_token_end,
            token_starts[must.first + 1],
        )
    records = [
        failed(STAGE, f"plan.{name}", f"{name} is {got}, must be {want}", Place(chunk=index))
        for name, (got, want) in fields.items()
        if got != want
    ]
    return records or [passed(STAGE, "plan.fields")]


def check_rows_held(workspace: torch.Tensor, row_budget: int, width: int) -> CheckRecord:
    """The chunk workspace must hold exactly the rows that the planner may fill."""
    if tuple(workspace.shape) != (row_budget, width):
        message = f"workspace has shape {tuple(workspace.shape)}, must be ({row_budget}, {width})"
        return failed(STAGE, "plan.workspace", message)
    return passed(STAGE, "plan.workspace")
