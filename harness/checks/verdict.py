"""From a result, its oracle and its tolerance to one typed check record.

Two kinds of comparison: `compare_exact` for integers and copies (equal or wrong), `compare_bounded` for elements
with an a-priori bound: r = max |err| / tol, PASS r <= 1, WATCH r > 0.8, FAIL r > 1. Positions of infinity and
NaN must agree exactly in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from reports.records import CheckRecord, Place, Status

WATCH_LEVEL = 0.8
MAX_SHIFT = 256
"""Rows by which an LSE is tried to be shifted."""
Locate = Callable[[tuple[int, ...]], Place]


def nowhere(index: tuple[int, ...]) -> Place:
    """A place of which nothing is known."""
    return Place()


def describe(place: Place) -> str:
    """`request 1, token 9, row 2, head 0` from the fields that are known."""
    known = place.model_dump(exclude_none=True)
    return ", ".join(f"{name} {value}" for name, value in known.items())


def passed(
    stage: str, check: str, margin: float | None = None, median: float | None = None, *, watch: bool = True
) -> CheckRecord:
    """A PASS or WATCH record."""
    status = Status.WATCH if watch and margin is not None and margin > WATCH_LEVEL else Status.PASS
    return CheckRecord(stage=stage, check=check, status=status, margin=margin, median_margin=median)


def failed(
    stage: str,
    check: str,
    message: str,
    place: Place | None = None,
    *,
    status: Status = Status.FAIL,
    margin: float | None = None,
    median: float | None = None,
    terms: dict[str, float] | None = None,
) -> CheckRecord:
    """A record that accuses; the message gets the place appended."""
    place = Place() if place is None else place
    where = describe(place)
    return CheckRecord(
        stage=stage,
        check=check,
        status=status,
        margin=margin,
        median_margin=median,
        place=place,
        message=f"{message} at {where}" if where else message,
        terms=terms,
    )


def unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Index of element `flat` of a contiguous tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def check_shape(
    stage: str, check: str, actual: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> CheckRecord | None:
    """A SHAPE record unless `actual` has this shape and dtype."""
    if tuple(actual.shape) == shape and actual.dtype == dtype:
        return None
    return failed(
        stage,
        check,
        f"{check} has shape {tuple(actual.shape)} and dtype {actual.dtype}, must be {shape} and {dtype}",
        status=Status.SHAPE,
    )


def compare_exact(
    stage: str,
    check: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    locate: Locate = nowhere,
    *,
    explain: Callable[[tuple[int, ...]], str] | None = None,
) -> CheckRecord:
    """Bit for bit (-0.0 is not 0.0), but NaN equal to NaN. `explain(index)` may say more of the first difference."""
    wrong_shape = check_shape(stage, check, actual, tuple(expected.shape), expected.dtype)
    if wrong_shape is not None:
        return wrong_shape
    different = actual != expected
    if actual.is_floating_point():
        different |= actual.signbit() != expected.signbit()
        different &= ~(actual.isnan() & expected.isnan())
    if not bool(different.any()):
        return passed(stage, check)
    flat = int(different.flatten().int().argmax())
    index = unravel(flat, actual.shape)
    message = f"{check} is {actual[index].item()}, must be exactly {expected[index].item()}"
    if explain is not None:
        message = explain(index)
    count = int(different.sum())
    if count > 1:
        message += f" (first of {count} differences)"
    return failed(stage, check, message, locate(index))


def compare_bounded(
    stage: str,
    check: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: torch.Tensor,
    locate: Locate = nowhere,
    *,
    terms: Mapping[str, torch.Tensor] | None = None,
    diagnose: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], str] | None = None,
    watch: bool = True,
) -> CheckRecord:
    """Element by element against `tolerance` (float64, the shape of `expected`).

    `watch=False` is for results that are one rounding of an exact value: they come near their bound always, and
    that says nothing.
    """
    if tuple(actual.shape) != tuple(expected.shape):
        return failed(
            stage,
            check,
            f"{check} has shape {tuple(actual.shape)}, must be {tuple(expected.shape)}",
            status=Status.SHAPE,
        )
    if actual.numel() == 0:
        return passed(stage, check, 0.0, 0.0)
    value = actual.to(torch.float64)
    same = (value.isinf() & (value == expected)) | (value.isnan() & expected.isnan())
    nonfinite = ~(value.isfinite() & expected.isfinite()) & ~same
    if bool(nonfinite.any()):
        index = unravel(int(nonfinite.flatten().int().argmax()), actual.shape)
        count = int(nonfinite.sum())
        message = f"{check} is {value[index].item()}, must be {expected[index].item():.9g} ({count} such elements)"
        hint = diagnose(value, expected, tolerance) if diagnose is not None else ""
        message += f"; {hint}" if hint else ""
        return failed(stage, check, message, locate(index), status=Status.NONFINITE)
    error = torch.where(same, 0.0, (value - expected).abs())
    ratio = torch.where(error == 0, 0.0, error / tolerance)
    margin, flat = ratio.flatten().max(dim=0)
    median = float(ratio.flatten().median())
    worst = float(margin)
    if worst <= 1.0:
        return passed(stage, check, worst, median, watch=watch)
    index = unravel(int(flat), actual.shape)
    beyond = f"({int((ratio > 1).sum())} of {ratio.numel()} elements beyond it)"
    found, right, far = (x[index].item() for x in (value, expected, error))
    if math.isfinite(worst):
        allowed = tolerance[index].item()
        message = (
            f"{check} is {found:.9g}, must be {right:.9g} within {allowed:.3g}: error {far:.3g} is {worst:.3g} x the "
            f"tolerance {beyond}"
        )
    else:
        message = f"{check} is {found:.9g}, must be exactly {right:.9g}: nothing is rounded there {beyond}"
    shares = term_shares(terms, index) if terms else None
    if shares:
        message += "; tolerance from " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if diagnose is not None:
        hint = diagnose(value, expected, tolerance)
        if hint:
            message += f"; {hint}"
    finite_worst = worst if math.isfinite(worst) else 1e300
    return failed(stage, check, message, locate(index), margin=finite_worst, median=median, terms=shares)


def term_shares(terms: Mapping[str, torch.Tensor], index: tuple[int, ...]) -> dict[str, float]:
    """Share of each named term of the tolerance at one element, largest first."""
    values = {name: float(tensor[index]) for name, tensor in terms.items()}
    total = sum(values.values())
    if total <= 0:
        return {}
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return {name: value / total for name, value in ordered if value > 0}


def diagnose_lse(actual: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> str:
    """What simple law an LSE error follows, in words; empty if none. A law fits if it explains every element but for
    its tolerance.

    Known laws: base-2 instead of natural logarithm (factor 1/ln 2), the reverse (factor ln 2), one constant
    offset (a key missed or doubled in every row), rows shifted (by one, or by a request), a transposed layout.
    """
    slack = tolerance + 1e-6 * (1 + expected.abs())
    finite = expected.isfinite()
    if int((finite & (expected.abs() > 1e-3)).sum()) >= 2:
        for law, name in ((1 / math.log(2), "base-2 LSE"), (math.log(2), "natural LSE taken for base 2")):
            if _fits(actual, law * expected, law * slack):
                return f"every error fits a factor {law:.4f}: {name}"
        centre = float((actual - expected)[finite].median())
        if abs(centre) > 4 * float(slack[finite].median()) and _fits(actual, expected + centre, slack):
            return f"every error fits a constant {centre:+.4g}: a factor {math.exp(centre):.4g} on the row sum"
    if actual.dim() == 2 and actual.shape[1] > 1:
        farthest = min(actual.shape[1] - 1, MAX_SHIFT)
        moves: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
            ("the layout is transposed ([T, H] written as [H, T])", lambda x: x.t().reshape(x.shape)),
            *((f"rows are shifted by {by}", _roll(by)) for far in range(1, farthest + 1) for by in (far, -far)),
        ]
        for what, move in moves:
            # where all rows have nearly one value, every order of them would fit
            other, other_slack = move(expected), move(slack)
            if _fits(actual, other, other_slack) and not _fits(expected, other, other_slack):
                return what
    return ""


def _roll(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.roll(by, dims=1)


def _fits(actual: torch.Tensor, predicted: torch.Tensor, slack: torch.Tensor) -> bool:
    same = (actual == predicted) | ((actual - predicted).abs() <= slack)
    return bool(same.all())
