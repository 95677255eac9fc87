"""Do the layer's kernels keep to their stream, and can they be captured and replayed on other numbers?"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from harness.checks.case import check_case, default_device
from harness.checks.guards import same_bits
from harness.checks.streams import on_side_stream
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer
from optimized.attention.fa4 import fa4_available, fa4_masked_mha
from optimized.attention.triton_mha import triton_masked_mha
from optimized.kv_cache import gather_and_maybe_dequant_cache
from optimized.mask import build_topk_mask, slice_topk_per_req, topk_mask_shape
from optimized.merge import merge_attn_states
from reports.records import Status
from tests.attention_cases import offsets
from tests.harness.traced import PROBLEMS, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = torch.device("cuda")
WARM_UPS = 2
"""Calls before a capture, so that nothing compiles and no library allocates its workspace in it."""

Call = Callable[[], tuple[Tensor, ...]]


@pytest.mark.parametrize("name", ["global_mask", "remap", "no_context", "dense", "mqa", "fp8"])
def test_a_side_stream_with_a_late_device_gives_the_same_bits(name: str) -> None:
    problem = PROBLEMS[name]
    subject = OurLayer("triton")
    eager = subject.prefill(problem, build_inputs(problem, DEVICE), traced=False)
    for _ in range(3):
        inputs = build_inputs(problem, DEVICE)
        late = on_side_stream(DEVICE, partial(subject.prefill, problem, inputs, traced=False))
        assert same_bits(late.out, eager.out)
        assert same_bits(late.lse, eager.lse)


def test_calls_in_a_row_share_workspaces_on_a_gpu() -> None:
    small, large = batch((9, 3)), batch((300, 5), (0, 2), (200, 170))
    for judged, earlier in ((small, large), (large, small), (large, large.replace(scale=0.7))):
        record = check_case(judged.replace(history=(earlier,)), "ours[triton]")
        assert record.status in (Status.PASS, Status.WATCH), record.message
    assert default_device().type == "cuda"


def check_replay(call: Call, refill: Callable[[int], None]) -> None:
    """Capture `call` on the numbers of `refill(0)`; replays on others must give the bits of an eager call.

    `refill(seed)` writes other numbers into the memory that `call` reads.
    """
    refill(0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in (1, 2, 0):
        refill(seed)
        graph.replay()
        replayed = [result.clone() for result in captured]
        eager = call()
        for mine, other in zip(replayed, eager, strict=True):
            assert same_bits(mine, other.contiguous()), f"seed {seed}"
        for result in captured:
            result.fill_(torch.nan)


def filler(tensors: list[Tensor]) -> Callable[[int], None]:
    """Standard normal numbers for all tensors, by seed."""

    def refill(seed: int) -> None:
        random = torch.Generator(DEVICE).manual_seed(seed)
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=random, device=DEVICE))

    return refill


@pytest.mark.parametrize("kernel", ["triton", "fa4"])
@pytest.mark.parametrize("offset", [False, True])
def test_an_attention_call_replays_with_other_numbers_lengths_and_masks(kernel: str, offset: bool) -> None:
    if kernel == "fa4" and not fa4_available()[0]:
        pytest.skip(fa4_available()[1])
    attend = fa4_masked_mha if kernel == "fa4" else triton_masked_mha
    heads, most_q, most_k = 4, 150, 700
    lengths = {0: ([150, 3], [700, 90]), 1: ([20, 133], [64, 700]), 2: ([150, 3], [1, 699])}
    tokens, keys = 153, 790
    q = torch.empty(tokens, heads, 192, dtype=torch.bfloat16, device=DEVICE)
    k = torch.empty(keys, heads, 192, dtype=torch.bfloat16, device=DEVICE)
    v = torch.empty(keys, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    shape = topk_mask_shape(2, most_q, most_k + 40, reserve_key_starts_word=offset)
    mask = torch.empty(shape, dtype=torch.int32, device=DEVICE)
    starts_q, starts_k = offsets([0, 0], DEVICE), offsets([0, 0], DEVICE)
    numbers = filler([q, k, v])

    def refill(seed: int) -> None:
        numbers(seed)
        random = torch.Generator(DEVICE).manual_seed(seed)
        mask.copy_(torch.randint(-(2**31), 2**31, shape, generator=random, device=DEVICE))
        if offset:
            mask[:, 0, -1] = torch.tensor([seed, 33 + seed], device=DEVICE)
        starts_q.copy_(offsets(lengths[seed][0], DEVICE))
        starts_k.copy_(offsets(lengths[seed][1], DEVICE))

    def call() -> tuple[Tensor, ...]:
        return attend(q, k, v, starts_q, starts_k, most_q, most_k, 0.09, mask=mask, offset=offset)

    # lengths add up to the same number of rows for each seed, so that every row of the result is written
    assert all(sum(lens[0]) == tokens for lens in lengths.values())
    check_replay(call, refill)


def test_a_merge_replays_with_other_numbers() -> None:
    out, prefix, suffix = (torch.empty(77, 8, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    lse, prefix_lse, suffix_lse = (torch.empty(8, 77, device=DEVICE) for _ in range(3))
    numbers = filler([prefix, suffix, prefix_lse, suffix_lse])

    def refill(seed: int) -> None:
        numbers(seed)
        prefix_lse[:, seed::5] = -torch.inf

    def call() -> tuple[Tensor, ...]:
        merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
        return out, lse

    check_replay(_into_new_memory(call), refill)


def _into_new_memory(call: Call) -> Call:
    """A call that writes into given tensors, with copies of them as its results."""
    return lambda: tuple(result.clone() for result in call())


def test_a_gather_replays_with_other_rows_and_blocks() -> None:
    block_size, blocks, rows = 16, 64, 250
    cache = torch.empty(blocks, block_size, 576, dtype=torch.bfloat16, device=DEVICE)
    gathered = torch.empty(rows, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(2, 20, dtype=torch.int32, device=DEVICE)
    starts, offset_of = torch.zeros(2, dtype=torch.int32, device=DEVICE), offsets([0, 0], DEVICE)
    owner = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    numbers = filler([cache])

    def refill(seed: int) -> None:
        numbers(seed)
        random = torch.Generator(DEVICE).manual_seed(seed)
        table.copy_(torch.randint(0, blocks, (2, 20), generator=random, device=DEVICE))
        first = 100 + 13 * seed
        starts.copy_(torch.tensor([seed, 17 * seed]))
        offset_of.copy_(offsets([first, rows - first], DEVICE))
        owner.copy_(torch.arange(rows, device=DEVICE) >= first)

    def call() -> tuple[Tensor, ...]:
        gather_and_maybe_dequant_cache(cache, gathered, table, offset_of, owner, rows, "auto", 1.0, starts)
        return (gathered,)

    check_replay(_into_new_memory(call), refill)


def test_a_mask_build_replays_with_other_rows() -> None:
    lens, keys, topk = [70, 9], 500, 64
    rows = torch.empty(sum(lens), topk, dtype=torch.int32, device=DEVICE)
    workspace = torch.empty(math.prod(topk_mask_shape(2, 70, keys)), dtype=torch.int32, device=DEVICE)
    starts = offsets(lens, DEVICE)

    def refill(seed: int) -> None:
        random = torch.Generator(DEVICE).manual_seed(seed)
        rows.copy_(torch.randint(-5, keys + 50, rows.shape, generator=random, device=DEVICE))
        workspace.fill_(0x5A5A5A5A)

    def call() -> tuple[Tensor, ...]:
        mask = build_topk_mask(slice_topk_per_req(rows, lens), lens, max(lens), keys, workspace, query_start_loc=starts)
        return (mask.float(),)

    check_replay(call, refill)
