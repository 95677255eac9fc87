"""FlashAttention-4 (`flash_attn.cute`, varlen) with our mask mods: stages `attend` and `mask_mod`.

Contract of FA4 itself, as seen in 4.0.0b36: head dims are multiples of 8 (on SM90 up to 256); every row of V is
finite, masked keys and the rows of the next request in the same key tile included; `causal` is dropped silently
beside a mask mod, so that the mask alone carries causality; LSE is natural, `[H, T]`, and -inf beside an output of 0
where a row has no key. `fa4[offset]` reads its keys from a mask over whole sequences, `fa4[packed]` offers the mods
for SM100.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from harness.checks.mask_mod import mod_factory
from harness.checks.mask_mod_python import PythonMaskMod
from harness.subjects.api import NotRunnable, subject
from harness.subjects.contract import Contract
from optimized.attention.fa4 import fa4_available, fa4_masked_mha
from optimized.mask_bits import key_bit, key_word
from reference.numerics import FA4_SM90, FA4_SM100, Numerics

_LARGEST_HEAD_DIM = 256


def _numerics() -> Numerics:
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return FA4_SM100 if blackwell else FA4_SM90


CONTRACT = Contract(device="cuda", head_dim_multiple=8, strides="any", numerics=_numerics())


@subject(stage="attend", contract=CONTRACT)
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FA4 with the mod whose segment starts at bit 0 of the mask. Raises NotRunnable where FA4 cannot run."""
    _require(q, v)
    return fa4_masked_mha(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, mask=mask)


@subject(stage="attend", contract=CONTRACT)
def attend_offset(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    mask: torch.Tensor,
    key_starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FA4 with the mod that adds the key start. Raises NotRunnable where FA4 cannot run.

    `key_starts` is not read: the same numbers stand in the mask.
    """
    _require(q, v)
    return fa4_masked_mha(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, mask=mask, offset=True
    )


def _require(q: torch.Tensor, v: torch.Tensor) -> None:
    usable, why = fa4_available()
    if not usable:
        raise NotRunnable(f"FA4 cannot run here: {why}")
    dims = (q.shape[2], v.shape[2])
    if max(dims) > _LARGEST_HEAD_DIM:
        raise NotRunnable(f"FA4 takes head dims up to {_LARGEST_HEAD_DIM}, these are {dims}")


def _mod(family: int, offset: bool) -> Callable[..., Any]:
    if importlib.util.find_spec("cutlass") is None:
        raise NotRunnable("FA4's mask mods need CuTe (nvidia-cutlass-dsl), which is not installed")
    from optimized.mask_mods import mask_mod_for

    return mask_mod_for(family, offset)


@subject(stage="mask_mod", contract=Contract())
@mod_factory
def mask_mod(offset: bool, device: torch.device) -> Callable[..., Any]:
    """Our mods for SM90, one element a call."""
    return _mod(90, offset)


@subject(stage="mask_mod", contract=Contract())
@mod_factory
def mask_mod_packed(offset: bool, device: torch.device) -> Callable[..., Any]:
    """Our mods for SM100, packed words."""
    return _mod(100, offset)


@subject(stage="mask_mod", contract=Contract())
@mod_factory
def mask_mod_logic(offset: bool, device: torch.device) -> PythonMaskMod:
    """The bit logic of our scalar mods on Python integers, which needs no CuTe."""
    return python_mask_mod(offset, packed=False)


def python_mask_mod(offset: bool, packed: bool) -> PythonMaskMod:
    """The bit logic of our mods (`optimized.mask_bits`) as a mod on Python integers."""

    def answer(batch: Any, head: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> list[int]:
        mask = aux_tensors[0]
        b, row = batch[0], q_idx[0]
        data = mask.shape[2] - int(offset)
        start = int(mask[b, 0, data]) if offset else 0
        zero = type(mask[b, row, 0])(0)

        def read(word: int) -> Any:
            return mask[b, row, word] if 0 <= word < data else zero

        if not packed:
            return [key_bit(read, start, kv_idx[0])]
        return [key_word(read, start, first) for first in kv_idx[::32]]

    return PythonMaskMod(answer, (32 if offset else 128) if packed else 1)
