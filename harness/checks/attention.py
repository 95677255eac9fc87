"""Output and LSE of some attention rows against one reference: shared by every stage that has both."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.checks.verdict import compare_bounded, diagnose_lse
from reference.bound import AttendReference
from reports.records import CheckRecord, Place

MAX_JUDGE_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 29}
"""float64 elements that one reference of the judge may hold at a time, keys, values and named terms together."""
_COPIES_OF_KEYS = 4
_COPIES_OF_ROWS = 12

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


def head_groups(rows: int, keys: int, heads: int, widths: tuple[int, int], device: torch.device) -> list[slice]:
    """Heads to judge together, so that the float64 reference of a full-size call fits in memory.

    `widths` are those of q and k, and of v. One group for every call of ordinary size.
    """
    per_head = _COPIES_OF_KEYS * keys * sum(widths) + _COPIES_OF_ROWS * rows * widths[1]
    size = max(1, min(heads, MAX_JUDGE_ELEMENTS.get(device.type, 1 << 24) // max(1, per_head)))
    return [slice(first, min(first + size, heads)) for first in range(0, heads, size)]


def compare_attention(
    stage: str,
    name: str,
    out: torch.Tensor,
    lse: torch.Tensor,
    exact: AttendReference,
    place: RowPlace,
    *,
    watch: bool = True,
    first_head: int = 0,
) -> list[CheckRecord]:
    """Checks `{name}.lse` and `{name}.out`: out `[n, H, Dv]`, lse `[H, n]`, heads from `first_head` on."""

    def at(row: int, head: int, column: int | None) -> Place:
        return place(row).model_copy(update={"head": first_head + head, "column": column})

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
