"""Read-outs: what an attention call really attended, exactly and without a tolerance (JUDGEMENT section 3).

Counting: with q = 0 every score is 0, so `exp(LSE)` is the number of keys that a row attended. Naming: with q = 0
and V one-hot over a window of keys, an output column is positive exactly where its key was attended. A mask is
shared by the heads, so each head shows its own window: `H * v` keys a launch. Showing: with one V for all keys the
output must be that V, whatever keys were attended.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

WORD_BITS = 32
COUNT_ERROR = 0.01
"""So far from a whole number `exp(LSE)` may be and still be a count; float32 gives 1e-6 of the number."""


class Attend(Protocol):
    """One varlen attention call; the signature of `optimized.attention.api.masked_mha` without its first argument."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        *,
        mask: torch.Tensor | None,
        offset: bool,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class AttendShape:
    """The structure of one call, without its numbers."""

    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    max_seqlen_q: int
    max_seqlen_k: int
    heads: int
    qk_width: int
    v_width: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    mask: torch.Tensor | None
    offset: bool
    causal: bool


def _call(attend: Attend, shape: AttendShape, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.zeros(shape.cu_seqlens_q[-1], shape.heads, shape.qk_width, dtype=shape.dtype, device=shape.device)
    k = torch.zeros(shape.cu_seqlens_k[-1], shape.heads, shape.qk_width, dtype=shape.dtype, device=shape.device)
    offsets = [
        torch.tensor(starts, dtype=torch.int32, device=shape.device)
        for starts in (shape.cu_seqlens_q, shape.cu_seqlens_k)
    ]
    return attend(
        q,
        k,
        v,
        offsets[0],
        offsets[1],
        shape.max_seqlen_q,
        shape.max_seqlen_k,
        shape.scale,
        mask=None if shape.mask is None else shape.mask.clone(),
        offset=shape.offset,
        causal=shape.causal,
    )


def count_attended(attend: Attend, shape: AttendShape) -> torch.Tensor:
    """`[H, Tq]` float64: keys that each row attended; an integer in every right answer, 0 for an empty row."""
    v = torch.zeros(shape.cu_seqlens_k[-1], shape.heads, shape.v_width, dtype=shape.dtype, device=shape.device)
    _, lse = _call(attend, shape, v)
    counted: torch.Tensor = lse.double().exp()
    return counted


def name_attended(attend: Attend, shape: AttendShape, head: int | None = None) -> list[torch.Tensor]:
    """For each request bool `[q_len, k_len]`: whether the row attended the key (key positions in the segment).

    Each key is shown by one head only, or all of them by `head`, which takes `H` times as many launches.
    """
    q_starts, k_starts = shape.cu_seqlens_q, shape.cu_seqlens_k
    k_lens = [stop - start for start, stop in pairwise(k_starts)]
    named = [
        torch.zeros(q_starts[i + 1] - q_starts[i], k_len, dtype=torch.bool, device=shape.device)
        for i, k_len in enumerate(k_lens)
    ]
    heads = slice(None) if head is None else slice(head, head + 1)
    window = shape.v_width * (shape.heads if head is None else 1)
    for base in range(0, max(k_lens, default=0), window):
        v = torch.zeros(k_starts[-1], shape.heads, shape.v_width, dtype=shape.dtype, device=shape.device)
        for start, k_len in zip(k_starts, k_lens, strict=False):
            slot = torch.arange(min(window, max(k_len - base, 0)), device=shape.device)
            v[start + base + slot, slot // shape.v_width + (head or 0), slot % shape.v_width] = 1.0
        out, _ = _call(attend, shape, v)
        seen = (out[:, heads] > 0).flatten(1)
        for request, k_len in enumerate(k_lens):
            shown = min(window, k_len - base)
            if shown > 0:
                rows = slice(q_starts[request], q_starts[request + 1])
                named[request][:, base : base + shown] = seen[rows, :shown]
    return named


def shown_wrongly(attend: Attend, shape: AttendShape, relative: float = 0.0) -> tuple[int, int, int] | None:
    """(row of the packed queries, head, column) where the output is not the V that all keys share, or None.

    V is an integer below 252 in each column of each head, another one in neighbouring columns and heads, so that
    sums and the quotient are exact; `relative` is for kernels that round probabilities after they divided. Rows of
    zeros are left out: they may have attended nothing.
    """
    pattern = torch.arange(shape.heads * shape.v_width, device=shape.device).remainder(251).add(1)
    value = pattern.view(shape.heads, shape.v_width).to(shape.dtype)
    out, _ = _call(attend, shape, value.expand(shape.cu_seqlens_k[-1], -1, -1).contiguous())
    wrong = ~((out.float() - value.float()).abs() <= relative * value.float()) & (out != 0).any(dim=2, keepdim=True)
    where = wrong.nonzero()
    return None if where.shape[0] == 0 else (int(where[0, 0]), int(where[0, 1]), int(where[0, 2]))


@dataclass(frozen=True)
class SetDifference:
    """The first row whose attended set is wrong."""

    row: int
    attended: list[int]
    """Keys attended that are not allowed."""
    missed: list[int]
    """Keys allowed that were not attended."""
    wrong_rows: int

    @property
    def key(self) -> int:
        """The first key in question."""
        return min([*self.missed, *self.attended])

    def place(self, key_start: int = 0) -> dict[str, Any]:
        """Row and first key in question, as fields of a Place; word and bit as in `describe`."""
        word, bit = divmod(self.key + key_start, WORD_BITS)
        return {"row": self.row, "key": self.key, "word": word, "bit": bit}

    def describe(self, key_start: int = 0) -> str:
        """`row 17 attended key 513 (word 16, bit 1), missed key 31 (word 0, bit 31)`.

        Words and bits are those of a mask in which this segment begins at bit `key_start`.
        """
        parts = []
        for verb, keys in (("attended", self.attended), ("missed", self.missed)):
            if keys:
                named = ", ".join(
                    f"key {key} (word {(key + key_start) // WORD_BITS}, bit {(key + key_start) % WORD_BITS})"
                    for key in keys[:3]
                )
                more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
                parts.append(f"{verb} {named}{more}")
        return f"row {self.row} {', '.join(parts)} ({self.wrong_rows} wrong rows)"


def first_difference(attended: torch.Tensor, allowed: torch.Tensor) -> SetDifference | None:
    """Compare two sets, both bool `[q_len, k_len]`."""
    wrong = attended != allowed
    rows = wrong.any(dim=1).nonzero().flatten()
    if rows.numel() == 0:
        return None
    row = int(rows[0])
    extra = (attended[row] & ~allowed[row]).nonzero().flatten().tolist()
    missed = (allowed[row] & ~attended[row]).nonzero().flatten().tolist()
    return SetDifference(row, extra, missed, int(rows.numel()))
