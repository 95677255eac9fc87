"""The inputs of stage `mqa`: absorbed queries, a pool of latent rows, and the slots that each query lists.

Two calls a case: on a pool that holds whole sequences in scattered rows, and, with context, on the paged cache
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.checks.facts import Facts
from harness.checks.stage_inputs import request_rows
from harness.problems.bits import Stream
from reference.latent import absorb_query, split_weight

_SHUFFLE_TAG, _GARBAGE_TAG = 701, 702
SPARE_SLOTS = 3
"""Rows of the pool that belong to no request."""
_FAR = 2**20
"""Entries further past the end of a sequence become the highest int32."""


NOBODYS = -3.0
"""What a read-out finds in rows that are no key of any request."""


@dataclass(frozen=True)
class MqaCall:
    """One call; request by request where a list."""

    name: str
    kv: torch.Tensor
    """`[slots, width]`"""
    slots: list[torch.Tensor]
    """`[keys]` int64: the row of `kv` of each key of the request."""
    indices: torch.Tensor
    """`[T, topk]` int32"""
    topk_length: torch.Tensor | None
    counts: list[torch.Tensor]
    """`[q_len, keys]` int64: how often each row lists each key."""

    def latents(self, request: int) -> torch.Tensor:
        """`[keys, width]`: the rows of a request in key order."""
        return self.kv[self.slots[request]]

    def one_hot(self, base: int, width: int) -> torch.Tensor:
        """`kv` with key `base + e` of each request one-hot at entry `e`, its other keys 0.

        Rows of nobody are negative, so that an output below 0 shows one of them; those that hold NaN keep it.
        """
        kv = self.kv.clone(memory_format=torch.contiguous_format)
        nobodys = torch.ones(len(kv), dtype=torch.bool, device=kv.device)
        for slots in self.slots:
            nobodys[slots] = False
        kv[nobodys] = torch.where(kv[nobodys].isnan(), kv[nobodys], NOBODYS)
        for slots in self.slots:
            kv[slots] = 0.0
            shown = slots[base : base + width]
            kv[shown, torch.arange(len(shown), device=kv.device)] = 1.0
        return kv


def absorbed_queries(facts: Facts) -> torch.Tensor:
    """`[T, H, kv_lora_rank + rope]` in the storage type."""
    dims = facts.problem.dims
    w_uk, _ = split_weight(facts.inputs.w_kv_b, dims.heads, dims.nope, dims.v)
    return absorb_query(facts.inputs.q, w_uk).to(facts.inputs.q.dtype)


def mqa_calls(facts: Facts) -> list[MqaCall]:
    """The calls of one case."""
    calls = [_pool(facts)]
    busy = [context for context, query_len in zip(facts.context_lens, facts.query_lens, strict=True) if query_len]
    if any(facts.context_lens) and (facts.contract.empty_rows or all(busy)):
        calls.append(_cache(facts))
    return calls


def _pool(facts: Facts) -> MqaCall:
    """Whole sequences in shuffled rows of one pool, with rows of nobody between them."""
    inputs, total = facts.inputs, sum(facts.seq_lens)
    device, width = inputs.q.device, facts.problem.dims.latent
    order = Stream(facts.problem.paging.seed, _SHUFFLE_TAG).raw(total + SPARE_SLOTS).argsort(kind="stable")
    places = torch.from_numpy(order).to(device)
    kv = torch.full((total + SPARE_SLOTS, width), _spare_value(facts), dtype=inputs.q.dtype, device=device)
    slots, first = [], 0
    for request, seq_len in enumerate(facts.seq_lens):
        slots.append(places[first : first + seq_len])
        kv[slots[-1]] = request_rows(facts, request).to(kv.dtype)
        first += seq_len
    return _call(facts, "pool", kv, slots, facts.seq_lens)


def _cache(facts: Facts) -> MqaCall:
    """Context rows in the paged cache; new tokens are no keys of this call."""
    inputs, size = facts.inputs, facts.problem.paging.block_size
    slots = []
    for request, context in enumerate(facts.context_lens):
        position = torch.arange(context, device=inputs.q.device)
        slots.append(inputs.block_table[request].long()[position // size] * size + position % size)
    kv = inputs.cache.reshape(-1, facts.problem.dims.latent)
    if facts.contract.unselected_rows == "finite":
        used = torch.zeros(len(kv), dtype=torch.bool, device=kv.device)
        used[torch.cat(slots)] = True
        kv = torch.where(used[:, None], kv, _spare_value(facts))
    return _call(facts, "cache", kv, slots, facts.context_lens)


def _spare_value(facts: Facts) -> float:
    """What fills rows that no index names."""
    return torch.nan if facts.contract.unselected_rows == "poison" else 3.0


def _past_the_end(excess: torch.Tensor, rows: int) -> torch.Tensor:
    """Indices past the last of `rows`, from how far an entry is past its sequence: mostly the first one behind it."""
    near = torch.where(excess % 4 == 3, rows + excess, rows)
    return torch.where(excess > _FAR, torch.iinfo(torch.int32).max, near)


def _call(facts: Facts, name: str, kv: torch.Tensor, slots: list[torch.Tensor], key_lens: list[int]) -> MqaCall:
    contract, dims = facts.contract, facts.problem.dims
    lists, lengths, counts = [], [], []
    for request, (context, query_len) in enumerate(zip(facts.context_lens, facts.query_lens, strict=True)):
        first = facts.token_starts[request]
        rows = facts.topk_rows[first : first + query_len].long()
        num_keys = key_lens[request]
        limit = context + torch.arange(query_len, device=rows.device)[:, None]
        owned = (rows >= 0) & (rows <= limit) & (rows < num_keys)
        if not contract.empty_rows and num_keys:
            empty = ~owned.any(dim=1)
            rows[empty, 0] = torch.minimum(limit[empty, 0], torch.tensor(num_keys - 1, device=rows.device))
            owned[:, 0] |= empty
        listed = slots[request][torch.where(owned, rows, 0)] if num_keys else torch.zeros_like(rows)
        invalid = torch.where(rows < 0, rows, -1)
        if contract.invalid_index == "ignored":
            beyond = _past_the_end(rows - facts.seq_lens[request], len(kv))
            invalid = torch.where(rows >= facts.seq_lens[request], beyond, invalid)
        lists.append(torch.where(owned, listed, invalid))
        last = torch.where(owned, torch.arange(dims.topk, device=rows.device) + 1, 0)
        lengths.append(last.amax(dim=1))
        # one more column takes what is no key, and is cut off
        table = torch.zeros(query_len, num_keys + 1, dtype=torch.int64, device=rows.device)
        table.scatter_add_(1, torch.where(owned, rows, num_keys), torch.ones_like(rows))
        counts.append(table[:, :num_keys])
    nothing = facts.topk_rows[:0].long()
    indices = torch.cat([nothing, *lists])
    topk_length = None
    if contract.topk_length:
        topk_length = torch.cat([nothing[:, 0], *lengths])
        behind = torch.arange(dims.topk, device=indices.device) >= topk_length[:, None]
        stray = Stream(facts.problem.topk.seed, _GARBAGE_TAG).integers(max(len(kv), 1), indices.numel())
        indices = torch.where(behind, torch.from_numpy(stray).to(indices.device).view(indices.shape), indices)
        topk_length = topk_length.to(torch.int32)
    return MqaCall(name, kv, slots, indices.to(torch.int32), topk_length, counts)
