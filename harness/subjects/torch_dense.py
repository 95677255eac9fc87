"""Subject `torch-dense`: PyTorch's own attention, request by request, with a boolean mask."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.subjects.api import NotRunnable, subject
from harness.subjects.contract import Contract

MAX_SCORES = 2**31
"""Scores of one request (heads x queries x keys): the boolean mask makes PyTorch keep all of them."""


@subject(stage="attend", contract=Contract(strides="any"))
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    allowed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[Tq, H, Dv]` and LSE `[H, Tq]`; rows without a key give 0 and -inf.

    Raises NotRunnable where a request has too many scores to keep.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for rows, keys in zip(_slices(q_starts), _slices(k_starts), strict=True):
        n, num_keys = rows.stop - rows.start, keys.stop - keys.start
        if n == 0 or num_keys == 0:
            continue
        if n * num_keys * q.shape[1] > MAX_SCORES:
            raise NotRunnable(f"torch-dense keeps every score: {q.shape[1]} x {n} x {num_keys} are too many")
        mask = allowed[rows, :num_keys]
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        attended = scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask, scale=scale)[0]
        # a row without any key has no softmax: PyTorch may give 0 or NaN for it
        out[rows] = attended.transpose(0, 1).masked_fill(~mask.any(dim=1)[:, None, None], 0.0)
        scores = scale * (one_q[0].float() @ one_k[0].float().transpose(1, 2))
        lse[:, rows] = scores.masked_fill(~mask, -torch.inf).logsumexp(dim=2)
    return out, lse


def _slices(starts: list[int]) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(starts)]
