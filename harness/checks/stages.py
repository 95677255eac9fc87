"""The stages that a case is judged by, in the order of the pipeline."""

from __future__ import annotations

STAGES: dict[str, str] = {
    "dispatch": "the path that the batch must take, or the refusal it must get",
    "plan": "context chunks: each context row once, in order, within the budget",
    "slice": "top-k rows of each request, decode tokens skipped",
    "remap": "top-k rows moved into the key range of one call",
    "mask": "packed mask words, bit by bit, padding included",
    "gather": "latent rows copied from the paged cache, bit by bit",
    "project": "K and V of each head from latent rows",
    "chunk_loop": "every attention call is given what belongs to it: queries, keys, mask, key start",
    "attend": "output and LSE of one attention call within the bound",
    "merge": "partial outputs and LSE put together",
    "mqa": "the absorbed form over listed cache slots",
    "prefill": "the whole prefill, end to end, within the bound",
    "guard": "nothing read or written that must not be; the same call gives the same bits",
}
