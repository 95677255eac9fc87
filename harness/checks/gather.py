"""Stage `gather`: context rows read from the paged cache, bit for bit."""

from __future__ import annotations

import torch

from harness.checks.verdict import check_shape, compare_exact
from reference.latent import read_cache_rows
from reports.records import CheckRecord, Place


def check_gather(
    call: str,
    rows: torch.Tensor,
    *,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    first_request: int,
    starts: list[int],
    lens: list[int],
    kv_cache_dtype: str,
    kv_cache_scale: float,
    rope: int,
    dtype: torch.dtype,
) -> CheckRecord:
    """`rows [sum(lens), lora + rope]`: per request, `lens[b]` rows from position `starts[b]`."""
    parts = [
        read_cache_rows(
            cache,
            block_table[first_request + offset],
            start,
            length,
            kv_cache_dtype=kv_cache_dtype,
            scale=kv_cache_scale,
            rope=rope,
            dtype=dtype,
        )
        for offset, (start, length) in enumerate(zip(starts, lens, strict=True))
    ]
    expected = torch.cat(parts)
    wrong = check_shape("gather", "gather.rows", rows, tuple(expected.shape), dtype)
    if wrong is not None:
        return wrong

    def locate(index: tuple[int, ...]) -> Place:
        row, offset = index[0], 0
        while row >= lens[offset]:
            row -= lens[offset]
            offset += 1
        return Place(call=call, request=first_request + offset, key=starts[offset] + row, column=index[1])

    return compare_exact("gather", "gather.rows", rows, expected, locate)
