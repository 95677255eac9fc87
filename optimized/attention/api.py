"""One signature for both attention kernels."""

from __future__ import annotations

import torch

from optimized.attention.fa4 import fa4_masked_mha
from optimized.attention.triton_mha import triton_masked_mha


def masked_mha(
    attention: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    *,
    mask: torch.Tensor | None,
    offset: bool,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Varlen attention by the kernel called `attention`, `triton` or `fa4`; out `[Tq, H, v]`, LSE `[H, Tq]`."""
    kernel = fa4_masked_mha if attention == "fa4" else triton_masked_mha
    return kernel(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        mask=mask,
        offset=offset,
        causal=causal,
    )
