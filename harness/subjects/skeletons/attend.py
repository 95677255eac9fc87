"""Checks varlen attention over given keys. Put your kernel's call in the place of the loop, then:

    mlacheck run --subject my_kernel_check.py:my_attend
"""

import torch

import mlacheck


@mlacheck.subject(stage="attend", contract=mlacheck.Contract())
def my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):
    """q [Tq, H, D], k [Tk, H, D], v [Tk, H, Dv], allowed [Tq, longest] bool -> out [Tq, H, Dv], lse [H, Tq]."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        scores = scale * torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float())
        scores = scores.masked_fill(~allowed[rows, : scores.shape[2]], -torch.inf)
        lse[:, rows] = scores.logsumexp(2)
        weights = torch.exp(scores - lse[:, rows, None]).nan_to_num(0.0)  # a row without any key: output 0
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v[keys].float()).to(q.dtype)
    return out, lse
