"""Which path a prefill batch takes: dense MHA, masked MHA (global mask or remap) or sparse MQA."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch

from optimized.attention.fa4 import fa4_available
from optimized.mask import masked_mha_workspace_fits, topk_mask_shape
from optimized.metadata import PrefillMetadata

Policy = Literal["ours", "vllm"]
POLICIES: tuple[Policy, ...] = ("ours", "vllm")

# (heads over all ranks, kv_lora_rank, nope, rope, v) for which the engine takes masked MHA
ENGINE_SHAPES = frozenset({(128, 512, 128, 64, 128), (64, 512, 192, 64, 256), (64, 512, 256, 0, 256)})

MIB = 1024 * 1024
INT32_BYTES = 4


class Path(StrEnum):
    """The three computations; masked MHA reports `no_context`, `global_mask` or `remap` in the trace."""

    DENSE = "dense"
    MASKED = "masked"
    MQA = "mqa"


Force = Literal["dense", "masked", "masked_remap", "mqa"]
FORCES: tuple[Force, ...] = ("dense", "masked", "masked_remap", "mqa")


class FusedOutputError(NotImplementedError):
    """`output_scale` was given: the fused FP8 output is not offered by this layer."""


@dataclass(frozen=True)
class Availability:
    """Whether masked MHA can run, and if not, why."""

    available: bool
    reason: str = ""


def capability_family() -> int | None:
    """Tens of the compute capability times ten (90 for SM90, 100 for SM100); None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()[0] * 10


def is_masked_mha_available(
    num_heads_total: int,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
    kv_cache_dtype: str,
    *,
    policy: Policy = "ours",
    attention: str = "triton",
    family: int | None = None,
    fa4: tuple[bool, str] | None = None,
) -> Availability:
    """Whether masked MHA can serve a layer of these dims.

    `policy="vllm"` keeps the engine's rule: capability family 100, FA4 importable, an unquantised cache and one
    of the published shapes. `policy="ours"` says what can run: FA4 where `attention="fa4"` and the device is
    SM90 or SM100, our Triton kernel everywhere. `family` and `fa4` stand in for the device and the installed
    package (tests). A quantised cache is refused by both: the masked path reads bf16 or fp16 rows.

    Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}, must be one of {', '.join(POLICIES)}")
    if kv_cache_dtype != "auto":
        return Availability(
            False, f"masked MHA reads an unquantised cache only, and kv_cache_dtype is {kv_cache_dtype!r}"
        )
    family = capability_family() if family is None else family
    if policy == "vllm":
        usable, why = fa4_available() if fa4 is None else fa4
        if family != 100:
            return Availability(
                False, f"policy 'vllm' needs capability family 100, and the device has {family}"
            )
        if not usable:
            return Availability(False, f"policy 'vllm' needs FA4: {why}")
        shape = (num_heads_total, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        if shape not in ENGINE_SHAPES:
            return Availability(
                False, f"policy 'vllm' does not serve (heads_total, lora, nope, rope, v) = {shape}"
            )
        return Availability(True)
    if attention == "fa4":
        usable, why = fa4_available() if fa4 is None else fa4
        if not usable:
            return Availability(False, f"attention 'fa4' cannot run: {why}")
        if family not in (90, 100):
            return Availability(
                False, f"attention 'fa4' needs SM90 or SM100, and the device family is {family}"
            )
    return Availability(True)


def use_dense_mha(max_seq_len: int, topk_tokens: int) -> bool:
    """Every key is selected when no sequence of the batch is longer than a top-k row."""
    return max_seq_len <= topk_tokens


_warned: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Warn with `message` the first time that `key` is seen in this process."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def reset_warnings() -> None:
    """Forget which warnings were given (tests)."""
    _warned.clear()


def batch_fits_mask_workspace(metadata: PrefillMetadata) -> bool:
    """The method form of SPEC 2.1: does this batch's masked MHA fit its mask workspace?

    False without a workspace or without query lengths on the CPU. Takes the longest context chunk (0 without
    context). Warns once, in MiB, when the workspace is too small.
    """
    workspace = metadata.topk_mask_workspace
    if workspace is None or metadata.query_lens_cpu is None:
        return False
    longest = 0
    if metadata.chunked_context is not None:
        longest = max(chunk.max_seq_len for chunk in metadata.chunked_context.chunks)
    if masked_mha_workspace_fits(metadata.num_requests, metadata.max_query_len, longest, workspace.numel()):
        return True
    batch, rows, words = topk_mask_shape(
        metadata.num_requests, metadata.max_query_len, max(metadata.max_query_len, longest)
    )
    needed = batch * rows * words * INT32_BYTES / MIB
    held = workspace.numel() * INT32_BYTES / MIB
    warn_once(
        "mask workspace",
        f"the top-k mask of a batch of {batch} requests x {rows} rows x {words} words needs {needed:.1f} MiB and "
        f"the mask workspace holds {held:.1f} MiB: sparse MQA serves such batches",
    )
    return False


def choose_path(
    metadata: PrefillMetadata,
    *,
    topk_tokens: int,
    masked: Availability,
    force: Force | None,
    dcp_world_size: int,
) -> Path:
    """Path of one batch, in the order of SPEC 2.9; a force wins over the order, and dense over masked.

    Raises ValueError for an unknown force or for a forced masked path that cannot run, NotImplementedError for
    masked MHA with context under decode context parallelism.
    """
    if force is not None and force not in FORCES:
        raise ValueError(f"force is {force!r}, must be None or one of {', '.join(FORCES)}")
    if force == "dense" or (force is None and use_dense_mha(metadata.max_seq_len, topk_tokens)):
        return Path.DENSE
    if force == "mqa":
        return Path.MQA
    forced = force in ("masked", "masked_remap")
    if forced and not masked.available:
        raise ValueError(f"force is {force!r}, but masked MHA cannot run: {masked.reason}")
    if not forced and not (masked.available and batch_fits_mask_workspace(metadata)):
        return Path.MQA
    if dcp_world_size > 1 and metadata.chunked_context is not None:
        raise NotImplementedError(
            f"masked MHA with context under decode context parallelism (dcp_world_size = {dcp_world_size}): the "
            "rank-major key order would break positional masks"
        )
    return Path.MASKED
