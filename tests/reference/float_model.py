"""A float32 model of flash attention with 16-bit operands, and the input families that bounds are tried on.

It rounds where a GPU kernel rounds: float32 scores, base-2 exponentials with the error of the hardware's,
P in the storage type, a running maximum with rescales, float32 sums in the declared order, partials stored
in the storage type and merged one after the other. With `tensor_cores` both products are accumulated 16 at
a time with aligned truncation, as measured on NVIDIA tensor cores (Fasi et al. 2021).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Case:
    """Inputs of one request: q `[n, H, D]`, k `[K, H, D]`, v `[K, H, Dv]`, allowed `[n, K]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    scale: float


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


def split_evenly(num_keys: int, parts: int) -> list[tuple[int, int]]:
    """`parts` segments of nearly equal length, not aligned to anything."""
    edges = [num_keys * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


_Change = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor, Tensor]]


def _chunk_gaps(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    level = torch.randint(-3, 4, (8,), generator=g).repeat_interleave(-(-len(k) // 8))[: len(k)]
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = 4 * q.shape[2] ** 0.5, level[:, None]  # scores of a chunk move by 4 * level
    return q, k, v


def _ties(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return q, k[torch.randint(0, 5, (len(k),), generator=g)], v


def _repeated_tokens(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.where(torch.rand(len(k), generator=g) < 0.95, 0, torch.arange(len(k)))
    return q, k[tokens], v[tokens]


def _ramp(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k = q / 8, k.clone()
    q[..., 0], k[..., 0] = q.shape[2] ** 0.5, torch.linspace(0, 3, len(k))[:, None]
    return q, k, v


def _one_key_and_ties(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    k = k[:1].expand_as(k).clone()
    k[::97] = k[::97] * 0.7
    return q, k, v


FAMILIES: dict[str, _Change] = {
    "unit normal": lambda q, k, v, g: (q, k, v),
    "flat": lambda q, k, v, g: (q / 64, k, v),
    "zero query": lambda q, k, v, g: (q * 0, k, v),
    "sharp": lambda q, k, v, g: (q * 6, k, v),
    "offset V": lambda q, k, v, g: (q, k, v + 8),
    "flat, offset V": lambda q, k, v, g: (q / 64, k, v + 8),
    "heavy-tailed V": lambda q, k, v, g: (q, k, v / (torch.rand(v.shape, generator=g) + 1e-3) ** 2),
    "alternating V": lambda q, k, v, g: (
        q,
        k,
        torch.ones_like(v) * (1 - 2 * (torch.arange(len(v)) % 2)).view(-1, 1, 1),
    ),
    "constant V": lambda q, k, v, g: (q, k, torch.full_like(v, 1.3)),
    "chunk gaps": _chunk_gaps,
    "ties": _ties,
    "repeated tokens": _repeated_tokens,
    "one key and ties": _one_key_and_ties,
    "ramp": _ramp,
    "all positive": lambda q, k, v, g: (q.abs() / 2, k.abs(), v.abs()),
    "offset K": lambda q, k, v, g: (q * 0 + 1 + q / 16, k / 16 + 1, v),
    "near overflow": lambda q, k, v, g: (q * 100, k, v),
    "tiny": lambda q, k, v, g: (q * 1e-20, k * 1e-15, v * 1e-36),
    "heavy-tailed K": lambda q, k, v, g: (q, k / (torch.rand(k.shape, generator=g) + 0.05), v),
}
"""name -> change of unit normal q, k, v."""

ORDINARY = ("unit normal", "flat", "sharp", "all positive", "ramp")
"""Families in which a bound that is far from every error would be useless."""


def make_case(
    family: str, seed: int, *, n: int, heads: int, keys: int, topk: int, dim: int, v_dim: int,
    storage: torch.dtype = torch.bfloat16,
) -> Case:  # fmt: skip
    """One case of a family: `topk` of `keys` keys at random for each row."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(m, heads, dim, generator=g) for m in (n, keys))
    v = torch.randn(keys, heads, v_dim, generator=g)
    q, k, v = (x.to(storage) for x in FAMILIES[family](q, k, v, g))
    chosen = torch.rand(n, keys, generator=g).argsort(dim=1)[:, :topk]
    allowed = torch.zeros(n, keys, dtype=torch.bool).scatter_(1, chosen, True)
    return Case(q, k, v, allowed, dim**-0.5)
