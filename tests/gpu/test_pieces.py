"""Do the compiled masks, gathers, concats and merges hold at real sizes, and compile once?"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

from optimized.gather_kernel import gather_cache_kernel
from optimized.kv_cache import gather_and_maybe_dequant_cache
from optimized.mask import build_topk_mask, remap_topk_to_ranges, slice_topk_per_req, topk_mask_shape
from optimized.mask_kernels import scatter_topk_kernel, scatter_topk_single_req_kernel
from optimized.merge import merge_attn_states, merge_attn_states_kernel
from optimized.projection import concat_k_kernel, concat_k_nope_k_pe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda")


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Slices that a reduction can take without much memory."""
    return (tensor[i : i + 4096] for i in range(0, tensor.shape[0], 4096))


def packed_bits(rows: torch.Tensor, words: int) -> torch.Tensor:
    """Mask words of top-k rows whose entries all are keys, by a Boolean scatter in torch."""
    chosen = torch.zeros((rows.shape[0], words * 32), dtype=torch.int64, device=DEVICE)
    chosen.scatter_(1, rows.long(), 1)
    weights = 1 << torch.arange(32, dtype=torch.int64, device=DEVICE)
    return (chosen.view(rows.shape[0], words, 32) * weights).sum(-1).to(torch.int32)


@pytest.mark.parametrize("q_lens", [[512], [512, 300, 7]])
def test_no_bit_is_lost_between_clearing_and_setting(q_lens: list[int]) -> None:
    keys, topk, total = 40_000, 2048, sum(q_lens)
    shape = topk_mask_shape(len(q_lens), max(q_lens), keys)
    out = torch.full((math.prod(shape),), -1, dtype=torch.int32, device=DEVICE)
    for seed in range(20):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        width = 64 if seed % 2 else keys  # crowded words, then scattered ones
        rows = torch.randint(0, width, (total, topk), generator=generator, device=DEVICE, dtype=torch.int32)
        per_req = slice_topk_per_req(rows, q_lens)
        mask = build_topk_mask(per_req, q_lens, max(q_lens), keys, out)
        for b, own in enumerate(per_req):
            assert torch.equal(mask[b, : q_lens[b]], packed_bits(own, shape[2]))
            assert not mask[b, q_lens[b] :].any()


def test_mask_words_past_int32_are_reached() -> None:
    rows = torch.tensor([[3, 720_000]], dtype=torch.int32, device=DEVICE)
    last = 32_767
    buffer = torch.full((last + 1, 2), -1, dtype=torch.int32, device=DEVICE)
    buffer[last] = rows[0]
    q_lens = [0, 0, last + 1]
    shape = topk_mask_shape(3, last + 1, 720_001)
    assert math.prod(shape) > 2**31
    out = torch.full((math.prod(shape),), -1, dtype=torch.int32, device=DEVICE)
    mask = build_topk_mask([buffer[:0], buffer[:0], buffer], q_lens, last + 1, 720_001, out)
    assert torch.equal(mask[2, last], packed_bits(rows, shape[2])[0])
    mask[2, last].zero_()
    assert not any(part.any() for request in mask for part in parts(request))


def test_merge_in_place_reads_every_value_before_it_is_overwritten() -> None:
    for heads, width in ((128, 128), (3, 1), (16, 24), (1, 512)):
        generator = torch.Generator(DEVICE).manual_seed(width)
        p, s = (
            torch.randn((5000, heads, width), generator=generator, device=DEVICE).half() for _ in range(2)
        )
        pl, sl = (torch.randn((heads, 5000), generator=generator, device=DEVICE) for _ in range(2))
        out, lse = torch.empty_like(p), torch.empty_like(pl)
        merge_attn_states(out, p, pl, s, sl, lse)
        for _ in range(10):
            target, target_lse = p.clone(), pl.clone()
            merge_attn_states(target, target, target_lse, s, sl, target_lse)
            assert torch.equal(target, out)
            assert torch.equal(target_lse, lse)


def test_key_and_output_offsets_past_int32_are_reached() -> None:
    heads, tokens = 128, 90_000
    assert tokens * heads * 192 > 2**31
    k_nope = torch.zeros((tokens, heads, 128), dtype=torch.bfloat16, device=DEVICE)
    k_pe = torch.zeros((tokens, 1, 64), dtype=torch.bfloat16, device=DEVICE)
    k_nope[-1], k_pe[-1] = 3.0, 5.0
    k = concat_k_nope_k_pe(k_nope, k_pe)
    assert (k[-1, :, :128] == 3).all()
    assert (k[-1, :, 128:] == 5).all()
    assert not any(part.any() for part in parts(k[:-1]))
    del k, k_nope
    tokens = 2**31 // (heads * 128) + 1
    out = torch.zeros((tokens, heads, 128), dtype=torch.bfloat16, device=DEVICE)
    other = torch.ones((1, heads, 128), dtype=torch.bfloat16, device=DEVICE).expand(tokens, heads, 128)
    lse = torch.zeros((heads, tokens), device=DEVICE)
    merge_attn_states(out, out, lse, other, lse, lse)
    assert all((part == 0.5).all() for part in parts(out))
    assert lse.min().item() == lse.max().item() == pytest.approx(math.log(2.0), abs=1e-6)


