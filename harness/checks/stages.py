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
    "mask_mod": "the keys that an attention call really attended, named by a read-out",
    "attend": "output and LSE of one attention call within the bound",
    "merge": "partial outputs and LSE put together",
    "slots": "cache slots of the listed keys, for sparse MQA",
    "absorb": "queries multiplied into the latent space, for sparse MQA",
    "mqa": "the absorbed form over listed cache slots",
    "unproject": "latent outputs back to value heads, for sparse MQA",
    "prefill": "the whole prefill, end to end, within the bound",
    "relation": "two runs whose results must be tied, where no stage of either is wrong",
    "guard": "nothing read or written that must not be; the same call gives the same bits",
}
