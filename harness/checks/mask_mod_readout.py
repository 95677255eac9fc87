"""The mask-mod read-out: asks a mod about every key of every query, as FA4's kernels do (JUDGEMENT section 3).

SM100 mods are read on any CUDA GPU, and on the CPU where CuTe can compile them for the host. Plain Python mods
(`PythonMaskMod`) need neither.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from harness.checks.attend import unpack_bits
from harness.checks.mask_mod_python import PythonMaskMod
from harness.checks.mask_mod_python import read_words as read_words_in_python
from harness.subjects.api import NotRunnable

WORD_BITS = 32
TILE_KEYS = 128
"""Keys of a tile of scores unless a caller says otherwise. FA4's SM90 kernel takes 80 at head dims 256/256."""
MAX_ROWS = 65_535
"""Query rows and requests that one read-out takes: the limit of a CUDA grid."""

Calling = Literal["sm90", "sm100"]
MaskMod = Callable[..., Any] | PythonMaskMod


def read_mask_mod(
    mod: MaskMod,
    mask: torch.Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    key_starts: Sequence[int] | None = None,
    calling: Calling = "sm90",
    *,
    tile_keys: int = TILE_KEYS,
    head: int = 0,
) -> list[torch.Tensor]:
    """The keys that `mod` lets each query see: for each request bool `[q_len, k_len]` on the CPU.

    mod:         an FA4 mask mod, `mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors)`
    mask:        int32 `[B, rows, words]`, given to the mod as `aux_tensors[0]`; on a CUDA device or the CPU
    key_starts:  written into a copy of the mask, last word of query row 0 of each request; None: left alone
    calling:     "sm90" (one element, a Boolean) or "sm100" (`__vec_size__` adjacent keys, packed words)
    tile_keys:   keys of a tile of scores; a multiple of 32 for packed mods

    Raises:
        ValueError, TypeError: an argument is wrong, or the mod cannot be called that way.
        NotRunnable: CuTe is not installed.
        ModFault: a Python mod read outside the mask or shifted by 32.
    """
    _check(mod, mask, q_lens, k_lens, key_starts, calling, tile_keys)
    if key_starts is not None and mask.numel():
        mask = mask.clone()
        mask[:, 0, -1] = torch.tensor(list(key_starts), dtype=torch.int32, device=mask.device)
    columns = -(-max(k_lens, default=0) // tile_keys) * tile_keys
    columns = -(-columns // WORD_BITS)
    lens = [(q, k, _asked_rows(q, mask.shape[1], calling)) for q, k in zip(q_lens, k_lens, strict=True)]
    sm90 = calling == "sm90"
    if isinstance(mod, PythonMaskMod):
        words = read_words_in_python(mod, mask.cpu(), lens, columns, sm90=sm90, tile_keys=tile_keys, head=head)
    else:
        if importlib.util.find_spec("cutlass") is None:
            raise NotRunnable("the mask-mod read-out needs CuTe (nvidia-cutlass-dsl), which is not installed")
        from harness.checks.mask_mod_kernel import read_words

        device_lens = torch.tensor(lens, dtype=torch.int32, device=mask.device).view(-1, 3)
        words = read_words(mod, mask, device_lens, columns, sm90=sm90, tile_keys=tile_keys, head=head)
    words = words.cpu()
    return [unpack_bits(words[b, :q], 0, k) for b, (q, k) in enumerate(zip(q_lens, k_lens, strict=True))]


def vec_size(mod: MaskMod) -> int:
    """Keys that a mod answers for in one call: its `__vec_size__`, or 1."""
    size: int = getattr(mod, "__vec_size__", 1)
    return size


def _asked_rows(q_len: int, rows: int, calling: Calling) -> int:
    """Query rows in whole tiles: 128 of them, or 256 for a longer suffix on SM100; never more than the mask has."""
    tile = 256 if calling == "sm100" and q_len > 128 else 128
    return min(-(-q_len // tile) * tile, rows)


def _check(
    mod: MaskMod,
    mask: torch.Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    key_starts: Sequence[int] | None,
    calling: str,
    tile_keys: int,
) -> None:
    if calling not in ("sm90", "sm100"):
        raise ValueError(f"calling is {calling!r}, must be 'sm90' or 'sm100'")
    size = vec_size(mod)
    if calling == "sm90" and size != 1:
        raise ValueError(f"mod has __vec_size__ {size}, must be 1: FA4's SM90 kernels refuse packed mods")
    if size < 1 or (size % WORD_BITS and WORD_BITS % size):
        raise ValueError(f"mod has __vec_size__ {size}, must divide 32 or be a multiple of 32")
    if tile_keys < 1 or (size > 1 and tile_keys % WORD_BITS):
        raise ValueError(f"tile_keys is {tile_keys}, must be positive, and a multiple of 32 for packed mods")
    if mask.dtype != torch.int32:
        raise TypeError(f"mask has dtype {mask.dtype}, must be int32")
    if mask.dim() != 3 or (mask.numel() and mask.stride(2) != 1):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} and strides {mask.stride()}, must be [B, rows, words] with "
            "contiguous words"
        )
    batch, rows, _ = mask.shape
    if max(batch, rows) > MAX_ROWS:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, must have at most {MAX_ROWS} requests and rows")
    for name, values in (("q_lens", q_lens), ("k_lens", k_lens), ("key_starts", key_starts)):
        if values is not None and len(values) != batch:
            raise ValueError(f"{name} has {len(values)} entries, must have {batch}, one for each request of the mask")
    if min([*q_lens, *k_lens], default=0) < 0:
        raise ValueError(f"q_lens is {list(q_lens)} and k_lens {list(k_lens)}, must not be negative")
    if max(q_lens, default=0) > rows:
        raise ValueError(f"q_lens is {list(q_lens)}, must be at most the mask's {rows} rows")
