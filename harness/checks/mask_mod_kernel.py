# mypy: disable-error-code="attr-defined, name-defined, no-untyped-def, misc"
"""Calls an FA4 mask mod as FA4's kernels call it, on a GPU or on the host, and writes the bits out.

The mod is compiled by CuTe into a loop of ours: on CUDA one thread for each group of 32 or more keys, on the CPU
a host loop with the same body. No tensor core is used, so a packed mod written for SM100 runs on any GPU.

What the kernels do with a mod (seen in flash-attn-4 4.0.0b36), and this does after them:

* Scores come in tiles of query rows by `tile_keys` keys, and the mod is asked about whole tiles: about rows and
  keys past the ends too, whose answers nobody uses. In the last key tile of a request indices are taken modulo
  the lengths (SM90: rows and keys; SM100: keys), elsewhere rows are not.
* SM90 asks once for each element, with vectors of one index, and takes a Boolean.
* SM100 asks once for `__vec_size__` = n adjacent keys counted from the start of the tile: n key indices, and the
  other indices n times. It takes ceil(n / 32) words, low bits first, of which n < 32 uses the low n. Keys past
  the tile have no index. A mod without `__vec_size__` is asked as on SM90.

Imports CuTe (`nvidia-cutlass-dsl`); import it only where that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from harness.checks.mask_mod_readout import vec_size

if not torch.cuda.is_available():
    # CuTe asks the driver for the target unless it is told one; host loops run whatever it is
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.runtime import from_dlpack

WORD_KEYS = 32
THREADS = 128
_ALIGN_BYTES = 16


class SeqlenInfo(NamedTuple):
    """The lengths that a mod may ask for, by FA4's names."""

    seqlen_q: Any
    seqlen_k: Any


@cute.jit
def _scalar_words(mod, sm90, tile_keys, mask, out, lens, b, head, row, word):
    """One word of answers, 32 calls."""
    q_len, k_len = lens[b, 0], lens[b, 1]
    tiles = (k_len + tile_keys - 1) // tile_keys if row < lens[b, 2] else 0
    bits = Uint32(0)
    for j in cutlass.range(WORD_KEYS):
        key = word * WORD_KEYS + j
        tile = key // tile_keys
        if tile < tiles:
            last = tile == tiles - 1
            asked_key = key % k_len if last else key
            asked_row = row
            if cutlass.const_expr(sm90):
                asked_row = row % q_len if last else row
            index = [_vector(x) for x in (b, head, asked_row, asked_key)]
            seen = mod(*index, SeqlenInfo(q_len, k_len), [mask])
            bits = bits | (Uint32(1) << Uint32(j) if cutlass.Boolean(seen[0]) else Uint32(0))
    out[b, row, word] = Int32(bits)


