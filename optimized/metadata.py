"""What the layer needs to know of one prefill batch besides its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from optimized.chunks import ChunkedContext, build_chunked_context


@dataclass(frozen=True)
class PrefillMetadata:
    """One prefill batch of `num_requests` requests and `num_tokens` packed query tokens."""

    query_lens_cpu: list[int] | None
    """New tokens of each request; None where the engine did not copy them to the host."""
    context_lens_cpu: list[int]
    query_start_loc: torch.Tensor
    """`[B + 1]` int32: first packed row of each request."""
    block_table: torch.Tensor
    """`[B, max_blocks]` int32, any row stride."""
    block_size: int
    num_decode_tokens: int
    """Rows of the top-k buffer which come before the prefill rows."""
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    chunked_context: ChunkedContext | None
    """None iff no request has context."""
    topk_mask_workspace: torch.Tensor | None
    """Flat int32, never zeroed."""

    @property
    def num_requests(self) -> int:
        return len(self.context_lens_cpu)


def build_prefill_metadata(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    block_size: int,
    num_decode_tokens: int = 0,
    context_row_budget: int,
    max_context_chunk: int | None = None,
    split_alignment: int | None = None,
    context_row_width: int,
    dtype: torch.dtype,
    topk_mask_workspace: torch.Tensor | None = None,
) -> PrefillMetadata:
    """Metadata of a batch with `query_lens[b]` new tokens behind `context_lens[b]` cached ones.

    `context_row_budget` rows of `context_row_width` elements are held for one context chunk;
    `max_context_chunk` defaults to the budget and `split_alignment` to the block size. The workspace for the
    chunks is allocated here, on the device of `block_table`.

    Raises TypeError for a block table that is no tensor, ValueError for lengths that differ in number or are
    negative, and for a budget below the alignment.
    """
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table is a {type(block_table).__name__}, must be a torch.Tensor")
    if len(query_lens) != len(context_lens):
        raise ValueError(
            f"query_lens has {len(query_lens)} entries and context_lens {len(context_lens)}: they must be equal"
        )
    for name, lens in (("query_lens", query_lens), ("context_lens", context_lens)):
        for request, length in enumerate(lens):
            if length < 0:
                raise ValueError(f"{name}[{request}] is {length}, must be >= 0")
    if num_decode_tokens < 0:
        raise ValueError(f"num_decode_tokens is {num_decode_tokens}, must be >= 0")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be >= 1")
    device = block_table.device
    starts = [0, *accumulate(query_lens)]
    seq_lens = [context + query for context, query in zip(context_lens, query_lens, strict=True)]
    chunked = build_chunked_context(
        list(context_lens),
        list(query_lens),
        row_budget=context_row_budget,
        max_context_chunk=context_row_budget if max_context_chunk is None else max_context_chunk,
        split_alignment=block_size if split_alignment is None else split_alignment,
        row_width=context_row_width,
        dtype=dtype,
        device=device,
    )
    return PrefillMetadata(
        query_lens_cpu=list(query_lens),
        context_lens_cpu=list(context_lens),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        block_table=block_table,
        block_size=block_size,
        num_decode_tokens=num_decode_tokens,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        num_tokens=starts[-1],
        chunked_context=chunked,
        topk_mask_workspace=topk_mask_workspace,
    )
