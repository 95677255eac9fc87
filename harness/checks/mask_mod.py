"""Stage `mask_mod`: which keys an FA4 mask mod lets each query see, bit by bit, without a tolerance.

A mod is asked exactly as FA4's SM90 or SM100 kernels ask it (see `mask_mod_kernel`), and its answers are compared
with the bits of the mask it was given. SM100 mods are read on any CUDA GPU, and on the CPU where CuTe can
compile them for the host. Plain Python mods (`PythonMaskMod`) need no CuTe.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from harness.checks.attend import unpack_bits
from harness.checks.mask_mod_python import ModFault, PythonMaskMod
from harness.checks.mask_mod_python import read_words as read_words_in_python
from harness.checks.readout import SetDifference, first_difference
from harness.checks.verdict import failed, passed
from reports.records import CheckRecord, Place, Status

STAGE = "mask_mod"
WORD_BITS = 32
TILE_KEYS = 128
"""Keys of a tile of scores unless a caller says otherwise. FA4's SM90 kernel takes 80 at head dims 256/256."""
MAX_ROWS = 65_535
"""Query rows and requests that one read-out takes: the limit of a CUDA grid."""

Calling = Literal["sm90", "sm100"]
MaskMod = Callable[..., Any] | PythonMaskMod


class CannotRead(RuntimeError):  # noqa: N818 - an outcome, not a fault
    """The mod cannot be read on this machine; the message says why."""


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
        CannotRead: CuTe is not installed.
        ModFault: a Python mod read outside the mask or shifted by 32.
    """
    _check(mod, mask, q_lens, k_lens, key_starts, calling, tile_keys)
    if key_starts is not None:
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
            raise CannotRead("CuTe (nvidia-cutlass-dsl) is not installed")
        from harness.checks.mask_mod_kernel import read_words

        device_lens = torch.tensor(lens, dtype=torch.int32, device=mask.device).view(-1, 3)
        words = read_words(mod, mask, device_lens, columns, sm90=sm90, tile_keys=tile_keys, head=head)
    words = words.cpu()
    return [unpack_bits(words[b, :q], 0, k) for b, (q, k) in enumerate(zip(q_lens, k_lens, strict=True))]


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
    size = getattr(mod, "__vec_size__", 1)
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
    if max(q_lens, default=0) > rows or min([*q_lens, *k_lens], default=0) < 0:
        raise ValueError(f"q_lens is {list(q_lens)} and k_lens {list(k_lens)}, must be 0 to the mask's {rows} rows")


def expected_bits(
    mask: torch.Tensor, q_lens: Sequence[int], k_lens: Sequence[int], key_starts: Sequence[int] | None
) -> list[torch.Tensor]:
    """The right answers: bits `key_start ..` of each query row; the last word holds the key start and is no data."""
    words = mask.cpu()
    if key_starts is None:
        return [unpack_bits(words[b, :q], 0, k) for b, (q, k) in enumerate(zip(q_lens, k_lens, strict=True))]
    return [
        unpack_bits(words[b, :q, :-1], start, k)
        for b, (q, k, start) in enumerate(zip(q_lens, k_lens, key_starts, strict=True))
    ]


def check_mask_mod(
    call: str,
    mod: MaskMod,
    mask: torch.Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    key_starts: Sequence[int] | None = None,
    calling: Calling = "sm90",
    *,
    tile_keys: int = TILE_KEYS,
    first_request: int = 0,
) -> CheckRecord:
    """Read the mod out and compare every bit of every request; the first wrong one is named.

    Arguments as `read_mask_mod`; `call` and `first_request` say where the call stands in its batch.
    """
    check = f"mask_mod.{calling}"
    try:
        seen = read_mask_mod(mod, mask, q_lens, k_lens, key_starts, calling, tile_keys=tile_keys)
    except CannotRead as reason:
        return failed(STAGE, check, str(reason), Place(call=call), status=Status.NOT_RUN)
    except ModFault as fault:
        return failed(STAGE, check, str(fault), Place(call=call), status=Status.GUARD)
    for b, allowed in enumerate(expected_bits(mask, q_lens, k_lens, key_starts)):
        difference = first_difference(seen[b], allowed)
        if difference is not None:
            start = 0 if key_starts is None else key_starts[b]
            return _wrong_bit(check, call, first_request + b, difference, start, seen[b], allowed)
    return passed(STAGE, check)


def _wrong_bit(
    check: str,
    call: str,
    request: int,
    difference: SetDifference,
    key_start: int,
    seen: torch.Tensor,
    allowed: torch.Tensor,
) -> CheckRecord:
    bit = key_start + difference.key
    place = Place(call=call, request=request, row=difference.row, key=bit, word=bit // WORD_BITS, bit=bit % WORD_BITS)
    selected = int(allowed.sum())
    lost, extra = int((allowed & ~seen).sum()), int((seen & ~allowed).sum())
    message = (
        f"{difference.describe(key_start)}; key_start {key_start}; of {selected} selected keys {lost} are missed, "
        f"{extra} others attended"
    )
    return failed(STAGE, check, message, place)


@dataclass(frozen=True)
class MaskModFault:
    """A fault shrunk to one request with one query row."""

    keys: tuple[int, ...]
    """Selected keys, counted from the start of the segment."""
    key_start: int | None
    key_len: int
    record: CheckRecord


def shrink_fault(
    mod: MaskMod,
    record: CheckRecord,
    key_start: int | None,
    calling: Calling,
    *,
    device: torch.device,
    tile_keys: int = TILE_KEYS,
) -> MaskModFault | None:
    """The smallest fault of the kind that `record` found: one row, one or two keys, a short segment.

    Tries the record's own key alone, then beside one neighbour, from the smallest key start and segment up. None
    if nothing so small shows the fault.
    """
    starts = [None] if key_start is None else sorted({key_start % WORD_BITS, key_start})
    key = max((record.place.key or 0) - (key_start or 0), 0)
    for start in starts:
        for target in sorted({key % WORD_BITS, key}):
            for keys in ((target,), (target, target + 1)):
                found = _single_row(mod, keys, start, calling, device, tile_keys)
                if found is not None:
                    return found
    return None


def _single_row(
    mod: MaskMod, keys: tuple[int, ...], key_start: int | None, calling: Calling, device: torch.device, tile_keys: int
) -> MaskModFault | None:
    key_len = max(keys) + 1
    first = key_start or 0
    words = -(-(first + key_len) // WORD_BITS) + int(key_start is not None)
    mask = torch.zeros(1, 128, -(-words // 4) * 4, dtype=torch.int64)
    for key in keys:
        mask[0, 0, (first + key) // WORD_BITS] |= 1 << (first + key) % WORD_BITS
    mask = torch.where(mask >= 2**31, mask - 2**32, mask).to(torch.int32).to(device)
    starts = None if key_start is None else [key_start]
    record = check_mask_mod("single", mod, mask, [1], [key_len], starts, calling, tile_keys=tile_keys)
    return MaskModFault(keys, key_start, key_len, record) if record.status.is_finding else None
