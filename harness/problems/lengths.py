"""Lengths of the requests of a batch: drawn, or taken from real traffic, and clipped to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.problems import traffic
from harness.problems.draws import among, between, chance, weighted
from harness.problems.names import TOPK_KINDS, Path, TopkKind
from harness.problems.profiles import Profile

Lengths = list[tuple[int, int]]
"""(context_len, query_len) of each request"""


MANY = (9, 40)
"""Fewest and most requests of a batch of tiny ones."""
_TINY_CONTEXT = 12


class Room(NamedTuple):
    """The most tokens of a batch."""

    query: int
    context: int


class Shape(NamedTuple):
    """What is drawn for one request, before it is clipped to the batch."""

    query_class: int | str
    """A length, or `any`, or `long` (around a query tile)"""
    query: int
    context_class: str
    context: int
    kind: TopkKind


@lru_cache(maxsize=64)
def shapes(profile: Profile, room: Room) -> SearchStrategy[list[Shape]]:
    """Shapes of the requests of one batch, simplest first."""
    long = profile.long_query_share
    queries = (("any", 55 - long), (1, 14), (31, 7), (32, 7), (33, 7), (0, 5), (2, 3), (5, 2), ("long", long))
    contexts = (
        ("any", 8),
        ("none", 4),
        ("32k", 2),
        ("32k+1", 2),
        ("32k-1", 2),
        ("block_k", 2),
        ("block_k+1", 2),
        ("block_k-1", 2),
    )
    shape = st.builds(
        Shape,
        weighted(*queries),
        between(1, max(room.query, 2)),
        weighted(*contexts),
        between(1, room.context),
        weighted(("random", 3), *((kind, 1) for kind in TOPK_KINDS)),
    )
    tiny = st.builds(
        Shape,
        weighted((1, 8), (2, 2), (0, 2), (3, 1)),
        st.just(1),
        weighted(("any", 7), ("none", 1)),
        between(1, _TINY_CONTEXT),
        weighted(("random", 3), *((kind, 1) for kind in TOPK_KINDS)),
    )
    counts = [(n, w) for n, w in ((1, 34), (2, 30), (3, 20), (4, 8), (6, 4), (8, 4)) if n <= profile.max_requests]
    sizes = weighted(*counts, (0, 1))
    few = sizes.flatmap(lambda n: st.lists(shape, min_size=n, max_size=n))
    many = st.tuples(
        st.lists(shape | tiny, min_size=1, max_size=1), st.lists(tiny, min_size=MANY[0] - 1, max_size=MANY[1] - 1)
    )
    return chance(profile.many_share).flatmap(lambda more: many.map(lambda parts: parts[0] + parts[1]) if more else few)


def clip(drawn: Sequence[Shape], profile: Profile, path: Path, block_size: int, room: Room) -> Lengths:
    """Lengths of a batch from what was drawn for its requests, within the room of the profile."""
    queries: list[int] = []
    contexts: list[int] = []
    long = 0
    for index, shape in enumerate(drawn):
        left = max((profile.beside_long if long else room.query) - sum(queries[long:]), 1)
        may_be_long = index == 0 or (index == long == 1 and profile.second_long)
        if shape.query_class == "long" and may_be_long:
            queries.append(profile.long_queries[shape.query % len(profile.long_queries)])
            long += 1
        elif isinstance(shape.query_class, int):
            queries.append(min(shape.query_class, left))
        else:
            queries.append((shape.query - 1) % left + 1)
        contexts.append(_context(shape, block_size, max(room.context - sum(contexts), 0)))
    if path == "no_context":
        contexts = [0] * len(drawn)
    elif drawn and path in ("global_mask", "remap") and not any(contexts):
        contexts[-1] = drawn[-1].context
    return list(zip(contexts, queries, strict=True))


def _context(shape: Shape, block_size: int, left: int) -> int:
    """A context length: none, near a multiple of a mask word or of a block, or anything."""
    if shape.context_class == "none" or left == 0:
        return 0
    if shape.context_class == "any":
        return (shape.context - 1) % left + 1
    unit = 32 if shape.context_class.startswith("32k") else block_size
    delta = {"+1": 1, "-1": -1}.get(shape.context_class[-2:], 0)
    most = max(left // unit, 1)
    return min(((shape.context - 1) // unit % most + 1) * unit + delta, left)


def with_tokens(lengths: Lengths, tokens: int) -> Lengths:
    """The same contexts with `tokens` query tokens in all: one for each request, the rest for the first."""
    kept = lengths[:tokens]
    return [(c, 1 if index else tokens - len(kept) + 1) for index, (c, _) in enumerate(kept)]


def traffic_lengths(draw: DrawFn, profile: Profile, path: Path, room: Room) -> tuple[Lengths, int, str]:
    """A batch of a real trace, scaled to the profile; the path decides whether its contexts count."""
    name, budget = draw(among(*traffic.TRACES)), draw(among(2048, 8192))
    pool = traffic.batches(name, budget)
    ragged = _ragged(name, budget)
    index = draw(between(0, 2**16 - 1))
    index = ragged[index % len(ragged)] if index % 4 else index % len(pool)
    batch = traffic.scale_down(
        pool[index], max_requests=profile.max_requests, max_tokens=room.query, max_keys=room.context
    )
    lengths = [(0 if path == "no_context" else c, q) for c, q in batch.lengths]
    if path in ("global_mask", "remap") and not any(c for c, _ in lengths):
        # an engine without a prefix cache sees a repeated prompt whole; with one, most of it is context
        prompt = lengths[0][1]
        lengths[0] = (prompt - max(prompt // 8, 1), max(prompt // 8, 1))
    return lengths, min(batch.decode_tokens, 8), f"traffic:{name}/{budget}[{index}]"


@lru_cache(maxsize=16)
def _ragged(name: str, budget: int) -> list[int]:
    return [i for i, batch in enumerate(traffic.batches(name, budget)) if len(batch.lengths) > 1]
