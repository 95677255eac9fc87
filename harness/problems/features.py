"""Named features of a problem: what a run has reached, and what it has not.

A feature is `group:value`. Some groups hold exactly one value in each problem (`dtype`, `path`); in the
others several hold at once, because a batch mixes requests. `FEATURES` lists every feature there is, so that
a coverage table can show the missing ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.problems.history import BEFORE, before
from harness.problems.names import (
    BLOCK_ORDERS,
    CACHE_DTYPES,
    FAMILIES,
    HOLES,
    POISONS,
    SLOT_ORDERS,
    TOPK_KINDS,
)
from harness.problems.workspace import words_per_row

if TYPE_CHECKING:
    from harness.problems.problem import Problem

_QUERY_EDGES = (0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257)
_QUERY_BETWEEN = {2: "2..30", 34: "34..126", 130: "130..254", 258: "258.."}
_CONTEXTS = ("0", "below_block", "32k", "32k+1", "32k-1", "block_k", "block_k+1", "block_k-1", "other")

_ONE_OF: dict[str, tuple[str, ...]] = {
    "requests": ("0", "1", "2", "3..4", "5..8", "9.."),
    "chunks": ("0", "1", "2", "3..5", "6.."),
    "path": ("dense", "no_context", "global_mask", "remap", "mqa"),
    "force": ("none", "dense", "masked", "masked_remap", "mqa"),
    "block_order": BLOCK_ORDERS,
    "block_size": ("1", "2..15", "16", "17..63", "64.."),
    "cache": CACHE_DTYPES,
    "topk_order": SLOT_ORDERS,
    "topk_holes": HOLES,
    "family": FAMILIES,
    "weights": ("normal", "exact"),
    "dtype": ("bf16", "fp16"),
    "poison": POISONS,
    "scale": ("d**-0.5", "other"),
    "heads": ("1", "2", "odd", "even"),
    "lengths": ("drawn", "traffic"),
    "dims": ("small", "published"),
    "history": ("none", "1", "2"),
}
_ANY_OF: dict[str, tuple[str, ...]] = {
    "query_len": (*(str(n) for n in _QUERY_EDGES), *_QUERY_BETWEEN.values()),
    "context_len": _CONTEXTS,
    "batch": (
        "long_beside_short",
        "with_and_without_context",
        "twins",
        "empty_request_beside_others",
        "tokens==heads",
        "sequence_of_one",
    ),
    "chunk": (
        "continuation",
        "three_parts_of_one_request",
        "ends_in_different_chunks",
        "covers_all_requests",
        "request_skipped",
        "rows==budget",
        "context==budget+1",
        "start_inside_word",
        "one_row",
    ),
    "workspace": (
        "default",
        "global_fits_exactly",
        "global_one_word_short",
        "call_fits_exactly",
        "call_one_word_short",
        "fits_all_but_the_suffix",
        "none",
    ),
    "mask": ("last_word_full", "last_word_one_key", "last_word_31_keys", "spare_words", "rows==padded_rows"),
    "paging": ("shared_prefix", "spare_blocks", "table_pad", "row_pad", "scale!=1", "partial_last_block"),
    "topk": TOPK_KINDS,
    "topk_rows": ("any_negative", "lowest_negative", "wider_than_a_sequence", "one_slot", "explicit", "narrow", "wide"),
    "layout": ("decode_tokens", "q_pad", "kv_pad", "out_pad", "topk_pad"),
    "model": ("no_rope", "tensor_parallel", "odd_dims", "v!=nope"),
    "before": BEFORE,
}

FEATURES: tuple[str, ...] = tuple(
    f"{group}:{value}" for groups in (_ONE_OF, _ANY_OF) for group, values in groups.items() for value in values
)
"""Every feature that a problem can have."""


def single_valued(feature: str) -> bool:
    """True if a problem has exactly one feature of this feature's group."""
    return feature.partition(":")[0] in _ONE_OF


