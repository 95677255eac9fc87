"""Stage `attend`: one varlen attention call against the float64 oracle on its actual inputs."""

from __future__ import annotations

import torch

from harness.checks.attention import compare_attention, head_groups, rows_of_request
from harness.checks.verdict import check_shape
from optimized.trace import AttendEvent
from reference.bound import attend_reference
from reference.numerics import Numerics
from reports.records import CheckRecord

STAGE = "attend"


def unpack_bits(mask_rows: torch.Tensor, key_start: int, num_keys: int) -> torch.Tensor:
    """`[n, words]` int32 -> bool `[n, num_keys]`: bits `key_start .. key_start + num_keys` of each row.

    Bits past the last word read as clear.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=mask_rows.device)
    bits = ((mask_rows.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)
    part = bits[:, key_start : key_start + num_keys]
    missing = num_keys - part.shape[1]
    return torch.nn.functional.pad(part, (0, missing)) if missing > 0 else part


def allowed_of_call(event: AttendEvent, request: int) -> torch.Tensor:
    """The keys that this call asks for, `[q_len, k_len]` bool: its mask from its key start, or causality."""
    q_len = event.cu_seqlens_q[request + 1] - event.cu_seqlens_q[request]
    k_len = event.cu_seqlens_k[request + 1] - event.cu_seqlens_k[request]
    if event.mask is not None:
        rows = event.mask[request, :q_len]
        start = 0
        if event.offset:
            rows = rows[:, :-1]
            start = 0 if event.key_starts is None else event.key_starts[request]
        return unpack_bits(rows, max(start, 0), k_len)
    if event.causal:
        position = k_len - q_len + torch.arange(q_len, device=event.q.device)
        return torch.arange(k_len, device=event.q.device) <= position.unsqueeze(1)
    return torch.ones(q_len, k_len, dtype=torch.bool, device=event.q.device)


def check_attend(event: AttendEvent, numerics: Numerics, chunk: int | None) -> list[CheckRecord]:
    """Output and LSE of every request of one call, separately."""
    tokens, heads, _ = event.q.shape
    out_shape = (tokens, heads, event.v.shape[2])
    wrong = check_shape(STAGE, "attend.out", event.out, out_shape, event.q.dtype)
    wrong = wrong or check_shape(STAGE, "attend.lse", event.lse, (heads, tokens), torch.float32)
    if wrong is not None:
        return [wrong]
    records: list[CheckRecord] = []
    for request in range(len(event.cu_seqlens_q) - 1):
        rows = slice(event.cu_seqlens_q[request], event.cu_seqlens_q[request + 1])
        keys = slice(event.cu_seqlens_k[request], event.cu_seqlens_k[request + 1])
        if rows.start == rows.stop:
            continue
        k_len = keys.stop - keys.start
        allowed = allowed_of_call(event, request)
        place = rows_of_request(event.first_request + request, event.first_token + rows.start, event.call, chunk)
        widths = (event.q.shape[2], event.v.shape[2])
        for group in head_groups(rows.stop - rows.start, k_len, heads, widths, event.q.device):
            exact = attend_reference(
                q=event.q[rows, group],
                k=event.k[keys, group],
                v=event.v[keys, group],
                allowed=allowed,
                scale=event.scale,
                segments=[(0, k_len)],
                numerics=numerics,
            )
            out, lse = event.out[rows, group], event.lse[group, rows]
            records += compare_attention(STAGE, "attend", out, lse, exact, place, first_head=group.start)
    return records
