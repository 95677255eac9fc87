"""The problems that are legal for our own layer: all, but for the head dims that its attention kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

from harness.problems.problem import Problem
from harness.subjects.domain import Domain


@dataclass(frozen=True)
class LayerDomain(Domain):
    """Every path, workspace, layout and cache format; sizes are rounded up to the contract's multiple."""

    def view(self, problem: Problem) -> Problem:
        """The whole problem: the layer sees all of it."""
        return problem

    def _legal(self, problem: Problem) -> Problem:
        dims = self._dims(problem.dims)
        history = tuple(map(self.fit, problem.history))
        same = dims == problem.dims and history == problem.history
        return problem if same else problem.replace(dims=dims, history=history)
