"""Where the context lies: physical blocks of each request, and the block table around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.problems.bits import I64, Stream
from harness.problems.problem import Problem

_ORDER_TAG = 301
_GARBAGE_TAG = 302


@dataclass(frozen=True)
class PagePlan:
    """Physical placement of every context token."""

    block_ids: list[I64]
    """Physical block of each logical block, per request."""
    table: I64
    """`[B, width]`: block ids, then garbage; the width leaves at least one garbage column."""
    slots: I64
    """`[sum of contexts]`: cache row (`block * block_size + offset`) of each context token."""
    owned: np.ndarray
    """`[sum of contexts]` bool: False where an earlier request already owns the (shared) row."""


def plan_pages(problem: Problem) -> PagePlan:
    """Place the context of every request in the cache."""
    paging, counts, shared = problem.paging, problem.block_counts, problem.shared_blocks
    pool, size = problem.num_blocks, paging.block_size
    used = pool - paging.spare_blocks if sum(counts) else 0
    ids = _physical_order(problem, used, pool)

    block_ids: list[I64] = []
    slots: list[I64] = []
    owned: list[np.ndarray] = []
    taken = 0
    for count, context in zip(counts, problem.context_lens, strict=True):
        borrowed = shared if count and taken else 0
        own = ids[taken : taken + count - borrowed]
        taken += count - borrowed
        blocks = np.concatenate([ids[:borrowed], own])
        position = np.arange(context, dtype=np.int64)
        block_ids.append(blocks)
        slots.append(blocks[position // size] * size + position % size if context else position)
        owned.append(position >= borrowed * size)
    return PagePlan(block_ids, _table(problem, block_ids, pool), _join(slots), _join(owned).astype(bool))


def _physical_order(problem: Problem, used: int, pool: int) -> I64:
    order = problem.paging.order
    if order == "identity":
        return np.arange(used, dtype=np.int64)
    if order == "reversed":
        return np.arange(used - 1, -1, -1, dtype=np.int64)
    if order == "high":
        return np.arange(pool - used, pool, dtype=np.int64)
    return Stream(problem.paging.seed, _ORDER_TAG).permutation(pool)[:used]


def _table(problem: Problem, block_ids: list[I64], pool: int) -> I64:
    width = max(problem.block_counts, default=0) + 1
    batch = len(block_ids)
    stream = Stream(problem.paging.seed, _GARBAGE_TAG)
    # one garbage entry in four is a legal id of someone else's block: a stray read of it is silent
    choices = np.array([-1, pool, 2**31 - 1], dtype=np.int64)
    pick = stream.integers(4, batch * width)
    legal = stream.integers(pool, batch * width)
    table = np.where(pick == 3, legal, choices[np.minimum(pick, 2)]).reshape(batch, width)
    for request, blocks in enumerate(block_ids):
        table[request, : len(blocks)] = blocks
    return table


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
