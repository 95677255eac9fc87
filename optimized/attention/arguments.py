"""Checks of the arguments that `triton_masked_mha` and `fa4_masked_mha` share (SPEC 3)."""

from dataclasses import dataclass

import torch
from torch import Tensor

STORAGE_DTYPES = (torch.bfloat16, torch.float16)
_PACKED_RANK = 3


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

    Offsets are device tensors and are not read back (that would stall the stream); only their shapes and dtypes
    are checked. Raises ValueError or TypeError that names the argument, before anything is written.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() != _PACKED_RANK:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, heads, head_dim]")
        if tensor.dtype not in STORAGE_DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be torch.bfloat16 or torch.float16")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {q.dtype}, the dtype of q")
        if tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; heads and head_dim must be positive")
    if tuple(k.shape[1:]) != tuple(q.shape[1:]):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; its heads and head_dim must be {tuple(q.shape[1:])}, as in q"
        )
    if tuple(v.shape[:2]) != tuple(k.shape[:2]):
        raise ValueError(
            f"v has shape {tuple(v.shape)}; its tokens and heads must be {tuple(k.shape[:2])}, as in k"
        )
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() == 0:
        raise ValueError(f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}; it must be [batch + 1]")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}; it must be {tuple(cu_seqlens_q.shape)}, "
            "the shape of cu_seqlens_q"
        )
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; it must be torch.int32")
    for name, value, total in (
        ("max_seqlen_q", max_seqlen_q, q.shape[0]),
        ("max_seqlen_k", max_seqlen_k, k.shape[0]),
    ):
        if not 0 <= value <= total:
            raise ValueError(f"{name} is {value}; it must lie in 0..{total}, the number of packed rows")
    batch_size = cu_seqlens_q.numel() - 1
    if mask is None:
        if offset:
            raise ValueError("offset is True but mask is None; a key start needs a mask that holds it")
    else:
        if causal:
            raise ValueError("causal is True beside a mask; the mask alone must encode causality")
        _check_mask(mask, batch_size, max_seqlen_q, offset)
    if out is not None:
        expected = (q.shape[0], q.shape[1], v.shape[2])
        if tuple(out.shape) != expected:
            raise ValueError(f"out has shape {tuple(out.shape)}; it must be {expected}")
        if out.dtype != q.dtype:
            raise TypeError(f"out has dtype {out.dtype}; it must be {q.dtype}, the dtype of q")
        if out.stride(-1) != 1:
            raise ValueError(f"out has strides {out.stride()}; its last stride must be 1")
    for name, tensor_or_none in (
        ("k", k),
        ("v", v),
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
        ("mask", mask),
        ("out", out),
    ):
        if tensor_or_none is not None and tensor_or_none.device != q.device:
            raise ValueError(
                f"{name} is on {tensor_or_none.device}; it must be on {q.device}, the device of q"
            )
    if out is None:
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


def _check_mask(mask: Tensor, batch_size: int, max_seqlen_q: int, offset: bool) -> None:
    if mask.dim() != _PACKED_RANK or mask.shape[0] != batch_size:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be [{batch_size}, padded_q, words]")
    if mask.dtype != torch.int32:
        raise TypeError(f"mask has dtype {mask.dtype}; it must be torch.int32")
    if mask.shape[1] < max_seqlen_q:
        raise ValueError(
            f"mask has {mask.shape[1]} query rows; it must have at least max_seqlen_q = {max_seqlen_q}"
        )
    if offset and batch_size > 0 and (mask.shape[1] == 0 or mask.shape[2] == 0):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; offset needs a reserved key-start word in row 0"
        )
    if mask.numel() > 0 and mask.shape[2] > 1 and mask.stride(2) != 1:
        raise ValueError(f"mask has strides {mask.stride()}; its last stride must be 1")


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()
