"""A float32 model of flash attention with 16-bit operands.

It rounds where a GPU kernel rounds: float32 scores, base-2 exponentials with the error of the hardware's,
P in the storage type, a running maximum with rescales, float32 sums in the declared order, partials stored
in the storage type and merged one after the other. With `tensor_cores` both products are accumulated 16 at
a time with aligned truncation, as measured on NVIDIA tensor cores (Fasi et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.measure.families import Case

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@dataclass(frozen=True, kw_only=True)
class Model:
    """How the modelled kernel computes."""

    storage: torch.dtype = torch.bfloat16
    tile: int = 128
    lanes: bool = False
    """Row sums by four lanes that carry their sums (FA4 on Hopper) instead of by tiles."""
    last_tile_first: bool = False
    tensor_cores: bool = False
    exp_error: float = 4 * 2.0**-24


def _aligned_product(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`c + a [H, n, x] @ b [H, x, y]` on a tensor core; 16-bit a, b and float32 c, all given as float64."""
    for first in range(0, a.shape[2], 16):
        products = a[:, :, first : first + 16, None] * b[:, None, first : first + 16]
        addends = torch.cat([products, c[:, :, None]], dim=2)
        _, exponent = torch.frexp(addends.abs().amax(dim=2, keepdim=True))
        grid = torch.ldexp(torch.ones_like(c[:, :, None]), exponent - 26)  # two bits below float32's last
        total = (torch.trunc(addends / grid) * grid).sum(dim=2)
        _, exponent = torch.frexp(total.abs())
        grid = torch.ldexp(torch.ones_like(total), exponent - 24)
        c = torch.trunc(total / grid) * grid
    return c


def _product(a: Tensor, b: Tensor, c: Tensor, model: Model) -> Tensor:
    """float32 `c + a @ b`, operands float32 that hold 16-bit values."""
    if model.tensor_cores:
        return _aligned_product(a.double(), b.double(), c.double()).float()
    return c + a @ b


def _add_lanes(lane_sums: Tensor, p: Tensor) -> Tensor:
    """lane_sums `[H, n, 4]` plus a tile `[H, n, tile]`, key by key in each lane."""
    padded = torch.nn.functional.pad(p, (0, -p.shape[2] % 8))
    columns = padded.view(*p.shape[:2], -1, 4, 2)
    for group in columns.unbind(dim=2):
        for i in range(2):
            lane_sums = lane_sums + group[..., i]
    return lane_sums


def attend(case: Case, model: Model, seed: int = 0) -> tuple[Tensor, Tensor]:
    """One attention call -> out `[n, H, Dv]` in the storage type, LSE `[H, n]` float32."""
    generator = torch.Generator().manual_seed(seed)

    def exp2(x: Tensor) -> Tensor:
        noise = model.exp_error * (2 * torch.rand(x.shape, generator=generator) - 1)
        return torch.where(x == 0, 1.0, torch.exp2(x) * (1 + noise.double()).float())

    q, k, v = (x.float().transpose(0, 1) for x in (case.q, case.k, case.v))
    heads, n, num_keys = q.shape[0], q.shape[1], k.shape[1]
    factor = torch.tensor(case.scale * LOG2_E).float()
    top = torch.full((heads, n), -torch.inf)
    row_sum = torch.zeros(heads, n, 4) if model.lanes else torch.zeros(heads, n, 1)
    acc = torch.zeros(heads, n, v.shape[2])
    starts = list(range(0, num_keys, model.tile))
    for start in reversed(starts) if model.last_tile_first else starts:
        keys = slice(start, start + model.tile)
        scores = _product(q, k[:, keys].transpose(1, 2), torch.zeros(heads, n, len(case.k[keys])), model)
        scores = (scores * factor).masked_fill(~case.allowed[:, keys], -torch.inf)
        new_top = torch.maximum(top, scores.amax(dim=2))
        shift = torch.where(new_top == -torch.inf, 0.0, new_top)
        p = exp2(scores - shift[..., None])
        decay = exp2(top - shift)[..., None]
        row_sum = row_sum * decay
        row_sum = _add_lanes(row_sum, p) if model.lanes else row_sum + p.sum(dim=2, keepdim=True)
        acc = _product(p.to(model.storage).float(), v[:, keys], acc * decay, model)
        top = new_top
    lane_pairs = row_sum.view(heads, n, 2, 2).sum(dim=3) if model.lanes else row_sum
    total = lane_pairs.sum(dim=2)
    empty = total == 0
    lse = torch.where(empty, -torch.inf, (top + torch.log2(total)) * LN_2)
    out = acc / torch.where(empty, 1.0, total)[..., None]
    return out.to(model.storage).transpose(0, 1), lse


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge of two partials in float32; the result is stored in the type of `out`."""
    top = torch.maximum(lse, other_lse)
    shift = torch.where(top == -torch.inf, 0.0, top)
    a, b = torch.exp(lse - shift), torch.exp(other_lse - shift)
    total = a + b
    merged_lse = torch.where(total == 0, -torch.inf, torch.log(total) + shift)
    weights = [torch.where(total == 0, 0.0, x / total).T[..., None] for x in (a, b)]
    merged = out.float() * weights[0] + other_out.float() * weights[1]
    return merged.to(out.dtype), merged_lse


def run(case: Case, model: Model, segments: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Attention by segments and merges, as the chunk loop does it."""
    result: tuple[Tensor, Tensor] | None = None
    for i, (start, length) in enumerate(segments):
        keys = slice(start, start + length)
        part = attend(Case(case.q, case.k[keys], case.v[keys], case.allowed[:, keys], case.scale), model, seed=i)
        result = part if result is None else merge(*result, *part)
    assert result is not None
    return result
