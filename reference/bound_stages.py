"""Answers and bounds of merge, projection and the whole prefill.

Projection is a GEMM with float32 sums, then one rounding: `u16 |y| + lam sqrt(L) u32 sum_l |c_l| |W_ld|`
for a sum of L products, in which no partial sum exceeds `sum |c| |W|`. A weight that selects or sign-flips
single latent entries makes both K and V exact in the storage type (`exact_projection`): nothing is rounded
then.

The merge of two partials as they were given, `O = sum w_c O_c` with `w_c = exp(LSE_c - LSE)`: the LSE as
in `reference.bound`; each weight has a relative error of at most 16 u32 + 2 u32 |LSE_c - LSE|
(subtraction, factor log2 e, exponential, sum, division), and the result is rounded once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference import oracle
from reference.bound import AttendBound, AttendReference, attend_reference, gemm_error, sum_terms
from reference.bound_mqa import absorbed_reference, mqa_reference, up_projection_bound
from reference.bound_rows import InputError
from reference.latent import project, request_latents, split_weight
from reference.numerics import U32, Numerics

__all__ = [
    "gemm_error",
    "merge_bound",
    "merge_reference",
    "mqa_reference",
    "prefill_reference",
    "projection_bound",
    "sum_terms",
    "up_projection_bound",
]


def merge_reference(
    *, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, numerics: Numerics
) -> AttendReference:
    """Merge of two partials: outputs `[n, H, Dv]`, LSE `[H, n]`, and its bound by `numerics.merge`.

    "natural": `m = max`, `lse = m + log(exp(a - m) + exp(b - m))`, weights `exp(side - lse)`. LSE is rounded in two
    sums of its size, an argument in one of the size of the gap; the functions and the constant terms are few units.
    Weights carry the error of the LSE that they are taken from.
    One side without keys: the other one is copied, no tolerance.

    "any": each LSE may be multiplied by log2 e first and the result by ln 2 last. Constant and product round once
    each: two units of the side, which reach LSE by its weight, and two of LSE, beside the rounding of the sum: five
    in all, for a row with one side too. The exponent of a weight is a difference of two such numbers. A relative
    error below u16 / 2 does not change the stored value of a copied side.
    """
    out, lse = oracle.merge(prefix_out, prefix_lse, suffix_out, suffix_lse)
    sides = [x.double().masked_fill(x == torch.inf, -torch.inf) for x in (prefix_lse, suffix_lse)]
    present = [side != -torch.inf for side in sides]
    both, one = present[0] & present[1], present[0] ^ present[1]
    converts = numerics.merge == "any"
    finite = torch.where(both | one, lse.abs(), 0.0)
    tol_lse = torch.where(both, U32 * (8 + (6 if converts else 2) * finite), 0.0)
    if converts:
        tol_lse = torch.where(one, U32 * (2 + 6 * finite), tol_lse)
    weights = torch.zeros_like(out)
    for side, here, partial in zip(sides, present, (prefix_out, suffix_out), strict=True):
        gap = torch.where(both, side - lse, 0.0)
        units = 16 + 2 * gap.abs()
        if converts:
            units = units + 4 * torch.where(here, side.abs(), 0.0) + 4 * finite
        else:
            units = units + 8 + 2 * finite
        error = torch.where(both, torch.exp(gap) * U32 * units, 0.0)
        if converts:
            error = torch.where(one & here & (U32 * units >= numerics.u16 / 2), U32 * units + numerics.u16, error)
        weights += error.T[..., None] * torch.where(here.T[..., None], partial.double().abs(), 0.0)
    both_out = both.T[..., None].expand_as(out)
    terms = {
        "weights": weights,
        "stores": torch.where(both_out, numerics.u16 * out.abs(), 0.0),
        "floor": torch.where(both_out, 2 * numerics.tiny, 0.0),
    }
    return AttendReference(out, lse, AttendBound(sum_terms(terms), tol_lse, terms, {"merge": tol_lse}))


def merge_bound(
    *, prefix_out: Tensor, prefix_lse: Tensor, suffix_out: Tensor, suffix_lse: Tensor, numerics: Numerics
) -> AttendBound:
    """The bound of `merge_reference` alone."""
    return merge_reference(
        prefix_out=prefix_out,
        prefix_lse=prefix_lse,
        suffix_out=suffix_out,
        suffix_lse=suffix_lse,
        numerics=numerics,
    ).bound


def projection_bound(
    x: Tensor, w: Tensor, *, numerics: Numerics, exact_projection: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tolerance and terms of the stored product `x [n, L] @ w [L, y]`, both as the kernel read them."""
    exact = x.double() @ w.double()
    if exact_projection:
        nothing = torch.zeros_like(exact)
        return nothing, {"GEMM": nothing, "store": nothing}
    terms = {"GEMM": gemm_error(x, w), "store": numerics.u16 * exact.abs() + numerics.tiny}
    return sum_terms(terms), terms


