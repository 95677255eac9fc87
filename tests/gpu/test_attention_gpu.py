"""Are the compiled attention kernels attention over exactly the allowed keys, and do they compile once?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized.attention.fa4 import fa4_available, fa4_masked_mha
from optimized.attention.mha_kernels import list_key_tiles_kernel, masked_mha_kernel
from optimized.attention.triton_mha import triton_masked_mha
from optimized.kv_cache import pack_fp8_ds_mla, quantise_fp8_e4m3
from optimized.sparse_mqa import triton_sparse_mqa
from optimized.sparse_mqa_kernel import sparse_mqa_kernel
from tests.attention_cases import naive_attention, offsets, pack_mask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda")
SCALE = 0.09
PUBLISHED = [(192, 128), (256, 256)]
SMALL = [(64, 64), (24, 16)]

Attention = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=["triton", "fa4"])
def attention(request: pytest.FixtureRequest) -> Attention:
    if request.param == "triton":
        return triton_masked_mha
    usable, reason = fa4_available()
    if not usable:
        pytest.skip(reason)
    return fa4_masked_mha


class Batch:
    """Random q, k, v of requests with the given lengths, and checked calls on them."""

    def __init__(
        self,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        dims: tuple[int, int],
        heads: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.random = torch.Generator(DEVICE).manual_seed(0)
        self.query_lens, self.key_lens = list(query_lens), list(key_lens)
        head_dim, v_dim = dims
        self.q = self.normal(sum(query_lens), heads, head_dim).to(dtype)
        kv = self.normal(sum(key_lens), heads, head_dim + v_dim).to(dtype)
        self.k = kv[..., :head_dim].contiguous()
        self.v = kv[..., head_dim:]  # a strided view, as the projection leaves it

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=DEVICE)

    def random_keep(self, share: float) -> list[Tensor]:
        return [
            torch.rand(q, k, generator=self.random, device=DEVICE) < share
            for q, k in zip(self.query_lens, self.key_lens, strict=True)
        ]

    def run(self, attention: Attention, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return attention(
            self.q,
            self.k,
            self.v,
            offsets(self.query_lens, DEVICE),
            offsets(self.key_lens, DEVICE),
            max(self.query_lens, default=0),
            max(self.key_lens, default=0),
            SCALE,
            **kwargs,
        )

    def check(self, attention: Attention, keep: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = self.run(attention, **kwargs)
        expected = naive_attention(self.q, self.k, self.v, self.query_lens, self.key_lens, keep, SCALE)
        expected.check(out, lse)
        return out, lse


def padded(q_len: int) -> int:
    tile = 128 if q_len <= 128 else 256
    return -(-q_len // tile) * tile


@pytest.mark.parametrize("dims", PUBLISHED + SMALL)
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [
        ([1, 127, 0, 128], [700, 81, 5, 0]),
        ([129, 3], [128, 1000]),
        ([255, 256, 257, 1], [300, 80, 79, 33]),
        ([5, 40], [1, 160]),
    ],
)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_masked_call_sees_the_mask(
    attention: Attention, dims: tuple[int, int], query_lens: list[int], key_lens: list[int], share: float
) -> None:
    batch = Batch(query_lens, key_lens, dims)
    keep = batch.random_keep(share)
    batch.check(attention, keep, mask=pack_mask(keep, words=32, padded_q=padded(max(query_lens))))


@pytest.mark.parametrize("dims", PUBLISHED + SMALL)
def test_offset_call_starts_at_any_key(attention: Attention, dims: tuple[int, int]) -> None:
    key_starts = [*range(33), 95, 1000]
    batch = Batch([3] * 35, [150 + i for i in range(35)], dims)
    keep = batch.random_keep(0.3)
    mask = pack_mask(keep, words=40, padded_q=128, key_starts=key_starts, stray=0xFFFFFFFF)
    batch.check(attention, keep, mask=mask, offset=True)


@pytest.mark.parametrize("dims", PUBLISHED + SMALL)
@pytest.mark.parametrize("key_start", [None, 0, 29])
def test_bits_past_the_segment_are_no_keys(attention: Attention, dims: tuple[int, int], key_start: int | None) -> None:
    batch = Batch([130], [150], dims)
    longer = torch.rand(130, 600, generator=batch.random, device=DEVICE) < 0.5  # a mask of the whole sequence
    starts = None if key_start is None else [key_start]
    mask = pack_mask([longer], 24, 256, starts)
    batch.check(attention, [longer[:, :150]], mask=mask, offset=key_start is not None)


@pytest.mark.parametrize("dims", PUBLISHED)
@pytest.mark.parametrize("key_start", [0, 5, 31])
def test_long_offset_call(attention: Attention, dims: tuple[int, int], key_start: int) -> None:
    batch = Batch([600, 130], [4000, 3000], dims, heads=4)
    keep = batch.random_keep(0.1)
    keep[0][:, :2000] = False  # leading key tiles without any bit
    keep[1][100] = False
    mask = pack_mask(keep, words=132, padded_q=768, key_starts=[key_start, 64], stray=0xFFFFFFFF)
    out, lse = batch.check(attention, keep, mask=mask, offset=True)
    assert lse[:, 700].isneginf().all()
    again = batch.run(attention, mask=mask, offset=True)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


@pytest.mark.parametrize("dims", PUBLISHED + SMALL)
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [([1, 127, 300], [1, 400, 300]), ([128, 0, 257], [1000, 7, 257]), ([9, 200], [4, 0])],
)
@pytest.mark.parametrize("causal", [True, False])
def test_dense_call(
    attention: Attention, dims: tuple[int, int], query_lens: list[int], key_lens: list[int], causal: bool
) -> None:
    batch = Batch(query_lens, key_lens, dims)
    keep = [torch.ones(q, k, dtype=torch.bool) for q, k in zip(query_lens, key_lens, strict=True)]
    if causal:
        keep = [x.tril(x.shape[1] - x.shape[0]) for x in keep]
    batch.check(attention, keep, causal=causal)


@pytest.mark.parametrize("dims", [(192, 128), (24, 16)])
def test_float16(attention: Attention, dims: tuple[int, int]) -> None:
    batch = Batch([100, 33], [300, 50], dims, dtype=torch.float16)
    keep = batch.random_keep(0.3)
    batch.check(attention, keep, mask=pack_mask(keep, words=12, padded_q=128))


@pytest.mark.parametrize(
    ("query_lens", "key_lens"), [([], []), ([0], [5]), ([0, 0], [0, 0]), ([3], [0]), ([2, 2], [0, 0])]
)
@pytest.mark.parametrize("masked", [True, False])
def test_empty_batches_requests_and_keys(
    attention: Attention, query_lens: list[int], key_lens: list[int], masked: bool
) -> None:
    batch = Batch(query_lens, key_lens, (192, 128))
    keep = batch.random_keep(1.0)
    empty = torch.zeros(0, 128, 4, dtype=torch.int32, device=DEVICE)
    mask = (pack_mask(keep, words=4, padded_q=128) if keep else empty) if masked else None
    batch.check(attention, keep, mask=mask, causal=not masked)


@pytest.mark.parametrize("dims", PUBLISHED)
def test_log_sum_exp_counts_keys_when_queries_are_zero(attention: Attention, dims: tuple[int, int]) -> None:
    batch = Batch([300], [2000], dims)
    batch.q.zero_()
    keep = batch.random_keep(0.4)
    _, lse = batch.run(attention, mask=pack_mask(keep, words=64, padded_q=512))
    assert torch.equal(lse.double().exp().round().to(torch.int64), keep[0].sum(1).expand(2, -1))


def test_given_output_is_written_in_place(attention: Attention) -> None:
    batch = Batch([70], [90], (192, 128))
    keep = batch.random_keep(0.5)
    buffer = torch.full((71, 3, 128), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out, _ = batch.check(attention, keep, mask=pack_mask(keep, words=4, padded_q=128), out=buffer[:70, :2])
    assert out.data_ptr() == buffer.data_ptr()
    assert (buffer[70] == 7).all()
    assert (buffer[:, 2] == 7).all()


def test_triton_reads_no_row_of_another_request() -> None:
    batch = Batch([130, 3, 5], [100, 70, 50], (192, 128))
    keep = batch.random_keep(0.5)
    mask = pack_mask(keep, words=4, padded_q=256)
    clean = batch.run(triton_masked_mha, mask=mask)
    batch.v = batch.v.contiguous()
    rows, keys = slice(130, 133), slice(100, 170)
    for x, own in ((batch.q, rows), (batch.k, keys), (batch.v, keys)):
        kept = x[own].clone()
        x.fill_(torch.nan)
        x[own] = kept
    out, lse = batch.run(triton_masked_mha, mask=mask)
    assert torch.equal(out[rows], clean[0][rows])
    assert torch.equal(lse[:, rows], clean[1][:, rows])


def test_triton_addresses_beyond_32_bits() -> None:
    keys, heads, dims = 90_000, 128, (192, 128)
    k = torch.zeros(keys, heads, dims[0], dtype=torch.bfloat16, device=DEVICE)
    v = torch.zeros(keys, heads, dims[1], dtype=torch.bfloat16, device=DEVICE)
    assert k.numel() > 2**31
    tail = Batch([4], [100], dims, heads=heads)
    k[-100:], v[-100:] = tail.k, tail.v
    keep = tail.random_keep(0.5)
    lens = [keys - 100, 100]
    out, lse = triton_masked_mha(
        torch.cat([tail.q[:1], tail.q]),
        k,
        v,
        offsets([1, 4], DEVICE),
        offsets(lens, DEVICE),
        4,
        keys - 100,
        SCALE,
        mask=pack_mask([torch.ones(1, lens[0], dtype=torch.bool, device=DEVICE), keep[0]], 2812, 128),
    )
    expected = naive_attention(tail.q, tail.k, tail.v, [4], [100], keep, SCALE)
    expected.check(out[1:], lse[:, 1:])


def compiled_variants(kernel: Any) -> int:
    caches = kernel.device_caches[torch.cuda.current_device()]
    return len(caches[0])


def test_another_batch_compiles_no_triton_kernel() -> None:
    def call(query_lens: list[int], key_lens: list[int], words: int, start: int) -> None:
        batch = Batch(query_lens, key_lens, (192, 128), heads=3)
        keep = batch.random_keep(0.3)
        starts = [start] * len(query_lens)
        mask = pack_mask(keep, words, padded(max(query_lens)), starts)
        batch.run(triton_masked_mha, mask=mask, offset=True)
        batch.run(triton_masked_mha, causal=True)

    call([5, 20], [64, 33], 8, 0)
    before = [compiled_variants(kernel) for kernel in (masked_mha_kernel, list_key_tiles_kernel)]
    for query_lens, key_lens, words, start in (
        ([1], [1], 4, 1),
        ([16], [16], 4, 16),
        ([300, 7, 0], [511, 1024, 2], 40, 17),
        ([128] * 16, [160] * 16, 12, 32),
    ):
        call(query_lens, key_lens, words, start)
    assert [compiled_variants(kernel) for kernel in (masked_mha_kernel, list_key_tiles_kernel)] == before


def test_another_batch_compiles_no_fa4_kernel() -> None:
    usable, reason = fa4_available()
    if not usable:
        pytest.skip(reason)
    from flash_attn.cute import interface

    def call(query_lens: list[int], key_lens: list[int], words: int) -> None:
        batch = Batch(query_lens, key_lens, (192, 128), heads=3)
        keep = batch.random_keep(0.3)
        mask = pack_mask(keep, words, padded(max(query_lens)), [1] * len(keep))
        batch.run(fa4_masked_mha, mask=mask, offset=True)

    call([5, 20], [64, 33], 8)
    call([300], [64], 8)  # FA4 has a kernel of its own for queries that fill more than one tile
    before = len(interface._flash_attn_fwd.compile_cache.cache)
    for query_lens, key_lens in (([1], [1]), ([128] * 16, [160] * 16), ([301, 7, 0], [511, 1024, 2])):
        call(query_lens, key_lens, 40)
    assert len(interface._flash_attn_fwd.compile_cache.cache) == before


def check_mqa(
    q: Tensor, cache: Tensor, rows: Tensor, indices: Tensor, latent: int, dtype: str = "auto", scale: float = 1.0
) -> None:
    """The kernel on `cache` against a naive attention over `rows`, what the cache's slots hold."""
    out, lse = triton_sparse_mqa(q, cache, indices, SCALE, v_dim=latent, kv_cache_dtype=dtype, kv_cache_scale=scale)
    keep = torch.zeros(q.shape[0], rows.shape[0] + 1, dtype=torch.bool, device=DEVICE)
    valid = (indices >= 0) & (indices < rows.shape[0])
    keep.scatter_(1, torch.where(valid, indices, rows.shape[0]).long(), True)
    keys = rows.unsqueeze(1).expand(-1, q.shape[1], -1)
    expected = naive_attention(q, keys, keys[..., :latent], [q.shape[0]], [rows.shape[0]], [keep[:, :-1]], SCALE)
    expected.check(out, lse)


