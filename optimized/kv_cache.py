"""Paged latent cache: gather with dequantisation, its host checks, and the writers of the quantised formats.

A cache is `[num_blocks, block_size, width]`. Row formats (`kv_cache_dtype`):

    auto         width = kv_lora_rank + rope, bfloat16 or float16: latent, then roped shared key part
    fp8_e4m3     the same width, e4m3 with one scale for the tensor: value = float32(e4m3) * scale
    fp8_ds_mla   656 bytes: 512 e4m3 latent values, 4 float32 scales (one for each 128 values), 64 bf16 rope

e4m3 is the finite-only format of arXiv 2209.05433: sign, 4 exponent bits (bias 7), 3 mantissa bits, no
infinity, NaN at 0x7f and 0xff, largest 448.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimized.gather_kernel import (
    DS_MLA_LATENT,
    DS_MLA_ROPE,
    DS_MLA_ROW_BYTES,
    DS_MLA_TILE,
    launch_gather,
)
from optimized.validation import (
    FLOAT_16_BIT_DTYPES,
    MAX_KERNEL_ROWS,
    require_distinct_elements,
    require_int,
    require_launchable,
    require_lengths,
    require_tensor,
    require_unit_stride,
)

KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8_ds_mla")
E4M3_MAX = 448.0
_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def cache_row_shape(
    kv_cache_dtype: str, kv_lora_rank: int, rope: int, dtype: torch.dtype
) -> tuple[int, tuple[torch.dtype, ...]]:
    """Width of a cache row in elements, and the dtypes that a cache of this format may have.

    `dtype` is that of the activations. Raises ValueError for an unknown format and for `fp8_ds_mla` with
    other sizes than 512 + 64.
    """
    if kv_cache_dtype == "auto":
        return kv_lora_rank + rope, (dtype,)
    if kv_cache_dtype == "fp8_e4m3":
        return kv_lora_rank + rope, _BYTE_DTYPES
    if kv_cache_dtype == "fp8_ds_mla":
        if (kv_lora_rank, rope) != (DS_MLA_LATENT, DS_MLA_ROPE):
            raise ValueError(
                f"kv_cache_dtype is 'fp8_ds_mla' with kv_lora_rank {kv_lora_rank} and rope {rope}, must be "
                f"{DS_MLA_LATENT} and {DS_MLA_ROPE}"
            )
        return DS_MLA_ROW_BYTES, _BYTE_DTYPES
    raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, must be one of {', '.join(KV_CACHE_DTYPES)}")


def check_block_table(
    block_table: torch.Tensor, context_lens: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Raise ValueError unless every used entry of `block_table [B, max_blocks]` names a block of the cache.

    The first `ceil(context_lens[b] / block_size)` entries of row `b` are used; the rest may hold anything and
    is not looked at. Copies the answer from the device: call it where the batch is made.
    """
    require_tensor("block_table", block_table, (None, None), torch.int32)
    lens = require_lengths("context_lens", context_lens, block_table.shape[0])
    require_int("block_size", block_size, 1)
    require_int("num_blocks", num_blocks, 0)
    used = [-(-length // block_size) for length in lens]
    for request, count in enumerate(used):
        if count > block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} entries for request {request}, must have {count} "
                f"for context_lens[{request}] = {lens[request]} in blocks of {block_size}"
            )
    width = max(used, default=0)
    table = block_table[:, :width]
    columns = torch.arange(width, device=table.device)
    is_used = columns < torch.tensor(used, dtype=torch.int64, device=table.device).unsqueeze(1)
    bad = (is_used & ((table < 0) | (table >= num_blocks))).nonzero()
    if len(bad):
        request, entry = bad[0].tolist()
        raise ValueError(
            f"block_table[{request}, {entry}] is {int(table[request, entry])}, must be in [0, {num_blocks}), "
            "the blocks of the cache"
        )


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: float,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Copy `num_tokens` cached rows into `dst [>= num_tokens, kv_lora_rank + rope]`, dequantised.

    Row `t` of `dst` is position `t - cu_seq_lens[b] + seq_starts[b]` of request `b = token_to_seq[t]`, found
    through `block_table [B, max_blocks]`; `seq_starts` None means 0. All index tensors are int32. `auto`
    copies bits; the others round float32 to the dtype of `dst`. `scale` is read by `fp8_e4m3` only. Later
    rows of `dst` are not written. On a GPU the values of the index tensors are not checked, which would wait for it;
    `check_block_table` does where a batch is made.

    Raises TypeError or ValueError, before any write, for arguments of a wrong type, shape or device, and on the CPU
    for index tensors that name a row outside the cache.
    """
    require_int("num_tokens", num_tokens, 0, MAX_KERNEL_ROWS)
    require_tensor("dst", dst, (None, None), FLOAT_16_BIT_DTYPES)
    width = dst.shape[1]
    rope = DS_MLA_ROPE if kv_cache_dtype == "fp8_ds_mla" else 0
    row_width, cache_dtypes = cache_row_shape(kv_cache_dtype, width - rope, rope, dst.dtype)
    require_tensor("src_cache", src_cache, (None, None, row_width), cache_dtypes, dst.device)
    require_tensor("block_table", block_table, (None, None), torch.int32, dst.device)
    requests = block_table.shape[0]
    require_tensor("cu_seq_lens", cu_seq_lens, (requests + 1,), torch.int32, dst.device)
    require_tensor("token_to_seq", token_to_seq, (None,), torch.int32, dst.device)
    if seq_starts is not None:
        require_tensor("seq_starts", seq_starts, (requests,), torch.int32, dst.device)
    for name, tensor in (("dst", dst), ("token_to_seq", token_to_seq)):
        if tensor.shape[0] < num_tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, must have num_tokens = {num_tokens}")
    for name, tensor in (("dst", dst), ("src_cache", src_cache)):
        require_unit_stride(name, tensor)
    require_distinct_elements("dst", dst)
    if not isinstance(scale, int | float):
        raise TypeError(f"scale is a {type(scale).__name__}, must be a float")
    if num_tokens == 0:
        return
    if src_cache.numel() == 0 or block_table.numel() == 0:
        raise ValueError(
            f"num_tokens is {num_tokens}, must be 0 with src_cache of shape {tuple(src_cache.shape)} and "
            f"block_table of shape {tuple(block_table.shape)}"
        )
    require_launchable("dst", dst)
    if dst.device.type == "cpu":
        _require_cached_rows(src_cache, block_table, cu_seq_lens, token_to_seq[:num_tokens], seq_starts)
    launch_gather(
        src_cache,
        dst,
        block_table,
        cu_seq_lens.contiguous(),
        token_to_seq.contiguous(),
        None if seq_starts is None else seq_starts.contiguous(),
        num_tokens,
        kv_cache_dtype,
        float(scale),
    )


def _require_cached_rows(
    src_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    seq_starts: torch.Tensor | None,
) -> None:
    """Raise ValueError unless every row that the index tensors name is in the cache."""
    blocks, block_size, _ = src_cache.shape
    requests, entries = block_table.shape
    request = token_to_seq.long()
    bad = ((request < 0) | (request >= requests)).nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(f"token_to_seq[{token}] is {int(request[token])}, must be in [0, {requests}), the requests")
    position = torch.arange(len(request)) - cu_seq_lens.long()[request]
    if seq_starts is not None:
        position = position + seq_starts.long()[request]
    bad = ((position < 0) | (position >= entries * block_size)).nonzero()
    if len(bad):
        token = int(bad[0])
        raise ValueError(
            f"cu_seq_lens and seq_starts put row {token} of dst at position {int(position[token])} of request "
            f"{int(request[token])}, must be in [0, {entries * block_size}): block_table has {entries} entries"
        )
    block = block_table.long()[request, position // block_size]
    bad = ((block < 0) | (block >= blocks)).nonzero()
    if len(bad):
        token = int(bad[0])
        entry = f"block_table[{int(request[token])}, {int(position[token]) // block_size}]"
        raise ValueError(f"{entry} is {int(block[token])}, must be in [0, {blocks}), the blocks of the cache")


def quantise_fp8_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """`x / scale` in float32, saturated at +-448 and rounded to nearest even e4m3, of the shape of `x`."""
    return (x.to(torch.float32) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def pack_fp8_ds_mla(latent_and_rope: torch.Tensor) -> torch.Tensor:
    """Rows `[..., 576]` (512 latent, 64 rope) -> packed `[..., 656]` uint8 rows of the `fp8_ds_mla` format.

    Each tile of 128 latent values is scaled by its largest magnitude / 448, in float32; a tile of zeros by 1.
    """
    width = DS_MLA_LATENT + DS_MLA_ROPE
    if latent_and_rope.shape[-1] != width:
        raise ValueError(f"latent_and_rope has {latent_and_rope.shape[-1]} columns, must have {width}")
    latent, rope = latent_and_rope.split((DS_MLA_LATENT, DS_MLA_ROPE), dim=-1)
    tiles = latent.to(torch.float32).unflatten(-1, (-1, DS_MLA_TILE))
    largest = tiles.abs().amax(dim=-1, keepdim=True)
    scales = (largest / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    scales = torch.where(largest == 0, 1.0, scales)
    codes = (tiles / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat(
        (
            codes.view(torch.uint8),
            scales.squeeze(-1).contiguous().view(torch.uint8),
            rope.to(torch.bfloat16).contiguous().view(torch.uint8),
        ),
        dim=-1,
    )
