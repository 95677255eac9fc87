"""The stages that a callable can be checked for alone: what it is given by name, what it returns, what is checked.

One table for everybody: the signature check, the judges, the pytest plugin's test ids, and the reference page.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage of the subject API."""

    name: str
    what: str
    inputs: Mapping[str, str]
    """Name -> shape, dtype and meaning. A function takes those it needs, by these names."""
    needs: tuple[tuple[str, ...], ...]
    """Of each group at least one must be taken: without it no right answer can be given."""
    returns: str
    checks: Mapping[str, str]
    """Name of the check -> the question that it answers."""
    judge: str
    """`module:function` of the judge (`harness.checks.stage_case.Judge`)."""


_RUN = "does every legal case end with a result: no exception, crash, hang, exhausted memory?"
_INPUTS = "are all inputs as they were?"
_REPEAT = "do two identical calls give the same bits (where the contract says so)?"
_BATCH = "does a request alone give the bits that it gives in a batch (where the contract says so)?"

_ATTEND = Stage(
    name="attend",
    what="varlen attention over given keys: K and V of each head, a set of allowed keys for each row",
    inputs={
        "q": "`[Tq, H, D]` bf16 or fp16: queries of all requests, packed",
        "k": "`[Tk, H, D]`: keys of all requests, packed",
        "v": "`[Tk, H, Dv]`",
        "cu_seqlens_q": "`[B + 1]` int32: first row of each request in `q`, and the number of rows",
        "cu_seqlens_k": "`[B + 1]` int32: the same for `k` and `v`",
        "max_seqlen_q": "int: most query rows of a request",
        "max_seqlen_k": "int: most keys of a request",
        "scale": "float: factor of the scores; not a function of `D`",
        "allowed": "`[Tq, max_seqlen_k]` bool: column `j` is key `j` of the row's own request",
        "mask": "`[B, padded_q, words]` int32: the same packed, key `j` is bit `j & 31` of word `j >> 5`; "
        "rows and bits behind the end are 0",
        "key_starts": "`[B]` int32: if taken, `mask` covers whole sequences, and key `j` is bit `key_starts[b] + j`; "
        "the same number stands in the last word of row 0",
        "sinks": "`[H]` float32: needs `attention_sink` in the contract",
    },
    needs=(("q",), ("k",), ("v",), ("cu_seqlens_q",), ("cu_seqlens_k",), ("scale",), ("allowed", "mask")),
    returns="`out [Tq, H, Dv]` in the dtype of `q`, and `lse [H, Tq]` float32",
    checks={
        "attend.run": _RUN,
        "attend.shape": "do the results have the right shapes and dtypes?",
        "attend.keys": "does each row attend exactly its allowed keys (read-out, exact)?",
        "attend.lse": "is the log-sum-exp within the bound?",
        "attend.out": "is the output within the bound?",
        "attend.max_logits": "is the largest score of each row right (where the contract says so)?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
        "guard.batch": _BATCH,
    },
    judge="harness.checks.stage_attend:judge",
)

_MQA = Stage(
    name="mqa",
    what="sparse attention in the absorbed form: one latent row is key and value of all heads, chosen by index",
    inputs={
        "q": "`[T, H, kv_lora_rank + rope]` bf16 or fp16: absorbed queries",
        "kv": "`[slots, kv_lora_rank + rope]`: latent rows; the first `v_dim` entries are the value",
        "indices": "`[T, topk]` int32: rows of `kv` in any order; negative entries are no keys, nor are those past "
        "the end (see `invalid_index`)",
        "scale": "float: factor of the scores",
        "v_dim": "int: `kv_lora_rank`",
        "topk_length": "`[T]` int32: entries behind the count are no keys; needs `topk_length` in the contract",
        "sinks": "`[H]` float32: needs `attention_sink` in the contract",
    },
    needs=(("q",), ("kv",), ("indices",), ("scale",)),
    returns="`out [T, H, kv_lora_rank]` in the dtype of `q`, and `lse [H, T]` float32",
    checks={
        "mqa.run": _RUN,
        "mqa.shape": "do the results have the right shapes and dtypes?",
        "mqa.keys": "does each row attend exactly its listed rows (read-out, exact)?",
        "mqa.lse": "is the log-sum-exp within the bound?",
        "mqa.out": "is the output within the bound?",
        "mqa.max_logits": "is the largest score of each row right (where the contract says so)?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
        "guard.batch": _BATCH,
    },
    judge="harness.checks.stage_mqa:judge",
)

