"""Stage `prefill` of a subject: a whole layer as a black box.

Without a trace there is only the end: the raw bound, whose power for one key is small unless the weights select
latent entries (a third of the drawn cases). So which keys each row attends is read out through the layer itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.checks.link import first_bad
from harness.checks.power import power_shares, vacuous_classes
from harness.checks.prefill import raw_power, raw_reference, requests_of
from harness.checks.readout import first_difference
from harness.checks.stage_case import StageRun
from harness.checks.stage_inputs import sequence_allowed
from harness.checks.stage_result import Result, compare_result, parse_result, say_conventions
from harness.checks.verdict import failed, passed
from harness.problems.tensors import Inputs, build_inputs
from reports.records import CheckRecord, Place, Status

STAGE = "prefill"
MAX_READOUT_LAUNCHES = 4
"""Longer cases are read out only where their numbers are wrong."""
MAX_LAUNCHES_OF_A_FAILURE = 64


def judge(run: StageRun) -> list[CheckRecord]:
    """The whole prefill of one case."""
    inputs = run.facts.inputs
    result = _call(run, "batch", inputs)
    broken = inputs.broken_canary()
    guard = failed("guard", "guard.output", broken, status=Status.GUARD) if broken else passed("guard", "guard.output")
    run.records.append(guard)
    records = [passed(STAGE, "prefill.shape")]
    if run.facts.num_tokens == 0:
        return []
    launches = -(-run.problem.max_seq_len // _window(run))
    keys = _keys(run) if launches <= MAX_READOUT_LAUNCHES else []
    if first_bad(keys) is not None:
        return [*keys, *records]
    numbers = _numbers(run, result)
    if not keys and launches <= MAX_LAUNCHES_OF_A_FAILURE and first_bad(numbers) is not None:
        keys = _keys(run)
        if first_bad(keys) is not None:
            return [*keys, *records]
    if not keys:
        run.record.vacuous = vacuous_classes(run.record.power, "prefill.raw")
    if first_bad(numbers) is None:
        run.check_repeat(
            "batch", lambda: _offered(run, _fresh(run)), lambda back, given: _parse(run, "batch", back, given).tensors()
        )
    return [*records, *keys, *say_conventions(numbers, run.facts.contract)]


def _fresh(run: StageRun, values: dict[str, torch.Tensor] | None = None) -> Inputs:
    return build_inputs(run.problem, run.facts.inputs.q.device, values)


def _offered(run: StageRun, inputs: Inputs) -> dict[str, Any]:
    problem = run.problem
    return {
        "q": inputs.q,
        "kv_c_normed": inputs.kv_c_normed,
        "k_pe": inputs.k_pe,
        "cache": inputs.cache,
        "block_table": inputs.block_table,
        "w_kv_b": inputs.w_kv_b,
        "topk": inputs.prefill_topk,
        "query_lens": list(problem.query_lens),
        "context_lens": list(problem.context_lens),
        "scale": problem.scale,
        "kv_cache_dtype": problem.paging.kv_cache_dtype,
        "kv_cache_scale": problem.paging.kv_cache_scale,
        "nope": problem.dims.nope,
        "rope": problem.dims.rope,
        "v_dim": problem.dims.v,
        "row_budget": problem.chunks.row_budget,
        "max_context_chunk": problem.chunks.max_context_chunk,
        "split_alignment": problem.chunks.split_alignment,
        "out": inputs.out,
    }


def _call(run: StageRun, name: str, inputs: Inputs) -> Result:
    offered = _offered(run, inputs)
    return _parse(run, name, run.call(name, offered, written=("out",)), offered)


def _parse(run: StageRun, name: str, returned: Any, offered: Mapping[str, Any]) -> Result:
    """`out` and `lse`, or what is returned beside a filled `out`."""
    dims, contract, tokens = run.problem.dims, run.facts.contract, run.facts.num_tokens
    parts = list(returned) if isinstance(returned, tuple | list) else [] if returned is None else [returned]
    if run.takes("out") and len(parts) < 1 + (contract.lse_base is not None):
        parts.insert(0, offered["out"])
    if parts and isinstance(parts[0], torch.Tensor) and parts[0].shape == (tokens, dims.heads * dims.v):
        parts[0] = parts[0].view(tokens, dims.heads, dims.v)
    shape = (tokens, dims.heads, dims.v)
    return parse_result(STAGE, name, tuple(parts), contract, shape, run.facts.inputs.q.dtype)


def _numbers(run: StageRun, result: Result) -> list[CheckRecord]:
    facts = run.facts
    exact = raw_reference(facts, "mqa" if facts.contract.absorbed else "masked", chunked=run.takes("row_budget"))
    if result.lse is not None:
        views = requests_of(facts, result.out, result.lse, dense=False)
        run.record.power = power_shares(raw_power(facts, exact, views))

    def place(token: int) -> Place:
        request = facts.request_of(token)
        return Place(request=request, row=token - facts.token_starts[request], token=token)

    records = compare_result(STAGE, result, slice(0, facts.num_tokens), exact, place)
    return [record.model_copy(update={"check": f"prefill.raw.{record.check.rpartition('.')[2]}"}) for record in records]


def _window(run: StageRun) -> int:
    """Keys of a request that one read-out shows: one a latent entry that a value column can select."""
    dims = run.problem.dims
    return min(dims.kv_lora_rank, dims.heads * dims.v)


def _keys(run: StageRun) -> list[CheckRecord]:
    """Read-out: q = 0, latents one-hot over a window of keys, value columns that select one latent entry each."""
    facts, window = run.facts, _window(run)
    if run.problem.paging.kv_cache_dtype != "auto":
        return []
    attended = [
        torch.zeros(query_len, seq_len, dtype=torch.bool, device=facts.inputs.q.device)
        for query_len, seq_len in zip(facts.query_lens, facts.seq_lens, strict=True)
    ]
    for base in range(0, run.problem.max_seq_len, window):
        result = _call(run, "read-out", _fresh(run, _one_hot_values(run, base)))
        if not bool(result.out.isfinite().all()):
            message = "with q = 0 and one-hot latents the output holds NaN or infinity"
            return [failed(STAGE, "prefill.keys", message, status=Status.NONFINITE)]
        seen = (result.out > 0).flatten(1)
        for request, part in enumerate(attended):
            shown = min(window, part.shape[1] - base)
            if shown > 0:
                rows = slice(facts.token_starts[request], facts.token_starts[request + 1])
                part[:, base : base + shown] = seen[rows, :shown]
    for request, part in enumerate(attended):
        difference = first_difference(part, sequence_allowed(facts, request))
        if difference is not None:
            token = facts.token_starts[request] + difference.row
            side = "context" if difference.key < facts.context_lens[request] else "new tokens"
            place = Place(request=request, token=token, **difference.place())
            return [failed(STAGE, "prefill.keys", f"{difference.describe()}, in the {side}", place)]
    return [passed(STAGE, "prefill.keys")]


def _one_hot_values(run: StageRun, base: int) -> dict[str, torch.Tensor]:
    """Numbers for `build_inputs`: key `base + e` of each request has latent entry `e`, value column `e` reads it."""
    facts, dims, dtype = run.facts, run.problem.dims, run.facts.inputs.q.dtype
    window = _window(run)

    def one_hot(first: int, count: int) -> torch.Tensor:
        rows = torch.zeros(count, dims.kv_lora_rank)
        entry = torch.arange(first, first + count) - base
        shown = (entry >= 0) & (entry < window)
        rows[shown.nonzero().flatten(), entry[shown]] = 1.0
        return rows.to(dtype)

    suffix = [one_hot(c, q) for c, q in zip(facts.context_lens, facts.query_lens, strict=True)]
    context = torch.cat([torch.zeros(0, dims.kv_lora_rank, dtype=dtype), *(one_hot(0, c) for c in facts.context_lens)])
    weights = torch.zeros(dims.kv_lora_rank, dims.heads, dims.nope + dims.v)
    entry = torch.arange(window)
    weights[entry, entry // dims.v, dims.nope + entry % dims.v] = 1.0
    return {
        "q": torch.zeros(facts.num_tokens, dims.heads, dims.qk, dtype=dtype),
        "kv_c_normed": torch.cat([torch.zeros(0, dims.kv_lora_rank, dtype=dtype), *suffix]),
        "k_pe": torch.zeros(facts.num_tokens, 1, dims.rope, dtype=dtype),
        "context": torch.nn.functional.pad(context, (0, dims.rope)),
        "w_kv_b": weights.view(dims.kv_lora_rank, -1).to(dtype),
    }
