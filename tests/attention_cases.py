"""Masks from plain sets, a naive float64 attention, and a tolerance for it: shared by the attention tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def offsets(lens: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """[B + 1] int32: where each request's rows start."""
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)


def as_int32(value: int) -> int:
    """The int32 of the same 32 bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_mask(
    keep: Sequence[Tensor], words: int, padded_q: int, key_starts: Sequence[int] | None = None, stray: int = 0
) -> Tensor:
    """[B, padded_q, words] int32 in which query i of request b may see segment key n where `keep[b][i, n]`.

    With key starts, key n is bit `key_starts[b] + n`, the last word of query row 0 holds the key start, and the
    last word of the other rows holds `stray`, which is no data.
    """
    masks = []
    for b, rows in enumerate(keep):
        start = 0 if key_starts is None else key_starts[b]
        bits = torch.zeros(padded_q, words * 32, dtype=torch.int64, device=rows.device)
        bits[: rows.shape[0], start : start + rows.shape[1]] = rows
        packed = (bits.view(padded_q, words, 32) << torch.arange(32, device=rows.device)).sum(-1)
        if key_starts is not None:
            packed[:, -1] = stray
            packed[0, -1] = start
        masks.append(torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32))
    return torch.stack(masks)


@dataclass(frozen=True)
class Expected:
    """Exact results and how far a right kernel may be from them."""

    out: Tensor
    """[Tq, H, Dv] float64."""
    lse: Tensor
    """[H, Tq] float64."""
    out_tolerance: Tensor
    lse_tolerance: Tensor

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Empty rows exactly, others within the tolerance; says where it fails."""
        empty = self.lse.isinf()
        assert torch.equal(lse.isneginf(), empty), f"empty rows: {lse.isneginf().nonzero()[:4].tolist()}"
        assert (out.transpose(0, 1)[empty] == 0).all(), "an empty row has a non-zero output"
        _check_close("LSE", lse[~empty], self.lse[~empty], self.lse_tolerance[~empty])
        _check_close("output", out, self.out, self.out_tolerance)


def _check_close(name: str, found: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    shares = (found.double() - expected).abs() / tolerance
    bad = (~(shares <= 1)).nonzero()  # NaN is bad too
    assert len(bad) == 0, f"{name} is off by {shares[tuple(bad[0])]:.3g} tolerances at {bad[0].tolist()}"


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    keep: Sequence[Tensor],
    scale: float,
) -> Expected:
    """float64 attention, request by request and with every score spelt out.

    The tolerance allows each probability and the output one rounding to the storage dtype, and scores float32.
    """
    unit = UNIT[q.dtype]
    heads, tokens, width = q.shape[1], q.shape[0], v.shape[2]
    out = torch.zeros(tokens, heads, width, dtype=torch.float64, device=q.device)
    lse = torch.full((heads, tokens), -torch.inf, dtype=torch.float64, device=q.device)
    out_tolerance, lse_tolerance = torch.full_like(out, 1e-30), torch.full_like(lse, 1e-30)
    q_end = k_end = 0
    for b, (q_len, k_len) in enumerate(zip(query_lens, key_lens, strict=True)):
        rows, keys = slice(q_end, q_end + q_len), slice(k_end, k_end + k_len)
        q_end, k_end = q_end + q_len, k_end + k_len
        if q_len == 0 or k_len == 0:
            continue
        allowed = keep[b].to(q.device)
        qd, kd = q[rows].double().transpose(0, 1), k[keys].double().transpose(0, 1)
        vd = v[keys].double().transpose(0, 1)
        scores = qd @ kd.transpose(1, 2) * scale
        # float32 sums of products: their size, not the score's, sets the error
        sizes = qd.abs() @ kd.abs().transpose(1, 2) * abs(scale)
        scores = scores.masked_fill(~allowed, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        p = (scores - scores.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
        o = p @ vd
        error = 2.0**-20 * (sizes.masked_fill(~allowed, 0.0).amax(-1, keepdim=True) + 1)
        out[rows] = o.transpose(0, 1)
        weight = p @ vd.abs()
        out_tolerance[rows] = ((unit + 2 * error) * weight + unit * o.abs() + 1e-30).transpose(0, 1)
        lse_tolerance[:, rows] = error.squeeze(-1)
    return Expected(out, lse, out_tolerance, lse_tolerance)
