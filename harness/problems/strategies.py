"""Hypothesis strategies of problems.

`cases(profile)` draws a path first and then makes lengths, chunk splits, mask workspace and top-k width lead
to it, so that every path and every edge around it (fits exactly, one word short, budget equal to the context
or one below) has a fixed share. The simplest value of every draw comes first, so that shrinking ends at one
request, plain numbers and identity paging.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.problems import traffic
from harness.problems.names import (
    BLOCK_ORDERS,
    FAMILIES,
    HOLES,
    SLOT_ORDERS,
    TOPK_KINDS,
    CacheDType,
    Force,
    Path,
)
from harness.problems.parts import Chunks, DataSpec, Dims, Layout, Paging, Request, TopkSpec
from harness.problems.problem import Problem
from harness.problems.profiles import PROFILES, Profile, ProfileName
from harness.problems.published import MODELS
from harness.problems.splits import split_context
from harness.problems.workspace import mask_words

T = TypeVar("T")
Lengths = list[tuple[int, int]]
"""(context_len, query_len) of each request"""

_QUERY_EDGES = (1, 31, 32, 33, 0, 2, 5)
_PATHS: tuple[tuple[Path, int], ...] = (
    ("no_context", 16),
    ("global_mask", 28),
    ("remap", 28),
    ("dense", 13),
    ("mqa", 15),
)


def weighted(*options: tuple[T, int]) -> SearchStrategy[T]:
    """One of the options, in proportion to its weight; shrinks towards the first."""
    return st.sampled_from([value for value, weight in options for _ in range(weight)])


def chance(percent: int) -> SearchStrategy[bool]:
    """True in `percent` of 100 draws; shrinks towards False."""
    return st.integers(0, 99).map(lambda number: number >= 100 - percent)


def cases(profile: ProfileName = "quick") -> SearchStrategy[Problem]:
    """Problems of a profile."""
    # Hypothesis follows each fresh example with up to five mutations that copy one draw over another, and
    # most of them change nothing that matters here; it leaves the inside of a unique collection alone
    one = st.lists(_problem(PROFILES[profile]), min_size=1, max_size=1, unique_by=lambda p: p.case_id)
    return one.map(lambda problems: problems[0])


@st.composite
def _problem(draw: DrawFn, profile: Profile) -> Problem:
    path = draw(weighted(*_PATHS))
    model = draw(weighted((None, 100 - profile.published_share), ("published", profile.published_share)))
    from_trace = draw(chance(profile.traffic_share))
    block_size = draw(st.sampled_from((16, 32, 64, 8, 1, 48, 5, 128)))
    max_query = profile.published_query if model else profile.max_query
    max_context = profile.published_context if model else profile.max_context
    decode_tokens = draw(st.integers(1, 5)) if draw(chance(25)) else 0
    if from_trace:
        lengths, decode_tokens, source = draw(_traffic_lengths(profile, path, max_query, max_context))
    else:
        lengths, source = draw(_drawn_lengths(profile, path, block_size, max_query, max_context)), "drawn"
    dims, source = draw(_dims(profile, lengths, bool(model), source))
    contexts, queries = [c for c, _ in lengths], [q for _, q in lengths]
    chunks = draw(_chunks(profile, contexts, block_size))
    pieces = split_context(contexts, chunks.row_budget, chunks.max_context_chunk, chunks.split_alignment)
    longest_chunk = max((p.length for chunk in pieces for p in chunk), default=0)
    width = draw(_topk_width(profile, path, lengths, published=bool(model)))
    dims = dims.model_copy(update={"topk": width})
    cache = draw(_cache_dtype(profile, path, dims))
    words, force = draw(_workspace(path, queries, contexts, longest_chunk, width, quantised=cache != "auto"))
    return Problem(
        dims=dims,
        dtype=draw(weighted(("bf16", 4), ("fp16", 1))),
        scale=draw(weighted((dims.qk**-0.5, 4), (1.37 * dims.qk**-0.5, 2), (0.0625, 1), (0.3, 1))),
        requests=tuple(Request(context_len=c, query_len=q) for c, q in lengths),
        paging=draw(_paging(cache, block_size)),
        chunks=chunks,
        mask_workspace_words=words,
        topk=draw(_topk(lengths, width)),
        data=draw(_data()),
        layout=draw(_layout(decode_tokens)),
        force=force,
        source=source,
    )


@st.composite
def _traffic_lengths(
    draw: DrawFn, profile: Profile, path: Path, max_query: int, max_context: int
) -> tuple[Lengths, int, str]:
    """A batch of a real trace, scaled to the profile; the path decides whether its contexts count."""
    name = draw(st.sampled_from(traffic.TRACES))
    budget = draw(st.sampled_from((2048, 8192)))
    pool = traffic.batches(name, budget)
    ragged = [i for i, batch in enumerate(pool) if len(batch.lengths) > 1]
    index = draw(st.sampled_from(ragged)) if draw(chance(75)) else draw(st.integers(0, len(pool) - 1))
    batch = traffic.scale_down(
        pool[index], max_requests=profile.max_requests, max_tokens=max_query, max_keys=max_context
    )
    lengths = [(0 if path == "no_context" else c, q) for c, q in batch.lengths]
    if path in ("global_mask", "remap") and not any(c for c, _ in lengths):
        # an engine without a prefix cache sees a repeated prompt whole; with one, most of it is context
        prompt = lengths[0][1]
        lengths[0] = (prompt - max(prompt // 8, 1), max(prompt // 8, 1))
    return lengths, min(batch.decode_tokens, 8), f"traffic:{name}/{budget}[{index}]"


@st.composite
def _drawn_lengths(
    draw: DrawFn, profile: Profile, path: Path, block_size: int, max_query: int, max_context: int
) -> Lengths:
    few = [(n, w) for n, w in ((1, 34), (2, 30), (3, 20), (4, 8), (6, 4), (8, 4)) if n <= profile.max_requests]
    batch = draw(weighted(*few, (0, 1)))
    queries: list[int] = []
    long = 0
    for index in range(batch):
        budget = profile.beside_long if long else max_query
        room = max(budget - sum(queries[long:]), 1)
        share = (profile.long_query_share, profile.second_long_share)[index] if index == long < 2 else 0
        if share and draw(chance(share)):
            queries.append(draw(st.sampled_from(profile.long_queries)))
            long += 1
        elif draw(chance(45)):
            queries.append(min(draw(st.sampled_from(_QUERY_EDGES)), room))
        else:
            queries.append(draw(st.integers(1, room)))
    contexts = [0] * batch
    if path != "no_context":
        for index in range(batch):
            contexts[index] = draw(_context(block_size, max(max_context - sum(contexts), 0)))
        if batch and path in ("global_mask", "remap") and not any(contexts):
            contexts[-1] = draw(st.integers(1, max_context))
    lengths = list(zip(contexts, queries, strict=True))
    if batch > 1 and draw(chance(6)):
        lengths[1] = lengths[0]
    return lengths


@st.composite
def _context(draw: DrawFn, block_size: int, room: int) -> int:
    """A context length: none, near a multiple of a mask word or of a block, or anything."""
    kind = draw(weighted(("any", 4), ("none", 2), ("word", 3), ("block", 3)))
    if kind == "none" or room == 0:
        return 0
    if kind == "any":
        return draw(st.integers(1, room))
    unit = 32 if kind == "word" else block_size
    near = draw(st.integers(1, max(room // unit, 1))) * unit + draw(st.sampled_from((0, 1, -1)))
    return min(max(near, 0), room)


@st.composite
def _dims(draw: DrawFn, profile: Profile, lengths: Lengths, published: bool, source: str) -> tuple[Dims, str]:
    tokens = sum(q for _, q in lengths)
    if published:
        name = draw(weighted(("deepseek-v3.2", 3), ("glm-5", 1), ("glm-5.3-flash", 1)))
        dims = MODELS[name].dims(draw(st.sampled_from(profile.published_heads)))
        return dims, f"published:{name}" if source == "drawn" else f"{source} published:{name}"
    heads = draw(st.sampled_from(profile.heads))
    if 0 < tokens <= 2 * max(profile.heads) and draw(chance(60)):
        heads = tokens
    lora, nope, rope, v = draw(st.sampled_from(profile.sizes))
    parallel = draw(weighted((1, 3), (2, 1), (8, 1)))
    return Dims(
        heads=heads, kv_lora_rank=lora, nope=nope, rope=rope, v=v, topk=1, tensor_parallel_size=parallel
    ), source


@st.composite
def _chunks(draw: DrawFn, profile: Profile, contexts: Sequence[int], block_size: int) -> Chunks:
    """A chunk plan by how the budget relates to the contexts."""
    total = sum(contexts)
    alignment = draw(weighted((block_size, 3), (16, 2), (1, 1), (32, 1), (4, 2)))
    kind = draw(weighted(("ample", 3), ("halves", 5), ("equal", 2), ("one_over", 3), ("longest", 2), ("many", 4)))
    least = -(-total // profile.max_chunks)
    budget = {
        "ample": 2 * total,
        "halves": -(-total // 2) + draw(st.integers(0, 9)),
        "equal": total,
        "one_over": total - 1,
        "longest": max(contexts, default=0),
        "many": max(total // draw(st.integers(3, max(profile.max_chunks, 3))), 1),
    }[kind]
    # a budget below the alignment is illegal: then align to what the budget allows
    alignment = min(alignment, max(budget, least, 1))
    budget = max(budget, least, alignment)
    longest_piece = draw(weighted((budget, 4), (-(-budget // 2), 1), (alignment, 1)))
    if total > longest_piece * 2 * profile.max_chunks:
        longest_piece = budget
    return Chunks(row_budget=budget, max_context_chunk=max(longest_piece, alignment), split_alignment=alignment)


@st.composite
def _topk_width(draw: DrawFn, profile: Profile, path: Path, lengths: Lengths, published: bool) -> int:
    """Slots of a top-k row: at least the longest sequence for the dense path, mostly below it for others."""
    longest = max((c + q for c, q in lengths), default=0)
    width = draw(st.sampled_from(profile.published_topk if published else profile.topk))
    if path == "dense" and draw(chance(80)):
        return max(longest + draw(st.sampled_from((0, 1, 7))), 1)
    if path != "dense" and longest > 1 and draw(chance(85)):
        return min(width, longest - 1)
    return width


@st.composite
def _workspace(
    draw: DrawFn,
    path: Path,
    queries: Sequence[int],
    contexts: Sequence[int],
    longest_chunk: int,
    width: int,
    *,
    quantised: bool,
) -> tuple[int | None, Force | None]:
    """Mask workspace words and a forced path that lead to `path`."""
    batch, max_q = len(queries), max(queries, default=0)
    longest = max((c + q for c, q in zip(contexts, queries, strict=True)), default=0)
    call = mask_words(batch, max_q, max(max_q, longest_chunk), reserve=False)
    whole = mask_words(batch, max_q, longest, reserve=True)
    natural_dense = longest <= width
    if path == "dense":
        words = draw(st.sampled_from((None, 0, call)))
        return words, None if natural_dense and draw(chance(70)) else "dense"
    if path == "mqa":
        if natural_dense or draw(chance(40)) or (call == 0 and not quantised):
            return draw(st.sampled_from((None, call, 0))), "mqa"
        if quantised:
            return draw(st.sampled_from((None, whole, call, 0))), None
        return draw(st.sampled_from((call - 1, 0, call // 2))), None
    if path == "remap":
        if natural_dense or call >= whole or draw(chance(30)):
            return draw(st.sampled_from((None, whole, call))), "masked_remap"
        return draw(st.sampled_from((call, whole - 1, (call + whole) // 2))), None
    fits = (None, whole, whole + 1) if path == "global_mask" else (None, call, call + 1)
    return draw(st.sampled_from(fits)), "masked" if natural_dense or draw(chance(10)) else None


@st.composite
def _topk(draw: DrawFn, lengths: Lengths, width: int) -> TopkSpec:
    batch, tokens = len(lengths), sum(q for _, q in lengths)
    if 0 < tokens <= 6 and draw(chance(25)):
        # small enough to be drawn key by key, which shrinks key by key
        longest = max(c + q for c, q in lengths)
        key = st.integers(-2, longest + 1)
        row = st.lists(key, max_size=min(width, 12)).map(tuple)
        return TopkSpec(rows=tuple(draw(row) for _ in range(tokens)))
    if draw(chance(55)):
        kinds = (draw(st.sampled_from(TOPK_KINDS)),) * batch
    else:
        kinds = tuple(draw(st.sampled_from(TOPK_KINDS)) for _ in range(batch))
    return TopkSpec(
        kinds=kinds,
        order=draw(st.sampled_from(SLOT_ORDERS)),
        holes=draw(st.sampled_from(HOLES)),
        any_negative=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def _data(draw: DrawFn) -> DataSpec:
    plain = draw(chance(25))
    return DataSpec(
        family="normal" if plain else draw(st.sampled_from(FAMILIES)),
        weights=draw(weighted(("normal", 2), ("exact", 1))),
        seed=draw(st.integers(0, 2**32 - 1)),
        temperature=draw(weighted((1.0, 4), (0.25, 1), (3.0, 1))),
    )


@st.composite
def _cache_dtype(draw: DrawFn, profile: Profile, path: Path, dims: Dims) -> CacheDType:
    """The masked paths take an unquantised cache only."""
    if path not in ("dense", "mqa") or not draw(chance(profile.fp8_share)):
        return "auto"
    packed = dims.kv_lora_rank == 512 and dims.rope == 64
    return draw(weighted(("fp8_e4m3", 1), ("fp8_ds_mla", 2))) if packed else "fp8_e4m3"


@st.composite
def _paging(draw: DrawFn, dtype: CacheDType, block_size: int) -> Paging:
    scale = draw(weighted((1.0, 1), (0.25, 1), (0.037, 2))) if dtype == "fp8_e4m3" else 1.0
    return Paging(
        block_size=block_size,
        order=draw(st.sampled_from(BLOCK_ORDERS)),
        shared_prefix=draw(chance(30)),
        spare_blocks=draw(weighted((0, 2), (1, 1), (5, 1))),
        table_pad=draw(weighted((0, 2), (3, 1))),
        cache_row_pad=draw(weighted((0, 3), (8, 1))),
        kv_cache_dtype=dtype,
        kv_cache_scale=scale,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@st.composite
def _layout(draw: DrawFn, decode_tokens: int) -> Layout:
    """Pads keep the 16-byte alignment that vector loads on a GPU ask for."""
    return Layout(
        num_decode_tokens=decode_tokens,
        q_pad=draw(weighted((0, 3), (8, 1))),
        kv_pad=draw(weighted((0, 3), (8, 1))),
        out_pad=draw(weighted((0, 3), (8, 1))),
        topk_pad=draw(weighted((0, 3), (4, 1))),
        poison=draw(weighted(("nan", 4), ("inf", 2), ("large", 2), ("zero", 1))),
    )
