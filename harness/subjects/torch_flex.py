"""Subject `torch-dense[flex]`: PyTorch's flex_attention, one call for the packed batch.

On a GPU it is the compiled Triton kernel; on the CPU the plain form, which keeps every score.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from harness.subjects.api import NotRunnable, subject
from harness.subjects.contract import Contract
from harness.subjects.torch_dense import MAX_SCORES

MIN_HEAD_DIM = 16
"""Least head dim of the compiled kernel, of q and k and of v."""


@subject(stage="attend", contract=Contract(strides="any"))
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[Tq, H, Dv]` and LSE `[H, Tq]`; rows without a key give 0 and -inf.

    Raises NotRunnable where the plain form would keep too many scores, or a head is too narrow for the kernel.
    """
    (rows, heads, _), keys = q.shape, k.shape[0]
    if rows == 0 or keys == 0:
        return q.new_zeros(rows, heads, v.shape[2]), q.new_full((heads, rows), -torch.inf, dtype=torch.float32)
    if rows * keys * heads > MAX_SCORES:
        raise NotRunnable(f"torch-dense[flex] is not asked for {heads} x {rows} x {keys} scores: too many")
    if q.is_cuda and min(q.shape[2], v.shape[2]) < MIN_HEAD_DIM:
        raise NotRunnable(f"the compiled flex_attention takes head dims from {MIN_HEAD_DIM} on")
    request_of_row, _ = _requests(cu_seqlens_q, rows)
    request_of_key, position = _requests(cu_seqlens_k, keys)

    def same_request_and_allowed(_: Any, __: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (request_of_row[row] == request_of_key[key]) & allowed[row, position[key]]

    mask = flex.create_block_mask(same_request_and_allowed, None, None, rows, keys, device=q.device)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = _kernel(q.device.type)(*heads_first, mask, scale)
    return out[0].transpose(0, 1), lse[0]


def _requests(starts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Request of each packed row, and its position there."""
    index = torch.arange(total, device=starts.device)
    request = torch.searchsorted(starts[1:].long().contiguous(), index, right=True)
    return request, index - starts[request]


@cache
def _kernel(device: str) -> Any:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: Any = flex.flex_attention(
            q, k, v, block_mask=mask, scale=scale, return_aux=flex.AuxRequest(lse=True)
        )
        return result[0], result[1].lse

    if device == "cuda":
        return torch.compile(call, dynamic=True)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return call
