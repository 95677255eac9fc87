"""Stage `merge`: running context partials and the final merge, on the actual partials."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.checks.attention import compare_attention, packed_rows
from harness.checks.verdict import check_shape, compare_exact, failed
from optimized.trace import AttendEvent, MergeEvent, PartialEvent
from reference.bound_stages import merge_reference
from reference.numerics import Numerics
from reports.records import CheckRecord, Place, Status
from reports.text import described

STAGE = "merge"


def check_merge(event: MergeEvent, numerics: Numerics, first_token: int = 0) -> list[CheckRecord]:
    """One merge of two partials: output and LSE."""
    return compare_merge(
        event.call,
        None,
        first_token,
        (event.prefix_out, event.prefix_lse),
        (event.suffix_out, event.suffix_lse),
        (event.out, event.lse),
        numerics,
    )


def compare_merge(
    call: str,
    chunk: int | None,
    first_token: int,
    prefix: tuple[torch.Tensor, torch.Tensor],
    suffix: tuple[torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, torch.Tensor],
    numerics: Numerics,
) -> list[CheckRecord]:
    """`merged` against the float64 merge of `prefix` and `suffix`, each `(out [n, H, D], lse [H, n])`."""
    out, lse = merged
    wrong = check_shape(STAGE, "merge.out", out, tuple(prefix[0].shape), prefix[0].dtype)
    wrong = wrong or check_shape(STAGE, "merge.lse", lse, tuple(prefix[1].shape), torch.float32)
    if wrong is not None:
        return [wrong]
    exact = merge_reference(
        prefix_out=prefix[0],
        prefix_lse=prefix[1],
        suffix_out=suffix[0],
        suffix_lse=suffix[1],
        numerics=numerics,
    )
    place = packed_rows(first_token, call, chunk)
    return compare_attention(STAGE, "merge", out, lse, exact, place, watch=False)


def check_partial(
    call: str,
    chunk: int,
    event: PartialEvent,
    before_out: torch.Tensor,
    before_lse: torch.Tensor,
    attend: AttendEvent,
    first_token: int,
    continuation_end: int,
    numerics: Numerics,
) -> list[CheckRecord]:
    """The running partial after one chunk.

    Tokens of the chunk up to `continuation_end` are merged, the others of the chunk are copied, tokens outside
    the chunk stay as they were.
    """
    wrong = check_shape(STAGE, "merge.partial", event.out, tuple(before_out.shape), before_out.dtype)
    wrong = wrong or check_shape(STAGE, "merge.partial", event.lse, tuple(before_lse.shape), torch.float32)
    if wrong is not None:
        return [wrong]
    stop = first_token + attend.out.shape[0]
    merged = continuation_end - first_token
    out, lse = before_out.clone(), before_lse.clone()
    out[continuation_end:stop] = attend.out[merged:]
    lse[:, continuation_end:stop] = attend.lse[:, merged:]
    found_out, found_lse = event.out.clone(), event.lse.clone()
    rows = slice(first_token, continuation_end)
    found_out[rows], found_lse[:, rows] = out[rows], lse[:, rows]
    records = [
        compare_exact(
            STAGE,
            "merge.partial_out",
            found_out,
            out,
            lambda index: Place(call=call, chunk=chunk, token=index[0], head=index[1], column=index[2]),
        ),
        compare_exact(
            STAGE,
            "merge.partial_lse",
            found_lse,
            lse,
            lambda index: Place(call=call, chunk=chunk, token=index[1], head=index[0]),
        ),
    ]
    if merged:
        records += compare_merge(
            call,
            chunk,
            first_token,
            (before_out[rows], before_lse[:, rows]),
            (attend.out[:merged], attend.lse[:, :merged]),
            (event.out[rows], event.lse[:, rows]),
            numerics,
        )
    return records


Merge = Callable[..., None]
"""`merge(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)`, as `merge_attn_states`."""
_HEAD_PAD = 8


def check_merge_alone(event: MergeEvent, merge: Merge) -> CheckRecord:
    """A traced merge once more, on the same numbers laid out otherwise: the same bits.

    Each side has strides of its own here, which in a layer they rarely have, and the output of a side without keys
    is NaN, as a kernel that leaves it unwritten may hand it over: it must not be read.
    """
    prefix = _laid_out(event.prefix_out, event.prefix_lse, 0)
    suffix = _laid_out(event.suffix_out, event.suffix_lse, _HEAD_PAD)
    out, lse = torch.full_like(event.out, torch.nan), torch.full_like(event.lse, torch.nan)
    try:
        merge(out, prefix, event.prefix_lse, suffix, event.suffix_lse, lse)
    except Exception as error:
        message = f"the merge of padded heads raised {described(error)}"
        return failed(STAGE, "merge.alone", message, Place(call=event.call), status=Status.CONTRACT)
    records = (
        compare_exact(
            STAGE,
            "merge.alone",
            out,
            event.out,
            lambda index: Place(call=event.call, token=index[0], head=index[1], column=index[2]),
        ),
        compare_exact(
            STAGE, "merge.alone", lse, event.lse, lambda index: Place(call=event.call, token=index[1], head=index[0])
        ),
    )
    return next((record for record in records if record.status.is_finding), records[0])


def _laid_out(out: torch.Tensor, lse: torch.Tensor, head_pad: int) -> torch.Tensor:
    """`out [T, H, D]` in heads of `D + head_pad` elements; NaN in the padding and wherever `lse [H, T]` is -inf."""
    tokens, heads, width = out.shape
    wide = out.new_full((tokens, heads, width + head_pad), torch.nan)
    wide[..., :width] = torch.where(torch.isneginf(lse).t().unsqueeze(-1), torch.nan, out)
    return wide[..., :width]
