"""Checks sparse attention over listed latent rows. Put your kernel's call in the place of the loop, then:

    mlacheck run --subject my_kernel_check.py:my_mqa
"""

import torch

import mlacheck


@mlacheck.subject(stage="mqa", contract=mlacheck.Contract())
def my_mqa(q, kv, indices, scale, v_dim):
    """q [T, H, width], kv [slots, width], indices [T, topk] int32 -> out [T, H, v_dim], lse [H, T]."""
    out = torch.zeros(q.shape[0], q.shape[1], v_dim, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    for t in range(q.shape[0]):
        row = indices[t]
        slots = row[(row >= 0) & (row < kv.shape[0])].unique()  # a slot that is listed twice counts once
        keys = kv[slots.long()].float()
        scores = scale * (q[t].float() @ keys.t())
        lse[:, t] = scores.logsumexp(1)
        weights = torch.exp(scores - lse[:, t, None]).nan_to_num(0.0)
        out[t] = (weights @ keys[:, :v_dim]).to(q.dtype)
    return out, lse
