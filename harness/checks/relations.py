"""Relations: two runs whose results must be tied (JUDGEMENT section 4). No oracle is asked.

Each relation changes a case in a way whose effect on a right result is known, runs the subject again and compares
the two results: bit for bit where the same arithmetic is done on the same numbers, within two tolerances else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from harness.checks.deferred import DelayedCopies
from harness.checks.facts import Facts
from harness.checks.guards import same_bits
from harness.checks.places import is_made_on
from harness.checks.streams import on_side_stream
from harness.checks.verdict import failed, passed
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs
from harness.subjects.base import PrefillOutcome, PrefillSubject
from reference.bound import AttendReference
from reports.records import CheckRecord, Place, Status
from reports.text import described

STAGE = "relation"
MASKED_PATHS = ("no_context", "global_mask", "remap")
FORCE_OF_PATH = {
    "dense": "dense",
    "no_context": "masked",
    "global_mask": "masked",
    "remap": "masked_remap",
    "mqa": "mqa",
}


@dataclass(frozen=True)
class Base:
    """The case that was run and judged, with its path and the tolerances of its result."""

    facts: Facts
    subject: PrefillSubject
    path: str
    out: torch.Tensor
    """`[T, H, v]`"""
    lse: torch.Tensor
    exact: AttendReference
    runs: list[tuple[Problem, Inputs]] = field(default_factory=list)
    """The changed cases that were run."""

    @property
    def problem(self) -> Problem:
        return self.facts.problem

    @property
    def inputs(self) -> Inputs:
        return self.facts.inputs

    def run(self, problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[T, H, v]` and LSE of a changed case."""
        fresh = torch.full((problem.num_tokens, problem.dims.heads * problem.dims.v), torch.nan)
        fresh = fresh.to(inputs.q.dtype).to(inputs.q.device)
        changed = replace(inputs, problem=problem, out=fresh)
        self.runs.append((problem, changed))
        outcome: PrefillOutcome = self.subject.prefill(problem, changed, traced=False)
        return outcome.out.view(-1, problem.dims.heads, problem.dims.v), outcome.lse


@dataclass(frozen=True)
class Relation:
    """A named check with its precondition and its comparison."""

    name: str
    what: str
    applies: Callable[[Base], bool]
    check: Callable[[Base], CheckRecord]


def _bitwise(
    name: str, base: Base, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]
) -> CheckRecord:
    for part, a, b in (("out", got[0], want[0]), ("lse", got[1], want[1])):
        if same_bits(a.contiguous(), b.contiguous()) or torch.equal(a, b):
            continue
        wrong = (a != b).nonzero()
        first = wrong[0].tolist() if wrong.numel() else []
        token, head = (first[0], first[1]) if part == "out" else (first[1], first[0])
        message = (
            f"{name}: {part} differs in {wrong.shape[0]} elements, must be the same bits "
            f"({a[tuple(first)].item():.9g} and {b[tuple(first)].item():.9g})"
        )
        return failed(STAGE, f"relation.{name}", message, Place(token=token, head=head))
    return passed(STAGE, f"relation.{name}")


def _within(name: str, base: Base, got: tuple[torch.Tensor, torch.Tensor], rows: slice = slice(None)) -> CheckRecord:
    """Two right results of the same rows differ by at most the sum of their tolerances."""
    bound = base.exact.bound
    worst = 0.0
    pairs = (
        ("out", got[0], base.out[rows], bound.tol_out[rows]),
        ("lse", got[1], base.lse[:, rows], bound.tol_lse[:, rows]),
    )
    for part, a, b, tol in pairs:
        x, y = a.to(tol.device).double(), b.to(tol.device).double()
        error = torch.where(x == y, 0.0, (x - y).abs())
        ratio = torch.where(error == 0, 0.0, error / (2 * tol))
        if ratio.numel() == 0:
            continue
        margin = float(ratio.max())
        worst = max(worst, margin)
        if not margin <= 1.0:
            at = (~(ratio <= 1.0)).nonzero()[0].tolist()
            token, head = (at[0], at[1]) if part == "out" else (at[1], at[0])
            values = f"{x[tuple(at)].item():.9g} and {y[tuple(at)].item():.9g}"
            message = f"{name}: {part} is {values}, {margin:.3g} x two tolerances apart"
            return failed(STAGE, f"relation.{name}", message, Place(token=token, head=head), margin=min(margin, 1e300))
    return passed(STAGE, f"relation.{name}", worst, watch=False)


