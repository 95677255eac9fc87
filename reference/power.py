"""Which single-key mask faults a case would certainly reveal.

Dropping an allowed key, or adding one that is not allowed, moves the exact answer by

    dropped   dLSE = -ln(1 - p_j)     dO = p_j/(1 - p_j) (O - v_j)
    added     dLSE = ln(1 + e)        dO = e/(1 + e) (v_j - O),     e = exp(s_j - LSE)

A right kernel is within one tolerance of the exact answer, and so is a faulty one of its own, whose tolerance
is nearly the same: the fault is certainly seen where the move exceeds twice the tolerance. The last key of a
row leaves LSE -inf and output 0; the first key of an empty row takes LSE from -inf and the output from 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.bound import AttendReference


@dataclass(frozen=True)
class Revealed:
    """Counts of single-key faults: looked at, and certainly revealed by LSE, by the output, by either."""

    total: int = 0
    by_lse: int = 0
    by_out: int = 0
    by_either: int = 0

    def share(self, count: int) -> float | None:
        """One of the counts as a share of the total; None if there was no fault to look at."""
        return count / self.total if self.total else None

    def __add__(self, other: "Revealed") -> "Revealed":
        return Revealed(
            self.total + other.total,
            self.by_lse + other.by_lse,
            self.by_out + other.by_out,
            self.by_either + other.by_either,
        )


@dataclass(frozen=True)
class Power:
    """What one case, or several added up, could have shown."""

    dropped: Revealed = Revealed()
    added: Revealed = Revealed()

    def __add__(self, other: "Power") -> "Power":
        return Power(self.dropped + other.dropped, self.added + other.added)


def attend_power(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    reference: AttendReference,
    max_rows: int = 8,
    max_keys: int = 512,
) -> Power:
    """Power of one request's attention; arguments as `reference.bound.attend_reference`, and its result.

    At most `max_rows` query rows are looked at, and for each at most `max_keys` allowed and as many other
    keys, evenly spread, for every head.
    """
    power = Power()
    for row in _spread(torch.arange(q.shape[0], device=q.device), max_rows).tolist():
        member = allowed[row]
        for is_added, candidates in enumerate((member, ~member)):
            keys = _spread(candidates.nonzero().flatten(), max(max_keys, 2))
            by_lse, by_out = _moves(q[row], k[keys], v[keys], scale, reference, row, bool(is_added))
            counts = Revealed(by_lse.numel(), int(by_lse.sum()), int(by_out.sum()), int((by_lse | by_out).sum()))
            power += Power(added=counts) if is_added else Power(dropped=counts)
    return power


def combine(powers: Iterable[Power]) -> Power:
    """Power of several cases together."""
    return sum(powers, start=Power())


def _spread(items: Tensor, at_most: int) -> Tensor:
    """`at_most` of the items, evenly spread."""
    if len(items) <= at_most:
        return items
    return items[torch.linspace(0, len(items) - 1, at_most, device=items.device).long()]


def _moves(
    q: Tensor, k: Tensor, v: Tensor, scale: float, reference: AttendReference, row: int, is_added: bool
) -> tuple[Tensor, Tensor]:
    """Whether LSE and output reveal each key, `[m, H]`: q `[H, D]`, k `[m, H or 1, D]`, v alike."""
    out, lse = reference.out[row], reference.lse[:, row]
    scores = scale * (q.double() * k.double()).sum(dim=-1)
    relative = torch.exp(scores - lse)  # p_j or e; inf for an empty row
    if is_added:
        move_lse, factor = torch.log1p(relative), relative / (1 + relative)
        factor = factor.where(lse != -torch.inf, 1.0)
    else:
        relative = relative.clamp(max=1.0)
        move_lse, factor = -torch.log1p(-relative), relative / (1 - relative)
        # where one key is nearly all of the row, O - v_j is lost to cancellation: claim nothing
        factor = factor.where(relative < 1 - 1e-9, 0.0)
    move_out = (factor[..., None] * (out - v.double())).abs()
    if not is_added and len(k) == 1:
        move_out = out.abs()[None]
    by_lse = move_lse > 2 * reference.bound.tol_lse[:, row]
    return by_lse, (move_out > 2 * reference.bound.tol_out[row]).any(dim=-1)
