"""Does our layer serve any order of calls, drawn rule by rule?

Each step makes one more call on the same layer and workspaces: another batch, the batch before again for the next
layer, with another softmax scale, by another path, or with one request of it alone.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import optimized.mask
import optimized.mha_path
from harness.checks.case import _judge_plainly, default_device
from harness.checks.guards import DIRT
from harness.checks.link import first_bad
from harness.checks.sequence import Calls
from harness.problems.names import Force, TopkKind
from harness.problems.parts import Chunks, DataSpec, Paging, TopkSpec
from harness.problems.problem import Problem
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer
from optimized.mask import build_topk_mask
from reports.records import CaseRecord, Status
from tests.harness.traced import batch

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**16)


class LayerInUse(RuleBasedStateMachine):
    """The calls of one engine step after step."""

    @initialize(words=st.sampled_from([None, 128 * 4 * 2, 0]), budget=st.sampled_from([64, 16]))
    def start(self, words: int | None, budget: int) -> None:
        """A layer with a workspace for its masks, of the default size, of a few small masks, or of none."""
        self.fields: dict[str, Any] = {
            "mask_workspace_words": words,
            "chunks": Chunks(row_budget=budget, max_context_chunk=budget, split_alignment=4),
        }
        # one batch as large as any that is drawn: it sizes the shared workspaces
        largest = batch((40, 20), (40, 20), (40, 20), **self.fields)
        self.calls = Calls(OurLayer("triton"), (largest,), default_device(), _judge_plainly)
        self.last: Problem | None = None

    def call(self, problem: Problem) -> None:
        """Make the call; it must be right, and as it is alone."""
        record = CaseRecord(case_id=problem.case_id, subject="ours[triton]", status=Status.PASS)
        bad = first_bad(self.calls.call(problem, build_inputs(problem, default_device()), record))
        assert bad is None, f"{bad.check}: {bad.message}"
        self.last = problem

    @rule(lengths=LENGTHS, seed=SEEDS)
    def another_batch(self, lengths: list[tuple[int, int]], seed: int) -> None:
        random: TopkKind = "random"
        kinds = TopkSpec(kinds=(random,) * len(lengths), seed=seed)
        paging = Paging(block_size=4, order="permuted", seed=seed)
        self.call(batch(*lengths, topk=kinds, paging=paging, **self.fields))

    @precondition(lambda self: self.last is not None)
    @rule(seed=SEEDS)
    def the_batch_again_in_the_next_layer(self, seed: int) -> None:
        assert self.last is not None
        topk = self.last.topk.model_copy(update={"seed": seed})
        self.call(self.last.replace(data=DataSpec(seed=seed), topk=topk))

    @precondition(lambda self: self.last is not None)
    @rule(scale=st.sampled_from([0.3, 0.5, 0.1]))
    def the_batch_again_with_another_scale(self, scale: float) -> None:
        assert self.last is not None
        self.call(self.last.replace(scale=scale))

    @precondition(lambda self: self.last is not None)
    @rule(force=st.sampled_from([None, "dense", "masked", "masked_remap", "mqa"]))
    def the_batch_again_by_another_path(self, force: Force | None) -> None:
        assert self.last is not None
        self.call(self.last.replace(force=force))

    @precondition(lambda self: self.last is not None)
    @rule()
    def the_first_request_alone(self) -> None:
        assert self.last is not None
        topk = self.last.topk.model_copy(update={"kinds": self.last.topk.kinds[:1]})
        self.call(self.last.replace(requests=self.last.requests[:1], topk=topk))


QUIET = settings(
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def test_our_layer_serves_calls_in_any_order() -> None:
    run_state_machine_as_test(LayerInUse, settings=settings(QUIET, max_examples=12, stateful_step_count=5))


def test_the_machine_finds_a_mask_that_keeps_the_bits_of_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask in a workspace that nobody has used is right; any other keeps the bits that are there."""
    unused = int.from_bytes(bytes([DIRT] * 4))

    def build(*args: Any, **kwargs: Any) -> Any:
        before = args[4].clone()
        mask = build_topk_mask(*args, **kwargs)
        if before.eq(unused).all():
            return mask
        return mask.bitwise_or_(before[: mask.numel()].view(mask.shape))

    # in both places: the own masks of a call, and the global mask
    monkeypatch.setattr(optimized.mha_path, "build_topk_mask", build)
    monkeypatch.setattr(optimized.mask, "build_topk_mask", build)
    with pytest.raises(AssertionError, match=r"mask\.bits"):
        run_state_machine_as_test(LayerInUse, settings=settings(QUIET, max_examples=20, stateful_step_count=6))
