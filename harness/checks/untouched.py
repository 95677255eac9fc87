"""Copies of what a call is given, to see afterwards whether it was left alone: tensors, lists of anything, numbers."""

from __future__ import annotations

from typing import Any

import torch

from harness.checks.guards import same_bits


def copy_of(value: Any) -> Any:
    """A copy that the call cannot reach."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [copy_of(item) for item in value] if isinstance(value, list) else value


def same_as(value: Any, old: Any) -> bool:
    """Whether a value is what its copy was: same types, lengths and bits."""
    if isinstance(old, torch.Tensor):
        return isinstance(value, torch.Tensor) and same_bits(value, old)
    if isinstance(old, list):
        return len(value) == len(old) and all(same_as(a, b) for a, b in zip(value, old, strict=True))
    return bool(value == old)


def restore(value: Any, old: Any) -> None:
    """Make a tensor, or a list of anything, what its copy was."""
    if isinstance(old, torch.Tensor):
        if value.shape == old.shape:
            value.copy_(old)
        else:
            value.set_(old.untyped_storage(), old.storage_offset(), old.size(), old.stride())
    elif isinstance(old, list):
        value[:] = old
