"""A trace: every intermediate of one `forward_mha` call, in the order in which it was made.

The layer fills a `Trace` only when the caller passes one. Tensors are copied at the moment they are used, so that
a buffer which is reused later still shows what the stage really read or wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch

from optimized.chunks import ChunkedContext

E = TypeVar("E")


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that later writes do not reach."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class MaskEvent:
    """One mask build. `mask` is `[B, padded_q, words]` int32 as the builder left it (key-start word included)."""

    call: str
    topk_per_req: list[torch.Tensor]
    range_starts: list[int] | None
    """Starts of the key ranges that the top-k rows were remapped to, or None where they were not remapped."""
    range_lens: list[int] | None
    q_lens: list[int]
    max_query_len: int
    max_key_len: int
    first_query_pos: list[int] | None
    reserved: bool
    mask: torch.Tensor


@dataclass(frozen=True)
class GatherEvent:
    """One paged gather: `rows` is `[num_tokens, kv_lora_rank + rope]`."""

    call: str
    chunk: int
    rows: torch.Tensor


@dataclass(frozen=True)
class ProjectEvent:
    """One up-projection: `kv_c [n, lora]`, `k_pe [n, 1, rope]` -> `k [n, H, nope + rope]`, `v [n, H, v]`."""

    call: str
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class AttendEvent:
    """One varlen attention call over requests `first_request .. first_request + B`."""

    call: str
    first_request: int
    first_token: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: list[int]
    cu_seqlens_k: list[int]
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    mask: torch.Tensor | None
    offset: bool
    key_starts: list[int] | None
    causal: bool
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class MergeEvent:
    """One merge of a prefix and a suffix partial, outputs `[n, H, D]`, LSE `[H, n]`."""

    call: str
    first_token: int
    prefix_out: torch.Tensor
    prefix_lse: torch.Tensor
    suffix_out: torch.Tensor
    suffix_lse: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class PartialEvent:
    """The running context partial after a chunk was accumulated: `out [T, H, D]`, `lse [H, T]`."""

    call: str
    chunk: int
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AbsorbEvent:
    """`q' = [q_nope W_UK | q_pe]`, `[T, H, lora + rope]`."""

    call: str
    q_absorbed: torch.Tensor


@dataclass(frozen=True)
class MqaEvent:
    """One sparse MQA call: keys by physical slot, latent output `[T, H, lora]`."""

    call: str
    q: torch.Tensor
    indices: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class UnprojectEvent:
    """Latent output `[T, H, lora]` through `W_UV` -> `[T, H, v]`."""

    call: str
    latent: torch.Tensor
    out: torch.Tensor


Event = (
    MaskEvent
    | GatherEvent
    | ProjectEvent
    | AttendEvent
    | MergeEvent
    | PartialEvent
    | AbsorbEvent
    | MqaEvent
    | UnprojectEvent
)


@dataclass
class Trace:
    """Path, plan and events of one call."""

    path: str | None = None
    """`dense`, `no_context`, `global_mask`, `remap` or `mqa`."""
    kernels: set[str] = field(default_factory=set)
    """Kernels that ran: `mask_single`, `mask_many`, `triton_mha`, `fa4`, `sparse_mqa`, ..."""
    plan: ChunkedContext | None = None
    topk_per_req: list[torch.Tensor] | None = None
    """The top-k rows as sliced from the buffer, before any remap."""
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        """Events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]
