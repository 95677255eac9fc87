"""Stage `mqa` of a subject: sparse attention over listed latent rows, exact in its keys, bounded in its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from harness.checks.attention import head_groups, rows_of_request
from harness.checks.link import first_bad
from harness.checks.mqa_inputs import MqaCall, absorbed_queries, mqa_calls
from harness.checks.power import ROWS, power_shares, vacuous_classes
from harness.checks.readout import first_difference
from harness.checks.stage_case import StageRun
from harness.checks.stage_result import (
    Result,
    batch_record,
    compare_largest,
    compare_result,
    count_record,
    in_order,
    largest_scores,
    parse_result,
    say_conventions,
    with_sinks,
)
from harness.checks.verdict import failed, passed
from reference.bound_stages import mqa_reference
from reference.power import Power, attend_power
from reports.records import CheckRecord, Place, Status

STAGE = "mqa"
MAX_READOUT_LAUNCHES = 4
"""Longer calls are read out only where their numbers are wrong."""
MAX_LAUNCHES_OF_A_FAILURE = 64


def judge(run: StageRun) -> list[CheckRecord]:
    """All calls of one case."""
    return MqaJudge(run).run_all()


@dataclass
class MqaJudge:
    """Judges the calls of one case."""

    run: StageRun

    def __post_init__(self) -> None:
        facts = self.run.facts
        self.contract = self.run.subject.contract
        self.lora = facts.problem.dims.kv_lora_rank
        self.power = Power()
        self.all_read_out = True
        """Whether the keys of each call were read out: then no key fault can have escaped, whatever the power."""
        self.sinks = torch.linspace(-2.0, 3.0, facts.problem.dims.heads, device=facts.inputs.q.device)
        self.q = absorbed_queries(facts)

    def run_all(self) -> list[CheckRecord]:
        """Records of every call; the keys of a call come before its numbers."""
        records: list[CheckRecord] = []
        calls = mqa_calls(self.run.facts)
        for call in calls:
            records += self._judge(call)
        if calls and first_bad(records) is None:
            first = calls[0]
            self.run.check_repeat(
                first.name,
                lambda: self.offered(first, self.q, first.kv),
                lambda result, _: self.parse(first.name, self.q, result).tensors(),
            )
            self._check_batch(first)
        self.run.record.power = power_shares(self.power)
        if not self.all_read_out:
            self.run.record.vacuous = vacuous_classes(self.run.record.power, STAGE)
        nothing = self.run.facts.num_tokens == 0
        return [] if nothing and first_bad(records) is None else records

    def offered(self, call: MqaCall, q: torch.Tensor, kv: torch.Tensor, rows: slice | None = None) -> dict[str, Any]:
        """All inputs of the stage; of some rows only, if they are given."""
        rows = rows or slice(0, q.shape[0])
        return {
            "q": q[rows].clone(),
            "kv": kv if self.contract.strides == "any" else kv.clone(memory_format=torch.contiguous_format),
            "indices": call.indices[rows].clone(),
            "scale": self.run.problem.scale,
            "v_dim": self.lora,
            "topk_length": None if call.topk_length is None else call.topk_length[rows].clone(),
            "sinks": self.sinks.clone(),
        }

    def parse(self, name: str, q: torch.Tensor, returned: Any) -> Result:
        """The result in our conventions. Raises Ended for a wrong shape."""
        return parse_result(STAGE, name, returned, self.contract, (q.shape[0], q.shape[1], self.lora), q.dtype)

    def call(self, call: MqaCall, q: torch.Tensor, kv: torch.Tensor, name: str = "") -> Result:
        """One call of the subject, its result in our conventions."""
        name = name or call.name
        return self.parse(name, q, self.run.call(name, self.offered(call, q, kv)))

    def _judge(self, call: MqaCall) -> list[CheckRecord]:
        result = self.call(call, self.q, call.kv)
        records = [passed(STAGE, "mqa.shape")]
        launches = -(-max((slots.shape[0] for slots in call.slots), default=0) // self.lora)
        read_out = launches <= MAX_READOUT_LAUNCHES
        self.all_read_out &= read_out
        keys = self._keys(call) if read_out else []
        if first_bad(keys) is not None:
            return [*keys, *records]
        numbers: list[CheckRecord] = []
        for request, query_len in enumerate(self.run.facts.query_lens):
            if query_len:
                numbers += self._numbers(call, request, result)
        if not keys and launches <= MAX_LAUNCHES_OF_A_FAILURE and first_bad(numbers) is not None:
            keys = self._keys(call)
            if first_bad(keys) is not None:
                return [*keys, *records]
        count = self._count(call) if keys else []
        return [*records, *keys, *in_order(say_conventions(numbers, self.contract), count)]

    def _numbers(self, call: MqaCall, request: int, result: Result) -> list[CheckRecord]:
        """LSE, output and largest scores of one request, in groups of heads that fit in memory."""
        latents, allowed = call.latents(request), call.counts[request] > 0
        if self.contract.duplicates == "per_slot":
            latents, allowed = with_copies(latents, call.counts[request])
        widths = (self.q.shape[2], self.lora)
        records: list[CheckRecord] = []
        for heads in head_groups(len(allowed), len(latents), self.q.shape[1], widths, self.q.device):
            records += self._numbers_of_heads(call, request, result, latents, allowed, heads)
        return records

    def _numbers_of_heads(
        self,
        call: MqaCall,
        request: int,
        result: Result,
        latents: torch.Tensor,
        allowed: torch.Tensor,
        heads: slice,
    ) -> list[CheckRecord]:
        facts = self.run.facts
        rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
        q = self.q[rows, heads]
        exact = mqa_reference(
            q=q,
            latents=latents,
            lora=self.lora,
            allowed=allowed,
            scale=facts.problem.scale,
            numerics=facts.mqa_numerics,
            slots=facts.problem.dims.topk,
        )
        keys = latents[:, None]
        if call.name == "pool":
            self.power += attend_power(
                q=q,
                k=keys,
                v=keys[..., : self.lora],
                allowed=allowed,
                scale=facts.problem.scale,
                reference=exact,
                max_rows=ROWS,
            )
        if self.contract.attention_sink:
            exact = with_sinks(exact, self.sinks[heads])
        place = rows_of_request(request, rows.start, call.name)
        records = compare_result(STAGE, result, rows, exact, place, heads=heads)
        if self.contract.max_logits:
            largest = largest_scores(q, keys, allowed, facts.problem.scale)
            records.append(compare_largest(STAGE, result, rows, largest, place, heads=heads))
        return records

    def _keys(self, call: MqaCall) -> list[CheckRecord]:
        """Read-out: which rows of `kv` each query attends, in every head; `kv_lora_rank` keys of a request a call."""
        facts = self.run.facts
        named = [(torch.zeros_like(counts, dtype=torch.bool),) * 2 for counts in call.counts]
        some = [pair[0].clone() for pair in named]
        every = [pair[1].clone() for pair in named]
        for base in range(0, max((slots.shape[0] for slots in call.slots), default=0), self.lora):
            kv = call.one_hot(base, self.lora)
            out = self.call(call, torch.zeros_like(self.q), kv, f"read-out of {call.name}").out
            if not bool(out.isfinite().all()):
                message = "with q = 0 and one-hot rows the output holds NaN or infinity"
                return [failed(STAGE, "mqa.keys", message, Place(call=call.name), status=Status.NONFINITE)]
            strange = (out < 0).any(dim=2).any(dim=1).nonzero().flatten()
            if len(strange):
                return [self._attended_nobodys(call, int(strange[0]), len(strange))]
            seen = out > 0
            for request, counts in enumerate(call.counts):
                shown = min(self.lora, counts.shape[1] - base)
                if shown > 0:
                    rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
                    some[request][:, base : base + shown] = seen[rows, :, :shown].any(dim=1)
                    every[request][:, base : base + shown] = seen[rows, :, :shown].all(dim=1)
        for request, counts in enumerate(call.counts):
            allowed = counts > 0
            difference = first_difference(torch.where(allowed, every[request], some[request]), allowed)
            if difference is None:
                continue
            slots, key = call.slots[request], difference.key
            parts = [
                f"{verb} " + ", ".join(f"key {k} (slot {int(slots[k])})" for k in keys[:3])
                for verb, keys in (("attended", difference.attended), ("missed", difference.missed))
                if keys
            ]
            message = f"row {difference.row} {', '.join(parts)} ({difference.wrong_rows} wrong rows)"
            token = facts.token_starts[request] + difference.row
            place = Place(call=call.name, request=request, row=difference.row, token=token, key=key)
            return [failed(STAGE, "mqa.keys", message, place)]
        return [passed(STAGE, "mqa.keys")]

    def _attended_nobodys(self, call: MqaCall, token: int, rows: int) -> CheckRecord:
        request = self.run.facts.request_of(token)
        row = token - self.run.facts.token_starts[request]
        message = f"row {row} attended a row of kv that is no key of any request ({rows} wrong rows)"
        return failed(STAGE, "mqa.keys", message, Place(call=call.name, request=request, row=row, token=token))

    def _count(self, call: MqaCall) -> list[CheckRecord]:
        """exp(LSE) at q = 0 is the number of keys, each listed slot counted as the contract says."""
        if self.contract.lse_base is None:
            return []
        result = self.call(call, torch.zeros_like(self.q), call.one_hot(0, self.lora), f"read-out of {call.name}")
        counts = call.counts if self.contract.duplicates == "per_slot" else [(c > 0).long() for c in call.counts]
        must = torch.cat([c.sum(dim=1) for c in counts] or [torch.zeros(0, device=self.q.device)])
        lse = result.lse
        assert lse is not None
        return [count_record(STAGE, lse.exp(), must, lambda row: Place(call=call.name, token=row))]

    def _check_batch(self, call: MqaCall) -> None:
        """The rows of a request alone give the bits that they give in the batch."""
        facts = self.run.facts
        busy = [request for request, query_len in enumerate(facts.query_lens) if query_len]
        if not self.contract.batch_invariant or len(busy) < 2:
            return
        request = busy[int(self.run.record.case_id, 16) % len(busy)]
        rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
        batch = self.call(call, self.q, call.kv)
        name = f"{call.name} of request {request} alone"
        returned = self.run.call(name, self.offered(call, self.q, call.kv, rows))
        alone = self.parse(name, self.q[rows], returned)
        self.run.records.append(batch_record(request, batch, alone, rows))


def with_copies(latents: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A key that a row lists n times as n keys: more latent rows, and bool `[n, more]` of who has them.

    latents `[K, width]`, counts `[n, K]`.
    """
    parts, allowed = [latents], [counts > 0]
    for copy in range(1, int(counts.max()) if counts.numel() else 0):
        more = (counts > copy).any(dim=0).nonzero().flatten()
        parts.append(latents[more])
        allowed.append(counts[:, more] > copy)
    return torch.cat(parts), torch.cat(allowed, dim=1)
