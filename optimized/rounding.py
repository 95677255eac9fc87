"""Rounding and products that mean the same in compiled and in interpreted Triton.

The interpreter holds bfloat16 as uint16 bit patterns: its products and dots on bfloat16 use those patterns as
numbers, and its float32 -> bfloat16 conversions truncate. So every kernel of this package widens after each
load, rounds through `round_to` before each store, and multiplies matrices through `dot`.
"""

import dataclasses
import os
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
INTERPRETED: tl.constexpr = tl.constexpr(IS_INTERPRETED)

if IS_INTERPRETED:
    # for each int32 operation the interpreter computes an overflow check and, outside its debug mode, drops the
    # result: a quarter of the time of a kernel
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def device_function(fn: Any) -> Any:
    """A function that kernels call: compiled by Triton, or the plain function where kernels are interpreted.

    The interpreter patches the whole language anew for each call of a `triton.jit` function, about 0.3 ms,
    and runs a plain function just as well.
    """
    return fn if IS_INTERPRETED else triton.jit(fn)


@device_function
def widen(x: tl.tensor) -> tl.tensor:
    """Any 16-bit or float32 tensor -> float32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # the interpreter's own conversion is right, but takes ten times as long
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@device_function
def round_to(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 -> `dtype` (bfloat16, float16 or float32), to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
        # a NaN payload must not carry into the exponent: keep its top bits and force it quiet
        rounded = tl.where(x != x, bits | 0x00400000, rounded)
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@device_function
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """acc + a @ b with float32 accumulation; `a` and `b` share one dtype (bfloat16, float16 or float32).

    16-bit products are exact in float32, so widening in the interpreter changes no product. float32 operands
    are multiplied as IEEE float32, never as tf32.
    """
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)