def prefill_reference(
    *,
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    cache: Tensor | None,
    block_table: Tensor | None,
    w_kv_b: Tensor,
    topk_rows: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
    nope: int,
    rope: int,
    v_head_dim: int,
    scale: float,
    numerics: Numerics,
    dense: bool = False,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: float = 1.0,
    path: str = "mha",
    segments: Sequence[Sequence[tuple[int, int]]] | None = None,
    exact_projection: bool = False,
    keep_terms: bool = True,
) -> AttendReference:
    """End to end, on raw inputs: arguments as `reference.oracle.sparse_mla_prefill`, and

    path:              "mha" (K and V projected and rounded) or "mqa" (absorbed; a call for the context, one for the
                       new tokens)
    segments:          for each request, (start, length) of its "mha" calls in merge order; or one call
    exact_projection:  K and V are exact in the storage type: no rounding propagates ("mha" only)

    Raises ValueError for an unknown path.
    """
    if path not in ("mha", "mqa"):
        raise ValueError(f"path is {path!r}, it must be 'mha' or 'mqa'")
    results = []
    first = 0
    for b, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = slice(first, first + query_len)
        first += query_len
        latents = request_latents(
            kv_c_normed=kv_c_normed[rows], k_pe=k_pe[rows], rope=rope, context_len=context_len,
            cache=cache, block_table_row=None if block_table is None else block_table[b],
            kv_cache_dtype=kv_cache_dtype, kv_cache_scale=kv_cache_scale,
        )  # fmt: skip
        if dense:
            allowed = oracle.causal_matrix(query_len, context_len, q.device)
        else:
            allowed = oracle.allowed_matrix(topk_rows[rows], context_len)
        k, v = project(latents, w_kv_b, num_heads, nope, v_head_dim)
        if path == "mqa":
            w_uk, w_uv = split_weight(w_kv_b, num_heads, nope, v_head_dim)
            results.append(
                absorbed_reference(
                    q=q[rows],
                    latents=latents,
                    v=v,
                    w_uk=w_uk,
                    w_uv=w_uv,
                    allowed=allowed,
                    scale=scale,
                    numerics=numerics,
                    calls=[(0, context_len), (context_len, query_len)],
                    slots=None if dense else topk_rows.shape[1],
                    keep_terms=keep_terms,
                )
            )
            continue
        error = None if exact_projection else _projection_error(latents, w_kv_b, k, v, nope)
        results.append(
            attend_reference(
                q=q[rows],
                k=k,
                v=v,
                allowed=allowed,
                scale=scale,
                numerics=numerics,
                input_error=error,
                segments=None if segments is None else segments[b],
                keep_terms=keep_terms,
            )
        )
    return _joined(results, q, num_heads, v_head_dim)


def _projection_error(latents: Tensor, w_kv_b: Tensor, k: Tensor, v: Tensor, nope: int) -> InputError:
    lora = w_kv_b.shape[0]
    error = gemm_error(latents[:, :lora], w_kv_b).view(len(latents), k.shape[1], nope + v.shape[2])
    key_error = torch.zeros_like(k)
    key_error[..., :nope] = error[..., :nope]
    return InputError(
        rounded_factor="k", rounded_dims=nope, key_error=key_error, values_rounded=True, value_error=error[..., nope:]
    )


def _joined(results: Sequence[AttendReference], q: Tensor, num_heads: int, v_head_dim: int) -> AttendReference:
    """Requests one after the other, along the tokens."""
    if not results:
        out = q.new_zeros(0, num_heads, v_head_dim, dtype=torch.float64)
        lse = q.new_zeros(num_heads, 0, dtype=torch.float64)
        return AttendReference(out, lse, AttendBound(out, lse))
    bounds = [r.bound for r in results]

    def gather(dicts: list[dict[str, Tensor]], like: list[Tensor], dim: int) -> dict[str, Tensor]:
        names = list(dict.fromkeys(name for d in dicts for name in d))
        return {
            name: torch.cat([d.get(name, torch.zeros_like(x)) for d, x in zip(dicts, like, strict=True)], dim=dim)
            for name in names
        }

    return AttendReference(
        torch.cat([r.out for r in results]),
        torch.cat([r.lse for r in results], dim=1),
        AttendBound(
            torch.cat([b.tol_out for b in bounds]),
            torch.cat([b.tol_lse for b in bounds], dim=1),
            gather([b.out_terms for b in bounds], [b.tol_out for b in bounds], 0),
            gather([b.lse_terms for b in bounds], [b.tol_lse for b in bounds], 1),
        ),
    )
