"""What share of single wrong keys is noticed? One key of a row is really dropped or added, the kernel is run, and its
result is judged by the bound of the right set; then by a read-out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.checks.readout import name_attended
from harness.measure.families import Case, make_case, split_evenly
from harness.measure.kernels import Kernel
from harness.measure.tightness import judge, reference

FAMILIES = ("flat", "unit normal", "temperature 0.5")
TOPK_KEYS = ((256, 1024), (2048, 4096))
"""(selected keys, keys) of a row."""
CHUNKS = (1, 4, 8)
FAULTS = ("dropped", "added")
TARGETS: dict[tuple[str, int], float] = {
    ("flat", 256): 0.999,
    ("flat", 2048): 0.999,
    ("unit normal", 256): 0.99,
    ("unit normal", 2048): 0.75,
    ("temperature 0.5", 256): 0.99,
    ("temperature 0.5", 2048): 0.99,
}
"""Least share of faults noticed, by family and selected keys."""


@dataclass
class Noticed:
    """Counts for one family, size, chunk count and kind of fault. A trial is one wrong key in one row of one head."""

    family: str
    topk: int
    keys: int
    chunks: int
    fault: str
    trials: int = 0
    by_lse: int = 0
    by_out: int = 0
    by_either: int = 0
    rows: int = 0
    """Wrong rows: all heads of a row share its mask."""
    rows_noticed: int = 0
    """Rows of which some head shows the fault."""
    named: int = 0
    """Rows whose wrong key the read-out named, and no other."""
    rows_read: int = 0
    accused: int = 0
    """Right rows that the bound accused: must be 0."""

    @property
    def share(self) -> float:
        """Share of trials that LSE or output show."""
        return self.by_either / max(self.trials, 1)

    @property
    def met(self) -> bool:
        """Whether the target is met; added keys have the same one."""
        target = TARGETS.get((self.family, self.topk), 0.0)
        return self.share >= target and self.named == self.rows_read and self.accused == 0


@dataclass
class Sensitivity:
    """What `measure` found."""

    subject: str
    cells: list[Noticed] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def met(self) -> bool:
        """Whether every target is met."""
        return all(cell.met for cell in self.cells)


def measure(
    kernel: Kernel,
    trials: int,
    *,
    seed: int = 0,
    sizes: tuple[tuple[int, int], ...] = TOPK_KEYS,
    n: int,
    heads: int,
    dim: int = 192,
    v_dim: int = 128,
) -> Sensitivity:
    """At least `trials` trials for each family, size, chunk count and kind of fault, `n * heads` at a time."""
    start = time.monotonic()
    found = Sensitivity(kernel.name)
    for family in FAMILIES:
        for topk, keys in sizes:
            for chunks in CHUNKS:
                cells = {fault: Noticed(family, topk, keys, chunks, fault) for fault in FAULTS}
                found.cells += cells.values()
                number = seed
                while cells["added"].trials < trials:
                    case = make_case(
                        family, number, n=n, heads=heads, keys=keys, topk=topk, dim=dim, v_dim=v_dim,
                        device=kernel.device,
                    )  # fmt: skip
                    _try_case(case, kernel, chunks, cells, trials, number, read=number == seed)
                    number += 1
    found.seconds = time.monotonic() - start
    return found


def _try_case(
    case: Case, kernel: Kernel, chunks: int, cells: dict[str, Noticed], trials: int, seed: int, *, read: bool
) -> None:
    """Up to four faults of each kind for every row of one case: the reference is the dear part."""
    segments = split_evenly(len(case.k), chunks)
    exact = reference(case, kernel.numerics, segments)
    right = judge(*kernel.run(case, segments), exact)
    accused = int(((right[0] > 1) | (right[1].T > 1)).sum())
    generator = torch.Generator(kernel.device).manual_seed(seed)
    for fault, cell in cells.items():
        cell.accused += accused
        for turn in range(4):
            if cell.trials >= trials:
                break
            wrong = with_one_wrong_key(case, generator, dropped=fault == "dropped")
            out, lse = judge(*kernel.run(wrong, segments), exact)
            by_lse, by_out = lse.T > 1, out > 1
            cell.trials += by_out.numel()
            cell.by_lse += int(by_lse.sum())
            cell.by_out += int(by_out.sum())
            cell.by_either += int((by_lse | by_out).sum())
            cell.rows += len(by_out)
            cell.rows_noticed += int((by_lse | by_out).any(dim=1).sum())
            if read and turn == 0:
                named = [name_attended(kernel.attend, shape)[0] for shape in kernel.readout_shapes(wrong, segments)]
                seen = torch.cat(named, dim=1) != case.allowed
                really = wrong.allowed != case.allowed
                cell.named += int((seen == really).all(dim=1).sum())
                cell.rows_read += len(seen)


def with_one_wrong_key(case: Case, generator: torch.Generator, *, dropped: bool) -> Case:
    """The case with one random allowed key of every row dropped, or one other key added."""
    order: Tensor = torch.rand(case.allowed.shape, generator=generator, device=case.allowed.device)
    key = order.masked_fill(case.allowed != dropped, -1.0).argmax(dim=1)
    allowed = case.allowed.clone()
    allowed[torch.arange(len(key), device=key.device), key] = not dropped
    return Case(case.q, case.k, case.v, allowed, case.scale)