def features_of(problem: Problem) -> list[str]:
    """Sorted features of one problem."""
    one = _one_of(problem)
    found = {f"{group}:{value}" for group, value in one.items()}
    for group, values in (
        ("query_len", {_query_class(n) for n in problem.query_lens}),
        ("context_len", _context_classes(problem)),
        ("batch", _batch(problem)),
        ("chunk", _chunk(problem)),
        ("workspace", _workspace(problem)),
        ("mask", _mask(problem)),
        ("paging", _paging(problem)),
        ("topk", set(problem.topk.kinds) if problem.topk.rows is None else set()),
        ("topk_rows", _topk_rows(problem)),
        ("layout", _layout(problem)),
        ("model", _model(problem)),
        ("before", before(problem)),
    ):
        found |= {f"{group}:{value}" for value in values}
    return sorted(found)


def _one_of(problem: Problem) -> dict[str, str]:
    dims, topk = problem.dims, problem.topk
    explicit = topk.rows is not None
    plain_scale = math.isclose(problem.scale, dims.qk**-0.5, rel_tol=1e-6)
    return {
        "requests": _ranged(len(problem.requests), (0, 1, 2, 3, 5, 9)),
        "chunks": _ranged(len(problem.planned_chunks), (0, 1, 2, 3, 6)),
        "path": problem.expected_path(),
        "force": problem.force or "none",
        "block_order": problem.paging.order,
        "block_size": _ranged(problem.paging.block_size, (1, 2, 16, 17, 64)),
        "cache": problem.paging.kv_cache_dtype,
        "topk_order": "shuffled" if explicit else topk.order,
        "topk_holes": "tail" if explicit else topk.holes,
        "family": problem.data.family,
        "weights": problem.data.weights,
        "dtype": problem.dtype,
        "poison": problem.layout.poison,
        "scale": "d**-0.5" if plain_scale else "other",
        "heads": str(dims.heads) if dims.heads <= 2 else "odd" if dims.heads % 2 else "even",
        "lengths": "traffic" if "traffic" in problem.source else "drawn",
        "dims": "published" if dims.kv_lora_rank == 512 and dims.nope >= 128 else "small",
        "history": str(len(problem.history) or "none"),
    }


def _ranged(number: int, lows: tuple[int, ...]) -> str:
    """The class of a number among ranges that begin at `lows`: `2`, `3..4`, `5..`."""
    index = sum(1 for low in lows if low <= number) - 1
    low = lows[index]
    if index == len(lows) - 1:
        return f"{low}.."
    high = lows[index + 1] - 1
    return str(low) if high == low else f"{low}..{high}"


def _query_class(length: int) -> str:
    if length in _QUERY_EDGES:
        return str(length)
    return _QUERY_BETWEEN[max(low for low in _QUERY_BETWEEN if low <= length)]


def _context_classes(problem: Problem) -> set[str]:
    found: set[str] = set()
    size = problem.paging.block_size
    for context in problem.context_lens:
        classes = set()
        if context == 0:
            classes.add("0")
        elif context < size:
            classes.add("below_block")
        for name, unit in (("32k", 32), ("block_k", size)):
            for sign, suffix in ((0, ""), (1, "+1"), (-1, "-1")):
                if context > 1 and (context - sign) % unit == 0 and context >= unit + sign:
                    classes.add(name + suffix)
        found |= classes or {"other"}
    return found


def _batch(problem: Problem) -> set[str]:
    lens, contexts = problem.query_lens, problem.context_lens
    alive = [n for n in problem.seq_lens if n]
    return _true(
        {
            "long_beside_short": bool(alive) and max(alive) >= 4 * min(alive) and max(alive) >= 32,
            "with_and_without_context": any(contexts) and not all(contexts),
            "twins": len(set(problem.requests)) < len(problem.requests),
            "empty_request_beside_others": 0 in lens and any(lens),
            "tokens==heads": problem.num_tokens == problem.dims.heads,
            "sequence_of_one": 1 in problem.seq_lens,
        }
    )


