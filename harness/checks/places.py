"""Checks that are made on some machines: elsewhere nothing has looked for what they found. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

ON_A_GPU: Mapping[str, bool] = {"mask.crowd": True, "relation.side_stream": True, "relation.delayed_copies": False}
"""Name of the check -> whether it is made on a GPU alone, or without one alone. All others are made everywhere."""


def is_made_on(check: str, device_type: str) -> bool:
    """Whether this check is made for a case whose tensors lie on such a device: `cuda`, `cpu`."""
    return ON_A_GPU.get(check, device_type == "cuda") == (device_type == "cuda")


def where_made(check: str) -> str | None:
    """`on a GPU alone`; None for a check that is made everywhere."""
    if check not in ON_A_GPU:
        return None
    return "on a GPU alone" if ON_A_GPU[check] else "without a GPU alone"
