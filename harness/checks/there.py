"""A call on another device than that of the judge: the arguments go there in one transfer, what was written comes back.

The judge of a single stage works on the CPU where the case is small (`near.py`), and only the call itself is a GPU's.
What the call is given is what it would be given if everything lay there: the same strides and offsets, one memory for
tensors that share one, and whatever stands around a view of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.checks.guards import storage_of
from harness.checks.near import rebuilt

ALIGNMENT = 512
"""Bytes to which the allocator of a GPU aligns; between two memories at least as many are left."""
GAP_BYTE = 0xFF
"""Fills the gaps: NaN in every float format, -1 in every integer."""


class There:
    """Arguments of one call, moved. `device` is where they go."""

    def __init__(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        self._starts: dict[int, int] = {}
        self._memories: list[tuple[torch.Tensor, int]] = []
        self._size = 0
        rebuilt(arguments, self._note)
        whole = torch.full((self._size,), GAP_BYTE, dtype=torch.uint8)
        for memory, start in self._memories:
            whole[start : start + memory.numel()] = memory
        self._whole = whole.to(device, copy=True)
        self.arguments: dict[str, Any] = rebuilt(arguments, self._moved)
        """The same names and values, tensors on the device."""

    def bring_back(self) -> None:
        """Write what the memories hold now into the tensors that were moved."""
        whole = self._whole.cpu()
        for memory, start in self._memories:
            memory.copy_(whole[start : start + memory.numel()])

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._starts:
            memory = storage_of(tensor)
            self._starts[address] = self._size
            self._memories.append((memory, self._size))
            self._size += (memory.numel() // ALIGNMENT + 2) * ALIGNMENT
        return tensor

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        start = self._starts[tensor.untyped_storage().data_ptr()] // tensor.element_size()
        there = torch.empty(0, dtype=tensor.dtype, device=self._whole.device)
        offset = start + tensor.storage_offset()
        return there.set_(self._whole.untyped_storage(), offset, tensor.size(), tensor.stride())
