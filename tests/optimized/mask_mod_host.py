"""Runs FA4 mask mods on the CPU: CuTe compiles host loops that call a mod as the kernels do."""

# mypy: ignore-errors

from __future__ import annotations

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from optimized.mask_mods import mask_mod_for


def _vector(first, count):  # type: ignore[no-untyped-def]
    values = cute.make_rmem_tensor(count, Int32)
    for i in range(count):
        values[i] = first + i
    return values.load()


@cute.jit
def _scalar_loop(
    mod: cutlass.Constexpr, mask: cute.Tensor, out: cute.Tensor, batches: Int32, queries: Int32, keys: Int32
) -> None:
    for b in cutlass.range(batches):
        for q in cutlass.range(queries):
            for n in cutlass.range(keys):
                index = [_vector(x, 1) for x in (b, Int32(0), q, n)]
                out[b, q, n] = Int32(mod(*index, None, [mask])[0])


@cute.jit
def _packed_loop(
    mod: cutlass.Constexpr, mask: cute.Tensor, out: cute.Tensor, batches: Int32, queries: Int32, keys: Int32
) -> None:
    size = mod.__vec_size__
    for b in cutlass.range(batches):
        for q in cutlass.range(queries):
            for chunk in cutlass.range(keys // size):
                index = [_vector(x, 1).broadcast_to((size,)) for x in (b, Int32(0), q)]
                words = mod(*index, _vector(chunk * size, size), None, [mask])
                for i in cutlass.range_constexpr(size // 32):
                    out[b, q, chunk * (size // 32) + i] = Int32(words[i])


def _run(loop, mod, mask: torch.Tensor, columns: int, keys: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    out = torch.full((mask.shape[0], mask.shape[1], columns), -7, dtype=torch.int32)
    aux = from_dlpack(mask, assumed_align=16).mark_layout_dynamic(leading_dim=2)
    loop(mod, aux, from_dlpack(out), Int32(mask.shape[0]), Int32(mask.shape[1]), Int32(keys))
    return out


def run_scalar(mask: torch.Tensor, offset: bool, keys: int) -> torch.Tensor:
    """[B, queries, keys] 0/1 of the SM90 mod, called once for each element."""
    return _run(_scalar_loop, mask_mod_for(90, offset), mask, keys, keys)


def run_packed(mask: torch.Tensor, offset: bool, keys: int) -> torch.Tensor:
    """[B, queries, keys] 0/1 of the SM100 mod, called with `__vec_size__` adjacent keys."""
    words = _run(_packed_loop, mask_mod_for(100, offset), mask, keys // 32, keys)
    bits = (words.to(torch.int64).unsqueeze(-1) >> torch.arange(32)) & 1
    return bits.flatten(2).to(torch.int32)
