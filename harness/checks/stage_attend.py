"""Stage `attend` of a subject: every call exact in its keys and within the bound in its numbers."""

from __future__ import annotations

from typing import Any

import torch

from harness.checks.attention import head_groups, rows_of_request
from harness.checks.link import first_bad
from harness.checks.power import ROWS, power_shares, vacuous_classes
from harness.checks.readout import (
    AttendShape,
    SetDifference,
    count_attended,
    first_difference,
    name_attended,
    shown_wrongly,
)
from harness.checks.stage_case import StageRun
from harness.checks.stage_inputs import AttendCall, attend_calls, dense_allowed, pack_mask
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
from reference.bound import attend_reference
from reference.power import Power, attend_power
from reports.records import CheckRecord, Place, Status

STAGE = "attend"
MAX_READOUT_LAUNCHES = 8
"""Longer calls are read out only where their numbers are wrong."""
MAX_LAUNCHES_OF_A_FAILURE = 64


def judge(run: StageRun) -> list[CheckRecord]:
    """All calls of one case."""
    return AttendJudge(run).run_all()


class AttendJudge:
    """Judges the calls of one case."""

    def __init__(self, run: StageRun) -> None:
        self.run = run
        self.power = Power()
        self.all_read_out = True
        """Whether the keys of each call were read out: then no key fault can have escaped, whatever the power."""
        self.contract = run.subject.contract
        heads = run.problem.dims.heads
        self.sinks = torch.linspace(-2.0, 3.0, heads, device=run.facts.inputs.q.device)

    def run_all(self) -> list[CheckRecord]:
        """Records of every call; the keys of a call come before its numbers."""
        records: list[CheckRecord] = []
        calls = attend_calls(self.run.facts)
        for call in calls:
            records += self._judge(call)
        if calls and first_bad(records) is None:
            first = calls[0]
            self.run.check_repeat(
                first.name, lambda: self.offered(first), lambda result, _: self.parse(first, result).tensors()
            )
            self._check_batch(first)
        self.run.record.power = power_shares(self.power)
        if not self.all_read_out:
            self.run.record.vacuous = vacuous_classes(self.run.record.power, STAGE)
        nothing = not any(sum(call.q_lens) for call in calls)
        return [] if nothing and first_bad(records) is None else records

    def offered(self, call: AttendCall) -> dict[str, Any]:
        """All inputs of the stage, made anew."""
        device = call.q.device
        takes_starts = self.run.takes("key_starts")
        return {
            "q": call.q.clone() if self.contract.strides == "contiguous" else call.q,
            "k": call.k.clone(),
            "v": call.v.clone(),
            "cu_seqlens_q": _int32(call.q_starts, device),
            "cu_seqlens_k": _int32(call.k_starts, device),
            "max_seqlen_q": max(call.q_lens, default=0),
            "max_seqlen_k": max(call.k_lens, default=0),
            "scale": call.scale,
            "allowed": dense_allowed(call) if self.run.takes("allowed") else None,
            "mask": pack_mask(call, whole=takes_starts) if self.run.takes("mask") else None,
            "key_starts": _int32(call.key_starts, device),
            "sinks": self.sinks.clone(),
        }

    def parse(self, call: AttendCall, returned: Any) -> Result:
        """The result in our conventions. Raises Ended for a wrong shape."""
        shape = (call.q.shape[0], call.q.shape[1], call.v.shape[2])
        return parse_result(STAGE, call.name, returned, self.contract, shape, call.q.dtype)

    def _judge(self, call: AttendCall) -> list[CheckRecord]:
        result = self.parse(call, self.run.call(call.name, self.offered(call)))
        records = [passed(STAGE, "attend.shape")]
        launches = -(-max(call.k_lens, default=0) // (call.q.shape[1] * call.v.shape[2]))
        read_out = launches <= MAX_READOUT_LAUNCHES
        self.all_read_out &= read_out
        keys = self._keys(call) if read_out else []
        if first_bad(keys) is not None:
            return [*keys, *records]
        numbers: list[CheckRecord] = []
        for slot, q_len in enumerate(call.q_lens):
            if q_len:
                numbers += self._numbers(call, slot, result)
        if not keys and launches <= MAX_LAUNCHES_OF_A_FAILURE and first_bad(numbers) is not None:
            keys = self._keys(call)
            if first_bad(keys) is not None:
                return [*keys, *records]
        count = self._count(call) if keys else []
        found = [*records, *keys, *in_order(say_conventions(numbers, self.contract), count)]
        bad = first_bad(found)
        if keys and bad is not None and bad.place.head is not None:
            other = self._keys_of_head(call, bad.place.head)
            if other is not None and other.check == "attend.keys":
                return [other, *records]
            if other is not None:
                more = bad.model_copy(update={"message": f"{bad.message}; {other.message}"})
                return [more if record is bad else record for record in found]
        return found

    def _numbers(self, call: AttendCall, slot: int, result: Result) -> list[CheckRecord]:
        """LSE, output and largest scores of one request, in groups of heads that fit in memory."""
        n, num_keys, widths = call.q_lens[slot], call.k_lens[slot], (call.q.shape[2], call.v.shape[2])
        records: list[CheckRecord] = []
        for group in head_groups(n, num_keys, call.q.shape[1], widths, call.q.device):
            records += self._numbers_of_heads(call, slot, result, group)
        return records

    def _numbers_of_heads(self, call: AttendCall, slot: int, result: Result, heads: slice) -> list[CheckRecord]:
        rows = slice(call.q_starts[slot], call.q_starts[slot + 1])
        keys = slice(call.k_starts[slot], call.k_starts[slot + 1])
        q, k, v, allowed = call.q[rows, heads], call.k[keys, heads], call.v[keys, heads], call.allowed(slot)
        exact = attend_reference(q=q, k=k, v=v, allowed=allowed, scale=call.scale, numerics=self.run.facts.numerics)
        if call.name == "whole":
            self.power += attend_power(q=q, k=k, v=v, allowed=allowed, scale=call.scale, reference=exact, max_rows=ROWS)
        if self.contract.attention_sink:
            exact = with_sinks(exact, self.sinks[heads])
        place = rows_of_request(call.first_request + slot, call.first_token + rows.start, call.name, call.chunk)
        records = compare_result(STAGE, result, rows, exact, place, heads=heads)
        if self.contract.max_logits:
            largest = largest_scores(q, k, allowed, call.scale)
            records.append(compare_largest(STAGE, result, rows, largest, place, heads=heads))
        return records

    def _keys(self, call: AttendCall) -> list[CheckRecord]:
        """Read-out: which keys each row attends."""
        reader = _Reader(self, call)
        named = name_attended(reader, reader.shape)
        if reader.nonfinite:
            message = "with q = 0 and V one-hot the output holds NaN or infinity"
            return [failed(STAGE, "attend.keys", message, Place(call=call.name), status=Status.NONFINITE)]
        for slot, attended in enumerate(named):
            difference = first_difference(attended, call.allowed(slot))
            if difference is None:
                continue
            blame = self._not_the_keys(call, reader, slot, attended, difference.row)
            if blame is None:
                return [self._other_set(call, slot, difference, None)]
            # it shows each key by one head: that one may attend others, as many as it must
            showing = difference.key // call.v.shape[2] % call.q.shape[1]
            other = self._keys_of_head(call, showing)
            return [blame if other is None or other.check != "attend.keys" else other]
        return [passed(STAGE, "attend.keys")]

    def _keys_of_head(self, call: AttendCall, head: int) -> CheckRecord | None:
        """A record if this head shows other keys than it must: the read-out of all heads shows a key by one only."""
        if -(-max(call.k_lens, default=0) // call.v.shape[2]) > MAX_LAUNCHES_OF_A_FAILURE:
            return None
        reader = _Reader(self, call)
        for slot, attended in enumerate(name_attended(reader, reader.shape, head)):
            difference = first_difference(attended, call.allowed(slot))
            if difference is not None and not reader.nonfinite:
                blame = self._not_the_keys(call, reader, slot, attended, difference.row, head)
                return blame or self._other_set(call, slot, difference, head)
        return None

    def _other_set(self, call: AttendCall, slot: int, difference: SetDifference, head: int | None) -> CheckRecord:
        """The record of a row that attends other keys; `head` where that one alone does."""
        start = call.key_starts[slot] if self.run.takes("key_starts") else 0
        place = Place(
            call=call.name,
            chunk=call.chunk,
            request=call.first_request + slot,
            token=call.first_token + call.q_starts[slot] + difference.row,
            head=head,
            **difference.place(start),
        )
        where = "" if head is None else f"head {head} alone: "
        return failed(STAGE, "attend.keys", where + difference.describe(start), place)

    def _not_the_keys(
        self,
        call: AttendCall,
        reader: _Reader,
        slot: int,
        attended: torch.Tensor,
        row: int,
        head: int | None = None,
    ) -> CheckRecord | None:
        """A record that blames the output, where it is wrong although the keys are not (of `head`, or of all)."""
        packed = call.q_starts[slot] + row
        where = Place(call=call.name, request=call.first_request + slot, row=row, token=call.first_token + packed)
        right = int(call.allowed(slot)[row].sum())
        tells = self.contract.lse_base is not None and not self.contract.attention_sink
        if right == 0 and tells and not bool(count_attended(reader, reader.shape)[:, packed].any()):
            note = f"row {row} has no key, and its LSE says so, but its output is not 0 (unwritten, or of another row)"
            return failed(STAGE, "attend.out", note, where)
        mixed = None if self.contract.attention_sink else shown_wrongly(reader, reader.shape, relative=2.0**-6)
        if mixed is not None:
            shown_at, shown_by, column = mixed
            note = "with one V for all keys the output shows another: rows, heads or columns are mixed up"
            place = Place(call=call.name, token=call.first_token + shown_at, head=shown_by, column=column)
            return failed(STAGE, "attend.out", note, place)
        shown = int(attended[row].sum())
        if shown == right:
            return None
        if self.contract.lse_base is None:
            if shown or head is None:
                return None
            return failed(STAGE, "attend.out", f"head {head} alone: row {row} shows none of its keys", where)
        counted = count_attended(reader, reader.shape)[slice(None) if head is None else head, packed]
        if not bool(((counted - right).abs() < 0.25).all()):
            return None
        whose = "" if head is None else f"head {head} alone: "
        note = f"LSE counts {right} keys, as it must, and the output shows {shown}: the output is wrong, not the set"
        return failed(STAGE, "attend.out", whose + note, where.model_copy(update={"head": head}))

    def _count(self, call: AttendCall) -> list[CheckRecord]:
        """exp(LSE) at q = 0 is the number of keys: a key that counts twice shows here and nowhere else."""
        if self.contract.lse_base is None:
            return []
        reader = _Reader(self, call)
        counted = count_attended(reader, reader.shape)
        must = torch.cat([call.allowed(slot).sum(dim=1) for slot in range(len(call.q_lens))] or [counted[0, :0]])
        return [count_record(STAGE, counted, must, lambda row: Place(call=call.name, token=call.first_token + row))]

    def _check_batch(self, call: AttendCall) -> None:
        """A request alone gives the bits that it gives in the batch."""
        busy = [slot for slot, q_len in enumerate(call.q_lens) if q_len]
        if not self.contract.batch_invariant or len(busy) < 2:
            return
        slot = busy[int(self.run.record.case_id, 16) % len(busy)]
        rows = slice(call.q_starts[slot], call.q_starts[slot + 1])
        batch = self.parse(call, self.run.call(call.name, self.offered(call)))
        single = call.alone(slot)
        alone = self.parse(single, self.run.call(single.name, self.offered(single)))
        self.run.records.append(batch_record(call.first_request + slot, batch, alone, rows))


class _Reader:
    """The subject's call as a read-out wants it (`readout.Attend`): same structure, other numbers."""

    def __init__(self, judge: AttendJudge, call: AttendCall) -> None:
        self.judge = judge
        self.call = call
        self.nonfinite = False
        self.shape = AttendShape(
            cu_seqlens_q=call.q_starts,
            cu_seqlens_k=call.k_starts,
            max_seqlen_q=max(call.q_lens, default=0),
            max_seqlen_k=max(call.k_lens, default=0),
            heads=call.q.shape[1],
            qk_width=call.q.shape[2],
            v_width=call.v.shape[2],
            dtype=call.q.dtype,
            device=call.q.device,
            scale=call.scale,
            mask=None,
            offset=False,
            causal=False,
        )

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        offered = self.judge.offered(self.call) | {"q": q, "k": k, "v": v}
        name = f"read-out of {self.call.name}"
        result = self.judge.parse(self.call, self.judge.run.call(name, offered))
        self.nonfinite |= not bool(result.out.isfinite().all())
        lse = result.lse
        return result.out, lse if lse is not None else q.new_zeros(q.shape[1], q.shape[0])


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
