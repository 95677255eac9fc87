"""What an attention subject returned, brought from its contract's conventions to ours: natural LSE `[H, T]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from harness.checks.attention import RowPlace, compare_attention
from harness.checks.guards import same_bits
from harness.checks.readout import COUNT_ERROR
from harness.checks.stage_case import Ended
from harness.checks.verdict import check_shape, compare_bounded, failed, passed
from harness.subjects.contract import Contract
from reference.bound import AttendBound, AttendReference
from reference.bound_rows import LAM
from reference.numerics import U32
from reports.records import CheckRecord, Place, Status

COUNTED = "with all scores 0, exp(LSE) counts"
ALL_HEADS = slice(0, None)


@dataclass(frozen=True)
class Result:
    """Output and, where the contract has them, LSE and largest scores in float64 as `[H, T]`."""

    out: torch.Tensor
    lse: torch.Tensor | None
    max_logits: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them, for a comparison of bits."""
        return self.out, self.lse, self.max_logits


def parse_result(
    stage: str, call: str, returned: Any, contract: Contract, shape: tuple[int, int, int], dtype: torch.dtype
) -> Result:
    """`out`, `(out, lse)` or `(out, max_logits, lse)`, as the contract says; `shape` is that of the output.

    Raises Ended with a SHAPE record for another number of results, another type, shape or dtype.
    """
    tokens, heads, _ = shape
    names = ["out", *(["max_logits"] if contract.max_logits else []), *(["lse"] if contract.lse_base else [])]
    parts = list(returned) if isinstance(returned, tuple | list) else [returned]
    check = f"{stage}.shape"
    kinds = [type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)]
    if len(parts) != len(names) or kinds:
        found = f"{len(parts)} results" + (f", one of type {kinds[0]}" if kinds else "")
        message = f"{call}: it returned {found}, must return ({', '.join(names)}) as tensors"
        raise Ended(failed(stage, check, message, Place(call=call), status=Status.SHAPE))
    by_name = dict(zip(names, parts, strict=True))
    sides = (heads, tokens) if contract.lse_layout == "HT" else (tokens, heads)
    for name, part in by_name.items():
        must = (shape, dtype) if name == "out" else (sides, torch.float32)
        wrong = check_shape(stage, check, part, *must)
        if wrong is not None:
            found = f"shape {tuple(part.shape)} and dtype {part.dtype}"
            message = f"{call}: {name} has {found}, must have {must[0]} and {must[1]}"
            raise Ended(failed(stage, check, message, Place(call=call), status=Status.SHAPE))
    lse, largest = by_name.get("lse"), by_name.get("max_logits")
    return Result(
        by_name["out"],
        None if lse is None else _natural(lse, contract),
        None if largest is None else _heads_first(largest, contract),
    )


def _heads_first(values: torch.Tensor, contract: Contract) -> torch.Tensor:
    return (values if contract.lse_layout == "HT" else values.t()).double()


def _natural(lse: torch.Tensor, contract: Contract) -> torch.Tensor:
    """Natural logarithm, -inf for an empty row; the wrong infinity becomes +inf."""
    values = _heads_first(lse, contract)
    if contract.lse_base == "2":
        values = values * math.log(2)
    if contract.empty_lse == "+inf":
        values = torch.where(values.isinf(), -values, values)
    return values


def with_sinks(exact: AttendReference, sinks: torch.Tensor) -> AttendReference:
    """The reference with one more logit a head in the softmax: the output shrinks, LSE leaves the sink out.

    `out' = out * w` with `w = 1 / (1 + exp(sink - LSE))`; `dw = w (1 - w) dLSE`, and a few roundings.
    """
    weight = torch.sigmoid(exact.lse - sinks.double()[:, None])
    w = weight.t()[..., None]
    bound = exact.bound
    moved = exact.out.abs() * (w * (1 - w) * bound.tol_lse.t()[..., None] + 8 * U32 * w)
    terms = {name: term * w for name, term in bound.out_terms.items()} | {"sink": moved}
    tolerance = bound.tol_out * w + moved
    return AttendReference(exact.out * w, exact.lse, AttendBound(tolerance, bound.tol_lse, terms, bound.lse_terms))


