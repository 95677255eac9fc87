"""Sparse MLA prefill, in float64, request by request: the specification as code.

    A(b, i) = unique { t in top-k row of query i : 0 <= t <= context_len[b] + i }
    s_j     = scale * q . K(j)           LSE = log sum_{j in A} exp(s_j)
    out     = sum_{j in A} exp(s_j - LSE) V(j)

Duplicates count once, order is irrelevant, entries outside the range are ignored, an empty A gives output 0
and LSE -inf. On the dense path A is every key up to the query's own position, and top-k rows are not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.arguments import require_attend, require_partials, require_topk
from reference.latent import project, request_latents

_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}


def allowed_set(topk_row: Sequence[int], position: int) -> list[int]:
    """The allowed set of one query at `position`, sorted."""
    return sorted({t for t in topk_row if 0 <= t <= position})


def allowed_matrix(topk_rows: Tensor, context_len: int) -> Tensor:
    """`allowed_set` for all rows of a request: top-k rows `[q, topk]` -> bool `[q, context_len + q]`."""
    require_topk(topk_rows, context_len)
    query_len = topk_rows.shape[0]
    num_keys = context_len + query_len
    rows = topk_rows.long()
    position = context_len + torch.arange(query_len, device=rows.device)[:, None]
    legal = (rows >= 0) & (rows <= position)
    allowed = torch.zeros(query_len, num_keys + 1, dtype=torch.bool, device=rows.device)
    # illegal entries land in one extra column, which is then cut off
    allowed.scatter_(1, rows.where(legal, torch.tensor(num_keys, device=rows.device)), True)
    return allowed[:, :num_keys]


def causal_matrix(query_len: int, context_len: int, device: torch.device | str = "cpu") -> Tensor:
    """The allowed sets of the dense path: bool `[query_len, context_len + query_len]`."""
    position = context_len + torch.arange(query_len, device=device)[:, None]
    return torch.arange(context_len + query_len, device=device)[None] <= position


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over allowed sets: out `[n, H, Dv]`, LSE `[H, n]`, float64.

    q `[n, H, D]`, k `[K, H, D]`, v `[K, H, Dv]`, allowed bool `[n, K]`, shared by the heads.
    Values of keys outside a row's allowed set do not reach that row, whatever they are (NaN too).
    """
    require_attend(q, k, v, allowed)
    n, heads, _ = q.shape
    out = q.new_zeros(n, heads, v.shape[2], dtype=torch.float64)
    lse = q.new_full((heads, n), -torch.inf, dtype=torch.float64)
    if n == 0 or k.shape[0] == 0:
        return out, lse
    keys, values = k.double().permute(1, 2, 0), v.double().transpose(0, 1)  # [H, D, K], [H, K, Dv]
    step = max(1, _BLOCK_ELEMENTS.get(q.device.type, 1 << 22) // (heads * k.shape[0]))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        scores = scale * (q[rows].double().transpose(0, 1) @ keys)  # [H, rows, K]
        scores = scores.masked_fill(~allowed[rows], -torch.inf)
        top = scores.amax(dim=2, keepdim=True)
        top = top.where(top != -torch.inf, 0.0)  # an empty row: exp(-inf - 0) = 0 for every key
        weights = torch.exp(scores - top)
        total = weights.sum(dim=2, keepdim=True)
        lse[:, rows] = (top + torch.log(total)).squeeze(2)
        probabilities = weights / total.where(total != 0, 1.0)
        out[rows] = _weighted_sum(probabilities, values, allowed[rows]).transpose(0, 1)
    return out, lse


def _weighted_sum(weights: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """`weights [H, n, K] @ values [H, K, Dv]`; a key outside the allowed set adds nothing, not 0 * NaN."""
    finite = values.isfinite()
    if bool(finite.all()):
        return weights @ values
    total = weights @ values.where(finite, 0.0)
    member = allowed.double()

    def touches(condition: Tensor) -> Tensor:
        return member @ condition.double() > 0

    up, down = touches(values == torch.inf), touches(values == -torch.inf)
    total = total.masked_fill(up, torch.inf).masked_fill(down, -torch.inf)
    return total.masked_fill(touches(values.isnan()) | (up & down), torch.nan)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Partials over two disjoint sets of keys -> that over both: out `[n, H, Dv]`, LSE `[H, n]`, float64.

    An LSE of +inf counts as -inf. A side with LSE -inf has weight zero and its output is not read.
    """
    require_partials(out_a, lse_a, out_b, lse_b)
    a, b = (lse.double().masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(a, b)
    out = torch.zeros_like(out_a, dtype=torch.float64)
    for side, partial in ((a, out_a), (b, out_b)):
        weight = torch.exp(side - lse.where(lse != -torch.inf, 0.0)).transpose(0, 1)[..., None]
        present = (side != -torch.inf).transpose(0, 1)[..., None]
        out = out + weight.where(present, 0.0) * partial.double().where(present, 0.0)
    return out, lse


def sparse_mla_prefill(
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
    dense: bool = False,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The whole layer on raw inputs: out `[T, H, v]`, LSE `[H, T]`, float64; K and V are not rounded.

    q `[T, H, nope+rope]`, kv_c_normed `[T, lora]`, k_pe `[T, 1, rope]`, cache `[blocks, block_size, width]`,
    block_table `[B, max_blocks]`, w_kv_b `[lora, H*(nope+v)]`, topk_rows `[T, topk]` (not read if `dense`).
    """
    out = q.new_zeros(q.shape[0], num_heads, v_head_dim, dtype=torch.float64)
    lse = q.new_full((num_heads, q.shape[0]), -torch.inf, dtype=torch.float64)
    first = 0
    for b, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        rows = slice(first, first + query_len)
        first += query_len
        latents = request_latents(
            kv_c_normed=kv_c_normed[rows], k_pe=k_pe[rows], rope=rope, context_len=context_len,
            cache=cache, block_table_row=None if block_table is None else block_table[b],
            kv_cache_dtype=kv_cache_dtype, kv_cache_scale=kv_cache_scale,
        )  # fmt: skip
        k, v = project(latents, w_kv_b, num_heads, nope, v_head_dim)
        if dense:
            allowed = causal_matrix(query_len, context_len, q.device)
        else:
            allowed = allowed_matrix(topk_rows[rows], context_len)
        out[rows], lse[:, rows] = attend(q[rows], k, v, allowed, scale)
    return out, lse
