"""The verdict on one call of FlashMLA's sparse prefill: stage `mqa` on flat rows, each slot counted.

Keys that a row lists twice stand twice in the oracle's keys, since FlashMLA counts slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.checks.guards import GuardedBuffer, guarded, same_bits
from harness.checks.stage_result import largest_scores
from harness.checks.verdict import compare_bounded, diagnose_lse, failed, passed
from harness.subjects.flashmla import VALUE_WIDTH, SparsePrefill
from harness.subjects.flashmla_cases import FlashMlaCase, Tensors, build
from reference.bound import AttendReference
from reference.bound_mqa import mqa_reference
from reference.numerics import U32, Numerics
from reports.records import CheckRecord, Place, Status
from reports.text import described

STAGE = "mqa"
NUMERICS = Numerics()
"""Declared: bf16 storage, hardware exp2, float32 sums over tiles of at most 128 slots."""


def check(
    case: FlashMlaCase, kernel: SparsePrefill, device: torch.device, *, repeat: bool = False
) -> list[CheckRecord]:
    """Judge one case; `repeat` makes the call a second time, which must give the same bits."""
    given = build(case, device)
    before = [t.clone() for t in (given.q, given.kv, given.indices)]
    shape = (case.queries, case.heads, VALUE_WIDTH)
    buffer = guarded(case.queries * case.heads * VALUE_WIDTH, torch.bfloat16, device) if case.own_out else None
    try:
        results = _call(kernel, given, buffer, shape)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        message = f"the kernel refused a legal case: {described(error)}"
        return [failed(STAGE, "mqa.run", message, status=Status.CONTRACT)]
    records = [_shape_record(results, shape)]
    if records[0].status.is_finding:
        return records
    records += _numbers(case, given, *results)
    for name, old, new in zip(("q", "kv", "indices"), before, (given.q, given.kv, given.indices), strict=True):
        if not same_bits(old, new):
            records.append(failed("guard", "guard.inputs", f"the call changed its input {name}", status=Status.GUARD))
    if buffer is not None:
        records.append(buffer.check("output"))
        if not same_bits(results[0], buffer.view.view(shape)):
            message = "the result is not in the output buffer that was given"
            records.append(failed("guard", "guard.output", message, status=Status.GUARD))
    if repeat:
        again = _call(kernel, given, None, shape)
        same = all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(results, again, strict=True))
        message = "two identical calls gave different bits"
        records.append(
            passed("guard", "guard.repeat") if same else failed("guard", "guard.repeat", message, status=Status.RACY)
        )
    return records


def _call(
    kernel: SparsePrefill, given: Tensors, buffer: GuardedBuffer | None, shape: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = None if buffer is None else buffer.view.view(shape)
    result = kernel(
        given.q, given.kv[:, None], given.indices[:, None], given.scale, given.sinks, given.topk_length, out
    )
    if given.q.is_cuda:
        torch.cuda.synchronize()
    return result


def _shape_record(results: Sequence[torch.Tensor], shape: tuple[int, int, int]) -> CheckRecord:
    must = [(shape, torch.bfloat16), (shape[:2], torch.float32), (shape[:2], torch.float32)]
    for name, result, (size, dtype) in zip(("out", "max_logits", "lse"), results, must, strict=True):
        if tuple(result.shape) != size or result.dtype != dtype:
            message = f"{name} has shape {tuple(result.shape)} and dtype {result.dtype}, must be {size} and {dtype}"
            return failed(STAGE, "mqa.shape", message, status=Status.SHAPE)
    return passed(STAGE, "mqa.shape")


def _numbers(
    case: FlashMlaCase, given: Tensors, out: torch.Tensor, largest: torch.Tensor, lse: torch.Tensor
) -> list[CheckRecord]:
    keys, allowed = _by_slot(given)
    exact = mqa_reference(
        q=given.q, latents=keys, lora=VALUE_WIDTH, allowed=allowed, scale=given.scale, numerics=NUMERICS,
        slots=case.topk,
    )  # fmt: skip
    tol_out, must_out, terms = _with_sinks(exact, given.sinks)
    # an empty row has LSE +inf by contract
    must_lse = torch.where(exact.lse == -torch.inf, torch.inf, exact.lse)
    records = [
        *_exact_keys(case, given, lse, out),
        compare_bounded(
            STAGE, "mqa.lse", lse.t(), must_lse, exact.bound.tol_lse,
            lambda i: Place(row=i[1], head=i[0]), terms=exact.bound.lse_terms, diagnose=diagnose_lse,
        ),
        compare_bounded(
            STAGE, "mqa.out", out, must_out, tol_out, lambda i: Place(row=i[0], head=i[1], column=i[2]), terms=terms
        ),
    ]  # fmt: skip
    scores, error = largest_scores(given.q, keys[:, None], allowed, given.scale)
    found = torch.where(scores.isinf(), scores, largest.t().double())
    records.append(compare_bounded(STAGE, "mqa.max_logits", found, scores, error, lambda i: Place(row=i[1], head=i[0])))
    return records


def _slot_counts(given: Tensors) -> torch.Tensor:
    """`[queries, rows of kv]`: slots of the row that hold the key."""
    count = torch.zeros(given.q.shape[0], given.kv.shape[0], dtype=torch.int64, device=given.q.device)
    return count.scatter_add_(1, given.indices.long().where(given.counted, 0), given.counted.long())


def _by_slot(given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[K, width]` and allowed `[queries, K]`, a row of kv as often as the row that lists it most."""
    count = _slot_counts(given)
    most = count.amax(dim=0)
    first = most.cumsum(0) - most
    source = torch.repeat_interleave(torch.arange(len(most), device=most.device), most)
    copy = torch.arange(source.numel(), device=most.device) - first[source]
    return given.kv[source], count[:, source] > copy


