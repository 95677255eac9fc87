"""Output and LSE of some attention rows against one reference: shared by every stage that has both."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.checks.verdict import compare_bounded, diagnose_lse
from reference.bound import AttendReference
from reports.records import CheckRecord, Place

RowPlace = Callable[[int], Place]
"""Row of the compared rows -> where it is; head and column are added."""


def rows_of_request(request: int, first_token: int, call: str | None = None, chunk: int | None = None) -> RowPlace:
    """Rows that are the query rows of one request, the first of which is packed token `first_token`."""

    def place(row: int) -> Place:
        return Place(call=call, chunk=chunk, request=request, row=row, token=first_token + row)

    return place


def packed_rows(first_token: int, call: str | None = None, chunk: int | None = None) -> RowPlace:
    """Rows that are packed tokens from `first_token` on, whatever their request."""

    def place(row: int) -> Place:
        return Place(call=call, chunk=chunk, token=first_token + row)

    return place


def compare_attention(
    stage: str,
    name: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    exact: AttendReference,
    place: RowPlace,
    *,
    watch: bool = True,
) -> list[CheckRecord]:
    """Checks `{name}.lse` and `{name}.out`: out `[n, H, Dv]`, lse `[H, n]`."""

    def at(row: int, head: int, column: int | None) -> Place:
        return place(row).model_copy(update={"head": head, "column": column})

    return [
        compare_bounded(
            stage,
            f"{name}.lse",
            lse,
            exact.lse,
            exact.bound.tol_lse,
            lambda index: at(index[1], index[0], None),
            terms=exact.bound.lse_terms,
            diagnose=diagnose_lse,
        ),
        compare_bounded(
            stage,
            f"{name}.out",
            out,
            exact.out,
            exact.bound.tol_out,
            lambda index: at(index[0], index[1], index[2]),
            terms=exact.bound.out_terms,
            watch=watch,
        ),
    ]
