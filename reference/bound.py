"""How far a right attention kernel may be from the exact answer, element by element.

Everything is float64, from the inputs that the kernel really read. For one row of one head: `S_j` exact
scaled scores, `p_j` exact probabilities, `A` the allowed set, `O` and `LSE` the exact answer, segments `c
= 1..C` in merge order with weights `w_c = exp(LSE_c - LSE)`. `u16`, `u32` are unit roundoffs, `D` is the
width of q and k, `g_j` the number of selected keys of the row whose score lies in the same cell (of width
u16/16) as that of key j.

**Probabilistic steps.** Rounding errors `|d_i| <= u` of different operations are taken as independent with
mean zero, except that keys with (nearly) the same score are taken to round alike. Hoeffding then gives
`|sum d_i x_i| <= lam u sqrt(sum x_i^2)` but for a share delta/N of all sums (Higham & Mary, SIAM J. Sci.
Comput. 41 (2019) A2815; Ipsen & Zhou, arXiv 1906.10465), `lam = sqrt(2 ln(2N/delta)) = 8.41` with N =
2^40, delta = 1e-3. Equal errors inside a cell add up: by Cauchy-Schwarz `(sum_{j in cell} x_j)^2 <= g sum
x_j^2`, so `x_j^2` becomes `g_j x_j^2`. (Rounding P is biased where probabilities repeat, arXiv 2510.04212:
those are the cells.) Each such term is capped by its worst case, `u sum |x_i|`.

**Score** (first product: exact products of 16-bit numbers, float32 sums in the order of the dims):

    dS1_j = lam u32 scale sqrt(sum_i s_i^2)                       s_i: partial sums of q . k_j
    b_j   = 4 u32 |S_j| + 3.5 u32 scale sum_b max(|s_16b|)        systematic part

Partial sums are known exactly after every 16 dims and bounded in between by the path's length. Tensor
cores add 16 products to the accumulator and truncate (Fasi et al., PeerJ CS 7:e330): the final cut is up
to 2 u32 of the partial sum, that of each aligned addend up to u32/2 of the largest. Half of that on
average, and 1/1.44 for numbers uniform in a binade, make 0.7 + 2.8 = 3.5 u32 where all products of a block
have one sign; such cuts are alike for all keys, so they are no random term. 4 u32 |S| are the roundings of
`scale * log2 e`, of the product with it, and of the running maximum (in the exponent, and on its return).

**LSE** of segment c, each term weighted by w_c, `X_c = sum_{j in c} p_j (max_c S - S_j)`:

    scores     min( sum p_j dS1_j , sqrt(sum g_j (p_j dS1_j)^2) ) + sum p_j b_j
    exp        eps_exp + 4 u32 X_c + (eps_rescale + u32) (mass multiplied by rescales)
    row sum    u32 min( sum p_j r_j , lam sqrt(sum g_i s_i^2) )
    logarithm  4 u32 max(ln 2, LSE_c - max_c S) + 4 u32 |LSE_c| + 2 u32 |max_c S|
    merge      u32 (8 + 2 |LSE_{<=c}|) for each merge of two non-empty sides, times the weight of its result;
               u32 (8 + 6 |LSE_{<=c}|), at every non-empty segment, where merges may work in base 2

`r_j` counts the additions that key j passes through, `s_i` are the partial sums of the row sum; both
follow from the declared order (`numerics.RowSum`) and the allowed set. A rescale multiplies what was
summed so far by `exp(old - new maximum)`: only where a key exceeds all before it, and the arguments
telescope to at most X_c, as do the roundings of the exponents. lg2.approx has 2^-22, relative or absolute
(PTX ISA). A merge is `max + log(exp(a - max) + exp(b - max))`: one exponential is exactly 1, the other at
most 1 with `x exp(-x) < 0.37`; with the sum, the logarithm and its return this is 8 u32 + 2 u32 |LSE|; there
and back through base 2 cost 4 u32 |LSE| more, constants and products (`bound_stages.merge_reference`). The
error of a running partial counts by its weight in the end.

**Output** (the first-order effect of score errors is exactly `sum p_j dS_j (v_j - O)`):

    P rounding   min( u16 sum p_j |v_jd| , lam u16/sqrt 3 sqrt(sum g_j p_j^2 v_jd^2) )
    scores       sum p_j dS_j |v_jd| + |O_d| sum p_j dS_j,   dS_j = dS1_j + b_j
    exp          2 (the exp term of LSE) sum p_j |v_jd|
    accumulation (|A|/4 + 1.5 B16 + 32) u32 sum p_j |v_jd| + (the row sum term) |O_d|
    merge        sum_c w_c dLSE_c |O_c,d - O_d| + (24 + 2 |LSE|) (C-1) u32 sum_c w_c |O_c,d|; 8 |LSE| in base 2
    stores       u16 ( sum_c w_c |O_c,d| + sum_{merges} |sum_{c'<=c} w_c' O_c',d| )
    floor        (2C + 2) tiny + tiny |A| max |v_d| / exp(LSE - max S)

Rounding to nearest has a mean square of at most u^2/3. B16 counts the blocks of 16 keys that hold a
selected one: the second product truncates |A|/2 + 2.5 B16 times u32 in the worst case, half of that on
average, over partial sums that grow. Only segments that hold keys of the row count in C. The floor covers
denormal probabilities and stores (fp16) and flushes to zero. Products of errors are left out: they are
below 1e-3 of these terms (arXiv 2405.02803 follows the whole scheme).

**Inputs that carry rounding** (`InputError`, for end-to-end judgement) add to dS_j, summed over p_j as it stands,

    u16 scale min( sum |q_d k_jd| , lam/sqrt 3 sqrt(sum h_d (q_d k_jd)^2) ) + scale sum (|q_d| dk_jd + dq_d |k_jd|)

over the rounded dims, h_d the entries of the rounded vector of nearly the same size, and to the output
`u16 sum p_j |v_jd|` and `sum p_j dv_jd`. There is no root of a sum of squares over keys: tokens repeat, also where
their scores differ by the rope part, and then their K and V round alike. Such errors need not be small: they are
multiplied by `exp(2 max dS)`, and capped by `max dS` for LSE and by `max |v_d| + |O_d|` for the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference import oracle
from reference.bound_rows import LAM, InputError, Problem, judge_rows
from reference.numerics import U32, Numerics

_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}


def sum_terms(terms: dict[str, Tensor]) -> Tensor:
    """The tolerance that named terms make."""
    return torch.stack(list(terms.values())).sum(dim=0)


def gemm_error(x: Tensor, w: Tensor) -> Tensor:
    """Float32 accumulation error of `x [..., L] @ w [L, y]`."""
    factor: float = LAM * x.shape[-1] ** 0.5 * U32
    return factor * (x.double().abs() @ w.double().abs())


@dataclass(frozen=True)
class AttendBound:
    """Tolerances of one attention result, and the named terms that add up to them."""

    tol_out: Tensor
    """`[n, H, Dv]` float64."""
    tol_lse: Tensor
    """`[H, n]` float64; 0 where the allowed set is empty."""
    out_terms: dict[str, Tensor] = field(default_factory=dict)
    lse_terms: dict[str, Tensor] = field(default_factory=dict)

    def explain_out(self, token: int, head: int, column: int) -> list[tuple[str, float]]:
        """Shares of the terms in one tolerance of the output, largest first."""
        return _shares({name: float(x[token, head, column]) for name, x in self.out_terms.items()})

    def explain_lse(self, token: int, head: int) -> list[tuple[str, float]]:
        """Shares of the terms in one tolerance of LSE, largest first."""
        return _shares({name: float(x[head, token]) for name, x in self.lse_terms.items()})


def _shares(values: dict[str, float]) -> list[tuple[str, float]]:
    total = sum(values.values())
    shares = [(name, value / total if total > 0 else 0.0) for name, value in values.items()]
    return sorted(shares, key=lambda item: -item[1])


@dataclass(frozen=True)
class AttendReference:
    """The exact answer and how far a right kernel may be from it."""

    out: Tensor
    """`[n, H, Dv]` float64."""
    lse: Tensor
    """`[H, n]` float64."""
    bound: AttendBound


def attend_reference(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    numerics: Numerics,
    segments: Sequence[tuple[int, int]] | None = None,
    slots: int | None = None,
    input_error: InputError | None = None,
    keep_terms: bool = True,
) -> AttendReference:
    """Exact attention of one request and its bound, in one pass over blocks of query rows.

    q:         `[n, H, D]`
    k, v:      `[K, H, D]`, `[K, H, Dv]`, or with one head that all heads share (MQA)
    allowed:   bool `[n, K]`; keys that no row allows may hold anything
    segments:  (start, length) of the keys of each attention call, in merge order; one call if not given
    slots:     width of the top-k rows, for kernels that visit keys in the order of the row
    A value that is inf or NaN reaches exactly the rows that select it; their tolerances leave it out.
    keep_terms=False drops the named terms, which are as large as the output each.
    Raises ValueError if the segments do not cover exactly the keys `0..K-1`.
    """
    num_keys, heads, n = k.shape[0], q.shape[1], q.shape[0]
    parts = [(0, num_keys)] if segments is None else [s for s in segments if s[1] > 0]
    _check_segments(parts, num_keys)
    used = allowed.any(dim=0)[:, None, None]
    readable = used & v.isfinite()
    problem = Problem(
        q=q.double().transpose(0, 1),
        k=k.double().where(used, 0.0).permute(1, 2, 0),
        v=v.double().where(readable, 0.0).transpose(0, 1),
        allowed=allowed,
        scale=scale,
        numerics=numerics,
        segments=parts,
        slots=slots,
        error=input_error or InputError(),
    )
    out = q.new_zeros(heads, n, v.shape[2], dtype=torch.float64)
    lse = q.new_full((heads, n), -torch.inf, dtype=torch.float64)
    tol_out, tol_lse = torch.zeros_like(out), torch.zeros_like(lse)
    out_terms: dict[str, Tensor] = {}
    lse_terms: dict[str, Tensor] = {}
    step = max(1, _BLOCK_ELEMENTS.get(q.device.type, 1 << 21) // max(1, heads * num_keys))
    for first in range(0, n if num_keys else 0, step):
        rows = slice(first, min(first + step, n))
        block = judge_rows(problem, rows)
        out[:, rows], lse[:, rows] = block.out, block.lse
        for parts_of, total, kept in (
            (block.out_terms, tol_out, out_terms),
            (block.lse_terms, tol_lse, lse_terms),
        ):
            for name, term in parts_of.items():
                total[:, rows] += term
                if keep_terms:
                    kept.setdefault(name, torch.zeros_like(total))[:, rows] = term
    if not bool((readable == used).all()):  # an inf or NaN reaches the rows that select it, and no other
        out = oracle.attend(q, k, v, allowed, scale)[0].transpose(0, 1)
    return AttendReference(
        out.transpose(0, 1),
        lse,
        AttendBound(
            tol_out.transpose(0, 1),
            tol_lse,
            {name: x.transpose(0, 1) for name, x in out_terms.items()},
            lse_terms,
        ),
    )


def attend_bound(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    numerics: Numerics,
    segments: Sequence[tuple[int, int]] | None = None,
) -> AttendBound:
    """The bound of `attend_reference` alone, same arguments."""
    return attend_reference(q=q, k=k, v=v, allowed=allowed, scale=scale, numerics=numerics, segments=segments).bound


def _check_segments(segments: Sequence[tuple[int, int]], num_keys: int) -> None:
    covered = 0
    for start, length in sorted(segments):
        if start != covered:
            raise ValueError(f"segments are {list(segments)}, they must cover keys 0..{num_keys - 1} once each")
        covered += length
    if covered != num_keys:
        raise ValueError(f"segments are {list(segments)}, they must cover keys 0..{num_keys - 1} once each")
