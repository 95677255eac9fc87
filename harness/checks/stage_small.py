"""Stages `mask`, `gather` and `plan` of a subject: integers and copies, compared exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from harness.checks.crowd import check_crowd, crowd_of
from harness.checks.facts import Facts
from harness.checks.gather import check_gather
from harness.checks.guards import GuardedBuffer, guarded
from harness.checks.link import first_bad
from harness.checks.mask import check_mask
from harness.checks.plan import ExpectedChunk
from harness.checks.stage_case import Ended, StageRun
from harness.checks.verdict import failed, passed
from harness.problems.bits import Stream
from harness.problems.workspace import padded_rows, words_per_row
from reports.records import CheckRecord, Place, Status

_PARTS_TAG = 703


def judge_mask(run: StageRun) -> list[CheckRecord]:
    """The mask builds of a layer: over whole sequences, over the new tokens, and over each context chunk.

    A builder that takes no `first_query_pos` is given only the builds without causality.
    """
    facts = run.facts
    rows = [
        facts.topk_rows[facts.token_starts[request] : facts.token_starts[request + 1]]
        for request in range(len(facts.query_lens))
    ]
    causal = run.takes("first_query_pos")
    calls: list[tuple[str, int, list[torch.Tensor], int, list[int] | None]] = [
        ("global", 0, rows, max(facts.seq_lens, default=0), facts.context_lens if causal else None)
    ]
    if causal:
        own = _remapped(rows, facts.context_lens, facts.query_lens)
        calls.append(("suffix", 0, own, max(facts.query_lens, default=0), [0] * len(rows)))
    for index, chunk in enumerate(facts.plan):
        part = _remapped(rows[chunk.first : chunk.first + len(chunk.lengths)], chunk.starts, chunk.lengths)
        calls.append((f"chunk[{index}]", chunk.first, part, max(chunk.lengths), None))
    records: list[CheckRecord] = []
    for name, first, part, keys, positions in calls:
        records += _one_mask(run, name, first, part, keys, positions)
    if first_bad([*records, *run.records]) is None:
        crowd = crowd_of(run.problem, run.subject.contract, run.device)
        records += check_crowd(run.subject, run.device, crowd)
    return [] if facts.num_tokens == 0 and first_bad(records) is None else records


def _one_mask(
    run: StageRun, name: str, first: int, rows: list[torch.Tensor], keys: int, positions: list[int] | None
) -> list[CheckRecord]:
    lens = run.facts.query_lens[first : first + len(rows)]
    longest = max(lens, default=0)
    reserve = name == "global" and run.takes("reserve_key_starts_word")
    words = len(rows) * padded_rows(longest) * words_per_row(keys, reserve=reserve)
    device = run.facts.inputs.q.device
    workspace = guarded(words, torch.int32, device)

    def inputs(out: torch.Tensor) -> dict[str, Any]:
        return {
            "topk_indices_per_req": [row.clone() for row in rows],
            "q_lens": list(lens),
            "max_q_len": longest,
            "max_seq_len": keys,
            "out": out,
            "first_query_pos": None if positions is None else _int32(positions, device),
            "reserve_key_starts_word": reserve,
        }

    mask = _tensor(run, name, run.call(name, inputs(workspace.view), {"out": workspace}))
    record = check_mask(
        name,
        mask,
        rows,
        max_query_len=longest,
        max_key_len=keys,
        first_query_pos=positions,
        reserved=reserve,
        first_request=first,
    )
    if not record.status.is_finding:
        run.check_repeat(
            name,
            lambda: inputs(guarded(words, torch.int32, device).view),
            lambda result, _: [_without_reserved(result, reserve)],
        )
    shape = [] if record.check == "mask.shape" else [passed("mask", "mask.shape")]
    return [*shape, record]


def _without_reserved(mask: torch.Tensor, reserve: bool) -> torch.Tensor:
    """The mask with the word that the builder leaves alone set to 0."""
    mask = mask.clone()
    if reserve and mask.numel():
        mask[:, 0, -1] = 0
    return mask


def _remapped(rows: Sequence[torch.Tensor], starts: Sequence[int], lens: Sequence[int]) -> list[torch.Tensor]:
    """Top-k rows moved into a key range of each request: `t - start` inside it, else -1."""
    return [
        torch.where((row >= start) & (row < start + length), row - start, -1)
        for row, start, length in zip(rows, starts, lens, strict=True)
    ]


def judge_gather(run: StageRun) -> list[CheckRecord]:
    """The gathers of a layer, each context chunk and all contexts at once, and a part of each context.

    The parts start anywhere: a plan starts at 0 in all requests of a chunk but the first.
    """
    facts = run.facts
    if not any(facts.context_lens):
        return []
    whole = ExpectedChunk(0, tuple(0 for _ in facts.context_lens), tuple(facts.context_lens))
    calls = [("whole", whole), *((f"chunk[{index}]", chunk) for index, chunk in enumerate(facts.plan))]
    calls.append(("parts", _parts(facts)))
    records: list[CheckRecord] = []
    for name, chunk in calls:
        records.append(_one_gather(run, name, chunk))
    return records


def _parts(facts: Facts) -> ExpectedChunk:
    """A range of each context that starts at any of its rows and ends at any row behind."""
    stream = Stream(facts.problem.paging.seed, _PARTS_TAG)
    starts, lengths = list[int](), list[int]()
    for context in facts.context_lens:
        start, length = (int(n) % max(context, 1) for n in stream.integers(2**31, 2))
        starts.append(start)
        lengths.append(min(length + 1, context - start))
    return ExpectedChunk(0, tuple(starts), tuple(lengths))


def _one_gather(run: StageRun, name: str, chunk: ExpectedChunk) -> CheckRecord:
    facts, dims, paging = run.facts, run.problem.dims, run.problem.paging
    cache, total = facts.inputs.cache, sum(chunk.lengths)
    device, dtype = cache.device, facts.inputs.q.dtype
    requests = slice(chunk.first, chunk.first + len(chunk.lengths))
    slots = [slot for slot, length in enumerate(chunk.lengths) for _ in range(length)]

    def inputs(dst: torch.Tensor) -> dict[str, Any]:
        return {
            "src_cache": cache,
            "dst": dst,
            "block_table": facts.inputs.block_table[requests],
            "cu_seq_lens": _int32([0, *accumulate(chunk.lengths)], device),
            "token_to_seq": _int32(slots, device),
            "num_tokens": total,
            "kv_cache_dtype": paging.kv_cache_dtype,
            "scale": paging.kv_cache_scale,
            "seq_starts": _int32(chunk.starts, device),
            "rope": dims.rope,
            "dtype": dtype,
        }

    def buffer() -> GuardedBuffer:
        return guarded(total * dims.latent, dtype, device)

    dst = buffer()
    filled = dst.view.view(total, dims.latent)
    returned = run.call(name, inputs(filled), {"dst": dst})
    record = check_gather(
        name,
        _tensor(run, name, filled if returned is None else returned),
        cache=cache,
        block_table=facts.inputs.block_table,
        first_request=chunk.first,
        starts=list(chunk.starts),
        lens=list(chunk.lengths),
        kv_cache_dtype=paging.kv_cache_dtype,
        kv_cache_scale=paging.kv_cache_scale,
        rope=dims.rope,
        dtype=dtype,
    )
    if not record.status.is_finding:
        run.check_repeat(
            name,
            lambda: inputs(buffer().view.view(total, dims.latent)),
            lambda result, given: [given["dst"] if result is None else result],
        )
    return record


def judge_plan(run: StageRun) -> list[CheckRecord]:
    """The chunks, one by one, against the greedy rule."""
    facts, chunks = run.facts, run.problem.chunks
    returned = run.call(
        "plan",
        {
            "context_lens": list(facts.context_lens),
            "row_budget": chunks.row_budget,
            "max_context_chunk": chunks.max_context_chunk,
            "split_alignment": chunks.split_alignment,
        },
    )
    found = [_chunk(item) for item in returned or []]
    for index, (got, must) in enumerate(zip(found, facts.plan, strict=False)):
        if got != must:
            return [failed("plan", "plan.chunks", f"chunk is {got}, must be {must}", Place(chunk=index))]
    if len(found) != len(facts.plan):
        message = f"the plan has {len(found)} chunks, must have {len(facts.plan)}"
        return [failed("plan", "plan.chunks", message)]
    return [passed("plan", "plan.chunks")]


def _chunk(item: Any) -> ExpectedChunk:
    """A chunk as the subject gave it: an object, or a tuple `(first_request, starts, lengths)`."""
    parts = item if isinstance(item, tuple | list) and not hasattr(item, "starts") else None
    names = ("first_request", "starts", "lengths")
    try:
        first, starts, lengths = parts if parts is not None else [getattr(item, name) for name in names]
        return ExpectedChunk(int(first), tuple(int(s) for s in starts), tuple(int(n) for n in lengths))
    except (AttributeError, TypeError, ValueError) as error:
        message = f"a chunk is {item!r}, must be (first_request, starts, lengths): {error}"
        raise Ended(failed("plan", "plan.chunks", message, status=Status.SHAPE)) from error


def _tensor(run: StageRun, call: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    check = f"{run.stage}.shape" if run.stage == "mask" else f"{run.stage}.rows"
    message = f"{call}: it returned a {type(value).__name__}, must return a tensor"
    raise Ended(failed(run.stage, check, message, Place(call=call), status=Status.SHAPE))


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)
