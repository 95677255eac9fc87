"""Is `triton_masked_mha` attention over exactly the keys that mask, causality and segments allow?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized.attention import triton_mha
from optimized.attention.mha_kernels import MASKED, MASKED_FROM_KEY_START, list_key_tiles_kernel
from optimized.attention.tiles import MhaTiles, split_head_dim
from optimized.attention.triton_mha import triton_masked_mha
from tests.attention_cases import naive_attention, offsets, pack_mask

SCALE = 0.17
# the tiles of a compiled kernel (split head dim, one head a program, listed key tiles), small enough to interpret
COMPILED_TILES = MhaTiles(16, 16, 16, 1, 16, 64, False, num_warps=4, num_stages=2)


class Batch:
    """Random q, k, v of requests with the given lengths, and calls on them."""

    def __init__(
        self,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        heads: int = 2,
        dims: tuple[int, int] = (24, 16),
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.query_lens, self.key_lens = list(query_lens), list(key_lens)
        tokens, keys = sum(query_lens), sum(key_lens)
        self.q, self.k, self.v = (
            torch.randn(*shape, generator=self.random).to(dtype)
            for shape in ((tokens, heads, dims[0]), (keys, heads, dims[0]), (keys, heads, dims[1]))
        )

    def random_keep(self, share: float) -> list[Tensor]:
        return [
            torch.rand(q, k, generator=self.random) < share for q, k in zip(self.query_lens, self.key_lens, strict=True)
        ]

    def run(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return triton_masked_mha(
            self.q,
            self.k,
            self.v,
            offsets(self.query_lens),
            offsets(self.key_lens),
            max(self.query_lens, default=0),
            max(self.key_lens, default=0),
            SCALE,
            **kwargs,
        )

    def check(self, keep: Sequence[Tensor], **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = self.run(**kwargs)
        expected = naive_attention(self.q, self.k, self.v, self.query_lens, self.key_lens, keep, SCALE)
        expected.check(out, lse)
        return out, lse


@pytest.fixture(params=["interpreted tiles", "compiled tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled tiles":
        monkeypatch.setattr(triton_mha, "mha_tiles", lambda *_: COMPILED_TILES)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_masked_call_sees_the_mask(share: float) -> None:
    batch = Batch([5, 0, 33, 1], [70, 3, 0, 160])
    keep = batch.random_keep(share)
    batch.check(keep, mask=pack_mask(keep, words=8, padded_q=64))


def test_masked_call_starts_at_any_key() -> None:
    batch = Batch([2] * 32, [70 + i for i in range(32)])
    keep = batch.random_keep(0.3)
    mask = pack_mask(keep, words=8, padded_q=16, key_starts=list(range(32)), stray=0xFFFFFFFF)
    batch.check(keep, mask=mask, offset=True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("key_starts", [(0, 31, 64), (97, 33, 5)])
def test_offset_call_joins_two_words(key_starts: tuple[int, int, int]) -> None:
    batch = Batch([3, 17, 1], [130, 64, 31])
    keep = batch.random_keep(0.2)
    mask = pack_mask(keep, words=12, padded_q=32, key_starts=key_starts, stray=0xFFFFFFFF)
    batch.check(keep, mask=mask, offset=True)


def test_key_start_word_is_not_read_as_bits() -> None:
    batch = Batch([3], [64])
    keep = [torch.zeros(3, 64, dtype=torch.bool)]
    keep[0][:, :20] = True  # keys 32.. of the segment would lie in the key-start word
    mask = pack_mask(keep, words=4, padded_q=4, key_starts=[64], stray=0xFFFFFFFF)
    batch.check(keep, mask=mask, offset=True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("key_start", [None, 0, 29])
def test_bits_past_the_segment_are_no_keys(key_start: int | None) -> None:
    batch = Batch([3], [50])
    longer = torch.rand(3, 200, generator=batch.random) < 0.5  # as in a mask of the whole sequence
    starts = None if key_start is None else [key_start]
    batch.check([longer[:, :50]], mask=pack_mask([longer], 12, 4, starts), offset=key_start is not None)


def test_words_beside_the_mask_are_not_read() -> None:
    batch = Batch([3], [200])
    keep = [torch.zeros(3, 200, dtype=torch.bool)]
    keep[0][:, 3:128:7] = True
    buffer = torch.full((1, 4, 12), -1, dtype=torch.int32)  # a row view: what lies beside it says "all keys"
    buffer[:, :, 4:8] = pack_mask([k[:, :128] for k in keep], words=4, padded_q=4)
    batch.check(keep, mask=buffer[:, :, 4:8])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [([7], [7]), ([1, 5, 0, 20], [140, 5, 9, 21]), ([6], [2]), ([3, 4], [0, 9]), ([40], [150])],
)
def test_causal_call_is_aligned_at_the_end(query_lens: list[int], key_lens: list[int]) -> None:
    batch = Batch(query_lens, key_lens)
    keep = [torch.ones(q, k, dtype=torch.bool).tril(k - q) for q, k in zip(query_lens, key_lens, strict=True)]
    batch.check(keep, causal=True)


@pytest.mark.usefixtures("tiles")
def test_full_call_sees_every_key() -> None:
    batch = Batch([4, 0, 19], [33, 5, 150])
    batch.check([torch.ones(q, k, dtype=torch.bool) for q, k in zip([4, 0, 19], [33, 5, 150], strict=True)])


@pytest.mark.parametrize("q_len", [127, 128, 129])
def test_query_tiles_meet(q_len: int) -> None:
    batch = Batch([q_len, 2], [40, 300], heads=1)
    keep = batch.random_keep(0.2)
    batch.check(keep, mask=pack_mask(keep, words=12, padded_q=256))


@pytest.mark.parametrize("dims", [(16, 16), (40, 8), (1, 1), (64, 128), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    batch = Batch([3, 4], [37, 20], heads=3, dims=dims, dtype=dtype)
    keep = batch.random_keep(0.5)
    out, lse = batch.check(keep, mask=pack_mask(keep, words=4, padded_q=4))
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(192, (128, 64)), (256, (256, 0)), (160, (128, 32)), (24, (32, 0)), (1, (16, 0)), (250, (256, 0))],
)
def test_split_head_dim_covers_it(head_dim: int, parts: tuple[int, int]) -> None:
    assert split_head_dim(head_dim) == parts


@pytest.mark.usefixtures("tiles")
def test_empty_leading_tiles_and_growing_scores() -> None:
    batch = Batch([4], [400], heads=1)
    batch.k *= torch.linspace(0, 40, 400).to(batch.k.dtype)[:, None, None]  # each tile outgrows the last
    keep = [torch.zeros(4, 400, dtype=torch.bool)]
    keep[0][0, 390:] = True  # first tiles empty
    keep[0][1, ::3] = True
    keep[0][2, :10] = True  # last tiles empty
    _, lse = batch.check(keep, mask=pack_mask(keep, words=16, padded_q=4))
    assert lse[0, 3].isneginf()


def test_log_sum_exp_counts_keys_when_queries_are_zero() -> None:
    batch = Batch([9], [150])
    batch.q.zero_()
    keep = batch.random_keep(0.3)
    _, lse = batch.run(mask=pack_mask(keep, words=8, padded_q=16))
    counts = keep[0].sum(1)
    assert torch.equal(lse.double().exp().round().to(torch.int64), counts.expand(2, -1))
    assert (lse.double().exp() - counts).abs().max() < 1e-3


def test_one_key_gives_its_value_unchanged() -> None:
    batch = Batch([5], [5])
    keep = [torch.eye(5, dtype=torch.bool)]
    out, _ = batch.run(mask=pack_mask(keep, words=4, padded_q=8))
    assert torch.equal(out, batch.v)


@pytest.mark.usefixtures("tiles")
def test_other_requests_and_rows_past_the_end_are_not_read() -> None:
    batch = Batch([4, 3, 5], [40, 35, 50])
    keep = batch.random_keep(0.5)
    mask = pack_mask(keep, words=4, padded_q=16)
    clean = batch.run(mask=mask)
    rows, keys = slice(4, 7), slice(40, 75)  # request 1 of three
    for x, own in ((batch.q, rows), (batch.k, keys), (batch.v, keys)):
        kept = x[own].clone()
        x.fill_(torch.nan)
        x[own] = kept
    out, lse = batch.run(mask=mask)
    assert torch.equal(out[rows], clean[0][rows])
    assert torch.equal(lse[:, rows], clean[1][:, rows])
    assert out[:4].isnan().any()


def test_masked_key_may_be_nan_but_a_seen_one_shows() -> None:
    batch = Batch([2], [10])
    keep = [torch.ones(2, 10, dtype=torch.bool)]
    keep[0][0, 4] = False
    batch.k[4] = torch.nan
    out, lse = batch.run(mask=pack_mask(keep, words=4, padded_q=4))
    assert out[0].isfinite().all()
    assert lse[:, 0].isfinite().all()
    assert out[1].isnan().all()
    assert lse[:, 1].isnan().all()


def test_strides_are_the_tensors_own() -> None:
    batch = Batch([5, 3], [30, 40], heads=3)
    keep = batch.random_keep(0.4)
    kv = torch.zeros(70, 3, 24 + 16 + 5, dtype=torch.bfloat16)  # k and v as views of one projection
    kv[..., :24], kv[..., 24:40] = batch.k, batch.v
    batch.k, batch.v = kv[..., :24], kv[..., 24:40]
    batch.q = torch.cat([batch.q, batch.q], dim=1)[:, :3]
    buffer = torch.full((9, 4, 20), 7.0, dtype=torch.bfloat16)
    out, _ = batch.check(keep, mask=pack_mask(keep, words=4, padded_q=8), out=buffer[:8, :3, :16])
    assert out.data_ptr() == buffer.data_ptr()
    assert (buffer[8] == 7).all()
    assert (buffer[:, 3] == 7).all()
    assert (buffer[..., 16:] == 7).all()


def test_last_stride_other_than_one_is_accepted() -> None:
    batch = Batch([5], [30])
    keep = batch.random_keep(0.4)
    batch.v = batch.v.transpose(1, 2).contiguous().transpose(1, 2)
    batch.check(keep, mask=pack_mask(keep, words=4, padded_q=8))


@pytest.mark.parametrize(
    ("query_lens", "key_lens"), [([], []), ([0], [5]), ([0, 0], [0, 0]), ([3], [0]), ([2, 2], [0, 0])]
)
@pytest.mark.parametrize("masked", [True, False])
def test_empty_batches_requests_and_keys(query_lens: list[int], key_lens: list[int], masked: bool) -> None:
    batch = Batch(query_lens, key_lens)
    keep = batch.random_keep(1.0)
    mask = pack_mask(keep, words=4, padded_q=8) if keep else torch.zeros(0, 128, 4, dtype=torch.int32)
    out, lse = batch.check(keep, mask=mask if masked else None, causal=not masked)
    assert out.shape == (sum(query_lens), 2, 16)
    assert lse.shape == (2, sum(query_lens))


@pytest.mark.parametrize("key_start", [None, 0, 45])
def test_tile_lists_hold_the_tiles_with_bits(key_start: int | None) -> None:
    k_len, block_m, block_n, words = 64 * 20, 16, 64, 48
    keep = torch.zeros(40, k_len, dtype=torch.bool)
    keep[0, 64 * 7] = keep[15, 64 * 7 + 63] = keep[3, 64 * 19 + 1] = keep[20, 0] = True  # none for rows 32..39
    starts = None if key_start is None else [key_start]
    mask = pack_mask([keep], words, 48, starts, stray=0xFFFFFFFF)
    lists = torch.full((1, 3, 21), -1, dtype=torch.int32)
    list_key_tiles_kernel[(3, 1)](
        offsets([40]),
        offsets([k_len]),
        mask,
        lists,
        mask.stride(0),
        mask.stride(1),
        words,
        21,
        KEYS=MASKED if key_start is None else MASKED_FROM_KEY_START,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        LIST_WORDS=32,
    )
    found = [row[1 : 1 + row[0]] for row in lists[0].tolist()]
    assert found == [[7, 19], [0], []]


def _bad(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "q": torch.zeros(4, 2, 16, dtype=torch.bfloat16),
        "k": torch.zeros(6, 2, 16, dtype=torch.bfloat16),
        "v": torch.zeros(6, 2, 8, dtype=torch.bfloat16),
        "cu_seqlens_q": offsets([4]),
        "cu_seqlens_k": offsets([6]),
        "max_seqlen_q": 4,
        "max_seqlen_k": 6,
        "scale": 1.0,
        "mask": torch.zeros(1, 4, 4, dtype=torch.int32),
    }
    return good | changes


@pytest.mark.parametrize("rows", [0, 128])
def test_without_queries_there_is_no_key_start_to_hold(rows: int) -> None:
    empty = {"q": torch.zeros(0, 2, 16, dtype=torch.bfloat16), "cu_seqlens_q": offsets([0]), "max_seqlen_q": 0}
    mask = torch.zeros(1, rows, 4, dtype=torch.int32)
    out, lse = triton_masked_mha(**_bad(**empty, mask=mask, offset=True))
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (TypeError, "q has dtype torch.float32", _bad(q=torch.zeros(4, 2, 16))),
        (TypeError, "k has dtype torch.float16", _bad(k=torch.zeros(6, 2, 16, dtype=torch.float16))),
        (ValueError, "q has shape", _bad(q=torch.zeros(4, 16, dtype=torch.bfloat16))),
        (ValueError, "k has shape", _bad(k=torch.zeros(6, 1, 16, dtype=torch.bfloat16))),
        (ValueError, "v has shape", _bad(v=torch.zeros(5, 2, 8, dtype=torch.bfloat16))),
        (TypeError, "cu_seqlens_q has dtype", _bad(cu_seqlens_q=torch.tensor([0, 4]))),
        (ValueError, "cu_seqlens_k has shape", _bad(cu_seqlens_k=offsets([3, 3]))),
        (ValueError, "max_seqlen_q is 5", _bad(max_seqlen_q=5)),
        (ValueError, "max_seqlen_k is -1", _bad(max_seqlen_k=-1)),
        (ValueError, "mask has shape", _bad(mask=torch.zeros(2, 4, 4, dtype=torch.int32))),
        (TypeError, "mask has dtype torch.int64", _bad(mask=torch.zeros(1, 4, 4, dtype=torch.int64))),
        (ValueError, "mask has 3 query rows", _bad(mask=torch.zeros(1, 3, 4, dtype=torch.int32))),
        (ValueError, "must hold a key-start word", _bad(mask=torch.zeros(1, 4, 0, dtype=torch.int32), offset=True)),
        (ValueError, "causal is True beside a mask", _bad(causal=True)),
        (ValueError, "offset is True without a mask", _bad(mask=None, offset=True)),
        (ValueError, "out has shape", _bad(out=torch.zeros(4, 2, 16, dtype=torch.bfloat16))),
    ],
)
def test_bad_argument_is_named(error: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    out: Any = arguments.get("out")
    before: Any = None if out is None else out.clone()
    with pytest.raises(error, match=text):
        triton_masked_mha(**arguments)
    assert out is None or torch.equal(out, before)
