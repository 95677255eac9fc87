# mypy: allow-untyped-decorators
"""Facts of interpreted Triton that the kernels rest on: bf16 rounded, widened and multiplied as PyTorch does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from optimized.rounding import IS_INTERPRETED, dot, round_to, widen

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="compiled kernels are tested in tests/gpu")


@triton.jit
def _round_kernel(x_ptr: Any, out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, round_to(x, out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _widen_kernel(x_ptr: Any, out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, widen(tl.load(x_ptr + at, mask=at < n, other=0)), mask=at < n)


@triton.jit
def _dot_kernel(
    a_ptr: Any, b_ptr: Any, c_ptr: Any, out_ptr: Any, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr
) -> None:
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.load(c_ptr + m[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], dot(a, b, c))


@triton.jit
def _plain_round_kernel(x_ptr: Any, out_ptr: Any, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _round_kernel[(triton.cdiv(x.numel(), 8192),)](x, out, x.numel(), BLOCK=8192)
    return out


def widened(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.float32)
    _widen_kernel[(triton.cdiv(x.numel(), 8192),)](x, out, x.numel(), BLOCK=8192)
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, any NaN equal to any."""
    nan = a.isnan() & b.isnan()
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool((nan | (a.view(kind) == b.view(kind))).all())


def floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern_is_widened_exactly(dtype: torch.dtype) -> None:
    x = every_pattern(dtype)
    assert same(widened(x), x.float())
    assert same(rounded(x.float(), dtype), x)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_round_to_nearest_even_as_pytorch_rounds_them(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    anything = floats(torch.randint(-(2**31), 2**31, (200_000,), generator=g))
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    # around every midpoint between two bf16 numbers
    ties = torch.cat([floats(high + low) for low in (0x7FFF, 0x8000, 0x8001, 1, 0xFFFF)])
    special = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 65504.0, 65520.0]
    )
    for x in (anything, ties, special):
        assert same(rounded(x, dtype), x.to(dtype))


def test_a_nan_stays_a_nan_whatever_its_payload() -> None:
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7F80FFFF, 0x7FC00000], dtype=torch.int64)
    x = floats(torch.cat([payloads, payloads - 2**31]))
    assert bool(x.isnan().all())
    assert bool(rounded(x, torch.bfloat16).isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_of_matrices_is_that_of_their_numbers(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(16, 64, generator=g).to(dtype), torch.randn(64, 32, generator=g).to(dtype)
    c, out = torch.randn(16, 32, generator=g), torch.empty(16, 32)
    _dot_kernel[(1,)](a, b, c, out, M=16, K=64, N=32)
    exact = c.double() + a.double() @ b.double()
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    assert float(((out - exact).abs() / size).max()) < 65 * 2.0**-24


def test_the_interpreters_own_conversion_truncates() -> None:
    """The reason for `round_to`; once this fails, an interpreter that rounds has come."""
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-9] * 16)  # above the midpoint between 1 and 1 + 2^-7
    out = torch.empty(16, dtype=torch.bfloat16)
    _plain_round_kernel[(1,)](x, out, BLOCK=16)
    assert out.float().tolist() == [1.0] * 16
    assert x.bfloat16().float().tolist() == [1.0 + 2.0**-7] * 16