def _generator(base: Base) -> torch.Generator:
    return torch.Generator().manual_seed(int(base.problem.case_id, 16) % 2**62)


def _heads_of_weight(base: Base) -> torch.Tensor:
    dims = base.problem.dims
    return base.inputs.w_kv_b.view(-1, dims.heads, dims.nope + dims.v)


def _double_values(base: Base) -> CheckRecord:
    """W_UV doubled: the same LSE, the output doubled."""
    weight = _heads_of_weight(base).clone()
    weight[..., base.problem.dims.nope :] *= 2
    out, lse = base.run(base.problem, replace(base.inputs, w_kv_b=weight.flatten(1)))
    return _bitwise("values_doubled", base, (out, lse), (2 * base.out, base.lse))


def _values_can_double(base: Base) -> bool:
    """No overflow and no denormal: then doubling changes exponents only."""
    if base.inputs.q.dtype != torch.bfloat16:
        return False
    magnitudes = [x.float().abs() for x in (_heads_of_weight(base), base.inputs.kv_c_normed, base.out)]
    magnitudes = [x[x > 0] for x in magnitudes if x.numel()]
    return all(bool((x.max() < 2.0**60) & (x.min() > 2.0**-60)) for x in magnitudes if x.numel())


def _permute_heads(base: Base) -> CheckRecord:
    order = torch.randperm(base.problem.dims.heads, generator=_generator(base)).to(base.out.device)
    weight = _heads_of_weight(base)[:, order].flatten(1)
    out, lse = base.run(base.problem, replace(base.inputs, q=base.inputs.q[:, order], w_kv_b=weight))
    return _bitwise("heads_permuted", base, (out, lse), (base.out[:, order], base.lse[order]))


def _permute_value_columns(base: Base) -> CheckRecord:
    dims = base.problem.dims
    order = torch.randperm(dims.v, generator=_generator(base)).to(base.out.device)
    weight = _heads_of_weight(base).clone()
    weight[..., dims.nope :] = weight[..., dims.nope + order]
    out, lse = base.run(base.problem, replace(base.inputs, w_kv_b=weight.flatten(1)))
    return _bitwise("value_columns_permuted", base, (out, lse), (base.out[..., order], base.lse))


def _permute_slots(base: Base) -> CheckRecord:
    """Top-k slots in another order, and a duplicate in a slot that held no key."""
    buffer = base.inputs.topk_buffer.clone()
    order = torch.randperm(buffer.shape[1], generator=_generator(base)).to(buffer.device)
    first = base.problem.layout.num_decode_tokens
    rows = buffer[first : first + base.problem.num_tokens, order]
    if base.subject.contract.duplicates == "once":
        filler = rows.amax(dim=1, keepdim=True)
        rows = torch.where(rows < 0, filler, rows)
    buffer[first : first + base.problem.num_tokens] = rows
    result = base.run(base.problem, replace(base.inputs, topk_buffer=buffer))
    if base.path in MASKED_PATHS:
        return _bitwise("slots_permuted", base, result, (base.out, base.lse))
    return _within("slots_permuted", base, result)


def _alone(base: Base) -> CheckRecord:
    """One request by itself gives what it gave in the batch."""
    problem, inputs = base.problem, base.inputs
    starts = problem.token_offsets
    busy = [b for b, length in enumerate(problem.query_lens) if length]
    request = busy[int(problem.case_id, 16) % len(busy)]
    rows = slice(starts[request], starts[request + 1])
    topk = problem.topk
    alone = problem.replace(
        requests=(problem.requests[request],),
        topk=topk.model_copy(
            update={
                "kinds": topk.kinds[request : request + 1],
                "rows": None if topk.rows is None else topk.rows[rows],
            }
        ),
        layout=problem.layout.model_copy(update={"num_decode_tokens": 0}),
        mask_workspace_words=None,
        force=FORCE_OF_PATH[base.path],
    )
    part = replace(
        inputs,
        q=inputs.q[rows],
        kv_c_normed=inputs.kv_c_normed[rows],
        k_pe=inputs.k_pe[rows],
        block_table=inputs.block_table[request : request + 1],
        topk_buffer=inputs.prefill_topk[rows],
    )
    result = base.run(alone, part)
    if base.subject.contract.batch_invariant:
        return _bitwise("request_alone", base, result, (base.out[rows], base.lse[:, rows]))
    return _within("request_alone", base, result, rows)