_MASK = Stage(
    name="mask",
    what="packed mask words from top-k rows",
    inputs={
        "topk_indices_per_req": "list of `[q_len, topk]` int32: request-local key positions; "
        "entries outside `[0, max_seq_len)` are no keys",
        "q_lens": "list of int",
        "max_q_len": "int",
        "max_seq_len": "int: keys that the mask covers",
        "out": "`[words]` int32: a dirty workspace of the right size; the mask may lie in it",
        "first_query_pos": "`[B]` int32 or None: if given, row `i` keeps only keys `<= first_query_pos[b] + i`",
        "reserve_key_starts_word": "bool: one more word a row; the last word of row 0 of each request is not judged",
    },
    needs=(("topk_indices_per_req",), ("max_q_len",), ("max_seq_len",)),
    returns="`[B, padded_q, words]` int32: key `j` is bit `j & 31` of word `j >> 5`; `padded_q` is `max_q_len` "
    "rounded up to 128 (to 256 if longer than 128), `words` is rounded up to a multiple of 4; all the rest is 0",
    checks={
        "mask.run": _RUN,
        "mask.shape": "does the mask have the right shape and dtype?",
        "mask.bits": "is every bit of every row right, padding included?",
        "mask.crowd": "on a GPU: and in a launch of 4,096 rows of 2,048 keys, where threads run apart?",
        "guard.workspace": "is nothing written around the workspace?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
    },
    judge="harness.checks.stage_small:judge_mask",
)

_MASK_MOD = Stage(
    name="mask_mod",
    what="a CuTe DSL mask mod for FA4, read out bit by bit on a GPU",
    inputs={},
    needs=(),
    returns="",
    checks={
        "mask_mod.run": _RUN,
        "mask_mod.bits": "does the mod let exactly the keys through whose bits are set?",
    },
    judge="harness.checks.mask_mod:judge",
)

_GATHER = Stage(
    name="gather",
    what="rows copied from a paged cache, with dequantisation",
    inputs={
        "src_cache": "`[num_blocks, block_size, width]`: bf16, fp16, float8_e4m3fn, or the bytes of `fp8_ds_mla`",
        "dst": "`[num_tokens, kv_lora_rank + rope]`: to be filled, unless the rows are returned",
        "block_table": "`[B, max_blocks]` int32; behind the used entries it may hold anything",
        "cu_seq_lens": "`[B + 1]` int32: first row of each request in `dst`",
        "token_to_seq": "`[num_tokens]` int32: request of each row of `dst`",
        "num_tokens": "int",
        "kv_cache_dtype": "`auto`, `fp8_e4m3` or `fp8_ds_mla`",
        "scale": "float: scale of `fp8_e4m3`",
        "seq_starts": "`[B]` int32: position of the first row of each request: any, aligned to blocks or not",
        "rope": "int",
        "dtype": "torch.dtype of the rows",
    },
    needs=(("src_cache",), ("block_table",), ("seq_starts",), ("cu_seq_lens", "token_to_seq")),
    returns="nothing if it fills `dst`; otherwise the rows",
    checks={
        "gather.run": _RUN,
        "gather.rows": "is every row a bitwise copy of the right cache row?",
        "guard.dst": "is nothing written around `dst`?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
    },
    judge="harness.checks.stage_small:judge_gather",
)

