"""Small cases of a GPU are judged on the CPU.

Judging a small batch takes thousands of tiny tensor operations. On a GPU each of them costs a launch, many a wait, and
the workers take turns at the device: there a case of a few hundred tokens is judged several times as fast on the
core of its worker, from copies made in one transfer. Large cases stay on the GPU, whose float64 units they need. Of a
subject of one stage it is the call that travels (`there.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from harness.checks.facts import Facts
from harness.checks.guards import bytes_of
from harness.problems.problem import Problem
from harness.subjects.base import PrefillOutcome

MAX_PRODUCTS = 5e7
"""Multiplications of one reference (scores, outputs and projections): about 0.1 s of a core in float64."""
MAX_ELEMENTS = 2**24
"""Elements of all tensors of the case."""
_ALIGNMENT = 16
"""Bytes at which each part of a transfer begins: a multiple of every element size."""


def is_small(problem: Problem) -> bool:
    """Whether a core judges the case in less time than a GPU would take for as many operations."""
    dims = problem.dims
    pairs = sum(q * s for q, s in zip(problem.query_lens, problem.seq_lens, strict=True))
    projected = sum(problem.seq_lens) * dims.kv_lora_rank
    products = dims.heads * (pairs * (dims.qk + dims.v) + projected * (dims.nope + dims.v))
    return products <= MAX_PRODUCTS and sum(problem.element_counts.values()) <= MAX_ELEMENTS


def judged_from(facts: Facts, outcome: PrefillOutcome) -> tuple[Facts, PrefillOutcome]:
    """What the judge reads: copies on the CPU for a small case of a GPU, else the same objects.

    The buffers of the inputs, which guards compare where they are, stay out of the copies.
    """
    if not is_far(facts.inputs.q) or not is_small(facts.problem):
        return facts, outcome
    inputs, near = on_cpu((replace(facts.inputs, buffers={}), outcome))
    return replace(facts, inputs=inputs), near


def judge_device(problem: Problem, subject: torch.device) -> torch.device:
    """Where the judge of a single stage works: on the CPU if the case is small, else where the subject does."""
    return torch.device("cpu") if is_small(problem) else subject


def on_cpu(root: Any) -> Any:
    """A copy of nested dataclasses, lists, tuples and dicts with every tensor on the CPU and contiguous.

    All tensors of a device come in one transfer; one that stands in several places stays one tensor.
    """
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    _rebuilt(root, note)
    near = dict(zip(found, _transferred(list(found.values())), strict=True))
    return _rebuilt(root, lambda tensor: near[id(tensor)])


def _rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested dataclasses, lists, tuples and dicts with each tensor replaced by what `change` gives for it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_rebuilt(item, change) for item in value)
    if type(value) is dict:
        return {key: _rebuilt(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                object.__setattr__(made, field.name, _rebuilt(getattr(value, field.name), change))
        return made
    return value


def _transferred(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the CPU, in order. Tensors that are there already are only made contiguous."""
    far = [tensor for tensor in tensors if is_far(tensor)]
    copies = iter(in_one_transfer([bytes_of(tensor.detach()) for tensor in far], torch.device("cpu")))
    return [
        next(copies).view(tensor.dtype).view(tensor.shape) if is_far(tensor) else tensor.contiguous()
        for tensor in tensors
    ]


def is_far(tensor: torch.Tensor) -> bool:
    """Whether an operation on it is a launch."""
    return tensor.is_cuda


def in_one_transfer(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of flat byte tensors of one device on another, views of one memory; each may be read in any dtype."""
    if not parts:
        return []
    padded = [piece for part in parts for piece in (part, part.new_empty(-part.numel() % _ALIGNMENT))]
    whole, start = torch.cat(padded).to(device), 0
    copies = []
    for part in parts:
        copies.append(whole[start : start + part.numel()])
        start += part.numel() + -part.numel() % _ALIGNMENT
    return copies
