"""Our layer as an engine holds it: what consecutive calls have in common is made once.

One mask workspace and one chunk workspace for all calls; one layer object for calls of the same sizes, scales and
weights; one metadata object for calls of the same batch. What a call leaves behind in any of them meets the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from harness.checks.guards import guarded, same_bits
from harness.problems.history import same_metadata, same_sizes
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs
from harness.subjects.ours import OurLayer, mask_words_held
from optimized.metadata import PrefillMetadata
from optimized.sparse_mla import SparseMLAImpl


class OurCalls(OurLayer):
    """`OurLayer` for the calls of one sequence.

    Workspaces are as large as the largest of `problems` needs; a call that needs more gets larger ones.
    """

    def __init__(self, attention: str, name: str, problems: Sequence[Problem], device: torch.device) -> None:
        super().__init__(attention, name)
        self._mask = guarded(max(map(mask_words_held, problems), default=0), torch.int32, device)
        size = max((p.chunks.row_budget * p.dims.latent for p in problems), default=0)
        self._rows = _unwritten(size, device)
        self._layers: list[tuple[Problem, SparseMLAImpl]] = []
        self._metadata: list[tuple[Problem, PrefillMetadata]] = []

    def layer(self, problem: Problem, inputs: Inputs) -> SparseMLAImpl:
        """The layer with these sizes, scales and weights, made at its first call."""
        for known, layer in self._layers:
            same_scales = (known.scale, known.paging.kv_cache_scale) == (problem.scale, problem.paging.kv_cache_scale)
            if same_sizes(known, problem) and same_scales and same_bits(layer.layer.kv_b_proj_weight, inputs.w_kv_b):
                return layer
        # weights outlive the call that brings them
        layer = super().layer(problem, dataclasses.replace(inputs, w_kv_b=inputs.w_kv_b.clone()))
        self._layers.append((problem, layer))
        return layer

    def metadata(self, problem: Problem, inputs: Inputs) -> PrefillMetadata:
        """The metadata of this batch, made at its first call."""
        words = mask_words_held(problem)
        if words > self._mask.view.numel():
            self._mask = guarded(words, torch.int32, inputs.q.device)
        self.mask_guard = self._mask.part(words)
        for known, metadata in self._metadata:
            if same_metadata(known, problem) and same_bits(metadata.block_table, inputs.block_table):
                return metadata
        table = _copy_with_strides(inputs.block_table)
        metadata = self.build(problem, dataclasses.replace(inputs, block_table=table), self.mask_guard.view)
        if metadata.chunked_context is not None:
            shape = metadata.chunked_context.workspace.shape
            if shape.numel() > self._rows.numel():
                self._rows = _unwritten(shape.numel(), inputs.q.device)
            rows = self._rows[: shape.numel()].view(inputs.q.dtype).view(shape)
            chunked = dataclasses.replace(metadata.chunked_context, workspace=rows)
            metadata = dataclasses.replace(metadata, chunked_context=chunked)
        self._metadata.append((problem, metadata))
        return metadata


def _copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy laid out like the original, gaps between its rows included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _unwritten(numel: int, device: torch.device) -> torch.Tensor:
    """16-bit elements that are NaN in both storage types."""
    return torch.full((numel,), -1, dtype=torch.int16, device=device)
