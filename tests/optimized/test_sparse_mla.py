"""Does the layer choose the documented path, and does it refuse what it cannot serve before it writes anything?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimized import dispatch
from optimized.dispatch import Availability, FusedOutputError, Path, choose_path, is_masked_mha_available
from optimized.mask import topk_mask_shape
from optimized.metadata import PrefillMetadata, build_prefill_metadata
from optimized.slots import context_slots, suffix_rows, token_requests
from optimized.sparse_mla import SparseMLAImpl
from optimized.trace import Trace

HEADS, LORA, NOPE, ROPE, V, TOPK, BLOCK = 2, 16, 8, 4, 8, 6, 4
PUBLISHED = (128, 512, 128, 64, 128)
WORDS = 1 << 16


class Batch:
    """A small batch and its layer; each test changes one argument."""

    def __init__(self, query_lens: list[int], context_lens: list[int], **layer: Any) -> None:
        torch.manual_seed(0)
        tokens = sum(query_lens)
        self.blocks = [-(-context // BLOCK) for context in context_lens]
        table = torch.full((len(query_lens), max(self.blocks, default=0) + 1), 2**31 - 1, dtype=torch.int32)
        first = 0
        for request, count in enumerate(self.blocks):
            table[request, :count] = torch.arange(first, first + count)
            first += count
        self.query_lens, self.context_lens, self.table = query_lens, context_lens, table
        self.layer_arguments = layer
        self.arguments: dict[str, Any] = {
            "q": torch.randn(tokens, HEADS, NOPE + ROPE).bfloat16(),
            "kv_c_normed": torch.randn(tokens, LORA).bfloat16(),
            "k_pe": torch.randn(tokens, 1, ROPE).bfloat16(),
            "kv_c_and_k_pe_cache": torch.randn(max(first, 1), BLOCK, LORA + ROPE).bfloat16(),
            "topk_indices_buffer": torch.randint(0, 40, (tokens, TOPK), dtype=torch.int32),
            "output": torch.full((tokens, HEADS * V), 7.0).bfloat16(),
        }

    def metadata(self, words: int | None = WORDS) -> PrefillMetadata:
        return build_prefill_metadata(
            self.query_lens,
            self.context_lens,
            self.table,
            block_size=BLOCK,
            context_row_budget=16,
            context_row_width=LORA + ROPE,
            dtype=torch.bfloat16,
            topk_mask_workspace=None if words is None else torch.zeros(words, dtype=torch.int32),
        )

    def layer(self) -> SparseMLAImpl:
        arguments: dict[str, Any] = {
            "num_heads": HEADS,
            "kv_lora_rank": LORA,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": V,
            "scale": 0.3,
            "topk_tokens": TOPK,
            "kv_b_proj_weight": torch.randn(LORA, HEADS * (NOPE + V)).bfloat16(),
        }
        return SparseMLAImpl(**{**arguments, **self.layer_arguments})

    def run(self, words: int | None = WORDS, **options: Any) -> Trace:
        trace = Trace()
        self.layer().forward_mha(**self.arguments, prefill=self.metadata(words), trace=trace, **options)
        return trace


def suffix_words(batch: Batch, keys: int) -> int:
    batch_size, rows, words = topk_mask_shape(len(batch.query_lens), max(batch.query_lens), keys)
    return batch_size * rows * words


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "words", "options", "path"),
    [
        ([6], [0], WORDS, {}, "dense"),
        ([7], [0], WORDS, {}, "no_context"),
        ([3, 2], [20, 5], WORDS, {}, "global_mask"),
        ([3, 2], [20, 5], WORDS, {"force": "masked_remap"}, "remap"),
        ([3, 2], [20, 5], WORDS, {"force": "mqa"}, "mqa"),
        ([3, 2], [20, 5], WORDS, {"force": "dense"}, "dense"),
        ([3, 2], [20, 5], 0, {}, "mqa"),
        ([3, 2], [20, 5], None, {}, "mqa"),
    ],
)
def test_which_path_does_a_batch_take(
    query_lens: list[int], context_lens: list[int], words: int | None, options: dict[str, Any], path: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert Batch(query_lens, context_lens).run(words, **options).path == path


def test_is_the_global_mask_given_up_one_word_below_its_size() -> None:
    batch = Batch([3], [200])
    rows, words = topk_mask_shape(1, 3, 203, reserve_key_starts_word=True)[1:]
    assert batch.run(rows * words).path == "global_mask"
    assert Batch([3], [200]).run(rows * words - 1).path == "remap"


def test_is_a_small_workspace_warned_of_once_and_in_mib() -> None:
    dispatch.reset_warnings()
    with pytest.warns(RuntimeWarning, match=r"needs .* MiB and the mask workspace holds 0\.0 MiB"):
        Batch([3], [20]).run(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Batch([3], [20]).run(0)


def test_does_a_forced_masked_path_name_the_words_that_it_lacks() -> None:
    batch = Batch([3], [20])
    needed = suffix_words(batch, 16)
    with pytest.raises(ValueError, match=rf"holds {needed - 1} int32 words, must hold"):
        batch.run(needed - 1, force="masked")
    assert bool((batch.arguments["output"] == 7.0).all())


def test_is_a_quantised_cache_refused_by_masked_mha_with_its_reason() -> None:
    answer = is_masked_mha_available(2, LORA, NOPE, ROPE, V, "fp8_e4m3")
    assert not answer.available
    assert "unquantised" in answer.reason


@pytest.mark.parametrize(
    ("changes", "available"),
    [
        ({}, True),
        ({"family": 90}, False),
        ({"fa4": (False, "not installed")}, False),
        ({"dims": (128, 512, 128, 64, 64)}, False),
        ({"dims": (64, 512, 192, 64, 256)}, True),
        ({"dims": (64, 512, 256, 0, 256)}, True),
        ({"cache": "fp8_ds_mla"}, False),
    ],
)
def test_does_the_engines_policy_keep_its_rule(changes: dict[str, Any], available: bool) -> None:
    given = {"dims": PUBLISHED, "cache": "auto", "family": 100, "fa4": (True, "")} | changes
    answer = is_masked_mha_available(
        *given["dims"], given["cache"], policy="vllm", family=given["family"], fa4=given["fa4"]
    )
    assert answer.available is available
    assert bool(answer.reason) is not available


def test_are_unknown_policies_and_forces_named() -> None:
    with pytest.raises(ValueError, match="policy is 'best'"):
        is_masked_mha_available(*PUBLISHED, "auto", policy="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="force is 'fast'"):
        Batch([7], [0]).run(force="fast")


def test_is_context_under_decode_context_parallelism_refused_on_the_masked_path_only() -> None:
    with pytest.raises(NotImplementedError, match="dcp_world_size = 2"):
        Batch([7], [9], dcp_world_size=2).run()
    assert Batch([7], [0], dcp_world_size=2).run().path == "no_context"
    assert Batch([7], [9], dcp_world_size=2).run(force="mqa").path == "mqa"


def test_is_a_fused_output_refused_by_name() -> None:
    with pytest.raises(FusedOutputError, match="output_scale"):
        Batch([7], [0]).run(output_scale=torch.ones(1))


def test_does_an_unavailable_masked_path_say_why_when_forced() -> None:
    with pytest.raises(ValueError, match="masked MHA cannot run: because"):
        choose_path(
            Batch([7], [0]).metadata(),
            topk_tokens=TOPK,
            masked=Availability(False, "because"),
            force="masked",
            dcp_world_size=1,
        )
    path = choose_path(
        Batch([7], [0]).metadata(),
        topk_tokens=TOPK,
        masked=Availability(False, "because"),
        force=None,
        dcp_world_size=1,
    )
    assert path is Path.MQA


BAD: dict[str, tuple[type[Exception], str, Callable[[Batch], None]]] = {
    "q of float32": (TypeError, "q has dtype torch.float32", lambda b: b.arguments.update(q=b.arguments["q"].float())),
    "q one row short": (ValueError, "q has shape", lambda b: b.arguments.update(q=b.arguments["q"][:-1])),
    "latent of another width": (
        ValueError,
        "kv_c_normed has shape",
        lambda b: b.arguments.update(kv_c_normed=b.arguments["kv_c_normed"][:, :-1]),
    ),
    "top-k of int64": (
        TypeError,
        "topk_indices_buffer has dtype torch.int64",
        lambda b: b.arguments.update(topk_indices_buffer=b.arguments["topk_indices_buffer"].long()),
    ),
    "top-k rows missing": (
        ValueError,
        "topk_indices_buffer has shape",
        lambda b: b.arguments.update(topk_indices_buffer=b.arguments["topk_indices_buffer"][1:]),
    ),
    "a block id outside the cache": (ValueError, "block_table", lambda b: b.table.__setitem__((0, 1), 99)),
    "a negative block id": (ValueError, "block_table", lambda b: b.table.__setitem__((1, 0), -1)),
    "block table of int64": (TypeError, "block_table has dtype", lambda b: setattr(b, "table", b.table.long())),
    "cache of float16": (
        TypeError,
        "kv_c_and_k_pe_cache has dtype",
        lambda b: b.arguments.update(kv_c_and_k_pe_cache=b.arguments["kv_c_and_k_pe_cache"].half()),
    ),
    "cache of another block size": (
        ValueError,
        "kv_c_and_k_pe_cache has shape",
        lambda b: b.arguments.update(kv_c_and_k_pe_cache=b.arguments["kv_c_and_k_pe_cache"][:, :2]),
    ),
    "output of another width": (
        ValueError,
        "output has shape",
        lambda b: b.arguments.update(output=b.arguments["output"][:, :-1]),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_is_a_bad_argument_named_before_anything_is_written(name: str) -> None:
    kind, words, spoil = BAD[name]
    batch = Batch([7, 2], [9, 5])
    spoil(batch)
    output = batch.arguments["output"].clone()
    with pytest.raises(kind, match=re.escape(words)):
        batch.run()
    assert torch.equal(batch.arguments["output"], output)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_b_proj_weight": torch.zeros(LORA, 3)}, "kv_b_proj_weight has shape"),
        ({"topk_tokens": 0}, "topk_tokens is 0"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim is -1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    ],
)
def test_is_a_bad_layer_refused_when_it_is_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Batch([7], [0], **changes).layer()


def test_are_bad_lengths_refused() -> None:
    table = torch.zeros((1, 1), dtype=torch.int32)
    common: dict[str, Any] = {"block_size": 4, "context_row_budget": 8, "context_row_width": 4, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="query_lens has 1 entries and context_lens 2"):
        build_prefill_metadata([1], [1, 2], table, **common)
    with pytest.raises(ValueError, match=r"context_lens\[0\] is -1"):
        build_prefill_metadata([1], [-1], table, **common)
    with pytest.raises(TypeError, match="block_table is a list"):
        build_prefill_metadata([1], [1], [[0]], **common)  # type: ignore[arg-type]


def test_do_empty_batches_and_zero_lengths_give_empty_results() -> None:
    layer = Batch([7], [0]).layer()
    for lens in ([], [0, 0]):
        batch = Batch(lens, [0] * len(lens))
        lse = layer.forward_mha(**batch.arguments, prefill=batch.metadata())
        assert tuple(lse.shape) == (HEADS, 0)


def test_do_slots_follow_the_block_table_and_leave_out_what_a_part_does_not_own() -> None:
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    requests = token_requests(starts, [2, 1])
    assert requests.tolist() == [0, 0, 1]
    contexts = torch.tensor([5, 0])
    topk = torch.tensor([[4, 5, 6, -1], [0, 6, 7, 2], [0, 1, -9, 2**31 - 1]], dtype=torch.int32)
    table = torch.tensor([[3, 1], [99, 99]], dtype=torch.int32)
    slots = context_slots(topk, requests, contexts, table, block_size=4)
    assert slots.tolist() == [[4, -1, -1, -1], [12, -1, -1, 14], [-1, -1, -1, -1]]
    rows = suffix_rows(topk, requests, contexts, starts)
    # query 0 of request 0 stands at position 5, query 1 at 6; request 1 has one query at position 0
    assert rows.tolist() == [[-1, 0, -1, -1], [-1, 1, -1, -1], [2, -1, -1, -1]]