def _chunk(problem: Problem) -> set[str]:
    chunks = problem.planned_chunks
    if not chunks:
        return set()
    pieces = [piece for chunk in chunks for piece in chunk]
    parts = [sum(1 for p in pieces if p.request == r) for r in range(len(problem.requests))]
    last = [
        max((i for i, c in enumerate(chunks) if any(p.request == r for p in c)), default=-1) for r in range(len(parts))
    ]
    total, budget = sum(problem.context_lens), problem.chunks.row_budget
    covered = {p.request for p in pieces}
    return _true(
        {
            "continuation": any(p.start for p in pieces),
            "three_parts_of_one_request": max(parts) >= 3,
            "ends_in_different_chunks": len({i for i in last if i >= 0}) > 1,
            "covers_all_requests": len(chunks) == 1 and len(covered) == len(problem.requests),
            "request_skipped": len(covered) < len(problem.requests),
            "rows==budget": any(sum(p.length for p in chunk) == budget for chunk in chunks),
            "context==budget+1": total == budget + 1,
            "start_inside_word": any(p.start % 32 for p in pieces),
            "one_row": any(p.length == 1 for p in pieces),
        }
    )


def _workspace(problem: Problem) -> set[str]:
    words, whole, call = problem.workspace_words, problem.global_mask_words, problem.call_mask_words
    return _true(
        {
            "default": problem.mask_workspace_words is None,
            "global_fits_exactly": words == whole,
            "global_one_word_short": words == whole - 1,
            "call_fits_exactly": words == call,
            "call_one_word_short": words == call - 1,
            "fits_all_but_the_suffix": problem.path_by_suffix_mask,
            "none": words == 0,
        }
    )


def _mask(problem: Problem) -> set[str]:
    keys, rows = problem.max_seq_len, problem.max_query_len
    return _true(
        {
            "last_word_full": keys > 0 and keys % 32 == 0,
            "last_word_one_key": keys % 32 == 1,
            "last_word_31_keys": keys % 32 == 31,
            "spare_words": words_per_row(keys, reserve=True) > -(-keys // 32) + 1,
            "rows==padded_rows": rows > 0 and (rows == 128 or rows % 256 == 0),
        }
    )


def _paging(problem: Problem) -> set[str]:
    paging = problem.paging
    return _true(
        {
            "shared_prefix": problem.shared_blocks > 0,
            "spare_blocks": paging.spare_blocks > 0,
            "table_pad": paging.table_pad > 0,
            "row_pad": paging.cache_row_pad > 0,
            "scale!=1": paging.kv_cache_dtype == "fp8_e4m3" and paging.kv_cache_scale != 1.0,
            "partial_last_block": any(c % paging.block_size for c in problem.context_lens),
        }
    )


def _topk_rows(problem: Problem) -> set[str]:
    width = problem.dims.topk
    return _true(
        {
            "any_negative": problem.topk.any_negative and problem.topk.rows is None,
            "lowest_negative": problem.topk.lowest and problem.topk.any_negative and problem.topk.rows is None,
            "wider_than_a_sequence": any(0 < n < width for n in problem.seq_lens)
            and problem.expected_path() != "dense",
            "one_slot": width == 1,
            "explicit": problem.topk.rows is not None,
            "narrow": 1 < width < 32,
            "wide": width >= 32,
        }
    )


def _layout(problem: Problem) -> set[str]:
    layout = problem.layout
    return _true(
        {
            "decode_tokens": layout.num_decode_tokens > 0,
            "q_pad": layout.q_pad > 0,
            "kv_pad": layout.kv_pad > 0,
            "out_pad": layout.out_pad > 0,
            "topk_pad": layout.topk_pad > 0,
        }
    )


def _model(problem: Problem) -> set[str]:
    dims = problem.dims
    return _true(
        {
            "no_rope": dims.rope == 0,
            "tensor_parallel": dims.tensor_parallel_size > 1,
            "odd_dims": any(size % 2 for size in (dims.kv_lora_rank, dims.nope, dims.rope, dims.v)),
            "v!=nope": dims.v != dims.nope,
        }
    )


def _true(flags: dict[str, bool]) -> set[str]:
    return {name for name, holds in flags.items() if holds}