def _remap_instead(base: Base) -> CheckRecord:
    """The global mask and remapped masks select the same keys for the same calls."""
    result = base.run(base.problem.replace(force="masked_remap"), base.inputs)
    return _bitwise("remap_equals_global", base, result, (base.out, base.lse))


def _other_plan(base: Base) -> CheckRecord:
    """Another cut of the contexts gives the same result within the bounds."""
    chunks = base.problem.chunks
    budget = 2 * sum(base.problem.context_lens) + chunks.split_alignment
    wide = chunks.model_copy(update={"row_budget": budget, "max_context_chunk": budget})
    result = base.run(base.problem.replace(chunks=wide, force=FORCE_OF_PATH[base.path]), base.inputs)
    return _within("other_chunk_plan", base, result)


def _has_chunks(base: Base) -> bool:
    return len(base.facts.plan) > 1 and base.path != "mqa" and base.problem.mask_workspace_words is None


def _delayed_copies(base: Base) -> CheckRecord:
    """Non-blocking copies that run as late as they may change nothing."""
    name = "relation.delayed_copies"
    try:
        with DelayedCopies() as late:
            result = base.run(base.problem, base.inputs)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        message = f"with late copies the call fails: {described(error)}"
        return failed(STAGE, name, message, status=Status.GUARD)
    if late.hazards:
        return failed(STAGE, name, "; ".join(sorted(set(map(str, late.hazards)))), status=Status.GUARD)
    return _bitwise("delayed_copies", base, result, (base.out, base.lse))


def _side_stream(base: Base) -> CheckRecord:
    """The same call on a stream of its own, with the device far behind the host."""
    result = on_side_stream(base.inputs.q.device, lambda: base.run(base.problem, base.inputs))
    return _bitwise("side_stream", base, result, (base.out, base.lse))


def _is_made_here(name: str, base: Base) -> bool:
    return is_made_on(f"{STAGE}.{name}", base.inputs.q.device.type)


RELATIONS = (
    Relation("values_doubled", "W_UV x 2: output x 2, same LSE", _values_can_double, _double_values),
    Relation(
        "heads_permuted",
        "permuting heads permutes the result",
        lambda base: base.problem.dims.heads > 1,
        _permute_heads,
    ),
    Relation(
        "value_columns_permuted",
        "permuting V columns permutes the output",
        lambda base: base.path != "mqa",
        _permute_value_columns,
    ),
    Relation(
        "slots_permuted",
        "order and duplicates of top-k slots do not matter",
        lambda base: base.path != "dense",
        _permute_slots,
    ),
    Relation(
        "request_alone",
        "a request alone gives what it gives in a batch",
        lambda base: len(base.problem.requests) > 1,
        _alone,
    ),
    Relation(
        "remap_equals_global",
        "global mask and remapped masks agree",
        lambda base: base.path == "global_mask",
        _remap_instead,
    ),
    Relation("other_chunk_plan", "the chunk plan does not matter", _has_chunks, _other_plan),
    Relation(
        "delayed_copies",
        "copies may run late",
        lambda base: _is_made_here("delayed_copies", base) and base.subject.contract.deterministic,
        _delayed_copies,
    ),
    Relation(
        "side_stream",
        "the stream does not matter",
        lambda base: _is_made_here("side_stream", base) and base.subject.contract.deterministic,
        _side_stream,
    ),
)


def check_relation(base: Base) -> list[CheckRecord]:
    """One applicable relation, chosen by the case id, so that a replay checks the same one."""
    fitting = [relation for relation in RELATIONS if relation.applies(base)]
    if not fitting or base.problem.num_tokens == 0:
        return []
    return [fitting[int(base.problem.case_id[:8], 16) % len(fitting)].check(base)]
