"""Does the gather return exactly the cached rows, from any paging, start, layout and format?"""

from __future__ import annotations

import math
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from optimized.kv_cache import (
    cache_row_shape,
    check_block_table,
    gather_and_maybe_dequant_cache,
    pack_fp8_ds_mla,
    quantise_fp8_e4m3,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GARBAGE = [-1, 2**31 - 1, -(2**31), 123_456_789]


def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def naive_e4m3(code: int) -> float:
    """Value of an e4m3 bit pattern, from the definition of the format."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3_VALUES = torch.tensor([naive_e4m3(code) for code in range(256)], dtype=torch.float32)


def dequantised(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`dtype(float32(e4m3) * float32 scale)` on the CPU."""
    return (E4M3_VALUES[codes.cpu().view(torch.uint8).long()] * scale).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns, with one pattern for every NaN."""
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).cpu().view(torch.int16)


class Batch:
    """Contexts of `lens` rows from `starts` on, in permuted blocks of a cache, and what the gather needs."""

    def __init__(self, lens: list[int], starts: list[int], block_size: int, seed: int, pad: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        used = [-(-(s + n) // block_size) if n else 0 for n, s in zip(lens, starts, strict=True)]
        self.num_blocks = sum(used) + 3
        ids = torch.randperm(self.num_blocks, generator=generator).tolist()
        width = max(used, default=0) + 1 + pad
        table = [[GARBAGE[(b + j) % 4] for j in range(width)] for b in range(len(lens))]
        for b, count in enumerate(used):
            for j in range(count):
                table[b][j] = ids.pop()
        self.table = table
        self.lens, self.starts, self.block_size = lens, starts, block_size
        self.num_tokens = sum(lens)
        backing = int32(table) if lens else torch.empty((0, width), dtype=torch.int32, device=DEVICE)
        self.block_table = backing[:, : width - pad]  # rows `width` apart, read as `width - pad` entries
        self.cu_seq_lens = int32([sum(lens[:b]) for b in range(len(lens) + 1)])
        self.token_to_seq = int32([b for b, n in enumerate(lens) for _ in range(n)])
        self.seq_starts = int32(starts)

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """The wanted rows of `cache`, one by one."""
        found = [
            cache[self.table[b][position // self.block_size], position % self.block_size]
            for b, (start, length) in enumerate(zip(self.starts, self.lens, strict=True))
            for position in range(start, start + length)
        ]
        return torch.stack(found) if found else cache.new_empty((0, cache.shape[2]))

    def gather(self, cache: torch.Tensor, dst: torch.Tensor, kind: str, scale: float = 1.0) -> None:
        gather_and_maybe_dequant_cache(
            cache,
            dst,
            self.block_table,
            self.cu_seq_lens,
            self.token_to_seq,
            self.num_tokens,
            kind,
            scale,
            self.seq_starts,
        )


@st.composite
def paged(draw: st.DrawFn) -> Batch:
    requests = draw(st.integers(0, 4))
    lens = [draw(st.integers(0, 40)) for _ in range(requests)]
    starts = [draw(st.integers(0, 40)) for _ in range(requests)]
    block_size = draw(st.sampled_from([1, 2, 3, 16, 64]))
    return Batch(lens, starts, block_size, draw(st.integers(0, 2**20)), draw(st.integers(0, 3)))


def with_row_pad(cache: torch.Tensor, pad: int) -> torch.Tensor:
    """The same values in rows `pad` elements further apart."""
    blocks, size, width = cache.shape
    backing = torch.zeros((blocks, size, width + pad), dtype=cache.dtype, device=cache.device)
    backing[..., :width] = cache
    return backing[..., :width]


def guarded(num_tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A destination inside a larger tensor of sevens: (backing, destination)."""
    backing = torch.full((num_tokens + 2, width + 8), 7.0, dtype=dtype, device=DEVICE)
    return backing, backing[:, :width]


def assert_gathered(backing: torch.Tensor, dst: torch.Tensor, tokens: int, expected: torch.Tensor) -> None:
    assert torch.equal(bits(dst[:tokens]), bits(expected))
    assert (dst[tokens:] == 7).all(), "rows past num_tokens were written"
    assert (backing[:, dst.shape[1] :] == 7).all(), "columns past the row were written"


@settings(max_examples=40, deadline=None)
@given(
    paged(),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([1, 5, 24, 72]),
    st.integers(0, 3),
)
def test_unquantised_rows_are_copied_bit_for_bit(
    batch: Batch, dtype: torch.dtype, width: int, pad: int
) -> None:
    shape = (batch.num_blocks, batch.block_size, width)
    words = torch.randint(
        -(2**15), 2**15, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int16
    )
    cache = with_row_pad(words.view(dtype).to(DEVICE), pad)  # every bit pattern: NaN, infinity, subnormal
    backing, dst = guarded(batch.num_tokens, width, dtype)
    batch.gather(cache, dst, "auto")
    got = dst[: batch.num_tokens].contiguous().view(torch.int16)
    assert torch.equal(got, batch.rows(cache).view(torch.int16)), "a bit pattern was changed"
    assert_gathered(backing, dst, batch.num_tokens, batch.rows(cache))


@settings(max_examples=25, deadline=None)
@given(
    paged(),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([1.0, 0.5, 0.37, 1.7e-3, 3.0]),
    st.sampled_from([torch.uint8, torch.float8_e4m3fn]),
    st.integers(0, 3),
)
def test_e4m3_rows_are_the_rounded_product_with_the_scale(
    batch: Batch, dtype: torch.dtype, scale: float, storage: torch.dtype, pad: int
) -> None:
    shape = (batch.num_blocks, batch.block_size, 24)
    codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    cache = with_row_pad(codes.to(DEVICE), pad).view(storage)
    backing, dst = guarded(batch.num_tokens, 24, dtype)
    batch.gather(cache, dst, "fp8_e4m3", scale)
    expected = dequantised(batch.rows(codes), torch.tensor(scale, dtype=torch.float32), dtype)
    assert_gathered(backing, dst, batch.num_tokens, expected)


@settings(max_examples=8, deadline=None)
@given(paged(), st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from([0, 1, 16]))
def test_packed_rows_use_the_scale_of_each_tile_and_plain_rope(
    batch: Batch, dtype: torch.dtype, pad: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = (batch.num_blocks, batch.block_size)
    codes = torch.randint(0, 256, (*shape, 512), generator=generator, dtype=torch.uint8)
    scales = torch.rand((*shape, 4), generator=generator) * 3 + 1e-3
    rope = torch.randn((*shape, 64), generator=generator).bfloat16()
    packed = torch.cat([codes, scales.view(torch.uint8), rope.view(torch.uint8)], dim=-1)
    assert packed.shape[-1] == 656
    backing, dst = guarded(batch.num_tokens, 576, dtype)
    batch.gather(with_row_pad(packed.to(DEVICE), pad), dst, "fp8_ds_mla", scale=1e30)  # scale is not read
    latent = dequantised(codes, scales.repeat_interleave(128, dim=-1), dtype)
    expected = batch.rows(torch.cat([latent, rope.to(dtype)], dim=-1))
    assert_gathered(backing, dst, batch.num_tokens, expected)


def test_every_e4m3_code_is_decoded() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 1, 256)
    dst = torch.empty((1, 256), dtype=torch.bfloat16, device=DEVICE)
    zero = int32([0])
    gather_and_maybe_dequant_cache(codes, dst, int32([[0]]), int32([0, 1]), zero, 1, "fp8_e4m3", 1.0, None)
    assert torch.equal(bits(dst[0]), bits(E4M3_VALUES.bfloat16()))
    assert torch.signbit(dst[0, 0x80]), "minus zero lost its sign"
    torch_values = codes.cpu().view(torch.float8_e4m3fn).flatten().float()
    assert torch.equal(bits(torch_values.bfloat16()), bits(dst[0])), "torch reads the format otherwise"


def test_block_table_of_any_strides_is_read() -> None:
    cache = torch.arange(40, dtype=torch.float32, device=DEVICE).to(torch.bfloat16).view(10, 2, 2)
    table = [[3, 9, 0], [7, 1, 5]]
    expected = torch.cat([cache[i].reshape(-1, 2) for row in table for i in row])
    cu, owner = int32([0, 6, 12]), int32([0] * 6 + [1] * 6)
    wide = torch.full((2, 7), -1, dtype=torch.int32, device=DEVICE)
    wide[:, 1:4] = int32(table)
    spread = torch.full((2, 6), -1, dtype=torch.int32, device=DEVICE)
    spread[:, ::2] = int32(table)
    for view in (int32(table), wide[:, 1:4], spread[:, ::2], int32(table).t().contiguous().t()):
        dst = torch.zeros((12, 2), dtype=torch.bfloat16, device=DEVICE)
        gather_and_maybe_dequant_cache(cache, dst, view, cu, owner, 12, "auto", 1.0, None)
        assert torch.equal(dst, expected)


def test_requests_may_share_blocks() -> None:
    cache = torch.randn((2, 4, 3)).to(DEVICE, torch.float16)
    dst = torch.zeros((6, 3), dtype=torch.float16, device=DEVICE)
    table, cu, owner = int32([[1, 0], [1, -1]]), int32([0, 3, 6]), int32([0, 0, 0, 1, 1, 1])
    gather_and_maybe_dequant_cache(cache, dst, table, cu, owner, 6, "auto", 1.0, int32([2, 1]))
    assert torch.equal(dst, torch.stack([cache[1, 2], cache[1, 3], cache[0, 0], *cache[1, 1:4]]))


def test_block_offsets_past_int32_are_reached() -> None:
    """Blocks 2^30 bytes apart, the third at 2^31; the memory between them is reserved, not touched."""
    block_stride = 2**30
    backing = torch.empty(2 * block_stride + 8, dtype=torch.uint8, device=DEVICE)
    cache = backing.as_strided((3, 1, 8), (block_stride, 8, 1))
    codes = torch.arange(0x30, 0x38, dtype=torch.uint8, device=DEVICE)
    cache[2, 0] = codes
    dst = torch.zeros((1, 8), dtype=torch.bfloat16, device=DEVICE)
    zero = int32([0])
    gather_and_maybe_dequant_cache(cache, dst, int32([[2]]), int32([0, 1]), zero, 1, "fp8_e4m3", 1.0, None)
    assert torch.equal(dst[0].cpu(), E4M3_VALUES[codes.cpu().long()].bfloat16())


def test_nothing_to_gather_writes_nothing() -> None:
    backing, dst = guarded(0, 4, torch.bfloat16)
    Batch([0, 0], [5, 0], 4, 0, 0).gather(torch.zeros((1, 4, 4), device=DEVICE).bfloat16(), dst, "auto")
    Batch([], [], 4, 0, 0).gather(torch.zeros((0, 4, 4), device=DEVICE).bfloat16(), dst, "auto")
    assert (backing == 7).all()


def gather_arguments() -> dict[str, object]:
    return {
        "src_cache": torch.zeros((2, 4, 6), dtype=torch.bfloat16, device=DEVICE),
        "dst": torch.full((8, 6), 7.0, dtype=torch.bfloat16, device=DEVICE),
        "block_table": int32([[0, 1]]),
        "cu_seq_lens": int32([0, 8]),
        "token_to_seq": int32([0] * 8),
        "num_tokens": 8,
        "kv_cache_dtype": "auto",
        "scale": 1.0,
        "seq_starts": int32([0]),
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "kv_cache_dtype",
            "fp8_e5m2",
            ValueError,
            "kv_cache_dtype is 'fp8_e5m2', must be one of auto, fp8_e4m3",
        ),
        (
            "kv_cache_dtype",
            "fp8_e4m3",
            TypeError,
            "src_cache has dtype torch.bfloat16, must be torch.uint8 or",
        ),
        ("kv_cache_dtype", "fp8_ds_mla", ValueError, "'fp8_ds_mla' with kv_lora_rank -58 and rope 64"),
        ("src_cache", torch.zeros(2, 4, 6).half(), TypeError, "src_cache has dtype torch.float16"),
        (
            "src_cache",
            torch.zeros(2, 4, 7).bfloat16(),
            ValueError,
            r"shape \(2, 4, 7\), must be \(any, any, 6\)",
        ),
        (
            "src_cache",
            torch.zeros((2, 4, 12), dtype=torch.bfloat16, device=DEVICE)[..., ::2],
            ValueError,
            "src_cache has stride 2",
        ),
        (
            "src_cache",
            torch.zeros(0, 4, 6).bfloat16(),
            ValueError,
            "num_tokens is 8, must be 0 with src_cache",
        ),
        ("dst", torch.zeros(7, 6).bfloat16(), ValueError, "dst has 7 rows, must have num_tokens = 8"),
        ("dst", torch.zeros(8, 6), TypeError, "dst has dtype torch.float32"),
        ("block_table", torch.zeros(1, 2).long(), TypeError, "block_table has dtype torch.int64"),
        ("cu_seq_lens", torch.zeros(3).int(), ValueError, r"cu_seq_lens has shape \(3,\), must be \(2,\)"),
        ("token_to_seq", torch.zeros(7).int(), ValueError, "token_to_seq has 7 rows"),
        ("seq_starts", torch.zeros(2).int(), ValueError, "seq_starts has shape"),
        ("num_tokens", -1, ValueError, "num_tokens is -1, must be >= 0"),
        ("scale", torch.ones(1), TypeError, "scale is a Tensor, must be a float"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(
    name: str, value: object, error: type[Exception], message: str
) -> None:
    arguments = gather_arguments()
    dst = arguments["dst"]
    arguments[name] = value.to(DEVICE) if isinstance(value, torch.Tensor) and name != "scale" else value
    with pytest.raises(error, match=message):
        gather_and_maybe_dequant_cache(**arguments)  # type: ignore[arg-type]
    assert isinstance(dst, torch.Tensor)
    assert (dst == 7).all()


def test_destination_that_repeats_its_memory_is_refused() -> None:
    arguments = gather_arguments()
    arguments["dst"] = torch.zeros((1, 6), dtype=torch.bfloat16, device=DEVICE).expand(8, 6)
    with pytest.raises(ValueError, match=r"dst has strides \(0, 1\)"):
        gather_and_maybe_dequant_cache(**arguments)  # type: ignore[arg-type]


def test_used_entries_of_the_block_table_are_checked_and_no_others() -> None:
    table = int32([[0, 4, 99], [-5, -5, -5], [3, -1, 2**31 - 1]])
    check_block_table(table, [32, 0, 1], 16, 5)
    check_block_table(table[:0], [], 16, 0)
    check_block_table(table[:, :0], [0, 0, 0], 16, 0)
    with pytest.raises(ValueError, match=r"block_table\[0, 2\] is 99, must be in \[0, 5\)"):
        check_block_table(table, [33, 0, 1], 16, 5)
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is -5"):
        check_block_table(table, [32, 1, 1], 16, 5)
    with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 4, must be in \[0, 4\)"):
        check_block_table(table, [32, 0, 1], 16, 4)
    with pytest.raises(ValueError, match="block_table has 3 entries for request 0, must have 4"):
        check_block_table(table, [49, 0, 0], 16, 200)
    with pytest.raises(ValueError, match="context_lens has 2 entries, must have 3"):
        check_block_table(table, [1, 1], 16, 5)


def test_row_shapes_of_the_formats() -> None:
    half = torch.float16
    assert cache_row_shape("auto", 512, 64, half) == (576, (half,))
    assert cache_row_shape("fp8_e4m3", 512, 0, half)[0] == 512
    assert cache_row_shape("fp8_ds_mla", 512, 64, half)[0] == 656
    with pytest.raises(ValueError, match="kv_lora_rank 256 and rope 64, must be 512 and 64"):
        cache_row_shape("fp8_ds_mla", 256, 64, half)


def test_quantiser_divides_by_the_scale_saturates_and_rounds_to_nearest() -> None:
    x = torch.tensor([1.0, -2.0, 1e6, -1e6, 0.0, 17.0, 19.0])
    codes = quantise_fp8_e4m3(x, 2.0)
    assert codes.dtype == torch.float8_e4m3fn
    # 8.5 and 9.5 lie between 8, 9 and 10: ties go to the even mantissa
    assert codes.float().tolist() == [0.5, -1.0, 448.0, -448.0, 0.0, 8.0, 10.0]


def test_packed_writer_and_reader_round_trip_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn((3, 2, 576), generator=generator) * torch.logspace(-6, 3, 6).view(3, 2, 1)
    rows[0, 0, :128] = 0.0
    rows[0, 1, 128:256] = 1e-40  # its scale is a subnormal float32
    rows = rows.bfloat16()
    packed = pack_fp8_ds_mla(rows).to(DEVICE)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, 2, 656))
    assert struct.unpack("<f", bytes(packed[0, 0, 512:516].tolist())) == (1.0,)
    dst = torch.empty((6, 576), dtype=torch.bfloat16, device=DEVICE)
    batch = Batch([6], [0], 2, 0, 0)
    gather_and_maybe_dequant_cache(
        packed, dst, int32([[0, 1, 2]]), batch.cu_seq_lens, batch.token_to_seq, 6, "fp8_ds_mla", 1.0, None
    )
    got, want = dst.cpu().float().view(3, 2, 576), rows.float()
    assert torch.equal(got[..., 512:], want[..., 512:]), "rope is stored as it is"
    assert (got[0, 0, :128] == 0).all()
    tiles = want[..., :512].reshape(3, 2, 4, 128)
    step = tiles.abs().amax(-1, keepdim=True) / 448  # one unit of the tile's e4m3 grid
    error = (got[..., :512].reshape(3, 2, 4, 128) - tiles).abs()
    relative = tiles.abs() * (2.0**-4 + 2.0**-8)
    assert (error <= relative + step * 2.0**-10 + 2.0**-126).all()


