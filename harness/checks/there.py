"""A call on another device than that of the judge: the arguments go there in one transfer, what was written comes back.

The judge of a single stage works on the CPU where the case is small (`near.py`), and only the call itself is a GPU's.
What the call is given is what it would be given if everything lay there: the same strides and offsets, one memory for
tensors that share one and another for those that do not, and whatever stands around a view. What it does to an
argument, its shape or a list included, is done to the one that was moved. One thing is lost: what a call does to the
arguments of an earlier call, which are gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.checks.guards import storage_of
from harness.checks.near import in_one_transfer


class There:
    """Arguments of one call, moved. `device` is where they go."""

    def __init__(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Identity of each tensor -> itself and the one there."""
        self._lists: list[tuple[list[Any], list[Any]]] = []
        here: dict[int, torch.Tensor] = {}
        _collect(arguments.values(), here)
        memories = [storage_of(tensor) for tensor in here.values()]
        self._memories = dict(zip(here, zip(memories, _moved(memories, device), strict=True), strict=True))
        """Address of a storage here -> its bytes here and there."""
        self.arguments = {name: self._made(value) for name, value in arguments.items()}
        """The same names and values, tensors on the device."""

    def bring_back(self) -> None:
        """Do to the arguments what was done to those that were moved."""
        written = in_one_transfer([there for _, there in self._memories.values()], torch.device("cpu"))
        for (memory, _), now in zip(self._memories.values(), written, strict=True):
            memory.copy_(now)
        for here, there in self._tensors.values():
            elsewhere = _address(there) != self._memories[_address(here)][1].untyped_storage().data_ptr()
            if elsewhere or (here.shape, here.stride()) != (there.shape, there.stride()):
                _reshape(here, there, elsewhere=elsewhere)
        known = {id(there): here for here, there in self._tensors.values()}
        for old, new in self._lists:
            old[:] = [known[id(item)] if id(item) in known else _here(item) for item in new]

    def _made(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list):
            made = [self._made(item) for item in value]
            self._lists.append((value, made))
            return made
        if isinstance(value, tuple):
            return tuple(self._made(item) for item in value)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][1]
        memory = self._memories[_address(tensor)][1]
        there = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        there.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        self._tensors[id(tensor)] = tensor, there
        return there


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _collect(values: Any, found: dict[int, torch.Tensor]) -> None:
    """One tensor for each memory that the values use."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.setdefault(_address(value), value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _moved(memories: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of flat byte tensors on a device, each in a memory of its own."""
    return [part.clone() for part in in_one_transfer(memories, device)]


def _reshape(here: torch.Tensor, there: torch.Tensor, *, elsewhere: bool) -> None:
    """Give a tensor the shape that the call gave its copy; one that got another memory gets what is in it."""
    if elsewhere or there.untyped_storage().nbytes() > here.untyped_storage().nbytes():
        other = there.detach().cpu().clone(memory_format=torch.contiguous_format)
        here.set_(other.untyped_storage(), 0, other.size(), other.stride())
    else:
        here.set_(here.untyped_storage(), there.storage_offset(), there.size(), there.stride())


def _here(item: Any) -> Any:
    """What a call put into a list: a tensor of its own is brought along."""
    return item.cpu() if isinstance(item, torch.Tensor) else item
