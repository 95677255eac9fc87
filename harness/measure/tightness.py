"""How near do errors come to their bounds? err / tol of output and LSE, family by family, over 1 to 8 chunks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from harness.measure.families import FAMILIES, Case, exact_case, make_case, split_evenly
from harness.measure.kernels import Kernel
from reference.bound import AttendReference, attend_reference
from reference.numerics import Numerics

BINS = 10
"""Bins of a histogram: [0, 0.1), ... [0.9, 1]; one more holds what is above 1."""
CHUNKS = tuple(range(1, 9))
EXACT_KINDS = ("single key", "one-hot softmax", "empty")


class Shape(NamedTuple):
    """Sizes of one case."""

    n: int
    heads: int
    keys: int
    topk: int
    dim: int
    v_dim: int


GPU_SHAPES = (
    Shape(48, 8, 1024, 256, 192, 128),
    Shape(48, 8, 4096, 2048, 192, 128),
    Shape(48, 8, 16384, 2048, 192, 128),
)
CPU_SHAPES = (
    Shape(4, 2, 128, 48, 64, 16),
    Shape(4, 2, 192, 64, 40, 12),
    Shape(4, 2, 77, 33, 192, 8),
    Shape(8, 1, 300, 100, 24, 8),
    Shape(2, 4, 160, 150, 96, 16),
    Shape(4, 2, 700, 256, 64, 16),
    Shape(4, 2, 1024, 256, 192, 16),
)
INTERPRETED_SHAPES = CPU_SHAPES[:5]
"""Short ones: an interpreted tile of 128 keys costs 10 ms and more."""


@dataclass
class Cell:
    """err / tol of every (token, head) row of one family and chunk count, the output's over its columns."""

    rows: int = 0
    out_max: float = 0.0
    lse_max: float = 0.0
    out_bins: list[int] = field(default_factory=lambda: [0] * (BINS + 1))
    lse_bins: list[int] = field(default_factory=lambda: [0] * (BINS + 1))
    worst: dict[str, object] = field(default_factory=dict)
    """How to make the case of `out_max` again."""

    def add(self, out: Tensor, lse: Tensor, made: dict[str, object]) -> None:
        """One case: ratios per row, any shape."""
        self.rows += out.numel()
        for bins, ratios in ((self.out_bins, out), (self.lse_bins, lse)):
            where = (ratios * BINS).long().clamp(max=BINS - 1).where(ratios <= 1, BINS)
            counts = torch.bincount(where.flatten(), minlength=BINS + 1).tolist()
            bins[:] = [a + b for a, b in zip(bins, counts, strict=True)]
        self.lse_max = max(self.lse_max, float(lse.max()))
        if float(out.max()) >= self.out_max:
            self.out_max, self.worst = float(out.max()), made


@dataclass
class Tightness:
    """What `measure` found; `cells[family][chunks]`."""

    subject: str
    cells: dict[str, dict[int, Cell]]
    cases: int = 0
    rows: int = 0
    seconds: float = 0.0
    inexact: list[str] = field(default_factory=list)
    """Exact families whose output was not bit for bit right."""
    exact_cases: int = 0

    @property
    def sound(self) -> bool:
        """No right result was accused."""
        return not self.inexact and all(
            cell.out_max <= 1 and cell.lse_max <= 1 for row in self.cells.values() for cell in row.values()
        )


def ratios(case: Case, kernel: Kernel, segments: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """err / tol of one run: of the output, the largest of each row `[n, H]`; of LSE `[H, n]`. NaN counts as inf."""
    exact = reference(case, kernel.numerics, segments)
    out, lse = kernel.run(case, segments)
    return judge(out, lse, exact)


def judge(out: Tensor, lse: Tensor, exact: AttendReference) -> tuple[Tensor, Tensor]:
    """`ratios` of a given result."""
    return ratio(out, exact.out, exact.bound.tol_out).amax(dim=-1), ratio(lse, exact.lse, exact.bound.tol_lse)


def reference(case: Case, numerics: Numerics, segments: list[tuple[int, int]]) -> AttendReference:
    """The exact answer of a case and its bound."""
    return attend_reference(
        q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, numerics=numerics,
        segments=segments, keep_terms=False,
    )  # fmt: skip


def ratio(actual: Tensor, expected: Tensor, tolerance: Tensor) -> Tensor:
    """err / tol element by element; equal values (infinities too) give 0, NaN gives inf."""
    value = actual.double()
    error = (value - expected).abs().where(value != expected, 0.0)
    return (error / tolerance).where(error != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def plan(rows: int, shapes: tuple[Shape, ...], seed: int) -> Iterator[tuple[int, str, int, Shape]]:
    """(seed, family, chunks, shape) of the cases that make up at least `rows` (token, head) rows.

    Each combination comes once before any comes again, in an order of which every beginning is well mixed.
    """
    combinations = list(itertools.product(FAMILIES, CHUNKS, shapes))
    stride = next(s for s in itertools.count(int(0.618 * len(combinations))) if math.gcd(s, len(combinations)) == 1)
    done = 0
    for number in itertools.count(seed):
        if done >= rows:
            return
        family, chunks, shape = combinations[number * stride % len(combinations)]
        yield number, family, chunks, shape
        done += shape.n * shape.heads


def measure(kernel: Kernel, rows: int, *, seed: int = 0, shapes: tuple[Shape, ...] | None = None) -> Tightness:
    """err / tol over at least `rows` rows, and the exact families."""
    start = time.monotonic()
    shapes = shapes or default_shapes(kernel)
    found = Tightness(kernel.name, {family: {chunks: Cell() for chunks in CHUNKS} for family in FAMILIES})
    for number, family, chunks, shape in plan(rows, shapes, seed):
        case = make_case(family, number, **shape._asdict(), device=kernel.device)
        out, lse = ratios(case, kernel, split_evenly(shape.keys, chunks))
        made = {"seed": number, **shape._asdict()}
        found.cells[family][chunks].add(out, lse, made)
        found.cases += 1
        found.rows += out.numel()
    _measure_exact(kernel, shapes, seed, found)
    found.seconds = time.monotonic() - start
    return found


def default_shapes(kernel: Kernel) -> tuple[Shape, ...]:
    """Published head dims on a GPU, small ones elsewhere."""
    if kernel.device.type == "cuda":
        return GPU_SHAPES
    return INTERPRETED_SHAPES if kernel.name.startswith("ours") else CPU_SHAPES


def _measure_exact(kernel: Kernel, shapes: tuple[Shape, ...], seed: int, found: Tightness) -> None:
    for shape in shapes:
        for kind in EXACT_KINDS:
            case, lead = exact_case(
                kind, seed, n=shape.n, heads=shape.heads, keys=shape.keys, dim=shape.dim, v_dim=shape.v_dim
            )
            case = case.to(kernel.device)
            for chunks in (1, 2, 5):
                segments = split_evenly(shape.keys, chunks)
                out, lse = kernel.run(case, segments)
                if not is_exact(case, lead.to(kernel.device), out, lse, reference(case, kernel.numerics, segments)):
                    found.inexact.append(f"{kind}, {chunks} chunks, {shape}")
                found.exact_cases += 1


def is_exact(case: Case, lead: Tensor, out: Tensor, lse: Tensor, exact: AttendReference) -> bool:
    """The output is the leading key's value bit for bit (0 without one); LSE is -inf or within its bound."""
    values = case.v[lead.clamp(min=0)].masked_fill((lead < 0)[:, None, None], 0.0)
    return torch.equal(out, values) and bool((ratio(lse, exact.lse, exact.bound.tol_lse) <= 1).all())
