"""The trace of a sparse MQA prefill: absorb, slots, two MQA calls, merge, W_UV."""

from __future__ import annotations

import torch

from harness.checks.attention import compare_attention, rows_of_request
from harness.checks.facts import Facts
from harness.checks.link import check_tensor_link
from harness.checks.merge import check_merge
from harness.checks.power import ROWS
from harness.checks.project import compare_head_gemm
from harness.checks.verdict import check_shape, compare_exact, failed
from optimized.trace import AbsorbEvent, MergeEvent, MqaEvent, Trace, UnprojectEvent
from reference.bound_stages import mqa_reference
from reference.latent import read_cache_rows
from reference.oracle import allowed_matrix
from reference.power import Power, attend_power
from reports.records import CheckRecord, Place

STAGE = "mqa"


class MqaWalk:
    """Checks one trace of the MQA path."""

    def __init__(self, facts: Facts, trace: Trace) -> None:
        self.facts = facts
        self.trace = trace
        self.calls = {event.call: event for event in trace.of(MqaEvent)}
        dims = facts.problem.dims
        weight = facts.inputs.w_kv_b.view(-1, dims.heads, dims.nope + dims.v)
        self.w_uk, self.w_uv = weight[..., : dims.nope], weight[..., dims.nope :]
        self.power = Power()
        """What the checks of the MQA calls could have shown."""

    def run(self) -> list[CheckRecord]:
        """Records in the order of the data flow."""
        facts = self.facts
        if facts.num_tokens == 0:
            return []
        has_context = any(facts.context_lens)
        needed = ["suffix", "context"] if has_context else ["suffix"]
        absorbs, unprojects = self.trace.of(AbsorbEvent), self.trace.of(UnprojectEvent)
        if sorted(self.calls) != sorted(needed) or not absorbs or not unprojects:
            message = f"sparse MQA calls {sorted(self.calls)} were made, must be {sorted(needed)}"
            return [failed(STAGE, "mqa.calls", message)]
        q = absorbs[0].q_absorbed
        records = self._absorb(q)
        for call in needed:
            event = self.calls[call]
            records.append(check_tensor_link("q", event.q, q, call, None, "the absorption"))
            records.append(self._slots(event))
            records += self._attend(event)
        suffix = self.calls["suffix"]
        latent, _lse = suffix.out, suffix.lse
        if has_context:
            merges = self.trace.of(MergeEvent)
            if not merges:
                return [*records, failed("merge", "merge.mqa", "context and suffix were not merged")]
            merge, context = merges[0], self.calls["context"]
            for name, got, want in (
                ("prefix_out", merge.prefix_out, context.out),
                ("prefix_lse", merge.prefix_lse, context.lse),
                ("suffix_out", merge.suffix_out, suffix.out),
                ("suffix_lse", merge.suffix_lse, suffix.lse),
            ):
                records.append(check_tensor_link(name, got, want, "mqa", None, "the calls"))
            records += check_merge(merge, facts.mqa_numerics)
            latent, _lse = merge.out, merge.lse
        unproject = unprojects[0]
        records.append(check_tensor_link("latent", unproject.latent, latent, "unproject", None, "the merge"))
        records += compare_head_gemm(
            "unproject", unproject.out, unproject.latent, self.w_uv.permute(1, 0, 2), facts.mqa_numerics
        )
        return records

    def _absorb(self, q: torch.Tensor) -> list[CheckRecord]:
        facts = self.facts
        dims = facts.problem.dims
        shape = (facts.num_tokens, dims.heads, dims.latent)
        wrong = check_shape("absorb", "absorb.q", q, shape, facts.inputs.q.dtype)
        if wrong is not None:
            return [wrong]
        rope = compare_exact(
            "absorb",
            "absorb.q_rope",
            q[..., dims.kv_lora_rank :],
            facts.inputs.q[..., dims.nope :],
            lambda index: Place(token=index[0], head=index[1], column=index[2]),
        )
        return [
            rope,
            *compare_head_gemm(
                "absorb",
                q[..., : dims.kv_lora_rank],
                facts.inputs.q[..., : dims.nope],
                self.w_uk.permute(1, 2, 0),
                facts.mqa_numerics,
            ),
        ]

    def _slots(self, event: MqaEvent) -> CheckRecord:
        """Slots of one call, one top-k entry at a time."""
        facts = self.facts
        parts = []
        size = facts.problem.paging.block_size
        for request, (context, query_len) in enumerate(zip(facts.context_lens, facts.query_lens, strict=True)):
            first = facts.token_starts[request]
            rows = facts.topk_rows[first : first + query_len].to(torch.int64)
            position = context + torch.arange(query_len, device=rows.device).unsqueeze(1)
            if event.call == "context":
                owned = (rows >= 0) & (rows < context)
                table = facts.inputs.block_table[request].to(torch.int64)
                safe = torch.where(owned, rows, 0)
                slots = table[safe // size] * size + safe % size
            else:
                owned = (rows >= context) & (rows <= position)
                slots = rows - context + first
            parts.append(torch.where(owned, slots, -1))
        expected = torch.cat(parts)
        return compare_exact(
            "slots",
            "slots.rows",
            event.indices.to(torch.int64),
            expected,
            lambda index: Place(call=event.call, token=index[0], request=facts.request_of(index[0]), column=index[1]),
        )

    def _rows(self, call: str, request: int) -> torch.Tensor:
        """Latent rows `[n, lora + rope]` that a call may read for one request, as the kernel holds them."""
        facts = self.facts
        if call == "context":
            paging = facts.problem.paging
            return read_cache_rows(
                facts.inputs.cache,
                facts.inputs.block_table[request],
                0,
                facts.context_lens[request],
                kv_cache_dtype=paging.kv_cache_dtype,
                scale=paging.kv_cache_scale,
                rope=facts.problem.dims.rope,
                dtype=facts.inputs.q.dtype,
            )
        rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
        return torch.cat([facts.inputs.kv_c_normed[rows], facts.inputs.k_pe[rows, 0]], dim=1)

    def _attend(self, event: MqaEvent) -> list[CheckRecord]:
        facts = self.facts
        dims = facts.problem.dims
        shape = (facts.num_tokens, dims.heads, dims.kv_lora_rank)
        wrong = check_shape(STAGE, "mqa.out", event.out, shape, event.q.dtype)
        wrong = wrong or check_shape(STAGE, "mqa.lse", event.lse, shape[1::-1], torch.float32)
        if wrong is not None:
            return [wrong]
        records: list[CheckRecord] = []
        for request, (context, query_len) in enumerate(zip(facts.context_lens, facts.query_lens, strict=True)):
            if query_len == 0:
                continue
            first = facts.token_starts[request]
            rows = slice(first, first + query_len)
            allowed = allowed_matrix(facts.topk_rows[rows], context)
            allowed = allowed[:, :context] if event.call == "context" else allowed[:, context:]
            latents = self._rows(event.call, request)
            exact = mqa_reference(
                q=event.q[rows],
                latents=latents,
                lora=dims.kv_lora_rank,
                allowed=allowed,
                scale=facts.problem.scale,
                numerics=facts.mqa_numerics,
                slots=dims.topk,
            )
            self.power += attend_power(
                q=event.q[rows],
                k=latents[:, None],
                v=latents[:, None, : dims.kv_lora_rank],
                allowed=allowed,
                scale=facts.problem.scale,
                reference=exact,
                max_rows=ROWS,
            )
            place = rows_of_request(request, first, event.call)
            records += compare_attention(STAGE, "mqa", event.out[rows], event.lse[:, rows], exact, place)
        return records
