"""Input families on which bounds are measured, one request of attention at a time.

Unlike the families of `harness.problems.data`, which pass through latents and weights, these set K and V directly,
so that they reach what a projection smooths away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Inputs of one request: q `[n, H, D]`, k `[K, H, D]`, v `[K, H, Dv]`, allowed bool `[n, K]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    scale: float

    def to(self, device: torch.device) -> Case:
        """The same case on a device."""
        return Case(self.q.to(device), self.k.to(device), self.v.to(device), self.allowed.to(device), self.scale)


def split_evenly(num_keys: int, parts: int) -> list[tuple[int, int]]:
    """`parts` segments of nearly equal length, not aligned to anything."""
    edges = [num_keys * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


Change = Callable[[Tensor, Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor, Tensor]]
"""Unit normal q, k, v and a generator on their device -> the q, k, v of a family."""


def _uniform(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g, device=g.device)


def _chunk_gaps(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    level = torch.randint(-3, 4, (8,), generator=g, device=g.device).repeat_interleave(-(-len(k) // 8))[: len(k)]
    q, k = q.clone(), k.clone()
    q[..., 0], k[..., 0] = 4 * q.shape[2] ** 0.5, level[:, None].to(k.dtype)  # scores of a chunk move by 4 * level
    return q, k, v


def _ties(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return q, k[torch.randint(0, 5, (len(k),), generator=g, device=g.device)], v


def _repeated_tokens(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.where(_uniform(g, len(k)) < 0.95, 0, torch.arange(len(k), device=g.device))
    return q, k[tokens], v[tokens]


def _ramp(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q, k = q / 8, k.clone()
    q[..., 0], k[..., 0] = q.shape[2] ** 0.5, torch.linspace(0, 3, len(k), device=g.device)[:, None]
    return q, k, v


def _low(level: float) -> Change:
    """All scores lie near `-level`: below any finite number that a kernel may start its maximum with."""

    def change(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        q[..., 0], k[..., 0] = q.shape[2] ** 0.5, -level
        return q, k, v

    return change


def _one_key_and_ties(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    k = k[:1].expand_as(k).clone()
    k[::97] = k[::97] * 0.7
    return q, k, v


def _alternating_v(q: Tensor, k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    sign = 1 - 2 * (torch.arange(len(v), device=g.device) % 2)
    return q, k, torch.ones_like(v) * sign.view(-1, 1, 1)


FAMILIES: dict[str, Change] = {
    "unit normal": lambda q, k, v, g: (q, k, v),
    "temperature 0.5": lambda q, k, v, g: (q / 2, k, v),
    "flat": lambda q, k, v, g: (q / 64, k, v),
    "zero query": lambda q, k, v, g: (q * 0, k, v),
    "sharp": lambda q, k, v, g: (q * 6, k, v),
    "offset V": lambda q, k, v, g: (q, k, v + 8),
    "flat, offset V": lambda q, k, v, g: (q / 64, k, v + 8),
    "heavy-tailed V": lambda q, k, v, g: (q, k, v / (_uniform(g, *v.shape) + 1e-3) ** 2),
    "alternating V": _alternating_v,
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
    "low": _low(2.0**12),
    "very low": _low(2.0**15),
    "heavy-tailed K": lambda q, k, v, g: (q, k / (_uniform(g, *k.shape) + 0.05), v),
}
"""name -> change of unit normal q, k, v."""

ORDINARY = ("unit normal", "flat", "sharp", "all positive", "ramp")
"""Families in which a bound that is far from every error would be useless."""


def make_case(
    family: str,
    seed: int,
    *,
    n: int,
    heads: int,
    keys: int,
    topk: int,
    dim: int,
    v_dim: int,
    storage: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Case:
    """One case of a family: `topk` of `keys` keys at random for each row. Numbers depend on the kind of device."""
    g = torch.Generator(device).manual_seed(seed)
    q, k = (torch.randn(m, heads, dim, generator=g, device=device) for m in (n, keys))
    v = torch.randn(keys, heads, v_dim, generator=g, device=device)
    q, k, v = (x.to(storage) for x in FAMILIES[family](q, k, v, g))
    chosen = _uniform(g, n, keys).argsort(dim=1)[:, :topk]
    allowed = torch.zeros(n, keys, dtype=torch.bool, device=device).scatter_(1, chosen, True)
    return Case(q, k, v, allowed, dim**-0.5)


def exact_case(kind: str, seed: int, *, n: int, heads: int, keys: int, dim: int, v_dim: int) -> tuple[Case, Tensor]:
    """A case whose output is known bit for bit, on the CPU, and the key `[n]` whose value each row returns.

    "single key": one allowed key; "one-hot softmax": one key leads all others by more than 500, so that every other
    probability is 0 in float32; "empty": no key, marked by -1. Raises ValueError for another kind.
    """
    case = make_case("unit normal", seed, n=n, heads=heads, keys=keys, topk=keys // 2, dim=dim, v_dim=v_dim)
    if kind == "empty":
        return Case(case.q, case.k, case.v, torch.zeros_like(case.allowed), case.scale), torch.full((n,), -1)
    lead = torch.randint(0, keys, (n,), generator=torch.Generator().manual_seed(seed))
    if kind == "single key":
        allowed = torch.zeros_like(case.allowed).scatter_(1, lead[:, None], True)
        return Case(case.q, case.k, case.v, allowed, case.scale), lead
    if kind != "one-hot softmax":
        raise ValueError(f"kind is {kind!r}, it must be 'single key', 'one-hot softmax' or 'empty'")
    # one leading key for all rows: entry 0 of q times entry 0 of k makes its score 1024 after scaling
    allowed = case.allowed.clone()
    allowed[:, lead[0]] = True
    q, k = case.q.clone(), case.k.clone()
    q[..., 0], k[..., 0], k[lead[0], :, 0] = 32.0, 0.0, 32.0
    return Case(q, k, case.v, allowed, 1.0), lead[:1].expand(n)
