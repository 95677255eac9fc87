"""Checks a whole sparse MLA prefill as a black box. Call your layer in the place of the loop, then:

    mlacheck run --subject my_kernel_check.py:my_prefill
"""

import torch

import mlacheck


@mlacheck.subject(stage="prefill", contract=mlacheck.Contract(cache_dtypes=("auto",)))
def my_prefill(
    q, kv_c_normed, k_pe, cache, block_table, w_kv_b, topk, query_lens, context_lens, scale, nope, rope, v_dim
):
    """q [T, H, nope + rope], topk [T, n] request-local key positions -> out [T, H, v_dim], lse [H, T]."""
    heads, lora = q.shape[1], w_kv_b.shape[0]
    out = torch.zeros(q.shape[0], heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.full((heads, q.shape[0]), -torch.inf, device=q.device)
    first = 0
    for b, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        new = slice(first, first + query_len)
        first += query_len
        position = torch.arange(context_len, device=q.device)
        block = block_table[b][position // cache.shape[1]].long()
        context = cache[block, position % cache.shape[1]]
        latent = torch.cat([context[:, :lora], kv_c_normed[new]])
        pe = torch.cat([context[:, lora:], k_pe[new, 0]])
        kv = (latent.float() @ w_kv_b.float()).to(q.dtype).view(len(latent), heads, nope + v_dim).float()
        k = torch.cat([kv[..., :nope], pe.float()[:, None].expand(-1, heads, rope)], dim=2)
        for i in range(query_len):
            t = new.start + i
            keys = topk[t][(topk[t] >= 0) & (topk[t] <= context_len + i)].unique().long()
            scores = scale * torch.einsum("hd,khd->hk", q[t].float(), k[keys])
            lse[:, t] = scores.logsumexp(1)
            weights = torch.exp(scores - lse[:, t, None]).nan_to_num(0.0)
            out[t] = torch.einsum("hk,khd->hd", weights, kv[keys][..., nope:]).to(q.dtype)
    return out, lse
