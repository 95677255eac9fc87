"""Checks a builder of packed top-k masks. Put your kernel's call in the place of the loops, then:

    mlacheck run --subject my_kernel_check.py:my_mask
"""

import torch

import mlacheck


@mlacheck.subject(stage="mask", contract=mlacheck.Contract())
def my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):
    """Top-k rows [q_len, topk] of each request -> [B, padded_q, words] int32 in the dirty workspace `out`."""
    tile = 128 if max_q_len <= 128 else 256
    padded_q = -(-max_q_len // tile) * tile
    words = -(-max_seq_len // 128) * 4
    bits = torch.zeros(len(q_lens), padded_q, words * 32, dtype=torch.bool, device=out.device)
    for b, rows in enumerate(topk_indices_per_req):
        for i in range(rows.shape[0]):
            last = max_seq_len - 1
            if first_query_pos is not None:
                last = min(last, int(first_query_pos[b]) + i)
            keys = rows[i][(rows[i] >= 0) & (rows[i] <= last)]
            bits[b, i, keys.long()] = True
    place = torch.arange(32, device=out.device)
    packed = (bits.view(len(q_lens), padded_q, words, 32).long() << place).sum(3)
    mask = out.view(len(q_lens), padded_q, words)
    mask.copy_(torch.where(packed >= 2**31, packed - 2**32, packed))
    return mask
