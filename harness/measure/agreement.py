"""Do the two oracles agree, and do they agree with 60-digit arithmetic?

Differences are given in units of what is asked for: `1e-14 sum p|v|` for the output, `1e-14 (1 + |LSE|)` for LSE.
Where V itself is a sum of latents times weights, `|v|` is `sum |c| |W|`: one road multiplies by W_UV before it sums
over the keys and the other after, and a value that cancels to nearly nothing is no measure for either.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.measure.draws import random_problem
from harness.measure.families import make_case
from harness.problems.tensors import Inputs, build_inputs
from reference.gather_oracle import gather_attend, gather_prefill
from reference.latent import project, request_latents
from reference.oracle import allowed_matrix, allowed_set, attend, causal_matrix, sparse_mla_prefill

UNIT = 1e-14
FAMILIES = (
    "unit normal",
    "temperature 0.5",
    "flat",
    "zero query",
    "offset V",
    "heavy-tailed V",
    "ties",
    "repeated tokens",
)
"""Families with scores below about 10: larger ones lose 1e-14 to their own float64 rounding."""


@dataclass
class Agreement:
    """Largest differences, in the units above."""

    attend_cases: int = 0
    attend_out: float = 0.0
    attend_lse: float = 0.0
    prefill_cases: int = 0
    prefill_out: float = 0.0
    prefill_lse: float = 0.0
    spots: int = 0
    """Cases compared with mpmath; 0 where it is not installed."""
    spot_out: float = 0.0
    spot_lse: float = 0.0
    seconds: float = 0.0

    @property
    def met(self) -> bool:
        """Whether every difference is at most one unit."""
        largest = (
            self.attend_out,
            self.attend_lse,
            self.prefill_out,
            self.prefill_lse,
            self.spot_out,
            self.spot_lse,
        )
        return max(largest) <= 1


def measure(cases: int, spots: int, *, seed: int = 0) -> Agreement:
    """`cases` attention calls and as many prefill batches by both oracles, and `spots` rows by mpmath."""
    start = time.monotonic()
    found = Agreement()
    for number in range(seed, seed + cases):
        _two_roads_of_attend(number, found)
        _two_roads_of_prefill(number, found)
    if importlib.util.find_spec("mpmath") is not None:
        for number in range(seed, seed + spots):
            _spot(number, found)
    found.seconds = time.monotonic() - start
    return found


def units(difference: Tensor, size: Tensor) -> float:
    """Largest `|difference| / (1e-14 size)`; 0 / 0 is 0, NaN is inf."""
    share = (difference.abs() / (UNIT * size)).where(difference != 0, 0.0)
    return float(share.nan_to_num(nan=torch.inf).max()) if share.numel() else 0.0


def lse_units(a: Tensor, b: Tensor) -> float:
    """As `units`, for two LSE whose -inf must stand in the same places."""
    if not torch.equal(a.isinf(), b.isinf()):
        return float("inf")
    usable = a.isfinite() | a.isnan()
    return units((a - b)[usable], 1 + b[usable].abs())


def drawn_rows(query_len: int, num_keys: int, topk: int, seed: int) -> Tensor:
    """Top-k rows `[query_len, topk]` int32 with holes, duplicates and entries past the end."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, num_keys + 3, (query_len, topk), generator=g, dtype=torch.int32)


def _two_roads_of_attend(seed: int, found: Agreement) -> None:
    family = FAMILIES[seed % len(FAMILIES)]
    context = 40 + 30 * (seed % 5)
    case = make_case(family, seed, n=6, heads=2, keys=context + 6, topk=1, dim=16 + 8 * (seed % 4), v_dim=5)
    rows = drawn_rows(6, context + 6, 1 + 7 * (seed % 9), seed)
    allowed = allowed_matrix(rows, context)
    out, lse = attend(case.q, case.k, case.v, allowed, case.scale)
    other_out, other_lse = gather_attend(case.q, case.k, case.v, rows, context, case.scale)
    size, _ = attend(case.q, case.k, case.v.abs(), allowed, case.scale)
    found.attend_cases += 1
    found.attend_out = max(found.attend_out, units(out - other_out, size))
    found.attend_lse = max(found.attend_lse, lse_units(lse, other_lse))