def _with_sinks(
    exact: AttendReference, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Tolerance, output and terms with the weight `w = 1 / (1 + exp(sink - LSE))`; its error is w (1 - w) dLSE."""
    bound = exact.bound
    if sinks is None:
        return bound.tol_out, exact.out, bound.out_terms
    weight = torch.sigmoid(exact.lse - sinks.double()[:, None])
    w = torch.where(exact.lse == -torch.inf, 0.0, weight).t()[..., None]
    moved = exact.out.abs() * (w * (1 - w) * bound.tol_lse.t()[..., None] + 8 * U32 * w)
    terms = {name: term * w for name, term in bound.out_terms.items()} | {"sink": moved}
    # a weight below the smallest float32 may be stored as 0
    return bound.tol_out * w + moved + exact.out.abs() * 2.0**-120, exact.out * w, terms


def _exact_keys(case: FlashMlaCase, given: Tensors, lse: torch.Tensor, out: torch.Tensor) -> list[CheckRecord]:
    """With q = 0: exp(LSE) counts the slots of a row, and one-hot values name the keys."""
    if case.family not in ("counting", "naming"):
        return []
    count = given.counted.sum(dim=1)
    counted = torch.where(lse.isinf(), 0.0, lse.double().exp())
    wrong = ((counted - count[:, None]).abs() > 0.25).nonzero()
    if wrong.numel():
        row, head = (int(i) for i in wrong[0])
        message = f"row {row} attended {float(counted[row, head]):.4g} slots, must be {int(count[row])}"
        return [failed(STAGE, "mqa.keys", message, Place(row=row, head=head))]
    if case.family == "naming" and given.sinks is None:
        named = torch.nn.functional.pad(_slot_counts(given) > 0, (0, VALUE_WIDTH - case.rows))
        return [_named_record(named, out)]
    return [passed(STAGE, "mqa.keys")]


def _named_record(named: torch.Tensor, out: torch.Tensor) -> CheckRecord:
    wrong = ((out > 0) != named[:, None]).nonzero()
    if not wrong.numel():
        return passed(STAGE, "mqa.keys")
    row, head, key = (int(i) for i in wrong[0])
    verb = "missed" if bool(named[row, key]) else "attended"
    return failed(STAGE, "mqa.keys", f"row {row} {verb} key {key}", Place(row=row, head=head, key=key))