_MERGE = Stage(
    name="merge",
    what="two partial results over disjoint keys put together",
    inputs={
        "prefix_output": "`[T, H, D]` bf16 or fp16",
        "prefix_lse": "`[H, T]` float32, natural logarithm; -inf where the part is empty, its output may be anything",
        "suffix_output": "`[T, H, D]`",
        "suffix_lse": "`[H, T]`",
        "output": "`[T, H, D]`: to be filled, unless the result is returned",
        "output_lse": "`[H, T]`: the same",
    },
    needs=(("prefix_output",), ("prefix_lse",), ("suffix_output",), ("suffix_lse",)),
    returns="nothing if it fills `output` (and `output_lse`); otherwise `out` and `lse`, or `out` alone without LSE",
    checks={
        "merge.run": _RUN,
        "merge.shape": "do the results have the right shapes and dtypes?",
        "merge.lse": "is the log-sum-exp within the bound?",
        "merge.out": "is the output within the bound?",
        "guard.output": "is nothing written around `output` and `output_lse`?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
    },
    judge="harness.checks.stage_merge:judge",
)

_PLAN = Stage(
    name="plan",
    what="context chunks for a budget of rows",
    inputs={
        "context_lens": "list of int",
        "row_budget": "int: rows of a chunk at most",
        "max_context_chunk": "int: rows of one request that is split, in one chunk",
        "split_alignment": "int: a context is split at multiples of this",
    },
    needs=(("context_lens",), ("row_budget",), ("max_context_chunk",), ("split_alignment",)),
    returns="list of chunks, each `(first_request, starts, lengths)` or an object with these attributes",
    checks={
        "plan.run": _RUN,
        "plan.chunks": "are the chunks those of the greedy rule?",
        "guard.inputs": _INPUTS,
    },
    judge="harness.checks.stage_small:judge_plan",
)

_PREFILL = Stage(
    name="prefill",
    what="the whole layer: top-k rows, paged context, projection, attention",
    inputs={
        "q": "`[T, H, nope + rope]` bf16 or fp16",
        "kv_c_normed": "`[T, kv_lora_rank]`: latents of the new tokens",
        "k_pe": "`[T, 1, rope]`",
        "cache": "`[num_blocks, block_size, width]`: latents, then rope part, of the context",
        "block_table": "`[B, max_blocks]` int32; behind the used entries it may hold anything",
        "w_kv_b": "`[kv_lora_rank, H * (nope + v)]`",
        "topk": "`[T, topk]` int32: request-local key positions",
        "query_lens": "list of int",
        "context_lens": "list of int",
        "scale": "float: factor of the scores",
        "kv_cache_dtype": "`auto`, `fp8_e4m3` or `fp8_ds_mla`",
        "kv_cache_scale": "float",
        "nope": "int",
        "rope": "int",
        "v_dim": "int",
        "row_budget": "int: if taken, the context is attended in chunks of the greedy plan and merged",
        "max_context_chunk": "int",
        "split_alignment": "int",
        "out": "`[T, H * v]`: to be filled, unless the result is returned",
    },
    needs=(("q",), ("kv_c_normed",), ("cache",), ("block_table",), ("w_kv_b",), ("topk",), ("scale",)),
    returns="`out [T, H * v]` (or `[T, H, v]`) in the dtype of `q`, and `lse [H, T]` float32; "
    "`lse` alone if it fills `out`",
    checks={
        "prefill.run": _RUN,
        "prefill.shape": "do the results have the right shapes and dtypes?",
        "prefill.keys": "does each row attend exactly its allowed keys (read-out, exact)?",
        "prefill.raw.lse": "is the log-sum-exp within the bound?",
        "prefill.raw.out": "is the output within the bound?",
        "guard.output": "is nothing written around the output?",
        "guard.inputs": _INPUTS,
        "guard.repeat": _REPEAT,
    },
    judge="harness.checks.stage_prefill:judge",
)

STAGES: dict[str, Stage] = {
    stage.name: stage for stage in (_ATTEND, _MQA, _MASK, _MASK_MOD, _GATHER, _MERGE, _PLAN, _PREFILL)
}