def test_table_offsets_past_int32_are_reached() -> None:
    backing = torch.empty(2**31 + 1, dtype=torch.int32, device=DEVICE)
    table = backing.as_strided((3, 1), (2**30, 1))
    table[2, 0] = 1
    cache = torch.arange(8, device=DEVICE).to(torch.bfloat16).view(2, 1, 4)
    dst = torch.zeros((1, 4), dtype=torch.bfloat16, device=DEVICE)
    cu, owner = int32([0, 0, 0, 1]), int32([2])
    gather_and_maybe_dequant_cache(cache, dst, table, cu, owner, 1, "auto", 1.0, None)
    assert torch.equal(dst, cache[1])


def compiled_variants(kernel: object) -> int:
    caches = kernel.device_caches  # type: ignore[attr-defined]
    return len(caches[torch.cuda.current_device()][0])


def test_unseen_sizes_compile_nothing() -> None:
    rng = random.Random(0)
    kernels = (
        scatter_topk_single_req_kernel,
        scatter_topk_kernel,
        gather_cache_kernel,
        merge_attn_states_kernel,
        concat_k_kernel,
    )

    def run(q_lens: list[int], topk: int, keys: int, heads: int, pad: int) -> None:
        total = sum(q_lens)
        buffer = torch.zeros((total + 1, topk + pad), dtype=torch.int32, device=DEVICE)
        rows = slice_topk_per_req(buffer[1:, :topk], q_lens)
        shape = topk_mask_shape(len(q_lens), max(q_lens), keys)
        out = torch.empty(math.prod(shape) + pad, dtype=torch.int32, device=DEVICE)[pad:]
        build_topk_mask(rows, q_lens, max(q_lens), keys, out, int32([3] * len(q_lens)))
        side = torch.zeros((total, heads, 128 + pad), dtype=torch.bfloat16, device=DEVICE)[..., :128]
        lse = torch.zeros((heads, total + pad), device=DEVICE)[:, :total]
        merge_attn_states(torch.empty_like(side), side, lse, side, lse, torch.empty_like(lse))
        concat_k_nope_k_pe(side, torch.zeros((total, 1, 64 + pad), device=DEVICE).bfloat16()[..., :64])
        cache = torch.zeros((heads, topk, 72 + pad), device=DEVICE).bfloat16()[..., :72]
        table = torch.zeros((len(q_lens), total + pad), dtype=torch.int32, device=DEVICE)
        owner, cu = int32([0] * total), int32([0] * (len(q_lens) + 1))
        dst = torch.empty((total, 72), dtype=torch.bfloat16, device=DEVICE)
        gather_and_maybe_dequant_cache(cache, dst, table, cu, owner, total, "auto", 1.0, cu[:-1])

    for pad in (16, 1):  # rows that start at a multiple of 16 bytes and rows that do not
        run([16], 16, 64, 16, pad)
        run([16, 32], 16, 64, 16, pad)
    before = [compiled_variants(kernel) for kernel in kernels]
    assert all(count >= 1 for count in before)
    for lengths in (1, 1, 1, 2, 3, 5):
        q_lens = [rng.choice([1, 16, rng.randrange(1, 300)]) for _ in range(lengths)]
        run(
            q_lens,
            rng.choice([1, 5, 16]),
            rng.randrange(1, 5000),
            rng.choice([1, 2, 3, 16]),
            rng.choice([0, 1, 8]),
        )
    assert [compiled_variants(kernel) for kernel in kernels] == before


def test_graph_replay_equals_the_eager_calls() -> None:
    q_lens, keys, topk = [5, 9], 300, 16
    starts = int32([0, *itertools.accumulate(q_lens)])
    first_pos = int32([100, 200])
    rows = torch.zeros((14, topk), dtype=torch.int32, device=DEVICE)
    per_req = slice_topk_per_req(rows, q_lens)
    out = torch.empty(math.prod(topk_mask_shape(2, 9, keys)), dtype=torch.int32, device=DEVICE)
    cache = torch.randn((8, 16, 72), device=DEVICE).bfloat16()
    table, chunk_starts, cu = int32([3, 1, 7, 0]).view(2, 2), int32([5, 0]), int32([0, 20, 30])
    owner = int32([0] * 20 + [1] * 10)
    dst = torch.empty((30, 72), dtype=torch.bfloat16, device=DEVICE)
    p, s = (torch.randn((14, 4, 24), device=DEVICE).bfloat16() for _ in range(2))
    pl, sl = (torch.randn((4, 14), device=DEVICE) for _ in range(2))
    merged, lse = torch.empty_like(p), torch.empty_like(pl)

    def step() -> torch.Tensor:
        local = remap_topk_to_ranges(per_req, chunk_starts, [250, 260])
        mask = build_topk_mask(local, q_lens, 9, keys, out, first_pos, query_start_loc=starts)
        gather_and_maybe_dequant_cache(cache, dst, table, cu, owner, 30, "auto", 1.0, chunk_starts)
        merge_attn_states(merged, p, pl, s, sl, lse)
        return mask

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = step()
    for seed in (1, 2):
        rows.copy_(torch.randint(-2, keys + 2, rows.shape, generator=torch.Generator().manual_seed(seed)))
        cache.neg_()
        pl.add_(1.0)
        for tensor in (out, dst, merged, lse):
            tensor.fill_(-1)
        graph.replay()
        replayed = [t.clone() for t in (mask, dst, merged, lse)]
        for tensor in (out, dst, merged, lse):
            tensor.fill_(-1)
        eager = [step(), dst, merged, lse]
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))
