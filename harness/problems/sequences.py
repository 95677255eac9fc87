"""What runs before the judged call: batches that share with it what an engine shares between calls.

Each kind of earlier call aims at a state that may survive it:

* `batch`: another batch on the same layer: stale masks and rows in the workspaces, sizes baked into a kernel;
* `metadata`: the same batch in another layer, or again in the same one, on one metadata object;
* `scale`: a layer of the same sizes with another softmax scale: a value missing from a compile key;
* `resized`: the same batch with lengths moved by whole multiples of 16: one compiled kernel for two sizes;
* `sizes`: a layer of other sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from hypothesis.strategies import DrawFn, SearchStrategy

from harness.problems.draws import weighted
from harness.problems.history import SIZE_CLASS
from harness.problems.parts import Request
from harness.problems.problem import Problem
from harness.problems.profiles import Profile

Kind = Literal["batch", "metadata", "scale", "resized", "sizes"]
KINDS: tuple[tuple[Kind, int], ...] = (("batch", 4), ("metadata", 3), ("scale", 2), ("resized", 2), ("sizes", 1))
_CALLS = ((0, 84), (1, 11), (2, 5))
"""Earlier calls, in percent of the cases."""
_MOST_QUERY, _MOST_CONTEXT = 512, 4096


@lru_cache(maxsize=16)
def earlier_profile(profile: Profile) -> Profile:
    """Earlier calls are small: they cost as much as the judged one, and what they leave behind is the same."""
    return replace(
        profile,
        max_query=min(profile.published_query, _MOST_QUERY),
        max_context=min(profile.published_context, _MOST_CONTEXT),
        published_share=min(profile.published_share, 10),
        long_query_share=4,
        second_long=False,
    )


def with_history(draw: DrawFn, judged: Problem, profile: Profile, small: SearchStrategy[Problem]) -> Problem:
    """The judged problem, for some draws with one or two calls before it.

    `small` draws problems of `earlier_profile(profile)`.
    """
    earlier = []
    for _ in range(draw(weighted(*_CALLS))):
        kind = draw(weighted(*KINDS))
        earlier.append(_earlier(kind, judged, draw(small), profile))
    return judged.replace(history=tuple(earlier)) if earlier else judged


def _earlier(kind: Kind, judged: Problem, other: Problem, profile: Profile) -> Problem:
    """The call of this kind: `other` where the kind leaves something open."""
    if kind == "sizes":
        call = other
    elif kind in ("batch", "scale"):
        call = _on_the_layer_of(judged, other, profile.max_chunks)
        if kind == "scale":
            call = call.replace(scale=judged.scale * 1.37, data=other.data)
    elif kind == "resized":
        call = judged.replace(requests=tuple(_moved(request) for request in judged.requests), **_own_topk(judged))
    else:
        # the other's seeds tell: the same layer again, another layer, a scale of its own, another path
        scale = judged.scale if other.data.seed % 3 else judged.scale * 0.73
        data = other.data if other.data.seed % 2 else judged.data
        topk = judged.topk.model_copy(update={"seed": other.topk.seed})
        force = judged.force if other.topk.seed % 3 else other.force
        call = judged.replace(scale=scale, data=data, topk=topk, force=force)
    call = call.replace(source=f"before: {kind}")
    return call.replace(force=None) if call.expected_path() == "refused" else call


def _moved(request: Request) -> Request:
    """Each length that is not 0 moved up, so that its remainder stays."""
    context, query = request.context_len, request.query_len
    return Request(context_len=context + 2 * SIZE_CLASS if context else 0, query_len=query + SIZE_CLASS if query else 0)


def _own_topk(judged: Problem) -> dict[str, Any]:
    """Explicit rows belong to the judged lengths."""
    if judged.topk.rows is None:
        return {}
    kinds = ("random",) * len(judged.requests)
    return {"topk": judged.topk.model_copy(update={"rows": None, "kinds": kinds})}


def _on_the_layer_of(judged: Problem, other: Problem, max_chunks: int) -> Problem:
    """The batch of `other` on the layer, the workspaces and the weights of `judged`."""
    rows, chunks = other.topk.rows, judged.chunks
    room = max_chunks * min(chunks.row_budget, chunks.max_context_chunk) // max(len(other.requests), 1)
    cache = {
        "kv_cache_dtype": judged.paging.kv_cache_dtype,
        "kv_cache_scale": judged.paging.kv_cache_scale,
        "block_size": judged.paging.block_size,
    }
    width = judged.dims.topk
    return other.replace(
        dims=judged.dims,
        dtype=judged.dtype,
        scale=judged.scale,
        data=judged.data,
        requests=tuple(r.model_copy(update={"context_len": min(r.context_len, room)}) for r in other.requests),
        paging=other.paging.model_copy(update=cache),
        chunks=chunks,
        mask_workspace_words=judged.mask_workspace_words,
        topk=other.topk.model_copy(update={"rows": None if rows is None else tuple(row[:width] for row in rows)}),
    )
