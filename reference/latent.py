"""Latent rows and what they stand for: paged cache -> rows -> per-head K and V, and the absorbed form.

Public names: `read_cache_rows`, `split_weight`, `project`, `absorb_query`, `request_latents`.
"""

import torch
from torch import Tensor

CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_ds_mla")
_GROUP = 128  # latent values that share one float32 scale in an fp8_ds_mla entry


def read_cache_rows(
    cache: Tensor,
    block_table_row: Tensor,
    start: int,
    length: int,
    *,
    kv_cache_dtype: str = "auto",
    scale: float = 1.0,
    rope: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Rows `start .. start+length-1` of one request, as a kernel must see them: `[length, lora + rope]`.

    cache:            `[num_blocks, block_size, width]`; raw bytes (uint8 or float8_e4m3fn) for the fp8 kinds
    block_table_row:  `[max_blocks]` integers; only the entries that these positions need are read

    "auto" copies. "fp8_e4m3" is `dtype(float32(e4m3) * scale)`, one scale for the tensor and the activations'
    dtype. An entry of "fp8_ds_mla" is `lora` e4m3 values, one float32 scale for each 128 of them, and `rope`
    bf16 values (656 bytes for 512 + 64).
    Raises ValueError for an unknown kind, or a needed block id outside the cache.
    """
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, it must be one of {CACHE_DTYPES}")
    num_blocks, block_size = cache.shape[0], cache.shape[1]
    positions = torch.arange(start, start + length, device=cache.device)
    blocks = block_table_row.to(cache.device, torch.int64)[positions // block_size]
    outside = blocks[(blocks < 0) | (blocks >= num_blocks)]
    if len(outside):
        raise ValueError(f"block_table names block {int(outside[0])}, ids must lie in [0, {num_blocks})")
    entries = cache[blocks, positions % block_size]
    if kv_cache_dtype == "auto":
        return entries
    if kv_cache_dtype == "fp8_e4m3":
        return (entries.view(torch.float8_e4m3fn).float() * torch.tensor(scale).float()).to(dtype)
    return _unpack_ds_mla(entries.contiguous().view(torch.uint8), rope)


def _unpack_ds_mla(entries: Tensor, rope: int) -> Tensor:
    """`[n, bytes]` uint8 -> `[n, lora + rope]` bf16."""
    n, width = entries.shape
    groups = (width - 2 * rope) // (_GROUP + 4)
    lora = groups * _GROUP
    if lora + 4 * groups + 2 * rope != width:
        raise ValueError(f"an fp8_ds_mla entry has {width} bytes, it must have 132 for each 128 latents + {2 * rope}")
    values = entries[:, :lora].contiguous().view(torch.float8_e4m3fn).float().view(n, groups, _GROUP)
    scales = entries[:, lora : lora + 4 * groups].contiguous().view(torch.float32).view(n, groups, 1)
    pe = entries[:, lora + 4 * groups :].contiguous().view(torch.bfloat16)
    return torch.cat([(values * scales).view(n, lora).bfloat16(), pe.view(n, rope)], dim=1)


def request_latents(
    *,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    cache: Tensor | None,
    block_table_row: Tensor | None,
    context_len: int,
    rope: int,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: float = 1.0,
) -> Tensor:
    """All latent rows of one request in key order, `[context_len + query_len, kv_lora_rank + rope]` float64.

    kv_c_normed `[query_len, kv_lora_rank]` and k_pe `[query_len, 1, rope]` are the request's new tokens.
    """
    new = torch.cat([kv_c_normed, k_pe.reshape(len(kv_c_normed), rope)], dim=1).double()
    if context_len == 0:
        return new
    if cache is None or block_table_row is None:
        raise ValueError(f"cache and block_table are needed, context_len is {context_len}")
    context = read_cache_rows(
        cache, block_table_row, 0, context_len, kv_cache_dtype=kv_cache_dtype, scale=kv_cache_scale, rope=rope,
        dtype=kv_c_normed.dtype,
    )  # fmt: skip
    return torch.cat([context.double(), new])


def split_weight(w_kv_b: Tensor, num_heads: int, nope: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """`[lora, H*(nope+v)]` -> W_UK `[lora, H, nope]` and W_UV `[lora, H, v]`, float64."""
    w = w_kv_b.double().reshape(w_kv_b.shape[0], num_heads, nope + v_head_dim)
    return w[..., :nope], w[..., nope:]


def project(latents: Tensor, w_kv_b: Tensor, num_heads: int, nope: int, v_head_dim: int) -> tuple[Tensor, Tensor]:
    """Rows `[n, lora + rope]` -> K `[n, H, nope + rope]` and V `[n, H, v]`, float64, unrounded.

    `K_h(j) = [W_UK,h c_j | k_pe_j]`, `V_h(j) = W_UV,h c_j`.
    """
    lora = w_kv_b.shape[0]
    c, pe = latents[:, :lora].double(), latents[:, lora:].double()
    kv = (c @ w_kv_b.double()).view(len(c), num_heads, nope + v_head_dim)
    k = torch.cat([kv[..., :nope], pe[:, None].expand(-1, num_heads, -1)], dim=2)
    return k, kv[..., nope:]


def absorb_query(q: Tensor, w_uk: Tensor) -> Tensor:
    """q `[n, H, nope+rope]`, W_UK `[lora, H, nope]` -> `[q_nope W_UK | q_pe]` `[n, H, lora+rope]`."""
    nope = w_uk.shape[2]
    absorbed = torch.einsum("nhd,lhd->nhl", q[..., :nope].double(), w_uk)
    return torch.cat([absorbed, q[..., nope:].double()], dim=2)
