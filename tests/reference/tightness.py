"""How tight are the bounds? `python -m tests.reference.tightness [seeds]` prints, for each family of the float model,
the largest and the median err / tol of output and LSE over 1..8 segments, and the power on single keys.
"""

import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from harness.measure.families import FAMILIES, Case, make_case, split_evenly
from harness.measure.float_model import Model, run
from reference.bound import attend_reference
from reference.numerics import FA4_SM90, TRITON, Numerics
from reference.power import attend_power

MODELS: dict[str, tuple[Model, Numerics]] = {
    "tiles": (Model(tile=64), TRITON),
    "lanes": (Model(lanes=True, last_tile_first=True), FA4_SM90),
    "tiles, tensor cores": (Model(tile=64, tensor_cores=True), TRITON),
    "lanes, tensor cores": (Model(lanes=True, last_tile_first=True, tensor_cores=True), FA4_SM90),
}


class Margin(NamedTuple):
    """Largest err / tol of one run."""

    out: float
    lse: float


def ratio(error: Tensor, tolerance: Tensor) -> float:
    """Largest err / tol; 0 / 0 passes, NaN does not."""
    r = torch.where((error == 0) & (tolerance == 0), 0.0, error / tolerance)
    return float(r.nan_to_num(nan=torch.inf).max())


def margin(case: Case, model: Model, numerics: Numerics, segments: list[tuple[int, int]]) -> Margin:
    """The model's errors on a case against the bound."""
    exact = attend_reference(
        q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, numerics=numerics,
        segments=segments, keep_terms=False,
    )  # fmt: skip
    out, lse = run(case, model, segments)
    empty = exact.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    lse_error = (lse.double() - exact.lse).abs().masked_fill(empty, 0.0)
    return Margin(ratio((out.double() - exact.out).abs(), exact.bound.tol_out), ratio(lse_error, exact.bound.tol_lse))


def margins(family: str, name: str, seeds: int, *, keys: int, topk: int, dim: int) -> Iterator[Margin]:
    """Margins over seeds and 1, 2, 4, 8 segments."""
    model, numerics = MODELS[name]
    for seed in range(seeds):
        case = make_case(family, seed, n=4, heads=2, keys=keys, topk=topk, dim=dim, v_dim=16)
        for parts in (1, 2, 4, 8):
            yield margin(case, model, numerics, split_evenly(keys, parts))


def main(seeds: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'':41s}out: max  median  LSE: max  median  dropped keys that LSE reveals")
    for family in FAMILIES:
        case = make_case(family, 0, n=4, heads=2, keys=1024, topk=256, dim=64, v_dim=16)
        for name, (_, numerics) in MODELS.items():
            found = list(margins(family, name, seeds, keys=1024, topk=256, dim=64))
            exact = attend_reference(
                q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, numerics=numerics
            )
            seen = attend_power(
                q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, reference=exact
            ).dropped
            columns = [(max(x), statistics.median(x)) for x in zip(*found, strict=True)]
            print(
                f"{family:20s} {name:20s} {columns[0][0]:8.3f} {columns[0][1]:7.3f} {columns[1][0]:8.3f} "
                f"{columns[1][1]:7.3f}  {seen.share(seen.by_lse):.4f}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
