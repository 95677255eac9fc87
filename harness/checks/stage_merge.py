"""Stage `merge` of a subject: partial results of the oracle, rounded as a layer stores them, put together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from harness.checks.attention import packed_rows
from harness.checks.guards import GuardedBuffer, guarded
from harness.checks.link import first_bad
from harness.checks.stage_case import StageRun
from harness.checks.stage_inputs import AttendCall, attend_calls
from harness.checks.stage_result import Result, compare_result, parse_result, say_conventions
from harness.checks.verdict import passed
from reference import oracle
from reference.bound_stages import merge_reference
from reports.records import CheckRecord

STAGE = "merge"


@dataclass(frozen=True)
class Partial:
    """Output `[T, H, D]` in the storage type and natural LSE `[H, T]` float32 over some keys."""

    out: torch.Tensor
    lse: torch.Tensor


def judge(run: StageRun) -> list[CheckRecord]:
    """All merges of one case: context with suffix, then the first chunk with each other part."""
    facts = run.facts
    calls = attend_calls(facts)
    parts = {call.name: _partial(run, call) for call in calls}
    nothing = _empty_partial(run)
    pairs: list[tuple[str, Partial, Partial]] = []
    context = [parts[name] for name in parts if name.startswith("chunk[")]
    if "suffix" in parts and context:
        pairs.append(("chunk[0] with suffix", context[0], parts["suffix"]))
        pairs += [(f"chunk[{i - 1}] with chunk[{i}]", context[i - 1], context[i]) for i in range(1, len(context))]
    elif "whole" in parts:
        pairs += [("nothing with whole", nothing, parts["whole"]), ("whole with nothing", parts["whole"], nothing)]
    records: list[CheckRecord] = []
    for name, prefix, suffix in pairs:
        records += _one_merge(run, name, prefix, suffix)
    return [] if facts.num_tokens == 0 and first_bad(records) is None else records


def _partial(run: StageRun, call: AttendCall) -> Partial:
    """Exact attention of one call, rounded; rows of all tokens of the batch, empty where the call has none."""
    empty = _empty_partial(run)
    for slot in range(len(call.q_lens)):
        rows = slice(call.q_starts[slot], call.q_starts[slot + 1])
        keys = slice(call.k_starts[slot], call.k_starts[slot + 1])
        out, lse = oracle.attend(call.q[rows], call.k[keys], call.v[keys], call.allowed(slot), call.scale)
        tokens = slice(call.first_token + rows.start, call.first_token + rows.stop)
        present = (lse != -torch.inf).t()[..., None]
        empty.out[tokens] = torch.where(present, out.to(empty.out.dtype), empty.out[tokens])
        empty.lse[:, tokens] = lse.float()
    return empty


def _empty_partial(run: StageRun) -> Partial:
    """No keys at all: LSE -inf, and outputs that must not be read (finite where the contract asks for it)."""
    facts = run.facts
    dims, q = facts.problem.dims, facts.inputs.q
    junk = torch.nan if facts.contract.unselected_rows == "poison" else 3.0
    out = torch.full((facts.num_tokens, dims.heads, dims.v), junk, dtype=q.dtype, device=q.device)
    lse = torch.full((dims.heads, facts.num_tokens), -torch.inf, dtype=torch.float32, device=q.device)
    return Partial(out, lse)


class _Buffers:
    """The results that the subject may fill."""

    def __init__(self, run: StageRun) -> None:
        facts = run.facts
        dims, tokens, q = facts.problem.dims, facts.num_tokens, facts.inputs.q
        heads_first = facts.contract.lse_layout == "HT"
        self.out = guarded(tokens * dims.heads * dims.v, q.dtype, q.device)
        self.lse = guarded(tokens * dims.heads, torch.float32, q.device)
        self.out_view = self.out.view.view(tokens, dims.heads, dims.v)
        self.lse_view = self.lse.view.view((dims.heads, tokens) if heads_first else (tokens, dims.heads))

    def written(self) -> dict[str, GuardedBuffer]:
        return {"output": self.out, "output_lse": self.lse}


def _one_merge(run: StageRun, name: str, prefix: Partial, suffix: Partial) -> list[CheckRecord]:
    contract, dims = run.facts.contract, run.problem.dims
    has_lse = contract.lse_base is not None
    sides = [_as_given(run, partial.lse) for partial in (prefix, suffix)]

    def inputs(buffers: _Buffers) -> dict[str, Any]:
        return {
            "prefix_output": prefix.out.clone(),
            "prefix_lse": sides[0].clone(),
            "suffix_output": suffix.out.clone(),
            "suffix_lse": sides[1].clone(),
            "output": buffers.out_view,
            "output_lse": buffers.lse_view,
        }

    def results(returned: Any, given: Any) -> Result:
        if returned is not None:
            parts = returned
        else:
            parts = (given["output"], given["output_lse"]) if has_lse else given["output"]
        shape = (run.facts.num_tokens, dims.heads, dims.v)
        return parse_result(STAGE, name, parts, contract, shape, prefix.out.dtype)

    buffers = _Buffers(run)
    given = inputs(buffers)
    returned = run.call(name, given, buffers.written())
    result = results(returned, given)
    if returned is None and not run.takes("output_lse"):
        result = Result(result.out, None, None)
    natural = [_natural(run, side) for side in sides]
    exact = merge_reference(
        prefix_out=prefix.out,
        prefix_lse=natural[0],
        suffix_out=suffix.out,
        suffix_lse=natural[1],
        numerics=run.facts.numerics,
    )
    everything = slice(0, run.facts.num_tokens)
    records = compare_result(STAGE, result, everything, exact, packed_rows(0, name), watch=False)
    if first_bad(records) is None:
        run.check_repeat(name, lambda: inputs(_Buffers(run)), lambda back, used: results(back, used).tensors())
    return [passed(STAGE, "merge.shape"), *say_conventions(records, contract)]


def _as_given(run: StageRun, lse: torch.Tensor) -> torch.Tensor:
    """An LSE in the contract's base and layout."""
    contract = run.facts.contract
    if contract.lse_base == "2":
        lse = (lse.double() / math.log(2)).float()
    return lse if contract.lse_layout == "HT" else lse.t().contiguous()


def _natural(run: StageRun, given: torch.Tensor) -> torch.Tensor:
    """What an LSE as given stands for: natural, `[H, T]`, float64."""
    contract = run.facts.contract
    lse = given.double() if contract.lse_layout == "HT" else given.t().double()
    return lse * math.log(2) if contract.lse_base == "2" else lse
