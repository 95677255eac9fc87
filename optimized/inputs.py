"""Checks of what `forward_mha` is given, before anything is launched or written (SPEC section 3)."""

from __future__ import annotations

import torch

from optimized.kv_cache import cache_row_shape, check_block_table
from optimized.layer import LayerDims
from optimized.metadata import PrefillMetadata

ATTENTION_DTYPES = (torch.bfloat16, torch.float16)


def require_tensor(
    name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise TypeError or ValueError unless `tensor` has exactly this shape, dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}, must be {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, must be on {device}")


def validate_prefill(
    dims: LayerDims,
    *,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    topk_tokens: int,
    output: torch.Tensor,
    metadata: PrefillMetadata,
    kv_cache_dtype: str,
) -> None:
    """Raise a TypeError or ValueError that names the first argument which cannot be served.

    The block table is checked for the `ceil(context / block_size)` entries of each request that are used.
    """
    if not isinstance(q, torch.Tensor) or q.dtype not in ATTENTION_DTYPES:
        found = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        raise TypeError(f"q has dtype {found}, must be torch.bfloat16 or torch.float16")
    tokens = metadata.num_tokens
    device = q.device
    require_tensor("q", q, (tokens, dims.num_heads, dims.qk_head_dim), q.dtype, device)
    require_tensor("kv_c_normed", kv_c_normed, (tokens, dims.kv_lora_rank), q.dtype, device)
    require_tensor("k_pe", k_pe, (tokens, 1, dims.qk_rope_head_dim), q.dtype, device)
    require_tensor("output", output, (tokens, dims.num_heads * dims.v_head_dim), q.dtype, device)
    if output.stride(-1) != 1:
        raise ValueError(f"output has stride {output.stride(-1)} in its last dimension, must be 1")
    if q.stride(-1) != 1:
        raise ValueError(f"q has stride {q.stride(-1)} in its last dimension, must be 1")
    _validate_topk(topk_indices_buffer, topk_tokens, metadata, device)
    _validate_offsets(metadata, device)
    _validate_cache(dims, cache, metadata, kv_cache_dtype, q.dtype, device)


def _validate_topk(buffer: object, topk_tokens: int, metadata: PrefillMetadata, device: torch.device) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"topk_indices_buffer is a {type(buffer).__name__}, must be a torch.Tensor")
    if buffer.dtype != torch.int32:
        raise TypeError(f"topk_indices_buffer has dtype {buffer.dtype}, must be torch.int32")
    rows = metadata.num_decode_tokens + metadata.num_tokens
    if buffer.dim() != 2 or buffer.shape[0] < rows or buffer.shape[1] != topk_tokens:
        raise ValueError(
            f"topk_indices_buffer has shape {tuple(buffer.shape)}, must be [at least {rows}, {topk_tokens}] "
            f"({metadata.num_decode_tokens} decode and {metadata.num_tokens} prefill rows)"
        )
    if buffer.device != device:
        raise ValueError(f"topk_indices_buffer is on {buffer.device}, must be on {device}")


def _validate_offsets(metadata: PrefillMetadata, device: torch.device) -> None:
    starts = metadata.query_start_loc
    require_tensor("query_start_loc", starts, (metadata.num_requests + 1,), torch.int32, device)
    lens = metadata.query_lens_cpu
    if lens is None:
        return
    if len(lens) != metadata.num_requests or any(length < 0 for length in lens):
        raise ValueError(f"query_lens_cpu is {lens}, must hold {metadata.num_requests} lengths >= 0")
    if sum(lens) != metadata.num_tokens:
        raise ValueError(
            f"query_lens_cpu adds up to {sum(lens)} tokens, must be num_tokens = {metadata.num_tokens}"
        )
    if device.type == "cpu":  # reading it on a GPU would make the host wait for the device
        expected = [0]
        for length in lens:
            expected.append(expected[-1] + length)
        if starts.tolist() != expected:
            raise ValueError(
                f"query_start_loc is {starts.tolist()}, must be {expected} (query_lens_cpu summed)"
            )


def _validate_cache(
    dims: LayerDims,
    cache: object,
    metadata: PrefillMetadata,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    table = metadata.block_table
    if not isinstance(table, torch.Tensor) or table.dtype != torch.int32:
        found = table.dtype if isinstance(table, torch.Tensor) else type(table).__name__
        raise TypeError(f"block_table has dtype {found}, must be torch.int32")
    if table.dim() != 2 or table.shape[0] != metadata.num_requests:
        raise ValueError(
            f"block_table has shape {tuple(table.shape)}, must be [{metadata.num_requests} requests, max_blocks]"
        )
    if table.device != device:
        raise ValueError(f"block_table is on {table.device}, must be on {device}")
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"kv_c_and_k_pe_cache is a {type(cache).__name__}, must be a torch.Tensor")
    width, cache_dtypes = cache_row_shape(kv_cache_dtype, dims.kv_lora_rank, dims.qk_rope_head_dim, dtype)
    if cache.dtype not in cache_dtypes:
        raise TypeError(
            f"kv_c_and_k_pe_cache has dtype {cache.dtype}, must be {' or '.join(map(str, cache_dtypes))} for "
            f"kv_cache_dtype {kv_cache_dtype!r}"
        )
    if cache.dim() != 3 or cache.shape[1] != metadata.block_size or cache.shape[2] != width:
        raise ValueError(
            f"kv_c_and_k_pe_cache has shape {tuple(cache.shape)}, must be "
            f"[num_blocks, {metadata.block_size}, {width}] for kv_cache_dtype {kv_cache_dtype!r}"
        )
    if cache.device != device:
        raise ValueError(f"kv_c_and_k_pe_cache is on {cache.device}, must be on {device}")
    check_block_table(table, metadata.context_lens_cpu, metadata.block_size, cache.shape[0])
