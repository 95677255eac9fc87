"""The tensors of one `forward_mha` call, as its paths read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimized.metadata import PrefillMetadata
from optimized.trace import Trace


@dataclass(frozen=True)
class PrefillBatch:
    """Arguments of one call; shapes as in `SparseMLAImpl.forward_mha`. `lse` is `[H, T]` float32."""

    q: torch.Tensor
    kv_c_normed: torch.Tensor
    k_pe: torch.Tensor
    cache: torch.Tensor
    metadata: PrefillMetadata
    output: torch.Tensor
    lse: torch.Tensor
    trace: Trace | None

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request, read back from the device where the host has no copy."""
        if self.metadata.query_lens_cpu is not None:
            return self.metadata.query_lens_cpu
        lens: list[int] = self.metadata.query_start_loc.diff().tolist()
        return lens

    def output_heads(self, num_heads: int) -> torch.Tensor:
        """`output` seen as `[T, H, v]`, writing through."""
        heads: torch.Tensor = self.output.view(self.output.shape[0], num_heads, -1)
        return heads
