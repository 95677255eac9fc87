"""Corners in which a bound could accuse a right result, or excuse any: tolerances stay numbers."""

from __future__ import annotations

import pytest
import torch

from harness.checks.facts import Facts
from harness.checks.prefill import raw_reference
from harness.checks.verdict import compare_bounded
from harness.problems.names import FAMILIES, Family
from harness.problems.problem import DataSpec
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer
from reference.bound import attend_reference
from reference.bound_rows import InputError
from reference.numerics import TRITON
from reports.records import Status
from tests.harness.traced import MANY


def test_a_zero_value_under_huge_scores_has_a_tolerance() -> None:
    """Rounded inputs move such scores without limit, and the effect on a value that is 0 is still 0."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, 1, 16, generator=g).bfloat16() * 1e3 for n in (2, 9))
    v = torch.randn(9, 1, 4, generator=g).bfloat16()
    v[..., 1] = 0
    exact = attend_reference(
        q=q, k=k, v=v, allowed=torch.ones(2, 9, dtype=torch.bool), scale=1.0, numerics=TRITON,
        input_error=InputError(rounded_factor="k", rounded_dims=16, values_rounded=True),
    )  # fmt: skip
    assert bool(exact.bound.tol_out.isfinite().all())
    assert bool(exact.bound.tol_lse.isfinite().all())
    record = compare_bounded("prefill", "prefill.raw.out", exact.out, exact.out, exact.bound.tol_out)
    assert record.status is Status.PASS
    record = compare_bounded("prefill", "prefill.raw.out", exact.out + 1e-6, exact.out, exact.bound.tol_out)
    assert record.status is Status.FAIL


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["global_mask", "mqa"])
def test_end_to_end_tolerances_are_numbers_in_every_family(family: Family, path: str) -> None:
    problem = MANY.replace(data=DataSpec(family=family, seed=7), force="mqa" if path == "mqa" else None)
    facts = Facts(problem, build_inputs(problem), OurLayer("triton").contract)
    bound = raw_reference(facts, path).bound
    for tolerance in (bound.tol_out, bound.tol_lse):
        assert bool(tolerance.isfinite().all())
        assert float(tolerance.min()) >= 0
