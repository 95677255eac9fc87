"""Hypothesis strategies of problems.

`cases(profile)` draws a path first and then makes lengths, chunk splits, mask workspace and top-k width lead to
it, so that every path and every edge around it (fits exactly, one word short, budget equal to the context or one
below) has a fixed share. Two rules keep shrinking quick and its results small: the simplest value of every draw
comes first, and no draw hangs on the value of another (a number that does not fit is clipped), so that making one
draw smaller leaves the meaning of the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.problems.draws import SEEDS, among, between, chance, weighted
from harness.problems.lengths import Lengths, Room, clip, shapes, traffic_lengths, with_tokens
from harness.problems.names import (
    BLOCK_ORDERS,
    FAMILIES,
    HOLES,
    SLOT_ORDERS,
    TOPK_KINDS,
    CacheDType,
    Force,
    Path,
    TopkKind,
)
from harness.problems.parts import Chunks, DataSpec, Dims, Layout, Paging, Request, TopkSpec
from harness.problems.problem import Problem
from harness.problems.profiles import PROFILES, Profile, ProfileName
from harness.problems.published import MODELS
from harness.problems.sequences import earlier_profile, with_history
from harness.problems.splits import split_context
from harness.problems.workspace import mask_words

_PATHS: tuple[tuple[Path, int], ...] = (
    ("no_context", 16),
    ("global_mask", 28),
    ("remap", 28),
    ("dense", 13),
    ("mqa", 15),
)
_MODELS: tuple[tuple[str, int], ...] = (("deepseek-v3.2", 3), ("glm-5", 1), ("glm-5.3-flash", 1))
_EXPLICIT_TOKENS, _EXPLICIT_SLOTS = 6, 12
"""Batches and rows so small may have their top-k rows drawn key by key, which shrink key by key."""


def cases(profile: ProfileName = "quick") -> SearchStrategy[Problem]:
    """Problems of a profile."""
    # Hypothesis follows each fresh example with up to five mutations that copy one draw over another, and
    # most of them change nothing that matters here; it leaves the inside of a unique collection alone
    one = st.lists(_case(PROFILES[profile]), min_size=1, max_size=1, unique_by=lambda p: p.case_id)
    return one.map(lambda problems: problems[0])


@st.composite
def _case(draw: DrawFn, profile: Profile) -> Problem:
    """A problem, for some draws with a history."""
    return with_history(draw, draw(_problem(profile)), profile, _problem(earlier_profile(profile)))


@st.composite
def _problem(draw: DrawFn, profile: Profile) -> Problem:
    path = draw(weighted(*_PATHS))
    published = draw(chance(profile.published_share))
    from_trace = draw(chance(profile.traffic_share))
    block_size = draw(among(16, 32, 64, 8, 1, 48, 5, 128))
    dims = _dims(draw, profile, published)
    half = draw(chance(20))
    stretch = draw(weighted((1.0, 4), (1.37, 2), (0.21, 1), (2.5, 1)))
    data, layout, cache = _data(draw), _layout(draw), _cache_dtype(draw, profile, path, dims)
    paging = _paging(draw, cache, block_size)
    plan = draw(st.tuples(weighted(*_BUDGETS), between(0, 9), weighted(*_ALIGNMENTS), among("full", "half", "step")))
    room = Room(profile.max_query, profile.max_context)
    if published:
        room = Room(profile.published_query, profile.published_context)
    if path == "dense":
        room = Room(min(room.query, profile.max_dense), min(room.context, profile.max_dense))

    decodes, source = draw(weighted((0, 3), (1, 1))) * (1 + draw(between(0, 4))), "drawn"
    as_many_as_heads, twins = draw(chance(6)), draw(chance(5))
    if from_trace:
        lengths, decodes, source = traffic_lengths(draw, profile, path, room)
        kinds = [draw(among(*TOPK_KINDS)) for _ in lengths]
    else:
        requests = draw(shapes(profile, room))
        lengths = clip(requests, profile, path, block_size, room)
        kinds = [request.kind for request in requests]
        if twins and len(lengths) > 1 and 2 * lengths[0][1] <= room.query:
            lengths[1] = lengths[0]
        if as_many_as_heads and lengths:
            lengths = with_tokens(lengths, dims.heads)
            kinds = kinds[: len(lengths)]
    if published:
        source = f"{source} published"

    contexts = [c for c, _ in lengths]
    chunks = _chunks(profile, contexts, block_size, *plan)
    width = _topk_width(draw, profile, path, lengths, published=published)
    words, force = _workspace(draw, path, lengths, _longest_chunk(contexts, chunks), width, quantised=cache != "auto")
    return Problem(
        dims=dims.model_copy(update={"topk": width}),
        # the packed cache holds bf16 rope values
        dtype="fp16" if half and cache != "fp8_ds_mla" else "bf16",
        scale=stretch * dims.qk**-0.5,
        requests=tuple(Request(context_len=c, query_len=q) for c, q in lengths),
        paging=paging,
        chunks=chunks,
        mask_workspace_words=words,
        topk=_topk(draw, lengths, kinds, width),
        data=data,
        layout=layout.model_copy(update={"num_decode_tokens": decodes}),
        force=force,
        source=source,
    )


def _dims(draw: DrawFn, profile: Profile, published: bool) -> Dims:
    heads, published_heads = draw(among(*profile.heads)), draw(among(*profile.published_heads))
    (lora, nope, rope, v), model = draw(among(*profile.sizes)), draw(weighted(*_MODELS))
    parallel = draw(weighted((1, 3), (2, 1), (8, 1)))
    if published:
        return MODELS[model].dims(published_heads)
    return Dims(heads=heads, kv_lora_rank=lora, nope=nope, rope=rope, v=v, topk=1, tensor_parallel_size=parallel)


_BUDGETS = (("ample", 3), ("halves", 4), ("equal", 2), ("one_over", 3), ("longest", 2), ("many", 3))
_ALIGNMENTS = (("block", 3), (16, 2), (1, 1), (32, 1), (4, 2))


def _chunks(
    profile: Profile, contexts: Sequence[int], block_size: int, kind: str, extra: int, step: int | str, piece: str
) -> Chunks:
    """A chunk plan by how its budget relates to the contexts."""
    total = sum(contexts)
    budget = {
        "ample": 2 * total,
        "halves": -(-total // 2) + extra,
        "equal": total,
        "one_over": total - 1,
        "longest": max(contexts, default=0),
        "many": total // (3 + extra % max(profile.max_chunks - 2, 1)),
    }[kind]
    budget = max(budget, -(-total // profile.max_chunks), 1)
    # a budget below the alignment is illegal: then align to what the budget allows
    alignment = min(block_size if isinstance(step, str) else step, budget)
    longest = {"full": budget, "half": -(-budget // 2), "step": alignment}[piece]
    if total > longest * profile.max_chunks:
        longest = budget
    return Chunks(row_budget=budget, max_context_chunk=max(longest, alignment), split_alignment=alignment)


def _longest_chunk(contexts: Sequence[int], chunks: Chunks) -> int:
    pieces = split_context(contexts, chunks.row_budget, chunks.max_context_chunk, chunks.split_alignment)
    return max((piece.length for chunk in pieces for piece in chunk), default=0)


def _topk_width(draw: DrawFn, profile: Profile, path: Path, lengths: Lengths, *, published: bool) -> int:
    """Slots of a top-k row: at least the longest sequence for the dense path, mostly below it for others."""
    longest = max((c + q for c, q in lengths), default=0)
    width: int = draw(among(*(profile.published_topk if published else profile.topk)))
    slack: int = draw(among(0, 1, 7))
    clipped = draw(weighted((True, 85), (False, 15)))
    if path == "dense" and clipped:
        return max(longest + slack, 1)
    return min(width, max(longest - 1, 1)) if clipped else width


def _workspace(
    draw: DrawFn, path: Path, lengths: Lengths, longest_chunk: int, width: int, *, quantised: bool
) -> tuple[int | None, Force | None]:
    """Mask workspace words and a forced path that lead to `path`."""
    batch, max_q = len(lengths), max((q for _, q in lengths), default=0)
    longest = max((c + q for c, q in lengths), default=0)
    call = mask_words(batch, max_q, max(max_q, longest_chunk), reserve=False)
    whole = mask_words(batch, max_q, longest, reserve=True)
    natural_dense = longest <= width
    roll, pick = draw(between(0, 99)), draw(between(0, 59))
    words: tuple[int | None, ...]
    any_words: tuple[int | None, ...] = (None, call, 0, max(call - 1, 0), max(whole - 1, 0))
    force: Force | None = None
    if path == "dense":
        words, force = any_words, None if natural_dense and roll < 70 else "dense"
    elif path == "mqa" and (natural_dense or roll >= 60 or (call == 0 and not quantised)):
        words, force = any_words, "mqa"
    elif path == "mqa":
        chunk = mask_words(batch, max_q, longest_chunk, reserve=False) if longest_chunk else 0
        words = (None, whole, call, 0) if quantised else (call - 1, chunk if chunk < call else 0, call // 2)
    elif path == "remap" and (natural_dense or call >= whole or roll >= 70):
        words, force = (None, whole, call), "masked_remap"
    elif path == "remap":
        words, force = (call, whole - 1, (call + whole) // 2), "masked" if roll >= 60 else None
    else:
        fits = whole if path == "global_mask" else call
        words, force = (None, fits, fits + 1), "masked" if natural_dense or roll >= 90 else None
    return words[pick % len(words)], force


def _topk(draw: DrawFn, lengths: Lengths, kinds: Sequence[TopkKind], width: int) -> TopkSpec:
    uniform, order, holes = draw(st.booleans()), draw(among(*SLOT_ORDERS)), draw(among(*HOLES))
    any_negative, lowest, seed, explicit = draw(st.booleans()), draw(st.booleans()), draw(SEEDS), draw(chance(25))
    tokens = sum(q for _, q in lengths)
    if explicit and 0 < tokens <= _EXPLICIT_TOKENS:
        key = between(-2, max(c + q for c, q in lengths) + 1)
        row = st.lists(key, max_size=min(width, _EXPLICIT_SLOTS)).map(tuple)
        return TopkSpec(rows=tuple(draw(row) for _ in range(tokens)))
    chosen = (kinds[0],) * len(kinds) if uniform and kinds else tuple(kinds)
    lowest &= any_negative
    return TopkSpec(kinds=chosen, order=order, holes=holes, any_negative=any_negative, lowest=lowest, seed=seed)


def _data(draw: DrawFn) -> DataSpec:
    return DataSpec(
        family=draw(weighted(("normal", 6), *((family, 1) for family in FAMILIES))),
        weights=draw(weighted(("normal", 2), ("exact", 1))),
        seed=draw(SEEDS),
        temperature=draw(weighted((1.0, 4), (0.25, 1), (3.0, 1))),
    )


def _cache_dtype(draw: DrawFn, profile: Profile, path: Path, dims: Dims) -> CacheDType:
    """The masked paths take an unquantised cache only."""
    roll = draw(between(0, 99))
    packed = dims.kv_lora_rank == 512 and dims.rope == 64
    if path not in ("dense", "mqa") or roll < 100 - profile.fp8_share * (2 if packed else 1):
        return "auto"
    return "fp8_ds_mla" if packed and roll % 3 else "fp8_e4m3"


def _paging(draw: DrawFn, dtype: CacheDType, block_size: int) -> Paging:
    scale = draw(among(1.0, 0.25, 0.037, 0.0061))
    return Paging(
        block_size=block_size,
        order=draw(among(*BLOCK_ORDERS)),
        shared_prefix=draw(st.booleans()),
        spare_blocks=draw(weighted((0, 2), (1, 1), (5, 1))),
        table_pad=draw(weighted((0, 2), (3, 1))),
        cache_row_pad=draw(weighted((0, 3), (8, 1))),
        kv_cache_dtype=dtype,
        kv_cache_scale=scale if dtype == "fp8_e4m3" else 1.0,
        seed=draw(SEEDS),
    )


def _layout(draw: DrawFn) -> Layout:
    """Pads keep the 16-byte alignment that vector loads on a GPU ask for."""
    return Layout(
        q_pad=draw(weighted((0, 3), (8, 1))),
        kv_pad=draw(weighted((0, 3), (8, 1))),
        out_pad=draw(weighted((0, 3), (8, 1))),
        topk_pad=draw(weighted((0, 3), (4, 1))),
        poison=draw(weighted(("nan", 4), ("inf", 2), ("large", 2), ("zero", 1))),
    )
