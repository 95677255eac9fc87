"""Stage `project`: the up-projection of latent rows, K and V separately."""

from __future__ import annotations

import torch

from harness.checks.facts import Facts
from harness.checks.verdict import Locate, check_shape, compare_bounded, compare_exact
from optimized.trace import ProjectEvent
from reference.bound_stages import projection_bound
from reference.numerics import Numerics
from reports.records import CheckRecord, Place

STAGE = "project"


def check_project(event: ProjectEvent, facts: Facts, chunk: int | None) -> list[CheckRecord]:
    """K's latent part and V within the GEMM bound; K's shared rope part is a copy."""
    dims = facts.problem.dims
    rows = event.kv_c.shape[0]
    wrong = check_shape(STAGE, "project.k", event.k, (rows, dims.heads, dims.qk), event.kv_c.dtype)
    wrong = wrong or check_shape(STAGE, "project.v", event.v, (rows, dims.heads, dims.v), event.kv_c.dtype)
    if wrong is not None:
        return [wrong]

    def locate(index: tuple[int, ...]) -> Place:
        return Place(call=event.call, chunk=chunk, token=index[0], head=index[1], column=index[2])

    weight = facts.inputs.w_kv_b.view(-1, dims.heads, dims.nope + dims.v)
    records = [
        compare_exact(
            STAGE,
            "project.k_rope",
            event.k[..., dims.nope :],
            event.k_pe.expand(rows, dims.heads, dims.rope),
            lambda index: locate((index[0], index[1], index[2] + dims.nope)),
        )
    ]
    for name, actual, columns in (
        ("project.k", event.k[..., : dims.nope], slice(0, dims.nope)),
        ("project.v", event.v, slice(dims.nope, dims.nope + dims.v)),
    ):
        part = weight[..., columns].flatten(1)
        records.append(compare_gemm(STAGE, name, actual, event.kv_c, part, facts.numerics, locate))
    return records


def compare_head_gemm(
    stage: str, actual: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, numerics: Numerics
) -> list[CheckRecord]:
    """`actual [n, H, out]` against `rows [n, H, in] @ weights [H, in, out]`, head by head, rounded once."""
    wrong = check_shape(stage, f"{stage}.out", actual, (*rows.shape[:2], weights.shape[2]), rows.dtype)
    if wrong is not None:
        return [wrong]
    return [
        compare_gemm(
            stage,
            f"{stage}.out",
            actual[:, head],
            rows[:, head],
            weights[head],
            numerics,
            _head_place(head),
        )
        for head in range(rows.shape[1])
    ]


def _head_place(head: int) -> Locate:
    def place(index: tuple[int, ...]) -> Place:
        return Place(token=index[0], head=head, column=index[1])

    return place


def compare_gemm(
    stage: str,
    check: str,
    actual: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    numerics: Numerics,
    locate: Locate,
) -> CheckRecord:
    """`actual [n, ...]` against `rows [n, L] @ weights [L, y]`, `y` the product of the other sizes of `actual`."""
    tolerance, terms = projection_bound(rows, weights, numerics=numerics)
    shape = actual.shape
    exact = (rows.double() @ weights.double()).view(shape)
    parts = {name: term.view(shape) for name, term in terms.items()}
    return compare_bounded(stage, check, actual, exact, tolerance.view(shape), locate, terms=parts, watch=False)
