"""Context chunks: which cached rows are gathered and attended together.

The plan is greedy and in request order. A chunk takes whole remaining contexts while they fit its row budget;
when the next does not fit, an aligned prefix of it closes the chunk and the rest starts the next one. A
request without context is in no chunk and ends the run, so that the requests and the query tokens of a chunk
are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from optimized.validation import require_int, require_lengths, require_tensor

MAX_WORKSPACE_ROWS = 65_536


@dataclass(frozen=True)
class PlannedChunk:
    """Context rows `[starts[i], starts[i] + lengths[i])` of request `first_request + i`."""

    first_request: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @property
    def request_slice(self) -> slice:
        return slice(self.first_request, self.first_request + len(self.lengths))

    @property
    def is_continuation(self) -> bool:
        """Whether an earlier chunk holds the first rows of the first request. Only the first can be one."""
        return self.starts[0] > 0


@dataclass(frozen=True)
class ContextChunk:
    """One chunk as the layer runs it; `n` requests, all index tensors int32 and local to the chunk."""

    index: int
    request_slice: slice
    token_slice: slice
    """Packed query tokens of these requests."""
    continuation_token_end: int
    """End (a packed token, as in `token_slice`) of the tokens that continue an earlier chunk; the start of
    `token_slice` if none does."""
    is_continuation: bool
    num_context_tokens: int
    query_start_loc: torch.Tensor
    """`[n + 1]`, device: first query of each request, counted from the start of `token_slice`."""
    max_query_len: int
    cu_seq_lens: torch.Tensor
    """`[n + 1]`, device: first gathered row of each request."""
    starts: torch.Tensor
    """`[n]`, device: position of the first gathered row of each request."""
    max_seq_len: int
    """Longest of `seq_lens`."""
    seq_lens: torch.Tensor
    """`[n]`, CPU: gathered rows of each request."""
    token_to_seq: torch.Tensor
    """`[num_context_tokens]`, device: request (counted from `request_slice.start`) of each gathered row."""


@dataclass(frozen=True)
class ChunkedContext:
    """The context of a prefill batch, cut into chunks."""

    context_lens: torch.Tensor
    """`[B]` int32, device."""
    context_lens_list: list[int]
    workspace: torch.Tensor
    """`[rows, width]`: gathered rows of the chunk being run."""
    chunks: list[ContextChunk]
    empty_token_slices: list[slice]
    """Packed query tokens of requests without context, adjacent requests together."""


def context_workspace_rows(max_model_len: int, max_num_seqs: int, block_size: int, topk_tokens: int) -> int:
    """Rows of the engine's context workspace.

    `min(max(8 * max_model_len, 4 * max_num_seqs * block_size), 65536)`, at most `max_num_seqs * topk_tokens`,
    at least one block.
    """
    require_int("max_model_len", max_model_len, 1)
    require_int("max_num_seqs", max_num_seqs, 1)
    require_int("block_size", block_size, 1)
    require_int("topk_tokens", topk_tokens, 1)
    rows = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), MAX_WORKSPACE_ROWS)
    return max(min(rows, max_num_seqs * topk_tokens), block_size)


def plan_context_chunks(
    context_lens: Sequence[int], row_budget: int, max_context_chunk: int, split_alignment: int
) -> list[PlannedChunk]:
    """Cut contexts of `context_lens` rows into chunks of at most `row_budget` rows.

    A prefix is a positive multiple of `split_alignment`, at most `max_context_chunk`, and leaves at least one
    row. Raises ValueError for a negative length and for a budget or a longest prefix below the alignment.
    """
    lens = require_lengths("context_lens", context_lens)
    require_int("split_alignment", split_alignment, 1)
    require_int("row_budget", row_budget, split_alignment)
    require_int("max_context_chunk", max_context_chunk, split_alignment)
    chunks: list[PlannedChunk] = []
    starts: list[int] = []
    lengths: list[int] = []

    def close(end_request: int) -> None:
        if lengths:
            chunks.append(PlannedChunk(end_request - len(lengths), tuple(starts), tuple(lengths)))
            starts.clear()
            lengths.clear()

    for request, context in enumerate(lens):
        done = 0
        if context == 0:
            close(request)
        while done < context:
            remaining = context - done
            room = row_budget - sum(lengths)
            taken = remaining
            if remaining > room:
                prefix = min(room, max_context_chunk)  # below `remaining`: a row is left for the next chunk
                taken = prefix - prefix % split_alignment
            if taken:
                starts.append(done)
                lengths.append(taken)
                done += taken
            if done < context:
                close(request + 1 if taken else request)
    close(len(lens))
    return chunks


def build_chunked_context(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    row_budget: int,
    max_context_chunk: int,
    split_alignment: int,
    row_width: int,
    dtype: torch.dtype,
    device: torch.device,
    workspace: torch.Tensor | None = None,
) -> ChunkedContext | None:
    """Chunks of a batch with their index tensors on `device`; None iff no request has context.

    `workspace` has at least `row_budget` rows of `row_width` elements of `dtype`; without one it is
    allocated. Raises TypeError or ValueError for the arguments that `plan_context_chunks` refuses, for lists
    of different lengths and for a workspace that does not fit.
    """
    contexts = require_lengths("context_lens", context_lens)
    queries = require_lengths("query_lens", query_lens, len(contexts))
    plan = plan_context_chunks(contexts, row_budget, max_context_chunk, split_alignment)
    require_int("row_width", row_width, 1)
    if workspace is not None:
        require_tensor("workspace", workspace, (None, row_width), dtype, torch.device(device))
        if workspace.shape[0] < row_budget:
            raise ValueError(f"workspace has {workspace.shape[0]} rows, must have row_budget = {row_budget}")
    if not plan:
        return None
    if workspace is None:
        workspace = torch.empty((row_budget, row_width), dtype=dtype, device=device)
    token_starts = [0, *accumulate(queries)]
    return ChunkedContext(
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        context_lens_list=contexts,
        workspace=workspace,
        chunks=[
            _materialise(index, planned, queries, token_starts, device) for index, planned in enumerate(plan)
        ],
        empty_token_slices=_empty_token_slices(contexts, token_starts),
    )


def _materialise(
    index: int,
    planned: PlannedChunk,
    query_lens: list[int],
    token_starts: list[int],
    device: torch.device,
) -> ContextChunk:
    requests = planned.request_slice
    lens = query_lens[requests]
    tokens = slice(token_starts[requests.start], token_starts[requests.stop])
    seq_lens = torch.tensor(planned.lengths, dtype=torch.int32)
    local = torch.arange(len(planned.lengths), dtype=torch.int32)

    def on_device(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ContextChunk(
        index=index,
        request_slice=requests,
        token_slice=tokens,
        continuation_token_end=tokens.start + (lens[0] if planned.is_continuation else 0),
        is_continuation=planned.is_continuation,
        num_context_tokens=planned.num_rows,
        query_start_loc=on_device([0, *accumulate(lens)]),
        max_query_len=max(lens),
        cu_seq_lens=on_device([0, *accumulate(planned.lengths)]),
        starts=on_device(planned.starts),
        max_seq_len=max(planned.lengths),
        seq_lens=seq_lens,
        token_to_seq=torch.repeat_interleave(local, seq_lens).to(device),
    )


def _empty_token_slices(context_lens: list[int], token_starts: list[int]) -> list[slice]:
    slices: list[slice] = []
    for request, context in enumerate(context_lens):
        if context:
            continue
        start, stop = token_starts[request], token_starts[request + 1]
        if request and context_lens[request - 1] == 0:
            start = slices.pop().start
        slices.append(slice(start, stop))
    return slices