def _two_roads_of_prefill(seed: int, found: Agreement) -> None:
    problem = random_problem(seed, max_query=12, max_context=60, mild=True)
    inputs = build_inputs(problem)
    dense = seed % 4 == 0
    out, lse = _prefill(sparse_mla_prefill, inputs, dense)
    other_out, other_lse = _prefill(gather_prefill, inputs, dense)
    found.prefill_cases += 1
    found.prefill_out = max(found.prefill_out, units(out - other_out, _prefill_size(inputs, dense)))
    found.prefill_lse = max(found.prefill_lse, lse_units(lse, other_lse))


def _prefill(road: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, dense: bool) -> tuple[Tensor, Tensor]:
    problem = inputs.problem
    dims = problem.dims
    return road(
        q=inputs.q,
        kv_c_normed=inputs.kv_c_normed,
        k_pe=inputs.k_pe,
        cache=inputs.cache,
        block_table=inputs.block_table,
        w_kv_b=inputs.w_kv_b,
        topk_rows=inputs.prefill_topk,
        query_lens=problem.query_lens,
        context_lens=problem.context_lens,
        num_heads=dims.heads,
        nope=dims.nope,
        rope=dims.rope,
        v_head_dim=dims.v,
        scale=problem.scale,
        dense=dense,
    )


def _prefill_size(inputs: Inputs, dense: bool) -> Tensor:
    """`sum p sum |c| |W|` of every output element, `[T, H, v]`: what both roads add up, each in its own order."""
    problem = inputs.problem
    dims = problem.dims
    sizes = []
    for request, (context, query) in enumerate(zip(problem.context_lens, problem.query_lens, strict=True)):
        first = problem.token_offsets[request]
        rows = slice(first, first + query)
        latents = request_latents(
            kv_c_normed=inputs.kv_c_normed[rows],
            k_pe=inputs.k_pe[rows],
            cache=inputs.cache,
            block_table_row=inputs.block_table[request],
            context_len=context,
            rope=dims.rope,
        )
        k, _ = project(latents, inputs.w_kv_b, dims.heads, dims.nope, dims.v)
        _, size = project(latents.abs(), inputs.w_kv_b.abs(), dims.heads, dims.nope, dims.v)
        allowed = causal_matrix(query, context) if dense else allowed_matrix(inputs.prefill_topk[rows], context)
        sizes.append(attend(inputs.q[rows], k, size, allowed, problem.scale)[0])
    return torch.cat(sizes)


def _spot(seed: int, found: Agreement) -> None:
    """One row of one head by both oracles and by mpmath with 60 digits."""
    import mpmath

    family = FAMILIES[seed % len(FAMILIES)]
    context, scale = 3 + seed % 40, 0.37
    case = make_case(family, seed, n=1, heads=1, keys=context + 1, topk=1, dim=4 + seed % 13, v_dim=3)
    rows = drawn_rows(1, context + 1, 2 + seed % 23, seed)
    keys = allowed_set(rows[0].tolist(), context)
    roads = (
        attend(case.q, case.k, case.v, allowed_matrix(rows, context), scale),
        gather_attend(case.q, case.k, case.v, rows, context, scale),
    )
    found.spots += 1
    if not keys:
        if not all(lse.item() == -torch.inf and not out.any() for out, lse in roads):
            found.spot_lse = float("inf")
        return
    with mpmath.workdps(60):
        q = case.q[0, 0].double().tolist()
        scores = [mpmath.mpf(scale) * mpmath.fdot(q, case.k[j, 0].double().tolist()) for j in keys]
        exact = mpmath.log(mpmath.fsum(mpmath.exp(s) for s in scores))
        weights = [mpmath.exp(s - exact) for s in scores]
        for out, lse in roads:
            found.spot_lse = max(found.spot_lse, float(abs(lse.item() - exact) / (1 + abs(exact))) / UNIT)
            for column in range(out.shape[2]):
                v = case.v[keys, 0, column].double().tolist()
                off = abs(out[0, 0, column].item() - mpmath.fdot(weights, v))
                found.spot_out = max(found.spot_out, float(off / mpmath.fdot(weights, map(abs, v))) / UNIT)
