"""Checks a gather from a paged cache. Put your kernel's call in the place of the loop, then:

    mlacheck run --subject my_kernel_check.py:my_gather
"""

import torch

import mlacheck


@mlacheck.subject(stage="gather", contract=mlacheck.Contract(cache_dtypes=("auto", "fp8_e4m3")))
def my_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):
    """Rows [num_tokens, kv_lora_rank + rope] into `dst`: request b from its position seq_starts[b] on."""
    block_size = src_cache.shape[1]
    for b in range(len(cu_seq_lens) - 1):
        first, last = int(cu_seq_lens[b]), int(cu_seq_lens[b + 1])
        position = int(seq_starts[b]) + torch.arange(last - first, device=dst.device)
        block = block_table[b][position // block_size].long()
        rows = src_cache[block, position % block_size]
        dst[first:last] = rows if kv_cache_dtype == "auto" else (rows.float() * scale).to(dst.dtype)
