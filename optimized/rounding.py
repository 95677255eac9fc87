"""Rounding and products that mean the same in compiled and in interpreted Triton.

The interpreter holds bfloat16 as uint16 bit patterns: its products and dots on bfloat16 use those patterns as
numbers, and its float32 -> bfloat16 conversions truncate. So every kernel of this package widens after each
load, rounds through `round_to` before each store, and multiplies matrices through `dot`.
"""

import os
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
INTERPRETED: tl.constexpr = tl.constexpr(IS_INTERPRETED)


def device_function(fn: Any) -> Any:
    """A function that kernels call: compiled by Triton, or the plain function where kernels are interpreted.

    The interpreter patches the whole language anew for each call of a `triton.jit` function, about 0.3 ms,
    and runs a plain function just as well.
    """
    return fn if IS_INTERPRETED else triton.jit(fn)


@device_function
def widen(x: tl.tensor) -> tl.tensor:
    """Any 16-bit or float32 tensor -> float32, exactly."""
    return x.to(tl.float32)


@device_function
def round_to(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 -> `dtype` (bfloat16, float16 or float32), to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        # a NaN payload must not carry into the exponent: keep its top bits and force it quiet
        rounded = tl.where(x != x, (bits | 0x00400000) & 0xFFFF0000, rounded)
        return rounded.to(tl.uint32).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)


@device_function
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """acc + a @ b with float32 accumulation; `a` and `b` share one dtype (bfloat16, float16 or float32).

    16-bit products are exact in float32, so widening in the interpreter changes no product. float32 operands
    are multiplied as IEEE float32, never as tf32.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)
