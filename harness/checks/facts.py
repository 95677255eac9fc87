"""What a problem asks for, worked out once for all checks of a case."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from harness.checks.plan import ExpectedChunk, expected_plan
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs
from harness.subjects.contract import Contract
from reference.numerics import Numerics


@dataclass
class Facts:
    """One case: its problem, its tensors and the contract that it is judged by."""

    problem: Problem
    inputs: Inputs
    contract: Contract

    @property
    def numerics(self) -> Numerics:
        """Declared arithmetic of the attention calls, in the storage type of this case."""
        return self.contract.numerics_for(self.problem.dtype)

    @property
    def mqa_numerics(self) -> Numerics:
        return self.contract.mqa_numerics_for(self.problem.dtype)

    @property
    def context_lens(self) -> list[int]:
        return self.problem.context_lens

    @property
    def query_lens(self) -> list[int]:
        return self.problem.query_lens

    @property
    def seq_lens(self) -> list[int]:
        return self.problem.seq_lens

    @property
    def num_tokens(self) -> int:
        return self.problem.num_tokens

    @property
    def token_starts(self) -> list[int]:
        return self.problem.token_offsets

    @property
    def topk_rows(self) -> torch.Tensor:
        """`[T, topk]` int32: the rows of this batch, decode rows left out."""
        return self.inputs.prefill_topk

    @cached_property
    def plan(self) -> list[ExpectedChunk]:
        """Context chunks that the rules ask for."""
        chunks = self.problem.chunks
        return expected_plan(self.context_lens, chunks.row_budget, chunks.max_context_chunk, chunks.split_alignment)

    def request_of(self, token: int) -> int:
        """Request of a packed token."""
        starts = self.token_starts
        return next(b for b in range(len(starts) - 1) if starts[b] <= token < starts[b + 1])
