"""Is `triton_sparse_mqa` latent attention over each row's set of cache rows, whatever the order and the format?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import sparse_mqa
from optimized.attention.tiles import MqaTiles
from optimized.kv_cache import pack_fp8_ds_mla, quantise_fp8_e4m3
from optimized.sparse_mqa import distinct_slots, triton_sparse_mqa
from tests.attention_cases import Expected, naive_attention

SCALE = 0.3
LATENT, ROPE, HEADS = 20, 8, 3
COMPILED_TILES = MqaTiles(32, 16, 1, 16, 16, False, num_warps=4, num_stages=1)


@pytest.fixture(params=["interpreted tiles", "compiled tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled tiles":
        monkeypatch.setattr(sparse_mqa, "mqa_tiles", lambda *_: COMPILED_TILES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def expected_of(q: Tensor, rows: Tensor, sets: list[set[int]], latent: int) -> Expected:
    """Naive latent attention of each query over `rows[slot]` for the slots of its set."""
    keep = torch.zeros(q.shape[0], rows.shape[0], dtype=torch.bool)
    for t, slots in enumerate(sets):
        keep[t, sorted(slots)] = True
    keys = rows.unsqueeze(1).expand(-1, q.shape[1], -1)
    return naive_attention(q, keys, keys[..., :latent], [q.shape[0]], [rows.shape[0]], [keep], SCALE)


def sets_of(indices: Tensor, num_slots: int, lengths: list[int] | None = None) -> list[set[int]]:
    return [
        {s for s in row[: None if lengths is None else lengths[t]] if 0 <= s < num_slots}
        for t, row in enumerate(indices.tolist())
    ]


def random_indices(rows: int, topk: int, num_slots: int, seed: int = 0) -> Tensor:
    """Unsorted, with duplicates, -1 and other entries outside the cache anywhere; row 1 has no valid entry."""
    random = torch.Generator().manual_seed(seed)
    indices = torch.randint(-3, num_slots + 3, (rows, topk), generator=random, dtype=torch.int32)
    indices[:, 2] = indices[:, 0]
    indices[0, -1] = 2**31 - 1
    if rows > 1:
        indices[1] = torch.tensor([-1, -(2**31), num_slots])[torch.arange(topk) % 3]
    return indices


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize(("rows", "topk", "num_slots"), [(37, 20, 90), (5, 150, 300), (1, 1, 1)])
def test_each_row_attends_to_its_set(rows: int, topk: int, num_slots: int, rope: int) -> None:
    q, kv = normal(rows, HEADS, LATENT + rope), normal(num_slots, LATENT + rope, seed=1)
    indices = random_indices(rows, topk, num_slots) if topk > 2 else torch.zeros(1, 1, dtype=torch.int32)
    out, lse = triton_sparse_mqa(q, kv, indices, SCALE, v_dim=LATENT)
    expected_of(q, kv, sets_of(indices, num_slots), LATENT).check(out, lse)


def test_order_padding_and_duplicates_change_nothing() -> None:
    q, kv = normal(4, HEADS, LATENT + ROPE), normal(50, LATENT + ROPE, seed=1)
    indices = random_indices(4, 12, 50)
    out, lse = triton_sparse_mqa(q, kv, indices, SCALE, v_dim=LATENT)
    shuffled = torch.cat([indices.flip(1), indices[:, 3:7], torch.full((4, 5), -1, dtype=torch.int32)], dim=1)
    again = triton_sparse_mqa(q, kv, shuffled.to(torch.int64), SCALE, v_dim=LATENT)
    sets = sets_of(indices, 50)
    assert sets == sets_of(shuffled, 50)
    expected_of(q, kv, sets, LATENT).check(*again)
    expected_of(q, kv, sets, LATENT).check(out, lse)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_topk_length_cuts_rows(dtype: torch.dtype) -> None:
    q, kv = normal(5, HEADS, LATENT + ROPE), normal(50, LATENT + ROPE, seed=1)
    indices = random_indices(5, 12, 50, seed=2)
    lengths = [12, 3, 0, 7, 100]
    out, lse = triton_sparse_mqa(q, kv, indices, SCALE, torch.tensor(lengths, dtype=dtype), v_dim=LATENT)
    expected_of(q, kv, sets_of(indices, 50, lengths), LATENT).check(out, lse)
    assert lse[:, 2].isneginf().all()


def paged(rows: Tensor, block_size: int, row_pad: int = 0) -> Tensor:
    """`rows` as a cache [blocks, block_size, row] whose rows and blocks are padded with bytes 0xff (NaN)."""
    blocks = rows.shape[0] // block_size
    buffer = torch.full((blocks, block_size + 1, rows.shape[1] + row_pad), 0, dtype=rows.dtype)
    buffer.view(torch.uint8).fill_(0xFF)
    cache = buffer[:, :block_size, : rows.shape[1]]
    cache.copy_(rows.view(blocks, block_size, -1))
    return cache


@pytest.mark.usefixtures("tiles")
def test_paged_cache_with_padded_strides() -> None:
    q, rows = normal(6, HEADS, LATENT + ROPE), normal(60, LATENT + ROPE, seed=1)
    indices = random_indices(6, 16, 60)
    out, lse = triton_sparse_mqa(q, paged(rows, 6, row_pad=3), indices, SCALE, v_dim=LATENT)
    expected_of(q, rows, sets_of(indices, 60), LATENT).check(out, lse)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("as_bytes", [False, True])
def test_fp8_e4m3_cache(as_bytes: bool) -> None:
    q, rows = normal(5, HEADS, LATENT + ROPE), normal(60, LATENT + ROPE, seed=1)
    codes = quantise_fp8_e4m3(rows, 0.37)
    dequantised = (codes.float() * 0.37).to(torch.bfloat16)
    cache = paged(codes.view(torch.uint8), 6, row_pad=1)
    indices = random_indices(5, 16, 60)
    out, lse = triton_sparse_mqa(
        q,
        cache if as_bytes else cache.view(torch.float8_e4m3fn),
        indices,
        SCALE,
        v_dim=LATENT,
        kv_cache_dtype="fp8_e4m3",
        kv_cache_scale=0.37,
    )
    expected_of(q, dequantised, sets_of(indices, 60), LATENT).check(out, lse)


@pytest.mark.parametrize("row_pad", [0, 1])
@pytest.mark.parametrize("folded", [True, False])
def test_fp8_ds_mla_cache(row_pad: int, folded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not folded:
        plain = MqaTiles(512, 64, 1, 16, 16, False, num_warps=4, num_stages=1)
        monkeypatch.setattr(sparse_mqa, "mqa_tiles", lambda *_: plain)
    q, rows = normal(3, HEADS, 576) * 0.2, normal(24, 576, seed=1)
    rows *= torch.logspace(-2, 2, 576).to(rows.dtype)  # a scale of its own for each of the four tiles
    packed = pack_fp8_ds_mla(rows)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    codes = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    latent = (codes.view(24, 4, 128) * scales.unsqueeze(-1)).view(24, 512).to(torch.bfloat16)
    dequantised = torch.cat([latent, packed[:, 528:].contiguous().view(torch.bfloat16)], dim=1)
    indices = random_indices(3, 10, 24)
    cache = paged(packed, 6, row_pad)
    out, lse = triton_sparse_mqa(q, cache, indices, SCALE, v_dim=512, kv_cache_dtype="fp8_ds_mla")
    expected_of(q, dequantised, sets_of(indices, 24), 512).check(out, lse)


def test_slots_that_are_not_listed_are_not_read() -> None:
    q, kv = normal(4, HEADS, LATENT + ROPE), normal(50, LATENT + ROPE, seed=1)
    indices = random_indices(4, 12, 50)
    listed = sorted(set().union(*sets_of(indices, 50)))
    poisoned = torch.full_like(kv, torch.nan)
    poisoned[listed] = kv[listed]
    clean = triton_sparse_mqa(q, kv, indices, SCALE, v_dim=LATENT)
    out, lse = triton_sparse_mqa(q, poisoned, indices, SCALE, v_dim=LATENT)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


@pytest.mark.parametrize(("rows", "topk", "num_slots"), [(0, 4, 9), (3, 0, 9), (3, 4, 0)])
def test_nothing_to_attend_to(rows: int, topk: int, num_slots: int) -> None:
    q, kv = normal(rows, HEADS, LATENT + ROPE), normal(num_slots, LATENT + ROPE)
    indices = torch.zeros(rows, topk, dtype=torch.int32)
    out, lse = triton_sparse_mqa(q, kv, indices, SCALE, v_dim=LATENT)
    assert (out.shape, lse.shape) == ((rows, HEADS, LATENT), (HEADS, rows))
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_distinct_slots_keeps_each_valid_slot_once() -> None:
    indices = torch.tensor([[5, -1, 3, 5, 9, 3, 3], [9, 8, -7, 100, 8, 0, 0]], dtype=torch.int32)
    slots, counts = distinct_slots(indices, torch.tensor([7, 5]), 10)
    kept = [[s for s in row[:n] if s != -1] for row, n in zip(slots.tolist(), counts.tolist(), strict=True)]
    assert kept == [[3, 5, 9], [8, 9]]


def test_strided_query_and_large_scores() -> None:
    wide = normal(6, HEADS + 2, LATENT + ROPE + 3)
    q, kv = wide[::2, 1 : 1 + HEADS, : LATENT + ROPE], normal(200, LATENT + ROPE, seed=1)
    kv *= torch.linspace(0, 30, 200).to(kv.dtype)[:, None]
    indices = torch.arange(200, dtype=torch.int32).expand(3, -1)
    out, lse = triton_sparse_mqa(q, kv, indices, SCALE, v_dim=LATENT)
    expected_of(q, kv, sets_of(indices, 200), LATENT).check(out, lse)


def _bad(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "q": torch.zeros(4, 2, 24, dtype=torch.bfloat16),
        "kv": torch.zeros(9, 24, dtype=torch.bfloat16),
        "indices": torch.zeros(4, 3, dtype=torch.int32),
        "scale": 1.0,
        "v_dim": 16,
    }
    return good | changes


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "q has dtype", _bad(q=torch.zeros(4, 2, 24))),
        (ValueError, "q has shape", _bad(q=torch.zeros(4, 24, dtype=torch.bfloat16))),
        (ValueError, "v_dim is 25", _bad(v_dim=25)),
        (ValueError, "v_dim is 0", _bad(v_dim=0)),
        (ValueError, "kv has shape", _bad(kv=torch.zeros(9, 23, dtype=torch.bfloat16))),
        (TypeError, "kv has dtype", _bad(kv=torch.zeros(9, 24, dtype=torch.float16))),
        (ValueError, "kv has stride", _bad(kv=torch.zeros(24, 9, dtype=torch.bfloat16).t())),
        (TypeError, "indices has dtype", _bad(indices=torch.zeros(4, 3))),
        (ValueError, "indices has shape", _bad(indices=torch.zeros(3, 3, dtype=torch.int32))),
        (ValueError, "topk_length has shape", _bad(topk_length=torch.zeros(3, dtype=torch.int32))),
        (ValueError, "kv_cache_dtype is 'fp4'", _bad(kv_cache_dtype="fp4")),
        (ValueError, "kv_cache_dtype is 'fp8_ds_mla'", _bad(kv_cache_dtype="fp8_ds_mla")),
        (TypeError, "kv has dtype", _bad(kv_cache_dtype="fp8_e4m3")),
    ],
)
def test_bad_argument_is_named(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        triton_sparse_mqa(**arguments)
