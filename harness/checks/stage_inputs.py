"""The inputs of the attention stages, by the reference road: oracle projections, oracle masks.

A batch is attended in the ways in which a layer may call its kernel: over whole sequences, and, with context,
over the new tokens alone and over each context chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from harness.checks.facts import Facts
from harness.problems.workspace import padded_rows, words_per_row
from reference.latent import project, request_latents
from reference.oracle import allowed_matrix, causal_matrix


@dataclass(frozen=True)
class AttendCall:
    """One varlen attention call over requests `first_request ..`; tensors packed as the kernel gets them."""

    name: str
    chunk: int | None
    first_request: int
    first_token: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_lens: list[int]
    k_lens: list[int]
    key_starts: list[int]
    """Position of each request's first key in its sequence."""
    sequences: list[torch.Tensor]
    """Allowed keys of whole sequences, bool `[q_len, seq_len]`, one for each request."""
    scale: float

    def allowed(self, slot: int) -> torch.Tensor:
        """Bool `[q_len, k_len]` of request `first_request + slot`."""
        start = self.key_starts[slot]
        return self.sequences[slot][:, start : start + self.k_lens[slot]]

    @property
    def q_starts(self) -> list[int]:
        return [0, *accumulate(self.q_lens)]

    @property
    def k_starts(self) -> list[int]:
        return [0, *accumulate(self.k_lens)]

    def alone(self, slot: int) -> AttendCall:
        """The same call for one of its requests."""
        rows = slice(self.q_starts[slot], self.q_starts[slot + 1])
        keys = slice(self.k_starts[slot], self.k_starts[slot + 1])
        return replace(
            self,
            name=f"{self.name} of request {self.first_request + slot} alone",
            first_request=self.first_request + slot,
            first_token=self.first_token + rows.start,
            q=self.q[rows],
            k=self.k[keys],
            v=self.v[keys],
            q_lens=[self.q_lens[slot]],
            k_lens=[self.k_lens[slot]],
            key_starts=[self.key_starts[slot]],
            sequences=[self.sequences[slot]],
        )


def request_rows(facts: Facts, request: int) -> torch.Tensor:
    """All latent rows of one request in key order, `[seq_len, kv_lora_rank + rope]` float64."""
    inputs, paging = facts.inputs, facts.problem.paging
    rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
    return request_latents(
        kv_c_normed=inputs.kv_c_normed[rows],
        k_pe=inputs.k_pe[rows],
        cache=inputs.cache,
        block_table_row=inputs.block_table[request],
        context_len=facts.context_lens[request],
        rope=facts.problem.dims.rope,
        kv_cache_dtype=paging.kv_cache_dtype,
        kv_cache_scale=paging.kv_cache_scale,
    )


def sequence_allowed(facts: Facts, request: int) -> torch.Tensor:
    """The allowed set of each row over the whole sequence, bool `[q_len, seq_len]`."""
    context, query_len = facts.context_lens[request], facts.query_lens[request]
    device = facts.inputs.q.device
    if facts.problem.force == "dense":
        return causal_matrix(query_len, context, device=device)
    rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
    return allowed_matrix(facts.topk_rows[rows], context)


def attend_calls(facts: Facts) -> list[AttendCall]:
    """The calls of one case. A contract without empty rows gives each such row the last key of its call."""
    dims, dtype = facts.problem.dims, facts.inputs.q.dtype
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    allowed: list[torch.Tensor] = []
    for request in range(len(facts.query_lens)):
        k, v = project(request_rows(facts, request), facts.inputs.w_kv_b, dims.heads, dims.nope, dims.v)
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
        allowed.append(sequence_allowed(facts, request))

    def call(name: str, chunk: int | None, first: int, starts: Sequence[int], lens: Sequence[int]) -> AttendCall:
        requests = range(first, first + len(lens))
        q_lens = [facts.query_lens[request] for request in requests]
        parts = [slice(start, start + length) for start, length in zip(starts, lens, strict=True)]
        token = facts.token_starts[first]
        nothing = keys[0][:0] if keys else facts.inputs.q[:0]
        no_values = values[0][:0] if values else facts.inputs.q[:0, :, :1].expand(0, dims.heads, dims.v)
        made = AttendCall(
            name=name,
            chunk=chunk,
            first_request=first,
            first_token=token,
            q=facts.inputs.q[token : token + sum(q_lens)],
            k=torch.cat([nothing, *(keys[r][part] for r, part in zip(requests, parts, strict=True))]),
            v=torch.cat([no_values, *(values[r][part] for r, part in zip(requests, parts, strict=True))]),
            q_lens=q_lens,
            k_lens=list(lens),
            key_starts=list(starts),
            sequences=[allowed[request] for request in requests],
            scale=facts.problem.scale,
        )
        return made if facts.contract.empty_rows else _without_empty_rows(made)

    context, seq = facts.context_lens, facts.seq_lens
    calls = [call("whole", None, 0, [0] * len(seq), seq)]
    if any(context):
        calls.append(call("suffix", None, 0, context, facts.query_lens))
        calls += [
            call(f"chunk[{index}]", index, chunk.first, chunk.starts, chunk.lengths)
            for index, chunk in enumerate(facts.plan)
        ]
    if not facts.contract.zero_lengths:
        calls = [one for one in calls if min(one.q_lens, default=0) and min(one.k_lens, default=0)]
    return calls


def _without_empty_rows(call: AttendCall) -> AttendCall:
    sequences = []
    for slot, sequence in enumerate(call.sequences):
        sequence = sequence.clone()
        start, length = call.key_starts[slot], call.k_lens[slot]
        if length:
            part = sequence[:, start : start + length]
            part[:, -1] |= ~part.any(dim=1)
        sequences.append(sequence)
    return replace(call, sequences=sequences)


def pack_mask(call: AttendCall, *, whole: bool) -> torch.Tensor:
    """`[B, padded_q, words]` int32: the keys of the call, or `whole` sequences with the key start in its word."""
    longest_q, batch = max(call.q_lens, default=0), len(call.q_lens)
    longest = max((s.shape[1] for s in call.sequences) if whole else call.k_lens, default=0)
    words = words_per_row(longest, reserve=whole)
    mask = torch.zeros(batch, padded_rows(longest_q), words, dtype=torch.int32, device=call.q.device)
    for slot in range(batch):
        part = call.sequences[slot] if whole else call.allowed(slot)
        bits = torch.nn.functional.pad(part, (0, words * 32 - part.shape[1])).view(len(part), words, 32)
        for bit in range(32):
            mask[slot, : len(part)] |= bits[:, :, bit].to(torch.int32) << bit
    if whole and mask.numel():
        mask[:, 0, -1] = torch.tensor(call.key_starts, dtype=torch.int32, device=mask.device)
    return mask


def dense_allowed(call: AttendCall) -> torch.Tensor:
    """`[Tq, max_seqlen_k]` bool, each row against the keys of its own request."""
    longest = max(call.k_lens, default=0)
    rows = [torch.zeros(0, longest, dtype=torch.bool, device=call.q.device)]
    for slot, length in enumerate(call.k_lens):
        rows.append(torch.nn.functional.pad(call.allowed(slot), (0, longest - length)))
    return torch.cat(rows)