def test_packed_writer_refuses_other_widths() -> None:
    with pytest.raises(ValueError, match="latent_and_rope has 575 columns, must have 576"):
        pack_fp8_ds_mla(torch.zeros(1, 575))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the values of index tensors are read on the CPU only")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_table", 10**8, r"block_table\[0, 1\] is 100000000, must be in \[0, "),
        ("block_table", -1, r"block_table\[0, 1\] is -1, must be in \[0, "),
        ("seq_starts", 100, "row 0 of dst at position 100 of request 0, must be in "),
        ("seq_starts", -3, "row 0 of dst at position -3 of request 0, must be in "),
        ("token_to_seq", 1, r"token_to_seq\[1\] is 1, must be in \[0, 1\)"),
        ("token_to_seq", -1, r"token_to_seq\[1\] is -1, must be in \[0, 1\)"),
    ],
)
def test_is_a_row_outside_the_cache_refused(name: str, value: int, message: str) -> None:
    arguments = gather_arguments()
    arguments["seq_starts"] = torch.zeros(1, dtype=torch.int32)
    tensor = arguments[name]
    assert isinstance(tensor, torch.Tensor)
    index = {"block_table": (0, 1), "seq_starts": (0,), "token_to_seq": (1,)}[name]
    changed = tensor.clone()
    changed[index] = value
    arguments[name] = changed
    with pytest.raises(ValueError, match=message):
        gather_and_maybe_dequant_cache(**arguments)  # type: ignore[arg-type]
    dst = arguments["dst"]
    assert isinstance(dst, torch.Tensor)
    assert (dst == 7).all()
