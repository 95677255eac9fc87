"""What can be put under test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from harness.problems.problem import Problem
from harness.problems.tensors import Inputs
from harness.subjects.api import NotRunnable as NotRunnable
from harness.subjects.api import SubjectError as SubjectError
from harness.subjects.contract import Contract
from optimized.trace import Trace


@dataclass(frozen=True)
class PrefillOutcome:
    """What one prefill gave: `out [T, H * v]`, `lse [H, T]`, and a trace where the subject offers one."""

    out: torch.Tensor
    lse: torch.Tensor
    trace: Trace | None


class PrefillSubject(Protocol):
    """A subject that offers the whole prefill."""

    name: str
    contract: Contract

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        """Run one prefill batch. Raises NotRunnable where it cannot run on this machine."""
        ...