@cute.jit
def _packed_words(mod, tile_keys, mask, out, lens, b, head, row, group):
    """`__vec_size__` keys, or 32 if that is more, of which all lie in one tile."""
    size = vec_size(mod)
    words, calls = max(1, size // WORD_KEYS), max(1, WORD_KEYS // size)
    groups_a_tile = -(-tile_keys // (words * WORD_KEYS))
    q_len, k_len = lens[b, 0], lens[b, 1]
    tiles = (k_len + tile_keys - 1) // tile_keys if row < lens[b, 2] else 0
    tile, group_in_tile = group // groups_a_tile, group % groups_a_tile
    if tile < tiles:
        found = cute.make_rmem_tensor(words, Uint32)
        for c in cutlass.range_constexpr(words):
            found[c] = Uint32(0)
        for call in cutlass.range_constexpr(calls):
            column = group_in_tile * words * WORD_KEYS + call * size
            keys = cute.make_rmem_tensor(size, Int32)
            for lane in cutlass.range(size, unroll_full=True):
                key = tile * tile_keys + column + lane
                key = key % k_len if tile == tiles - 1 else key
                keys[lane] = key if column + lane < tile_keys else Int32(0)
            index = [_vector(x).broadcast_to((size,)) for x in (b, head, row)]
            answer = mod(*index, keys.load(), SeqlenInfo(q_len, k_len), [mask])
            for c in cutlass.range_constexpr(words):
                bits = Uint32(answer[c])
                if cutlass.const_expr(size < WORD_KEYS):
                    bits = bits & Uint32((1 << size) - 1)
                found[c] = found[c] | (bits << Uint32(call * size))
        for c in cutlass.range_constexpr(words):
            column = group_in_tile * words * WORD_KEYS + c * WORD_KEYS
            if column < tile_keys:
                out[b, row, (tile * tile_keys + column) // WORD_KEYS] = Int32(found[c])


@cute.jit
def _vector(value):
    values = cute.make_rmem_tensor(1, Int32)
    values[0] = value
    return values.load()


@cute.jit
def _ask(mod, sm90, tile_keys, mask, out, lens, b, head, row, group):
    if cutlass.const_expr(vec_size(mod) == 1):
        _scalar_words(mod, sm90, tile_keys, mask, out, lens, b, head, row, group)
    else:
        _packed_words(mod, tile_keys, mask, out, lens, b, head, row, group)


@cute.kernel
def _kernel(
    mod: cutlass.Constexpr,
    sm90: cutlass.Constexpr,
    tile_keys: cutlass.Constexpr,
    mask: cute.Tensor,
    out: cute.Tensor,
    lens: cute.Tensor,
    head: Int32,
    groups: Int32,
) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, row, b = cute.arch.block_idx()
    group = block * THREADS + thread
    if group < groups:
        _ask(mod, sm90, tile_keys, mask, out, lens, b, head, row, group)


@cute.jit
def _on_device(
    mod: cutlass.Constexpr,
    sm90: cutlass.Constexpr,
    tile_keys: cutlass.Constexpr,
    mask: cute.Tensor,
    out: cute.Tensor,
    lens: cute.Tensor,
    head: Int32,
    rows: Int32,
    groups: Int32,
    stream: Any,
) -> None:
    _kernel(mod, sm90, tile_keys, mask, out, lens, head, groups).launch(
        grid=[(groups + THREADS - 1) // THREADS, rows, cute.size(out, mode=[0])], block=[THREADS, 1, 1], stream=stream
    )


@cute.jit
def _on_host(
    mod: cutlass.Constexpr,
    sm90: cutlass.Constexpr,
    tile_keys: cutlass.Constexpr,
    mask: cute.Tensor,
    out: cute.Tensor,
    lens: cute.Tensor,
    head: Int32,
    rows: Int32,
    groups: Int32,
) -> None:
    for b in cutlass.range(cute.size(out, mode=[0])):
        for row in cutlass.range(rows):
            for group in cutlass.range(groups):
                _ask(mod, sm90, tile_keys, mask, out, lens, b, head, row, group)


_compiled: dict[tuple[object, ...], Any] = {}


def read_words(
    mod: Callable[..., Any],
    mask: torch.Tensor,
    lens: torch.Tensor,
    columns: int,
    *,
    sm90: bool,
    tile_keys: int,
    head: int,
) -> torch.Tensor:
    """Answers of `mod` as packed words: int32 `[B, rows, columns]`, key `k` in bit `k & 31` of word `k >> 5`.

    mask:       int32 `[B, rows, words]`, on a CUDA device or the CPU, last dimension contiguous
    lens:       int32 `[B, 3]` on the same device: queries, keys, and query rows to ask about
    columns:    words of one row of answers, whole tiles of the longest request

    Words that nobody asked about hold 0.
    """
    size = vec_size(mod)
    group_keys = max(WORD_KEYS, size)
    groups = columns * WORD_KEYS // tile_keys * -(-tile_keys // group_keys) if size > 1 else columns
    out = torch.zeros(mask.shape[0], mask.shape[1], columns, dtype=torch.int32, device=mask.device)
    if out.numel() == 0:
        return out
    aligned = mask.data_ptr() % _ALIGN_BYTES == 0 and all(s % 4 == 0 for s in mask.stride()[:2])
    align = _ALIGN_BYTES if aligned else 4
    tensors = [_laid_out(t, a) for t, a in ((mask, align), (out, 4), (lens, 4))]
    arguments = [*tensors, Int32(head), Int32(mask.shape[1]), Int32(groups)]
    if mask.is_cuda:
        import cuda.bindings.driver as driver

        with torch.cuda.device(mask.device):
            arguments.append(driver.CUstream(torch.cuda.current_stream().cuda_stream))
            _call(_on_device, (mod, sm90, tile_keys), arguments, (align, mask.device.index))
    else:
        _call(_on_host, (mod, sm90, tile_keys), arguments, (align, None))
    return out


def _laid_out(tensor: torch.Tensor, align: int) -> Any:
    """As FA4 takes an auxiliary tensor: dynamic sizes, contiguous along its last dimension."""
    return from_dlpack(tensor.detach(), assumed_align=align).mark_layout_dynamic(leading_dim=tensor.dim() - 1)


def _call(function: Any, static: tuple[Any, ...], arguments: list[Any], key: tuple[object, ...]) -> None:
    entry = (function, *static, *key)
    if entry not in _compiled:
        _compiled[entry] = cute.compile(function, *static, *arguments)
    _compiled[entry](*arguments)
