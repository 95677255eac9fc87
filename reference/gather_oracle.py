"""The oracle's answers by another road: row by row over the listed keys, in the absorbed form.

Nothing of `reference.oracle` is used: duplicates are removed by sorting a row, scores come from latent rows
(`q' = [q_nope W_UK | q_pe]`), values are weighted as latents and pass through W_UV last. Each block of rows
gathers only its own keys, so the memory does not grow with the length of the sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.latent import absorb_query, request_latents, split_weight

_BLOCK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}


def _listed_keys(topk_rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k rows `[n, topk]` -> keys `[n, topk]` (0 if none), and which entries are first of their key."""
    keys = topk_rows.long()
    keys = torch.where((keys < 0) | (keys > positions[:, None]), -1, keys).sort(dim=1).values
    first = keys >= 0
    first[:, 1:] &= keys[:, 1:] != keys[:, :-1]
    return keys.clamp(min=0), first


def _log_sum_exp(scores: Tensor, listed: Tensor) -> tuple[Tensor, Tensor]:
    """scores `[n, H, topk]`, listed `[n, topk]` -> probabilities (0 if unlisted), LSE `[n, H]`."""
    scores = torch.where(listed[:, None], scores, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return weights, lse


def _row_blocks(n: int, elements_per_row: int, device: torch.device) -> list[slice]:
    step = max(1, _BLOCK_ELEMENTS.get(device.type, 1 << 21) // max(1, elements_per_row))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _all_keys(num_keys: int, rows: slice, device: torch.device) -> Tensor:
    return torch.arange(num_keys, device=device).expand(rows.stop - rows.start, num_keys)


def gather_attend(
    q: Tensor, k: Tensor, v: Tensor, topk_rows: Tensor, context_len: int, scale: float, *, dense: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of one request: out `[n, H, Dv]`, LSE `[H, n]`, float64.

    q `[n, H, D]`, k `[K, H, D]`, v `[K, H, Dv]`, top-k rows `[n, topk]`. Query `i` sits at `context_len + i`.
    With `dense` the rows are not read: every key up to the own position is allowed.
    """
    n, heads, dim = q.shape
    out = q.new_zeros(n, heads, v.shape[2], dtype=torch.float64)
    lse = q.new_full((n, heads), -torch.inf, dtype=torch.float64)
    topk = k.shape[0] if dense else topk_rows.shape[1]
    if topk == 0 or k.shape[0] == 0:
        return out, lse.T
    for rows in _row_blocks(n, topk * heads * (dim + v.shape[2]), q.device):
        positions = context_len + torch.arange(rows.start, rows.stop, device=q.device)
        listed = _all_keys(topk, rows, q.device) if dense else topk_rows[rows]
        keys, first = _listed_keys(listed, positions)
        scores = scale * torch.einsum("nhd,njhd->nhj", q[rows].double(), k[keys].double())
        weights, lse[rows] = _log_sum_exp(scores, first)
        values = torch.where(first[..., None, None], v[keys].double(), 0.0)
        out[rows] = torch.einsum("nhj,njhd->nhd", weights, values)
    return out, lse.T


def gather_prefill(
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
    """`reference.oracle.sparse_mla_prefill` by the other road: same arguments, same answers."""
    w_uk, w_uv = split_weight(w_kv_b, num_heads, nope, v_head_dim)
    lora = w_kv_b.shape[0]
    out = q.new_zeros(q.shape[0], num_heads, v_head_dim, dtype=torch.float64)
    lse = q.new_full((q.shape[0], num_heads), -torch.inf, dtype=torch.float64)
    offset = 0
    for b, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        tokens = slice(offset, offset + query_len)
        latents = request_latents(
            kv_c_normed=kv_c_normed[tokens], k_pe=k_pe[tokens], rope=rope, context_len=context_len,
            cache=cache, block_table_row=None if block_table is None else block_table[b],
            kv_cache_dtype=kv_cache_dtype, kv_cache_scale=kv_cache_scale,
        )  # fmt: skip
        topk = len(latents) if dense else topk_rows.shape[1]
        for rows in _row_blocks(query_len if topk else 0, topk * (lora + rope + num_heads), q.device):
            here = slice(offset + rows.start, offset + rows.stop)
            positions = context_len + torch.arange(rows.start, rows.stop, device=q.device)
            listed = _all_keys(topk, rows, q.device) if dense else topk_rows[here]
            keys, first = _listed_keys(listed, positions)
            gathered = torch.where(first[..., None], latents[keys], 0.0)  # [rows, topk, lora + rope]
            scores = scale * (absorb_query(q[here], w_uk) @ gathered.transpose(1, 2))
            weights, lse[here] = _log_sum_exp(scores, first)
            out[here] = torch.einsum("nhl,lhd->nhd", weights @ gathered[..., :lora], w_uv)
        offset += query_len
    return out, lse.T
