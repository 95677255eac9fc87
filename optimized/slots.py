"""From request-local top-k positions to the rows that sparse MQA reads.

A top-k row is split into two disjoint parts: keys in the paged cache (physical slot = block id x block size +
offset) and new tokens (row of the packed batch). The layer does not presume that the new tokens were written to
the cache. Entries that a part does not own become -1.
"""

from __future__ import annotations

import torch


def token_requests(query_start_loc: torch.Tensor, query_lens: list[int]) -> torch.Tensor:
    """`[T]` int64: request of each packed token."""
    lens = torch.tensor(query_lens, dtype=torch.int64, device=query_start_loc.device)
    return torch.repeat_interleave(torch.arange(len(query_lens), device=lens.device), lens)


def context_slots(
    topk: torch.Tensor,
    requests: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """`topk [T, k]` int32 -> `[T, k]` int64 physical slots of context keys, -1 elsewhere."""
    positions = topk.to(torch.int64)
    owned = (positions >= 0) & (positions < context_lens[requests].unsqueeze(1))
    safe = torch.where(owned, positions, 0)
    if block_table.shape[1] == 0:
        return torch.full_like(positions, -1)
    blocks = block_table[requests.unsqueeze(1), safe // block_size].to(torch.int64)
    return torch.where(owned, blocks * block_size + safe % block_size, -1)


def suffix_rows(
    topk: torch.Tensor,
    requests: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> torch.Tensor:
    """`topk [T, k]` int32 -> `[T, k]` int64 packed rows of the new tokens at or before each query, -1 elsewhere."""
    positions = topk.to(torch.int64)
    starts = query_start_loc.to(torch.int64)[requests].unsqueeze(1)
    tokens = torch.arange(topk.shape[0], device=topk.device).unsqueeze(1)
    rows = positions - context_lens[requests].unsqueeze(1) + starts
    owned = (rows >= starts) & (rows <= tokens)
    return torch.where(owned, rows, -1)
