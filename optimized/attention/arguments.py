"""Checks of the arguments that `triton_masked_mha` and `fa4_masked_mha` share (SPEC 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.validation import (
    FLOAT_16_BIT_DTYPES,
    require_distinct_elements,
    require_int,
    require_tensor,
    require_unit_stride,
)


@dataclass(frozen=True)
class AttentionCall:
    """One checked call. All tensors lie on one device and have stride 1 in their last dimension."""

    q: Tensor
    """[Tq, H, D], bfloat16 or float16."""
    k: Tensor
    """[Tk, H, D], dtype of q."""
    v: Tensor
    """[Tk, H, Dv], dtype of q."""
    cu_seqlens_q: Tensor
    """[B + 1] int32, contiguous."""
    cu_seqlens_k: Tensor
    """[B + 1] int32, contiguous."""
    mask: Tensor | None
    """[B, padded_q, words] int32."""
    out: Tensor
    """[Tq, H, Dv], dtype of q."""
    lse: Tensor
    """[H, Tq] float32."""

    @property
    def batch_size(self) -> int:
        return self.cu_seqlens_q.numel() - 1

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]


def check_attention_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    mask: Tensor | None,
    offset: bool,
    causal: bool,
    out: Tensor | None,
) -> AttentionCall:
    """Checks every argument, then allocates the results that the caller did not bring.

    Offsets are device tensors and are not read back (that would stall the stream): only their shapes and
    dtypes are checked. Raises ValueError or TypeError that names the argument, before anything is written.
    """
    require_tensor("q", q, (None, None, None), FLOAT_16_BIT_DTYPES)
    require_tensor("k", k, (None, *q.shape[1:]), q.dtype, q.device)
    require_tensor("v", v, (k.shape[0], q.shape[1], None), q.dtype, q.device)
    for name, tensor in (("q", q), ("v", v)):
        for axis, what in ((1, "heads"), (2, "head dim")):
            if tensor.shape[axis] == 0:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have a positive {what}")
    require_tensor("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32, q.device)
    batch_size = cu_seqlens_q.numel() - 1
    if batch_size < 0:
        raise ValueError("cu_seqlens_q has 0 entries, must have batch + 1")
    require_tensor("cu_seqlens_k", cu_seqlens_k, (batch_size + 1,), torch.int32, q.device)
    require_int("max_seqlen_q", max_seqlen_q, 0, q.shape[0])
    require_int("max_seqlen_k", max_seqlen_k, 0, k.shape[0])
    if mask is not None:
        if causal:
            raise ValueError("causal is True beside a mask, must be False: the mask alone encodes causality")
        _check_mask(mask, batch_size, max_seqlen_q, offset, q.device)
    elif offset:
        raise ValueError("offset is True without a mask, must be False: the mask holds the key start")
    if out is not None:
        require_tensor("out", out, (q.shape[0], q.shape[1], v.shape[2]), q.dtype, q.device)
        require_unit_stride("out", out)
        require_distinct_elements("out", out)
    else:
        out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    return AttentionCall(
        q=_unit_last_stride(q),
        k=_unit_last_stride(k),
        v=_unit_last_stride(v),
        cu_seqlens_q=cu_seqlens_q.contiguous(),
        cu_seqlens_k=cu_seqlens_k.contiguous(),
        mask=mask,
        out=out,
        lse=torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device),
    )


def _check_mask(mask: Tensor, batch_size: int, max_seqlen_q: int, offset: bool, device: torch.device) -> None:
    require_tensor("mask", mask, (batch_size, None, None), torch.int32, device)
    require_unit_stride("mask", mask)
    if mask.shape[1] < max_seqlen_q:
        raise ValueError(f"mask has {mask.shape[1]} query rows, must have at least max_seqlen_q = {max_seqlen_q}")
    # without a query there is no row, and nothing that a key start could move
    if offset and batch_size > 0 and max_seqlen_q > 0 and mask.shape[2] == 0:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, must hold a key-start word in query row 0")


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
