"""The exact answer and all bound terms of a block of query rows; formulae in `reference.bound`.

Inside this module tensors are heads first: `[H, n, K]` per key, `[H, n]` per row, `[H, n, Dv]` per output.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from reference import bound_terms as terms
from reference.bound_terms import matmul
from reference.numerics import U32, Numerics

LAM = 8.41
"""sqrt(2 ln(2 * 2^40 / 1e-3))."""
LN_2 = 0.6931471805599453


@dataclass(frozen=True, kw_only=True)
class InputError:
    """Rounding that q, k, v have already suffered where the kernel reads them, for end-to-end judgement."""

    rounded_factor: Literal["q", "k"] | None = None
    """Which factor of the scores was rounded to the storage type, in its first `rounded_dims` dims."""
    rounded_dims: int = 0
    query_error: Tensor | None = None
    """Absolute error of q `[n, H, D]`."""
    key_error: Tensor | None = None
    """Absolute error of k `[K, H, D]`."""
    values_rounded: bool = False
    value_error: Tensor | None = None
    """Absolute error of v `[K, H, Dv]`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One request, float64, heads first: q `[H, n, D]`, k `[H or 1, D, K]`, v `[H or 1, K, Dv]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    allowed: Tensor
    """bool `[n, K]`"""
    scale: float
    numerics: Numerics
    segments: list[tuple[int, int]]
    slots: int | None
    error: InputError

    @cached_property
    def k_size(self) -> Tensor:
        return self.k.abs()

    @cached_property
    def rounded_k_square(self) -> Tensor:
        """`k^2` of the rounded dims, `[H or 1, D', K]`; times the repeats in its key if k was rounded."""
        k = self.k[:, : self.error.rounded_dims]
        if self.error.rounded_factor == "q":
            return k.square()
        return k.square() * terms.repeats(k.transpose(1, 2), self.numerics.cell).transpose(1, 2)

    @cached_property
    def v_size(self) -> Tensor:
        return self.v.abs()

    @cached_property
    def v_square(self) -> Tensor:
        return self.v.square()

    @cached_property
    def v_largest(self) -> Tensor:
        """`[H or 1, 1, Dv]`"""
        return self.v_size.amax(dim=1, keepdim=True)


@dataclass(frozen=True)
class RowResult:
    """Results of a block of rows."""

    out: Tensor
    lse: Tensor
    out_terms: dict[str, Tensor]
    lse_terms: dict[str, Tensor]


@dataclass(frozen=True)
class _Keys:
    """What is known of each key of each row, `[H, n, K]`; 0 outside the allowed set."""

    scores: Tensor
    """-inf outside the allowed set."""
    p: Tensor
    in_cell: Tensor
    ds_random: Tensor
    ds_bias: Tensor
    ds_input: Tensor | None


@dataclass
class _Sums:
    """Sums over segments, `[H, n]`; the squares stay apart until all segments are in."""

    score: Tensor
    score_squares: Tensor
    score_bias: Tensor
    exp: Tensor
    row_sum: Tensor
    row_sum_squares: Tensor
    logarithm: Tensor

    def add(self, other: "_Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def lse_terms(self) -> dict[str, Tensor]:
        return {
            "scores": torch.minimum(self.score, self.score_squares.sqrt()) + self.score_bias,
            "exp": self.exp,
            "row sum": self.row_sum_error(),
            "logarithm": self.logarithm,
        }

    def row_sum_error(self) -> Tensor:
        return U32 * torch.minimum(self.row_sum, LAM * self.row_sum_squares.sqrt())


def judge_rows(problem: Problem, rows: slice) -> RowResult:
    """The exact answer of these query rows and the terms of its bound."""
    allowed, q = problem.allowed[rows], problem.q[:, rows]
    product, squares, ends = terms.first_product(q, problem.k, problem.k_size)
    scores = (problem.scale * product).masked_fill(~allowed, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    top = top.where(top != -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    p = weights / total.where(total != 0, 1.0)
    lse = (top + torch.log(total)).squeeze(-1)
    out = matmul(p, problem.v)
    keys = _key_errors(problem, rows, scores, p, squares, ends)
    sums, merge_lse, merge_out, stores, calls = _walk_segments(problem, allowed, keys, lse, out)

    lse_terms = {**sums.lse_terms(), "merge": merge_lse}
    out_terms = _output_terms(problem, allowed, keys, out, sums)
    out_terms |= {"merge": merge_out, "stores": stores}
    reach = problem.v_largest * allowed.sum(dim=-1)[:, None]
    reach = reach * torch.exp((top.squeeze(-1) - lse).clamp(max=0))[..., None]
    out_terms["floor"] = problem.numerics.tiny * ((2 * calls + 2)[..., None] + reach)
    if keys.ds_input is not None:
        largest = keys.ds_input.amax(dim=-1)
        lse_terms["rounded inputs"] = torch.minimum(_grown((p * keys.ds_input).sum(dim=-1), largest), largest)
    empty = total.squeeze(-1) == 0
    return RowResult(
        out,
        lse,
        {name: x.masked_fill(empty[..., None], 0.0) for name, x in out_terms.items()},
        {name: x.masked_fill(empty, 0.0) for name, x in lse_terms.items()},
    )


def _key_errors(problem: Problem, rows: slice, scores: Tensor, p: Tensor, squares: Tensor, ends: Tensor) -> _Keys:
    allowed, numerics, size = problem.allowed[rows], problem.numerics, abs(problem.scale) * U32
    in_cell = terms.count_in_cell(scores, allowed, numerics.cell).double()
    bias = 4 * U32 * scores.abs()
    if numerics.tensor_cores:
        bias = bias + 3.5 * size * ends
    return _Keys(
        scores=scores,
        p=p,
        in_cell=in_cell,
        ds_random=LAM * size * squares.sqrt(),
        ds_bias=bias.where(allowed, 0.0),
        ds_input=_input_errors(problem, rows),
    )


def _input_errors(problem: Problem, rows: slice) -> Tensor | None:
    """Effect on each score of the rounding that q and k carry, `[H, n, K]`; None if they carry none."""
    error, q = problem.error, problem.q[:, rows]
    parts = []
    if error.rounded_factor is not None:
        dims = slice(0, error.rounded_dims)
        square = q[..., dims].square()
        if error.rounded_factor == "q":
            square = square * terms.repeats(q[..., dims], problem.numerics.cell)
        worst = matmul(q[..., dims].abs(), problem.k_size[:, dims])
        spread = LAM / 3**0.5 * matmul(square, problem.rounded_k_square).sqrt()
        parts.append(problem.numerics.u16 * torch.minimum(worst, spread))
    if error.query_error is not None:
        parts.append(matmul(error.query_error[rows].transpose(0, 1), problem.k_size))
    if error.key_error is not None:
        parts.append(matmul(q.abs(), error.key_error.permute(1, 2, 0)))
    if not parts:
        return None
    return abs(problem.scale) * torch.stack(parts).sum(dim=0).masked_fill(~problem.allowed[rows], 0.0)


def _grown(first_order: Tensor, largest_ds: Tensor) -> Tensor:
    """The full effect of score errors that are not small: `exp(x) - 1 <= x exp(x)`, in weights and sum."""
    return first_order * torch.exp((2 * largest_ds).clamp(max=700.0))  # finite: 0 * inf would be NaN, no tolerance


def _walk_segments(
    problem: Problem, allowed: Tensor, keys: _Keys, lse: Tensor, out: Tensor
) -> tuple[_Sums, Tensor, Tensor, Tensor, Tensor]:
    """Sums over the segments; what merging adds to LSE `[H, n]` and output; stores; non-empty calls `[n]`."""
    u16, segments, converts = problem.numerics.u16, problem.segments, problem.numerics.merge == "any"
    if len(segments) == 1:
        sums = _one_call(problem, allowed, keys, slice(0, allowed.shape[1]), lse, torch.ones_like(lse))
        nothing = torch.zeros_like(out)
        return sums, torch.zeros_like(lse), nothing, u16 * out.abs(), allowed.any(dim=-1).double()
    nothing = torch.zeros_like(lse)
    total = _Sums(*[nothing] * 7)
    merge_lse, mass_so_far = nothing, nothing
    merge_out, stores, out_so_far = (torch.zeros_like(out) for _ in range(3))
    partial_size = torch.zeros_like(out)
    calls = torch.zeros(allowed.shape[0], dtype=torch.float64, device=allowed.device)
    for start, length in segments:
        part = slice(start, start + length)
        present = allowed[:, part].any(dim=-1)
        merges = present & (calls > 0)
        calls = calls + present
        mass = keys.p[..., part].sum(dim=-1)
        part_out = matmul(keys.p[..., part], problem.v[:, part])  # w_c O_c
        sums = _one_call(problem, allowed, keys, part, lse, mass)
        total.add(sums)
        mass_so_far, out_so_far = mass_so_far + mass, out_so_far + part_out
        lse_so_far = torch.where(mass_so_far > 0, lse + torch.log(mass_so_far), 0.0)
        turned = present if converts else merges
        merge_lse = merge_lse + turned * mass_so_far * U32 * (8 + (6 if converts else 2) * lse_so_far.abs())
        own_error = torch.stack(list(sums.lse_terms().values())).sum(dim=0)  # w_c dLSE_c
        share = own_error / mass.clamp(min=torch.finfo(torch.float64).tiny)
        merge_out += share[..., None] * (part_out - mass[..., None] * out).abs()
        partial_size += part_out.abs()
        stores += u16 * (part_out.abs() + merges[:, None] * out_so_far.abs())
    units = 24 + (8 if converts else 2) * lse.abs().where(lse.isfinite(), 0.0)[..., None]
    merge_out += units * U32 * (calls - 1).clamp(min=0)[:, None] * partial_size
    return total, merge_lse, merge_out, stores, calls


def _one_call(problem: Problem, allowed: Tensor, keys: _Keys, part: slice, lse: Tensor, mass: Tensor) -> _Sums:
    """The LSE terms of one attention call, weighted by its mass `[H, n]`."""
    numerics, allowed = problem.numerics, allowed[:, part]
    p, scores, in_cell = keys.p[..., part], keys.scores[..., part], keys.in_cell[..., part]
    random = p * keys.ds_random[..., part]
    top = scores.amax(dim=-1)
    top = top.where(top != -torch.inf, 0.0)
    below_top = (p * (top[..., None] - scores).where(allowed, 0.0)).sum(dim=-1)
    own_lse = torch.where(mass > 0, lse + torch.log(mass), 0.0)
    rescaled = terms.rescaled_mass(scores, p, allowed, numerics.row_sum)
    row_sum, row_sum_squares = terms.row_sum_error(p, allowed, in_cell, numerics.row_sum, problem.slots)
    log_error = 4 * (own_lse - top).clamp(min=LN_2) + 4 * own_lse.abs() + 2 * top.abs()
    return _Sums(
        score=random.sum(dim=-1),
        score_squares=(in_cell * random.square()).sum(dim=-1),
        score_bias=(p * keys.ds_bias[..., part]).sum(dim=-1),
        exp=numerics.eps_exp * mass + 4 * U32 * below_top + (numerics.eps_rescale + U32) * rescaled,
        row_sum=row_sum,
        row_sum_squares=row_sum_squares,
        logarithm=U32 * mass * log_error,
    )


def _output_terms(problem: Problem, allowed: Tensor, keys: _Keys, out: Tensor, sums: _Sums) -> dict[str, Tensor]:
    """Terms of the output that do not depend on the segments."""
    u16, p, v_size = problem.numerics.u16, keys.p, problem.v_size
    size = matmul(p, v_size)  # sum p |v|
    spread = LAM * u16 / 3**0.5 * matmul(keys.in_cell * p.square(), problem.v_square).sqrt()
    rounding = torch.minimum(u16 * size, spread)

    def of_scores(ds: Tensor) -> Tensor:
        weighted = p * ds
        return matmul(weighted, v_size) + out.abs() * weighted.sum(dim=-1, keepdim=True)

    selected, blocks = terms.product_steps(allowed, problem.numerics.row_sum, problem.slots)
    steps = (selected / 4 + 1.5 * blocks + 32)[:, None]
    result = {
        "P rounding": rounding,
        "scores": of_scores(keys.ds_random + keys.ds_bias),
        "exp": 2 * sums.exp[..., None] * size,
        "accumulation": steps * U32 * size + sums.row_sum_error()[..., None] * out.abs(),
    }
    error = problem.error
    if keys.ds_input is not None:
        grown = _grown(of_scores(keys.ds_input), keys.ds_input.amax(dim=-1, keepdim=True))
        result["rounded inputs"] = torch.minimum(grown, problem.v_largest + out.abs())
    values = u16 * size if error.values_rounded else torch.zeros_like(size)
    if error.value_error is not None:
        values = values + matmul(p, error.value_error.transpose(0, 1))
    if error.values_rounded or error.value_error is not None:
        result["rounded values"] = values
    return result