def mqa_inputs(tokens: int, heads: int, topk: int, slots: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randn(tokens, heads, width, generator=random, device=DEVICE).to(torch.bfloat16)
    rows = torch.randn(slots, width, generator=random, device=DEVICE).to(torch.bfloat16)
    indices = torch.randint(-5, slots + 5, (tokens, topk), generator=random, device=DEVICE, dtype=torch.int32)
    indices[:, 3] = indices[:, 1]
    if tokens > 1:
        indices[1] = -1
    return q, rows, indices


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (20, 8)])
@pytest.mark.parametrize("heads", [1, 3, 64, 128])
@pytest.mark.parametrize(("tokens", "topk"), [(1, 7), (40, 300), (3, 2048)])
def test_sparse_mqa_attends_to_each_set(latent: int, rope: int, heads: int, tokens: int, topk: int) -> None:
    q, rows, indices = mqa_inputs(tokens, heads, topk, 64 * 50, latent + rope)
    buffer = torch.full((50, 64, latent + rope + 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    cache = buffer[..., : latent + rope]
    cache.copy_(rows.view(50, 64, -1))
    check_mqa(q, cache, rows, indices, latent)


def test_sparse_mqa_reads_fp8_caches() -> None:
    q, rows, indices = mqa_inputs(20, 16, 200, 64 * 20, 576)
    codes = quantise_fp8_e4m3(rows, 0.37)
    dequantised = (codes.float() * 0.37).to(torch.bfloat16)
    check_mqa(q, codes.view(20, 64, 576), dequantised, indices, 512, "fp8_e4m3", 0.37)
    packed = pack_fp8_ds_mla(rows)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    values = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    latent = (values.view(-1, 4, 128) * scales.unsqueeze(-1)).view(-1, 512).to(torch.bfloat16)
    dequantised = torch.cat([latent, packed[:, 528:].contiguous().view(torch.bfloat16)], dim=1)
    check_mqa(q, packed.view(20, 64, 656), dequantised, indices, 512, "fp8_ds_mla")


def test_sparse_mqa_addresses_beyond_32_bits() -> None:
    q, rows, indices = mqa_inputs(4, 16, 100, 64 * 3, 576)
    stride = 2**30 + 64
    storage = torch.zeros(2 * stride + 64 * 576, dtype=torch.bfloat16, device=DEVICE)
    cache = storage.as_strided((3, 64, 576), (stride, 576, 1))
    cache.copy_(rows.view(3, 64, 576))
    check_mqa(q, cache, rows, indices, 512)


def test_another_batch_compiles_no_mqa_kernel() -> None:
    def call(tokens: int, topk: int, slots: int) -> None:
        q, rows, indices = mqa_inputs(tokens, 16, topk, slots, 576)
        triton_sparse_mqa(q, rows, indices, SCALE, v_dim=512)

    call(5, 30, 100)
    before = compiled_variants(sparse_mqa_kernel)
    for tokens, topk, slots in ((1, 4, 1), (16, 16, 16), (333, 64, 4096)):
        call(tokens, topk, slots)
    assert compiled_variants(sparse_mqa_kernel) == before
