"""Does a whole case come to the right verdict: end to end, relations, guards, refusals, power?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks import case as judge
from harness.checks.guards import CANARY, MARGIN, GuardedBuffer, guarded, same_bits
from harness.checks.power import power_shares, vacuous_classes
from harness.checks.prefill import check_fed, check_raw, raw_reference, requests_of
from harness.checks.relations import RELATIONS, Base
from harness.problems.problem import DataSpec, Problem
from harness.problems.tensors import Inputs, build_inputs
from harness.subjects.base import NotRunnable, PrefillOutcome
from harness.subjects.ours import OurLayer
from reference.power import Power, Revealed
from reports.records import CaseRecord, CheckRecord, Status
from tests.harness.traced import DIMS, MANY, PROBLEMS, batch, traced

Change = Callable[[Problem, Inputs, Tensor, Tensor], None]
"""What a faulty layer does to its output `[T, H * v]` and LSE, in place."""


class Changed:
    """Our layer with a result that is changed afterwards; without a trace unless it is kept."""

    def __init__(self, change: Change | None = None, *, trace: bool = False, **contract: Any) -> None:
        self.layer, self.change, self.keeps_trace = OurLayer("triton"), change, trace
        self.name = "changed"
        self.contract = replace(self.layer.contract, **contract)
        self.calls = 0

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        self.calls += 1
        outcome = self.layer.prefill(problem, inputs, traced=traced and self.keeps_trace)
        if self.change is not None:
            self.change(problem, inputs, outcome.out, outcome.lse)
        return outcome


def check(problem: Problem, subject: Any, monkeypatch: pytest.MonkeyPatch, **every: int) -> CaseRecord:
    """The verdict on one case; second runs only where `relation=1` or `repeat=1` asks for them."""
    monkeypatch.setattr(judge, "resolve", lambda name: subject)
    monkeypatch.setattr(judge, "RELATION_EVERY", 10**40)
    monkeypatch.setattr(judge, "REPEAT_EVERY", every.get("repeat", 10**40))
    return judge.check_case(problem, "ours")


def first(record: CaseRecord) -> CheckRecord:
    return next(found for found in record.checks if found.status.is_finding)


# end to end


@pytest.mark.parametrize("name", ["global_mask", "dense", "mqa", "exact", "empty_rows", "fp8"])
def test_a_black_box_that_is_right_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = check(PROBLEMS[name], Changed(), monkeypatch)
    assert record.status in (Status.PASS, Status.WATCH)
    assert record.margin_out is not None
    assert record.margin_lse is not None


def zero_row(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    out[7] = 0


def swap_heads(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    out.copy_(out.view(len(out), 2, -1).flip(1).reshape(out.shape))


def lse_of_another_base(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse.mul_(1.4426950408889634)


@pytest.mark.parametrize(
    ("change", "part"),
    [(zero_row, "out"), (swap_heads, "out"), (lse_of_another_base, "lse")],
    ids=lambda x: str(x)[:20],
)
@pytest.mark.parametrize("name", ["global_mask", "mqa"])
def test_a_black_box_that_is_wrong_is_accused(
    name: str, change: Change, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = check(PROBLEMS[name], Changed(change), monkeypatch)
    assert (record.status, record.stage) == (Status.FAIL, "prefill")
    bad = first(record)
    assert bad.check == f"prefill.raw.{part}"
    if change is zero_row:
        assert (bad.place.request, bad.place.row, bad.place.token) == (1, 2, 7)
    if part == "lse":
        assert "base-2 LSE" in bad.message
    assert bad.terms is not None


def test_with_a_trace_the_result_is_judged_on_the_projected_keys() -> None:
    case = traced("global_mask")
    dims = case.facts.problem.dims
    out = case.out.view(-1, dims.heads, dims.v)
    views = requests_of(case.facts, out, case.lse, dense=False)
    records, power = check_fed(case.facts, case.trace, views)
    assert all(record.status in (Status.PASS, Status.WATCH) for record in records)
    assert power.dropped.total > 100
    wrong = case.lse.clone()
    wrong[1, 9] += 1e-3
    fed, _ = check_fed(case.facts, case.trace, requests_of(case.facts, out, wrong, dense=False))
    bad = next(record for record in fed if record.status.is_finding)
    assert (bad.check, bad.place.request, bad.place.token, bad.place.head) == ("prefill.fed.lse", 2, 9, 1)
    # rounding of K and V, which the raw inputs do not know of, hides an error of this size
    raw = check_raw(case.facts, out, wrong, raw_reference(case.facts, "global_mask"))
    assert not any(record.status.is_finding for record in raw)


def test_exact_projections_leave_no_rounding_to_hide_behind() -> None:
    case = traced("exact")
    dims = case.facts.problem.dims
    out, exact = case.out.view(-1, dims.heads, dims.v), raw_reference(case.facts, "global_mask")
    assert not any(record.status.is_finding for record in check_raw(case.facts, out, case.lse, exact))
    wrong = case.lse.clone()
    wrong[1, 9] += 1e-3
    assert any(record.status.is_finding for record in check_raw(case.facts, out, wrong, exact))


@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_result_of_a_wrong_shape_or_type_is_accused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Changed()

    class Misshapen(Changed):
        def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
            outcome = right.prefill(problem, inputs, traced=traced)
            return replace(outcome, **{name: getattr(outcome, name).double()})

    record = check(MANY, Misshapen(), monkeypatch)
    assert (record.status, record.stage) == (Status.SHAPE, "prefill")


# relations


def bias(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    out.add_(0.125)


def first_head_differs(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse[0] *= 1.001


def first_column_differs(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    out[:, 0] *= 2


def slots_matter(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse += 0.01 * inputs.prefill_topk[:, 0].remainder(7)


def batch_size_matters(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse += 0.3 * len(problem.requests)


def remapping_matters(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    if problem.force == "masked_remap":
        lse.view(torch.int32)[0, 0] += 1


def chunks_matter(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse += 0.3 * len(problem.planned_chunks)


BROKEN: dict[str, tuple[str, Change]] = {
    "values_doubled": ("global_mask", bias),
    "heads_permuted": ("dense", first_head_differs),
    "value_columns_permuted": ("global_mask", first_column_differs),
    "slots_permuted": ("global_mask", slots_matter),
    "request_alone": ("global_mask", batch_size_matters),
    "remap_equals_global": ("global_mask", remapping_matters),
    "other_chunk_plan": ("global_mask", chunks_matter),
}


def base(name: str, change: Change | None = None) -> Base:
    """A batch as our layer, perhaps changed, answers it: without asking the oracle whether that is right."""
    problem, subject = PROBLEMS[name], Changed(change)
    inputs = build_inputs(problem)
    outcome = subject.prefill(problem, inputs, traced=False)
    facts = traced(name).facts
    path = problem.expected_path()
    out = outcome.out.view(-1, problem.dims.heads, problem.dims.v)
    return Base(replace(facts, inputs=inputs), subject, path, out, outcome.lse, raw_reference(facts, path))


@pytest.mark.parametrize("name", BROKEN)
def test_a_relation_holds_for_our_layer_and_not_for_one_that_breaks_it(name: str) -> None:
    relation = next(relation for relation in RELATIONS if relation.name == name)
    batch_name, change = BROKEN[name]
    right = base(batch_name)
    assert relation.applies(right)
    assert relation.check(right).status is Status.PASS
    record = relation.check(base(batch_name, change))
    assert record.status is Status.FAIL
    assert record.check == f"relation.{name}"
    assert record.place.token is not None


def test_relations_ask_only_where_they_must_hold() -> None:
    applicable = {
        name: {relation.name for relation in RELATIONS if relation.applies(base(name))}
        for name in ("mqa", "dense", "one_request")
    }
    assert not applicable["mqa"] & {"value_columns_permuted", "remap_equals_global", "other_chunk_plan"}
    assert not applicable["dense"] & {"slots_permuted", "remap_equals_global"}
    assert "request_alone" not in applicable["one_request"]


# guards


def test_a_guarded_buffer_is_dirty_inside_and_notices_writes_outside() -> None:
    buffer = guarded(10, torch.int32, torch.device("cpu"))
    assert set(buffer.view.tolist()) == {0x7B7B7B7B}
    buffer.view.fill_(5)
    assert buffer.check("mask_workspace").status is Status.PASS
    for at, side in ((MARGIN - 1, "before"), (MARGIN + 10, "behind"), (0, "before"), (2 * MARGIN + 9, "behind")):
        fresh = guarded(10, torch.int32, torch.device("cpu"))
        fresh.whole[at] = 0
        record = fresh.check("mask_workspace")
        assert (record.status, record.check) == (Status.GUARD, "guard.mask_workspace")
        assert f"the guard {side} it was written" in record.message
    one_byte = guarded(10, torch.int32, torch.device("cpu"))
    one_byte.whole.view(torch.uint8)[4 * MARGIN - 1] = CANARY ^ 1
    assert one_byte.check("mask_workspace").status is Status.GUARD


def test_bits_are_compared_with_shape_type_and_payload() -> None:
    x = torch.tensor([1.0, float("nan"), 0.0])
    assert same_bits(x, x.clone())
    assert not same_bits(x, -x)
    assert not same_bits(x, x.double())
    assert not same_bits(x, x[:2])
    assert same_bits(x[:0], x[:0])


class Sloppy(Changed):
    """Our layer, and something is written afterwards that must not be."""

    def __init__(self, write: Callable[[Inputs, GuardedBuffer], Any]) -> None:
        super().__init__()
        self.write = write

    @property
    def mask_guard(self) -> GuardedBuffer | None:
        return self.layer.mask_guard

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        outcome = super().prefill(problem, inputs, traced=traced)
        assert self.mask_guard is not None
        self.write(inputs, self.mask_guard)
        return outcome


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda inputs, guard: inputs.buffers["out"][0, 0].fill_(0), "guard.output"),
        (lambda inputs, guard: inputs.buffers["out"][3, -1].fill_(0), "guard.output"),
        (lambda inputs, guard: inputs.buffers["out"][-1, 0].fill_(0), "guard.output"),
        (lambda inputs, guard: guard.whole[MARGIN - 1].fill_(0), "guard.mask_workspace"),
        (lambda inputs, guard: guard.whole[-1].fill_(0), "guard.mask_workspace"),
        (lambda inputs, guard: inputs.buffers["topk_buffer"][3, 0].add_(1), "guard.inputs"),
        (lambda inputs, guard: inputs.buffers["block_table"][0, 0].add_(1), "guard.inputs"),
        (lambda inputs, guard: inputs.buffers["cache"].mul_(1.5), "guard.inputs"),
        (lambda inputs, guard: inputs.buffers["q"][0].fill_(1.0), "guard.inputs"),
    ],
)
def test_stray_writes_are_accused(
    write: Callable[[Inputs, GuardedBuffer], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = check(MANY, Sloppy(write), monkeypatch)
    assert (record.status, record.stage) == (Status.GUARD, "guard")
    assert first(record).check == name


_OTHER_EACH_TIME = itertools.count(1)


def racy(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    lse.view(torch.int32)[0, 3] += next(_OTHER_EACH_TIME)


def reads_what_it_must_not(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    behind = inputs.buffers["kv_c_normed"][-1, 0]  # a spare row behind the batch: poison
    lse.view(torch.int32)[0, 3] += int(behind.isnan())


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (None, Status.PASS, ""),
        (racy, Status.RACY, "two identical calls gave different LSE bits"),
        (reads_what_it_must_not, Status.GUARD, "LSE depends on memory that must not be read"),
    ],
)
def test_the_same_call_twice_gives_the_same_bits(
    change: Change | None, status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = check(MANY, Changed(change), monkeypatch, repeat=1)
    assert record.status is status
    assert words in record.message
    unclaimed = Changed(change, deterministic=False)
    assert check(MANY, unclaimed, monkeypatch, repeat=1).status is Status.PASS
    assert unclaimed.calls == 1


# refusals and exceptions


class Raising(Changed):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        raise self.error


def test_exceptions_become_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    record = check(MANY, Raising(NotRunnable("needs a GPU")), monkeypatch)
    assert (record.status, record.message) == (Status.NOT_RUN, "needs a GPU")
    record = check(MANY, Raising(TypeError("q is strange")), monkeypatch)
    assert record.status is Status.CONTRACT
    assert "refused a legal case: TypeError: q is strange" in record.message
    record = check(MANY, Raising(TypeError("q is\n\udc80")), monkeypatch)
    assert "refused a legal case: TypeError: q is \\udc80" in record.message
    for error in (MemoryError(), torch.OutOfMemoryError("no room")):
        with pytest.raises(type(error)):
            check(MANY, Raising(error), monkeypatch)


def test_a_batch_that_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = MANY.replace(force="masked", mask_workspace_words=8)
    assert refused.expected_path() == "refused"
    record = check(refused, Changed(), monkeypatch)
    assert (record.status, record.paths) == (Status.PASS, ["refused"])
    assert check(refused, Raising(TypeError("no")), monkeypatch).status is Status.CONTRACT
    served = check(refused, Served(), monkeypatch)
    assert (served.status, served.stage) == (Status.FAIL, "dispatch")


class Served(Changed):
    """Serves a batch that it must refuse."""

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        return super().prefill(problem.replace(mask_workspace_words=None), inputs, traced=traced)


def test_nothing_compared_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    record = check(batch((9, 0), (0, 0)), Changed(trace=True), monkeypatch)
    assert record.status is Status.VACUOUS


# power


def test_shares_are_of_what_was_looked_at() -> None:
    power = Power(Revealed(10, 5, 2, 6), Revealed(0, 0, 0, 0))
    assert power_shares(power) == {"dropped": 0.6, "dropped_lse": 0.5, "dropped_out": 0.2}
    assert vacuous_classes({"dropped": 0.49, "added": 0.5}, "prefill.fed") == ["prefill.fed:dropped"]
    assert vacuous_classes({}, "mqa") == []


@pytest.mark.parametrize(("family", "vacuous"), [("flat", False), ("normal", False), ("near_overflow", True)])
def test_a_case_says_what_it_could_have_shown(family: Any, vacuous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataSpec(family=family, seed=2, temperature=32.0 if vacuous else 1.0)
    problem = batch((90, 6), data=data, dims=DIMS.model_copy(update={"topk": 40}))
    record = check(problem, Changed(trace=True), monkeypatch)
    assert record.status in (Status.PASS, Status.WATCH)
    assert set(record.power) >= {"dropped", "dropped_lse", "dropped_out", "added"}
    assert ("prefill.fed:dropped" in record.vacuous) == vacuous
    assert (record.power["dropped"] < 0.5) == vacuous


@pytest.mark.parametrize(
    ("name", "trace", "judged_by"),
    [("mqa", True, "mqa"), ("global_mask", False, "prefill.raw"), ("exact", False, "prefill.raw")],
)
def test_power_is_that_of_the_sharpest_check(
    name: str, trace: bool, judged_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = check(PROBLEMS[name], Changed(trace=trace), monkeypatch)
    assert set(record.power) >= {"dropped", "added"}
    if judged_by == "prefill.raw":  # rounding of K and V hides keys end to end, unless the projection is exact
        fed = check(PROBLEMS[name], Changed(trace=True), monkeypatch)
        assert (record.power["dropped_lse"] < 0.99 * fed.power["dropped_lse"]) == (name == "global_mask")
    sharp = check(
        PROBLEMS[name].replace(data=DataSpec(family="near_overflow", temperature=32.0)),
        Changed(trace=trace),
        monkeypatch,
    )
    assert f"{judged_by}:dropped" in sharp.vacuous


def test_the_record_keeps_one_summary_of_each_check_and_every_accusation(monkeypatch: pytest.MonkeyPatch) -> None:
    record = check(MANY, Changed(trace=True), monkeypatch)
    names = [found.check for found in record.checks]
    assert len(names) == len(set(names))
    assert {"plan.chunks", "slice.rows", "mask.bits", "attend.out", "merge.lse", "prefill.raw.out"} <= set(names)
    assert record.paths == ["global_mask", "mask_many", "triton_mha"]
    assert record.chunks == 3
    worst = max(found.margin or 0 for found in record.checks if found.check == "attend.out")
    assert record.margin_out is not None
    assert record.margin_out >= worst
    assert record.tensor_hash