def largest_scores(
    q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest score of each row `[H, n]` (-inf where it has no key) and how far a float32 product may be off.

    q `[n, H, D]`, k `[K, H or 1, D]`, allowed bool `[n, K]`.
    """
    keys = k.double().permute(1, 2, 0)
    scores = scale * (q.double().transpose(0, 1) @ keys)
    size = scale * (q.double().abs().transpose(0, 1) @ keys.abs())
    error = LAM * q.shape[-1] ** 0.5 * U32 * size + 8 * U32 * scores.abs()
    if k.shape[0] == 0:
        empty = scores.new_full(scores.shape[:2], -torch.inf)
        return empty, torch.zeros_like(empty)
    error = error.masked_fill(~allowed, 0.0).amax(dim=2)
    return scores.masked_fill(~allowed, -torch.inf).amax(dim=2), error


def compare_result(
    stage: str,
    result: Result,
    rows: slice,
    exact: AttendReference,
    place: RowPlace,
    *,
    heads: slice = ALL_HEADS,
    watch: bool = True,
) -> list[CheckRecord]:
    """Checks `{stage}.lse` (where there is one) and `{stage}.out` of some rows and heads, those of `exact`."""
    out = result.out[rows, heads]
    lse = exact.lse if result.lse is None else result.lse[heads, rows]
    records = compare_attention(stage, stage, out, lse, exact, place, watch=watch, first_head=heads.start)
    return [record for record in records if result.lse is not None or not record.check.endswith(".lse")]


def compare_largest(
    stage: str,
    result: Result,
    rows: slice,
    exact: tuple[torch.Tensor, torch.Tensor],
    place: RowPlace,
    *,
    heads: slice = ALL_HEADS,
) -> CheckRecord:
    """Check `{stage}.max_logits` of some rows and heads, those of `exact`; rows without a key are not judged."""
    scores, tolerance = exact
    assert result.max_logits is not None
    found = torch.where(scores.isinf(), scores, result.max_logits[heads, rows])

    def locate(index: tuple[int, ...]) -> Place:
        return place(index[1]).model_copy(update={"head": heads.start + index[0]})

    return compare_bounded(stage, f"{stage}.max_logits", found, scores, tolerance, locate)


def count_record(stage: str, counted: torch.Tensor, must: torch.Tensor, place: RowPlace) -> CheckRecord:
    """Check `{stage}.lse` with all scores 0: `counted [H, T]` is exp(LSE), `must [T]` the number of keys."""
    wrong = ~((counted - must).abs() <= 0.25)
    if not bool(wrong.any()):
        return passed(stage, f"{stage}.lse")
    head, row = (int(i) for i in wrong.nonzero()[0])
    found = float(counted[head, row])
    if math.isfinite(found) and abs(found - round(found)) < COUNT_ERROR:
        often = "more" if found > int(must[row]) else "less"
        message = (
            f"{COUNTED} {round(found)} keys, must be {int(must[row])}: the keys attended are the right ones, so that "
            f"some count {often} often than they must"
        )
        return failed(stage, f"{stage}.keys", message, place(row).model_copy(update={"head": head}))
    message = f"with all scores 0, exp(LSE) of the row is {found:.6g}, must be its number of keys, {int(must[row])}"
    if found > 0 and abs(2 ** math.log(found) - int(must[row])) < 0.25:
        message += "; 2 ** LSE is: a base-2 LSE"
    return failed(stage, f"{stage}.lse", message, place(row).model_copy(update={"head": head}))


def in_order(numbers: list[CheckRecord], count: list[CheckRecord]) -> list[CheckRecord]:
    """A wrong whole number of keys explains wrong numbers, and comes first; else it comes after them."""
    explains = any(record.message.startswith(COUNTED) for record in count)
    return [*count, *numbers] if explains else [*numbers, *count]


def batch_record(request: int, batch: Result, alone: Result, rows: slice) -> CheckRecord:
    """Check `guard.batch`: the rows of a request are bit for bit those of its own call."""
    pairs = {
        "output": (batch.out[rows], alone.out),
        "LSE": (None if batch.lse is None else batch.lse[:, rows], alone.lse),
    }
    for name, (first, second) in pairs.items():
        if first is not None and second is not None and not same_bits(first.contiguous(), second.contiguous()):
            message = f"request {request} alone gives other {name} bits than in its batch, the same are promised"
            return failed("guard", "guard.batch", message, Place(request=request))
    return passed("guard", "guard.batch")


def say_conventions(records: list[CheckRecord], contract: Contract) -> list[CheckRecord]:
    """Say in which convention the numbers of a message are, where it is not the subject's own."""
    notes = []
    if contract.lse_base == "2":
        notes.append("its base-2 LSE times ln 2")
    if contract.empty_lse == "+inf":
        notes.append("+inf of an empty row read as -inf")
    if not notes:
        return records
    return [
        record.model_copy(update={"message": f"{record.message} ({', '.join(notes)})"})
        if record.check.endswith(".lse") and record.status.is_finding
        else record
        for record in records
    ]
