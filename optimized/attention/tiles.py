"""Tile sizes of the Triton kernels: from head dims and device alone, so that no batch compiles anew."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optimized.attention.arguments import AttentionCall
from optimized.rounding import IS_INTERPRETED

_MIN_DOT = 16
"""Smallest side of a compiled `tl.dot`."""
_STORAGE_BYTES = 2
_MAX_ACC_ELEMENTS = 128 * 256
"""Float32 accumulator elements of one program: 128 registers a thread at 8 warps."""
_INTERPRETED_ELEMENTS = 1 << 19
"""Elements of one interpreted tile: above it, numpy's own time dominates the fixed cost of an operation."""
_COMPILED_CHOICES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (16, 32, 4, 1),
)
"""(query rows, keys, warps, stages), the fastest first."""
_COMPILED_MQA_CHOICES = (
    (64, 32, 8, 3),
    (64, 32, 8, 2),
    (32, 32, 4, 2),
    (16, 32, 4, 2),
    (16, 16, 4, 1),
)
"""(most heads, keys, warps, stages), the fastest first."""


@dataclass(frozen=True)
class MhaTiles:
    """Compile keys of `masked_mha_kernel`."""

    block_d: int
    """First part of the q/k head dim: a power of two."""
    block_d_tail: int
    """Padded rest of the q/k head dim, or 0. 192 is 128 + 64 rather than 256."""
    block_dv: int
    block_g: int
    """Groups (a request and a head) of one program; 1 unless `folded`."""
    block_m: int
    """Query rows of one program."""
    block_n: int
    """Keys of one step: a multiple of 32."""
    folded: bool
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """`(first, tail)`: a power of two and a padded rest, where that is less padding than one power of two."""
    whole = max(next_power_of_2(head_dim), _MIN_DOT)
    first = whole // 2
    if first < _MIN_DOT or head_dim == whole:
        return whole, 0
    tail = max(next_power_of_2(head_dim - first), _MIN_DOT)
    return (first, tail) if first + tail < whole else (whole, 0)


def mha_tiles(call: AttentionCall, max_seqlen_q: int, max_seqlen_k: int) -> MhaTiles:
    """Tiles of one call. The batch and its lengths count only in interpreted mode, which compiles nothing."""
    head_dim = call.q.shape[2]
    block_dv = max(next_power_of_2(call.v.shape[2]), _MIN_DOT)
    if not IS_INTERPRETED:
        return _compiled_tiles(*split_head_dim(head_dim), block_dv, shared_memory_bytes(call.q.device))
    block_d = max(next_power_of_2(head_dim), _MIN_DOT)
    block_m = min(max(next_power_of_2(max_seqlen_q), _MIN_DOT), 128)
    block_n = min(max(next_power_of_2(max_seqlen_k), 32), 128)
    room = max(_INTERPRETED_ELEMENTS // (max(block_m, block_n) * max(block_n, block_d, block_dv)), 1)
    block_g = min(next_power_of_2(call.batch_size * call.num_heads), 1 << (room.bit_length() - 1))
    return MhaTiles(block_d, 0, block_dv, block_g, block_m, block_n, True, num_warps=4, num_stages=1)


@cache
def _compiled_tiles(block_d: int, block_d_tail: int, block_dv: int, shared_bytes: int) -> MhaTiles:
    """The largest tiles whose operands fit shared memory and whose accumulator fits registers."""
    width = block_d + block_d_tail
    for block_m, block_n, num_warps, num_stages in _COMPILED_CHOICES:
        operands = block_m * (width + block_n) + num_stages * block_n * (width + block_dv)
        if operands * _STORAGE_BYTES <= shared_bytes and block_m * block_dv <= _MAX_ACC_ELEMENTS:
            return MhaTiles(block_d, block_d_tail, block_dv, 1, block_m, block_n, False, num_warps, num_stages)
    raise ValueError(
        f"head dims (q/k {width}, v {block_dv}, padded) need more than the {shared_bytes} bytes of shared "
        "memory that one block of this device may use"
    )


@cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one block may use on this CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class MqaTiles:
    """Compile keys of `sparse_mqa_kernel`."""

    block_latent: int
    block_rope: int
    """Padded rope width, or 0 without rope."""
    block_t: int
    """Query rows of one program; 1 unless `folded`."""
    block_h: int
    """Heads of one program."""
    block_n: int
    """Keys of one step."""
    folded: bool
    num_warps: int
    num_stages: int


def mqa_tiles(q: Tensor, v_dim: int, topk: int) -> MqaTiles:
    """Tiles for q `[T, H, v_dim + rope]`. The rows and `topk` count only in interpreted mode."""
    num_rows, num_heads, width = q.shape
    block_latent = max(next_power_of_2(v_dim), _MIN_DOT)
    block_rope = max(next_power_of_2(width - v_dim), _MIN_DOT) if width > v_dim else 0
    block_h = max(next_power_of_2(num_heads), _MIN_DOT)
    if not IS_INTERPRETED:
        return _compiled_mqa_tiles(block_latent, block_rope, block_h, shared_memory_bytes(q.device))
    block_n = min(max(next_power_of_2(topk), _MIN_DOT), 128)
    room = max(_INTERPRETED_ELEMENTS // (max(block_n, block_h) * max(block_n, block_latent + block_rope)), 1)
    block_t = min(next_power_of_2(num_rows), 1 << (room.bit_length() - 1))
    return MqaTiles(block_latent, block_rope, block_t, block_h, block_n, True, num_warps=4, num_stages=1)


@cache
def _compiled_mqa_tiles(block_latent: int, block_rope: int, heads: int, shared_bytes: int) -> MqaTiles:
    """The largest tiles that fit; a program never takes more heads than there are."""
    width = block_latent + block_rope
    for most_heads, block_n, num_warps, num_stages in _COMPILED_MQA_CHOICES:
        block_h = min(most_heads, heads)
        operands = block_h * (width + block_n) + num_stages * block_n * width
        if operands * _STORAGE_BYTES <= shared_bytes and block_h * block_latent <= _MAX_ACC_ELEMENTS:
            return MqaTiles(block_latent, block_rope, 1, block_h, block_n, False, num_warps, num_stages)
    raise ValueError(
        f"kv_lora_rank {block_latent} and rope {block_rope} (padded) need more than the {shared_bytes} bytes "
        "of shared memory that one block of this device may use"
    )
