"""Answers and bounds of sparse MQA, stage by stage and end to end.

Latent rows are attended with q' = [q_nope W_UK | q_pe], and the latent output is multiplied by W_UV. End
to end, the rounding of P and of the scores act on `V_h(j) = W_UV,h c_j`, since W_UV is linear; latent
partials and their merges are rounded before the GEMM, each of their entries once: `u16 min( sum |x_l W_l|
, lam/sqrt 3 sqrt(sum h_l (x_l W_l)^2) )` with h_l the entries of x of nearly the same size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference import bound_terms as terms
from reference import oracle
from reference.bound import AttendReference, attend_reference, gemm_error, sum_terms
from reference.bound_rows import LAM, InputError
from reference.latent import absorb_query
from reference.numerics import U32, Numerics


def mqa_reference(
    *,
    q: Tensor,
    latents: Tensor,
    lora: int,
    allowed: Tensor,
    scale: float,
    numerics: Numerics,
    slots: int | None = None,
    keep_terms: bool = True,
) -> AttendReference:
    """Absorbed attention of one request, stage-fed: q' `[n, H, lora + rope]`, latent rows `[K, lora + rope]`.

    The output is latent, `[n, H, lora]`; `up_projection_bound` judges what W_UV makes of it.
    """
    rows = latents[:, None]
    return attend_reference(
        q=q, k=rows, v=rows[..., :lora], allowed=allowed, scale=scale, numerics=numerics, slots=slots,
        keep_terms=keep_terms,
    )  # fmt: skip


def up_projection_bound(
    latent_out: Tensor, w_uv: Tensor, *, numerics: Numerics
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Stored latent output `[n, H, lora]`, W_UV `[lora, H, v]` -> exact `[n, H, v]`, its tolerance, terms."""
    x, w = latent_out.double().transpose(0, 1), w_uv.double().transpose(0, 1)
    exact = (x @ w).transpose(0, 1)
    terms = {"GEMM": gemm_error(x, w).transpose(0, 1), "store": numerics.u16 * exact.abs() + numerics.tiny}
    return exact, sum_terms(terms), terms


def absorbed_reference(
    *,
    q: Tensor,
    latents: Tensor,
    v: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    allowed: Tensor,
    scale: float,
    numerics: Numerics,
    calls: Sequence[tuple[int, int]],
    slots: int | None,
    keep_terms: bool,
) -> AttendReference:
    """One request end to end: q `[n, H, nope + rope]`, latent rows `[K, lora + rope]`, and the V `[K, H, v]` of them.

    calls: (start, length) of the keys of each MQA call; their latent partials are merged before W_UV.
    """
    lora, nope = w_uk.shape[0], w_uk.shape[2]
    absorbed = absorb_query(q, w_uk)
    query_error = torch.zeros_like(absorbed)
    query_error[..., :lora] = (
        LAM * nope**0.5 * U32 * torch.einsum("nhd,lhd->nhl", q[..., :nope].double().abs(), w_uk.abs())
    )
    error = InputError(rounded_factor="q", rounded_dims=lora, query_error=query_error)
    result = attend_reference(
        q=absorbed, k=latents[:, None], v=v, allowed=allowed, scale=scale, numerics=numerics, slots=slots,
        segments=calls, input_error=error, keep_terms=keep_terms,
    )  # fmt: skip
    extra = {
        "latent stores": numerics.u16
        * _latent_stores(absorbed, latents, allowed, scale, calls, result.lse, w_uv, numerics.cell),
        "GEMM": _latent_gemm(absorbed, latents, allowed, scale, w_uv),
    }
    bound = result.bound
    return replace(
        result,
        bound=replace(
            bound,
            tol_out=bound.tol_out + sum_terms(extra),
            out_terms={**bound.out_terms, **extra} if keep_terms else {},
        ),
    )


def _latent_stores(
    q: Tensor,
    latents: Tensor,
    allowed: Tensor,
    scale: float,
    calls: Sequence[tuple[int, int]],
    lse: Tensor,
    w_uv: Tensor,
    cell: float,
) -> Tensor:
    """Effect on the output of rounding the latent partials and their merges once, relative to u16: `[n, H, v]`."""
    keys, lora = latents[:, None], w_uv.shape[0]
    total = torch.zeros(*q.shape[:2], w_uv.shape[2], dtype=torch.float64, device=q.device)
    so_far = torch.zeros(*q.shape[:2], lora, dtype=torch.float64, device=q.device)
    for i, (start, length) in enumerate(calls):
        part = slice(start, start + length)
        out, part_lse = oracle.attend(q, keys[part], keys[part, :, :lora], allowed[:, part], scale)
        weight = torch.exp(part_lse - lse.where(lse != -torch.inf, 0.0))
        out = out * weight.T[..., None]
        so_far = so_far + out
        for stored in (out, so_far) if i else (out,):
            worst = torch.einsum("nhl,lhd->nhd", stored.abs(), w_uv.abs())
            alike = terms.repeats(stored, cell)
            spread = torch.einsum("nhl,lhd->nhd", alike * stored.square(), w_uv.square()).sqrt()
            total += torch.minimum(worst, LAM / 3**0.5 * spread)
    return total


def _latent_gemm(q: Tensor, latents: Tensor, allowed: Tensor, scale: float, w_uv: Tensor) -> Tensor:
    """Float32 accumulation error of the product with W_UV, `[n, H, v]`."""
    lora = w_uv.shape[0]
    size, _ = oracle.attend(q, latents[:, None], latents[:, None, :lora].abs(), allowed, scale)
    factor: float = LAM * lora**0.5 * U32
    return factor * torch.einsum("nhl,lhd->nhd", size, w_uv.abs())
