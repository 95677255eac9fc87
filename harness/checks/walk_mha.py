"""The trace of a dense or masked MHA prefill, stage by stage, each on its actual inputs."""

from __future__ import annotations

from itertools import accumulate

import torch

from harness.checks.attend import check_attend
from harness.checks.facts import Facts
from harness.checks.gather import check_gather
from harness.checks.link import ExpectedCall, check_call, check_tensor_link, first_bad
from harness.checks.mask import check_mask, check_remap, check_slice
from harness.checks.merge import check_merge, check_partial
from harness.checks.plan import ExpectedChunk, check_plan
from harness.checks.project import check_project
from harness.checks.verdict import failed
from optimized.trace import (
    AttendEvent,
    GatherEvent,
    MaskEvent,
    MergeEvent,
    PartialEvent,
    ProjectEvent,
    Trace,
)
from reports.records import CheckRecord


def check_trace_plan(facts: Facts, trace: Trace) -> list[CheckRecord]:
    """The chunk plan of a trace, of whatever path, against the rules."""
    chunks = facts.problem.chunks
    return check_plan(
        trace.plan,
        context_lens=facts.context_lens,
        query_lens=facts.query_lens,
        row_budget=chunks.row_budget,
        max_context_chunk=chunks.max_context_chunk,
        split_alignment=chunks.split_alignment,
    )


