"""Pieces of the attention bound that look at single keys: cells of equal scores, row sums, rescales.

Everything works on one segment of one block of rows: `p [H, n, K]` are exact probabilities (0 outside the
allowed set, normalised over the whole row), `allowed [n, K]` is shared by the heads. Results are per row and
head, `[H, n]`, already weighted by the segment's share of the row. The derivations are in `reference.bound`.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone knows)
from torch import Tensor

from reference.numerics import RowSum


def count_in_cell(scores: Tensor, allowed: Tensor, width: float) -> Tensor:
    """For each key, how many allowed keys of its row have their score in the same cell, `[H, n, K]`."""
    cells = torch.floor(scores / width).masked_fill(~allowed, torch.inf)
    ordered = cells.sort(dim=-1).values
    return torch.searchsorted(ordered, cells, right=True) - torch.searchsorted(ordered, cells)


def repeats(x: Tensor, width: float) -> Tensor:
    """For each entry, how many entries along the last axis have nearly its size: they may round alike."""
    everything = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
    return count_in_cell(x.abs().log2(), everything, width)


def row_sum_error(
    p: Tensor, allowed: Tensor, in_cell: Tensor, row_sum: RowSum, slots: int | None
) -> tuple[Tensor, Tensor]:
    """Rounding errors of the row sum in units of u32: a sum that no rounding can pass, and a sum of squares.

    The first is `sum_j p_j r_j`, `r_j` the additions that key j passes through. The second is
    `sum_i g_i s_i^2` over all additions with partial sums s_i; inf where the order is not known.
    """
    if row_sum.running == "lane":
        return _lane_errors(p, allowed, in_cell, row_sum)
    share = p.sum(dim=-1)
    unknown = torch.full_like(share, torch.inf)
    if row_sum.running == "any":
        chain = allowed.sum(dim=-1).double()
        if slots is not None:
            chain = chain.clamp(max=row_sum.tile_keys + -(-slots // row_sum.smallest_tile))
        return share * chain, unknown
    passes = _tile_passes(allowed, row_sum)
    return torch.einsum("hnk,nk->hn", p, passes), unknown


def _tile_passes(allowed: Tensor, row_sum: RowSum) -> Tensor:
    """`[n, K]`: additions that each key passes through when tiles are summed one by one."""
    n, keys = allowed.shape
    padded = F.pad(allowed, (0, -keys % row_sum.tile_keys)).view(n, -1, row_sum.tile_keys)
    if row_sum.running == "first_lane":
        lanes = padded.view(n, padded.shape[1], -1, row_sum.lanes, row_sum.lane_run)
        chain = lanes.sum(dim=(2, 4)).amax(dim=-1).double()
        per_tile = torch.where(chain > 0, chain + row_sum.combine, 0.0)
        passes = _sum_from_here(per_tile, row_sum.last_tile_first).repeat_interleave(row_sum.tile_keys, dim=1)
        return passes[:, :keys]
    own = padded.sum(dim=-1).double().repeat_interleave(row_sum.tile_keys, dim=1)[:, :keys]
    small = F.pad(allowed, (0, -keys % row_sum.smallest_tile)).view(n, -1, row_sum.smallest_tile)
    later = _sum_from_here(small.any(dim=-1).double(), row_sum.last_tile_first)
    return own + row_sum.combine * later.repeat_interleave(row_sum.smallest_tile, dim=1)[:, :keys]


def _sum_from_here(x: Tensor, last_first: bool) -> Tensor:
    """Sum over this entry and those visited after it, along the last axis."""
    return x.cumsum(dim=-1) if last_first else x.flip(-1).cumsum(dim=-1).flip(-1)


def _lane_errors(p: Tensor, allowed: Tensor, in_cell: Tensor, row_sum: RowSum) -> tuple[Tensor, Tensor]:
    """As `row_sum_error`, for lanes that carry their own running sums through all tiles.

    The tile size is only known to be at most `tile_keys`. In whatever tile a key falls, the keys visited
    before it lie within one tile's length of those before it in plain order; hence the shifts by `slack`.
    """
    member = _by_lane(allowed, row_sum)
    mass = _by_lane(p, row_sum)
    squares = _by_lane(in_cell * allowed, row_sum)
    slack = row_sum.tile_keys // row_sum.lanes
    if row_sum.last_tile_first:
        member, mass, squares = member.flip(-1), mass.flip(-1), squares.flip(-1)
    counts, sums = member.double().cumsum(dim=-1), mass.cumsum(dim=-1)
    passes = counts[..., -1:] - _shift_right(counts, slack + 1)
    partial = _shift_left(sums, slack)
    certain = torch.einsum("hnlk,nlk->hn", mass, passes) + row_sum.combine * sums[..., -1].sum(dim=-1)
    return certain, torch.einsum("hnlk,hnlk,hnlk->hn", squares.double(), partial, partial)


def _by_lane(x: Tensor, row_sum: RowSum) -> Tensor:
    """`[..., K]` -> `[..., lanes, K / lanes]`, padded with zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % (row_sum.lanes * row_sum.lane_run)))
    split = padded.view(*x.shape[:-1], -1, row_sum.lanes, row_sum.lane_run)
    return split.transpose(-3, -2).reshape(*x.shape[:-1], row_sum.lanes, -1)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Entry i becomes entry i - by, or 0."""
    return F.pad(x, (by, 0))[..., : x.shape[-1]]


def _shift_left(x: Tensor, by: int) -> Tensor:
    """Entry i becomes entry i + by, or the last one."""
    by = min(by, x.shape[-1])
    return torch.cat([x[..., by:], x[..., -1:].expand(*x.shape[:-1], by)], dim=-1)


def rescaled_mass(scores: Tensor, p: Tensor, allowed: Tensor, row_sum: RowSum) -> Tensor:
    """Sum over the rescales of the running sum of the mass that each one multiplies, `[H, n]`.

    scores must be -inf outside the allowed set. A tile raises the running maximum only if one of its keys is
    above all keys before it, so counting such keys one by one counts no rescale too few.
    """
    share = p.sum(dim=-1)
    if row_sum.running == "any":
        return share * (allowed.sum(dim=-1).double() - 1).clamp(min=0, max=4)
    if row_sum.last_tile_first:
        scores, p = scores.flip(-1), p.flip(-1)
    highest = scores.cummax(dim=-1).values
    before = F.pad(highest[..., :-1], (1, 0), value=-torch.inf)
    mass_before = F.pad(p.cumsum(dim=-1)[..., :-1], (1, 0))
    return (mass_before * (highest > before)).sum(dim=-1)


def product_steps(allowed: Tensor, row_sum: RowSum, slots: int | None) -> tuple[Tensor, Tensor]:
    """Steps of the second product per row `[n]`: selected keys, and blocks of 16 keys that hold one."""
    selected = allowed.sum(dim=-1).double()
    if row_sum.running == "any":
        return selected, selected if slots is None else selected.clamp(max=-(-slots // 16))
    n, keys = allowed.shape
    blocks = F.pad(allowed, (0, -keys % 16)).view(n, -1, 16).any(dim=-1)
    return selected, blocks.sum(dim=-1).double()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`[H, n, x] @ [H or 1, x, y]` without copying a shared right-hand side for each head."""
    if b.shape[0] == 1 and a.shape[0] > 1:
        return (a.reshape(-1, a.shape[2]) @ b[0]).view(a.shape[0], a.shape[1], -1)
    return a @ b


def first_product(q: Tensor, k: Tensor, k_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`q . k` of q `[H, n, D]` and k `[H or 1, D, K]` (k_size: `|k|`), and its partial sums; all `[H, n, K]`.

    Returns the product, `sum_i s_i^2` over the partial sums of all D additions, and `sum_b max |s|` over the ends
    of blocks of 16 dims. Partial sums inside a block lie within `(|s_before| + |s_after| + sum |q_d k_d|) / 2`.
    """
    total = torch.zeros(q.shape[0], q.shape[1], k.shape[2], dtype=q.dtype, device=q.device)
    squares, ends = torch.zeros_like(total), torch.zeros_like(total)
    before = torch.zeros_like(total)
    q_size = q.abs()
    for first in range(0, q.shape[2], 16):
        dims = slice(first, first + 16)
        total += matmul(q[..., dims], k[:, dims])
        after = total.abs()
        reach = matmul(q_size[..., dims], k_size[:, dims]).add_(before).add_(after)
        squares.addcmul_(reach, reach, value=min(16, q.shape[2] - first) / 4)
        ends += torch.maximum(before, after, out=before)
        before = after
    return total, squares, ends
