"""Device code that decodes quantised cache rows.

Rows are read byte by byte and decoded with integer operations: the same on every GPU and in the interpreter, and
free of alignment rules for the packed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 bit pattern -> float32, exactly."""
    bits = code.to(tl.int32)
    exponent = (bits >> 3) & 15
    mantissa = bits & 7
    normal = ((exponent + 120) << 23) | (mantissa << 20)  # 120 moves the exponent bias from 7 to 127
    subnormal = (mantissa.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
    magnitude = tl.where(exponent == 0, subnormal, normal)
    magnitude = tl.where((bits & 127) == 127, 0x7FC00000, magnitude)
    # the sign is set as a bit: compiled Triton negates as 0 - x, which loses the sign of zero
    return (magnitude | ((bits & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def load_float32(ptrs: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Little-endian float32 from four bytes at any address."""
    bits = tl.load(ptrs, mask=live, other=0).to(tl.uint32)
    bits = bits | (tl.load(ptrs + 1, mask=live, other=0).to(tl.uint32) << 8)
    bits = bits | (tl.load(ptrs + 2, mask=live, other=0).to(tl.uint32) << 16)
    bits = bits | (tl.load(ptrs + 3, mask=live, other=0).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_bfloat16(ptrs: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Little-endian bfloat16 from two bytes at any address, as float32."""
    bits = tl.load(ptrs, mask=live, other=0).to(tl.uint32) << 16
    bits = bits | (tl.load(ptrs + 1, mask=live, other=0).to(tl.uint32) << 24)
    return bits.to(tl.float32, bitcast=True)