class MhaWalk:
    """Checks one trace. `facts` say what the problem asks for; the trace says what was done."""

    def __init__(self, facts: Facts, trace: Trace) -> None:
        self.facts = facts
        self.trace = trace
        self.masks = {event.call: event for event in trace.of(MaskEvent)}
        self.projections = {event.call: event for event in trace.of(ProjectEvent)}
        self.gathers = {event.call: event for event in trace.of(GatherEvent)}
        self.attends = {event.call: event for event in trace.of(AttendEvent)}
        self.partials = {event.call: event for event in trace.of(PartialEvent)}
        self.merges = {event.call: event for event in trace.of(MergeEvent)}

    def run(self) -> list[CheckRecord]:
        """Records in the order of the data flow: the first that accuses is the culprit."""
        records = check_trace_plan(self.facts, self.trace)
        if any(record.status.is_finding for record in records):
            return records
        if self.facts.num_tokens == 0:
            return records
        dense = self.trace.path == "dense"
        if not dense:
            records += self._slice()
            records += self._masks()
        calls = ["no_context"] if not self.facts.plan else ["suffix"]
        calls += [f"chunk[{index}]" for index in range(len(self.facts.plan))]
        missing = [call for call in calls if call not in self.attends or call not in self.projections]
        extra = [call for call in self.attends if call not in calls]
        if missing or extra:
            message = f"attention calls {sorted(self.attends)} were made, must be {calls}"
            return [*records, failed("chunk_loop", "chunk_loop.calls", message)]
        for call in calls:
            records += self._call(call, dense)
        if self.facts.plan:
            records += self._merges()
        return records

    def _slice(self) -> list[CheckRecord]:
        if self.trace.topk_per_req is None:
            return [failed("slice", "slice.rows", "the trace holds no top-k rows")]
        return [check_slice(self.trace.topk_per_req, self.facts.topk_rows, self.facts.query_lens)]

    def _masks(self) -> list[CheckRecord]:
        """Mask builds, judged against the rules of their call (SPEC 2.9) and the actual top-k rows."""
        records: list[CheckRecord] = []
        facts = self.facts
        source = self.trace.topk_per_req or []
        for call, event in self.masks.items():
            chunk = self._chunk_of(call)
            first = 0 if chunk is None else chunk.first
            requests = slice(0, len(facts.query_lens)) if chunk is None else slice(first, first + len(chunk.lengths))
            starts, lens = self._ranges(call, chunk)
            rows = source[requests]
            if starts is not None:
                records.append(check_remap(call, event.topk_per_req, rows, starts, lens, first))
            elif len(event.topk_per_req) == len(rows):
                records += [
                    check_tensor_link("topk", got, want, call, None, "the slicing")
                    for got, want in zip(event.topk_per_req, rows, strict=True)
                ]
            records += self._mask_arguments(call, event, requests, lens)
            q_lens = facts.query_lens[requests]
            positions: list[int] | None = None
            if call == "global":
                positions = facts.context_lens
            elif chunk is None:
                positions = [0] * len(q_lens)
            records.append(
                check_mask(
                    call,
                    event.mask,
                    event.topk_per_req,
                    max_query_len=max(q_lens),
                    max_key_len=max(facts.seq_lens) if call == "global" else max(lens),
                    first_query_pos=positions,
                    reserved=call == "global",
                    first_request=first,
                )
            )
        return records

    def _mask_arguments(self, call: str, event: MaskEvent, requests: slice, lens: list[int]) -> list[CheckRecord]:
        q_lens = self.facts.query_lens[requests]
        if event.q_lens != q_lens or len(event.topk_per_req) != len(q_lens):
            message = f"the mask of {call} was built for query lengths {event.q_lens}, must be {q_lens}"
            return [failed("mask", "mask.requests", message)]
        return []

    def _ranges(self, call: str, chunk: ExpectedChunk | None) -> tuple[list[int] | None, list[int]]:
        """Remap ranges of a call: starts (None where nothing is remapped) and lengths."""
        if chunk is not None:
            return list(chunk.starts), list(chunk.lengths)
        if call == "suffix":
            return self.facts.context_lens, self.facts.query_lens
        return None, self.facts.query_lens

    def _chunk_of(self, call: str) -> ExpectedChunk | None:
        return self.facts.plan[int(call[6:-1])] if call.startswith("chunk[") else None

    def _call(self, call: str, dense: bool) -> list[CheckRecord]:
        facts = self.facts
        chunk = self._chunk_of(call)
        index = None if chunk is None else int(call[6:-1])
        projection, attend = self.projections[call], self.attends[call]
        records: list[CheckRecord] = []
        if chunk is None:
            kv_c, k_pe, source = facts.inputs.kv_c_normed, facts.inputs.k_pe, "the batch"
            first, lens = 0, facts.query_lens
            requests = slice(0, len(lens))
        else:
            gather = self.gathers.get(call)
            if gather is None:
                return [failed("gather", "gather.rows", f"{call} gathered nothing")]
            first, lens = chunk.first, list(chunk.lengths)
            requests = slice(first, first + len(lens))
            records.append(self._gather(call, gather, chunk))
            lora = facts.problem.dims.kv_lora_rank
            kv_c, k_pe, source = gather.rows[:, :lora], gather.rows[:, lora:].unsqueeze(1), "the gather"
        links = [
            check_tensor_link("kv_c", projection.kv_c, kv_c, call, index, source),
            check_tensor_link("k_pe", projection.k_pe, k_pe, call, index, source),
        ]
        records += links
        if first_bad(links) is not None:  # a stage that was given the wrong tensors is not to blame for its result
            return records
        records += check_project(projection, facts, index)
        mask, key_starts = self._mask_of(call, chunk, dense)
        q_lens = facts.query_lens[requests]
        token = facts.token_starts[first]
        must = ExpectedCall(
            call=call,
            chunk=index,
            first_request=first,
            q=facts.inputs.q[token : token + sum(q_lens)],
            k=projection.k,
            v=projection.v,
            cu_seqlens_q=[0, *accumulate(q_lens)],
            cu_seqlens_k=[0, *accumulate(lens)],
            scale=facts.problem.scale,
            causal=dense and chunk is None,
            key_starts=key_starts,
            mask=mask,
        )
        given = check_call(attend, must)
        records += given
        if first_bad(given) is None:
            records += check_attend(attend, facts.numerics, index)
        return records

    def _mask_of(
        self, call: str, chunk: ExpectedChunk | None, dense: bool
    ) -> tuple[MaskEvent | None, list[int] | None]:
        if dense:
            return None, None
        if self.trace.path == "global_mask":
            starts = self.facts.context_lens if chunk is None else list(chunk.starts)
            return self.masks.get("global"), starts
        return self.masks.get(call), None

    def _gather(self, call: str, event: GatherEvent, chunk: ExpectedChunk) -> CheckRecord:
        facts = self.facts
        paging = facts.problem.paging
        return check_gather(
            call,
            event.rows,
            cache=facts.inputs.cache,
            block_table=facts.inputs.block_table,
            first_request=chunk.first,
            starts=list(chunk.starts),
            lens=list(chunk.lengths),
            kv_cache_dtype=paging.kv_cache_dtype,
            kv_cache_scale=paging.kv_cache_scale,
            rope=facts.problem.dims.rope,
            dtype=facts.inputs.q.dtype,
        )

    def _merges(self) -> list[CheckRecord]:
        """Running partials chunk by chunk, then the final merge."""
        facts = self.facts
        records: list[CheckRecord] = []
        only = facts.plan[0]
        covers_all = len(facts.plan) == 1 and len(only.lengths) == len(facts.query_lens)
        if covers_all:
            attend = self.attends["chunk[0]"]
            context_out, context_lse = attend.out, attend.lse
        else:
            tokens, heads = facts.num_tokens, facts.problem.dims.heads
            running = torch.zeros(tokens, heads, facts.problem.dims.v, dtype=facts.inputs.q.dtype)
            context_out = running.to(facts.inputs.q.device)
            context_lse = torch.full((heads, tokens), -torch.inf, device=context_out.device)
            for index, chunk in enumerate(facts.plan):
                call = f"chunk[{index}]"
                partial = self.partials.get(call)
                if partial is None:
                    return [*records, failed("merge", "merge.partial", f"{call} was not accumulated")]
                attend = self.attends[call]
                token = facts.token_starts[chunk.first]
                end = facts.token_starts[chunk.first + 1] if chunk.starts[0] > 0 else token
                records += check_partial(
                    call, index, partial, context_out, context_lse, attend, token, end, facts.numerics
                )
                context_out, context_lse = partial.out, partial.lse
        final = self.merges.get("final")
        if final is None:
            return [*records, failed("merge", "merge.final", "context and suffix were not merged")]
        suffix = self.attends["suffix"]
        for name, got, want in (
            ("prefix_out", final.prefix_out, context_out),
            ("prefix_lse", final.prefix_lse, context_lse),
            ("suffix_out", final.suffix_out, suffix.out),
            ("suffix_lse", final.suffix_lse, suffix.lse),
        ):
            records.append(check_tensor_link(name, got, want, "final", None, "the calls"))
        records += check_merge(final, facts.numerics)
        return records
