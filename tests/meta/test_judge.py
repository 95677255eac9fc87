"""Is the judge itself right? A fixed panel of faulty and right results, and judges with a fault of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.checks import attend, attention, case, gather, link, mask, merge, plan, prefill, readout, verdict
from harness.checks.guards import GuardedBuffer
from harness.problems.tensors import Inputs
from reference import bound, bound_stages, oracle
from reference.bound import AttendReference
from reference.power import Power
from reports.records import CheckRecord, Place
from tests.meta.faults import FAULTS
from tests.meta.panel import ENTRIES, judged, surprises


def replaced(patch: pytest.MonkeyPatch, right: Callable[..., Any], wrong: Callable[..., Any]) -> None:
    """Put `wrong` wherever the judge holds `right`."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("harness", "reference") or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if value is right:
                patch.setattr(module, attribute, wrong)
                found += 1
    assert found, f"{right} is used nowhere"


# the true judge


def test_twenty_faults_and_more_over_all_stages() -> None:
    assert len(FAULTS) >= 20
    stages = {stage for fault in FAULTS for stage in fault.stages}
    assert stages >= {
        "plan", "dispatch", "slice", "remap", "mask", "gather", "project", "chunk_loop", "mask_mod", "attend", "merge",
        "absorb", "slots", "mqa", "unproject", "prefill", "guard",
    }  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_judged_as_it_should_be(name: str) -> None:
    found = [str(surprise) for surprise in surprises((name,))]
    assert found == []


def test_messages_tell_what_to_look_at() -> None:
    message = judged("kernel_without_bit_31").message
    assert "missed key" in message
    assert "bit 31" in message
    message = judged("mask_causal_off_by_one").message
    assert message.startswith("row ")
    assert " has key " in message
    assert "key start is 41, must be 40" in judged("key_start_off_by_one").message
    assert "base-2 LSE" in judged("kernel_lse_base_2").message
    assert "tolerance from" in judged("kernel_two_percent_high").message
    assert "transposed" in judged("kernel_lse_transposed").message


# judges with a fault


def accept(stage: str, check: str, *args: Any, **kwargs: Any) -> CheckRecord:
    return verdict.passed(stage, check, 0.0, 0.0)


def scaled_bounds(factor: float) -> Callable[[Callable[..., AttendReference]], Callable[..., AttendReference]]:
    def scale(right: Callable[..., AttendReference]) -> Callable[..., AttendReference]:
        def wrong(*args: Any, **kwargs: Any) -> AttendReference:
            exact = right(*args, **kwargs)
            tol_out, tol_lse = exact.bound.tol_out * factor, exact.bound.tol_lse * factor
            return replace(exact, bound=replace(exact.bound, tol_out=tol_out, tol_lse=tol_lse))

        return wrong

    return scale


def accepts_everything(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, verdict.compare_bounded, accept)


def accepts_every_copy(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, verdict.compare_exact, accept)


def bounds_times_a_hundred(patch: pytest.MonkeyPatch) -> None:
    for right in (bound.attend_reference, bound_stages.merge_reference, bound_stages.mqa_reference):
        replaced(patch, right, scaled_bounds(100.0)(right))


def bounds_by_a_hundred(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, bound.attend_reference, scaled_bounds(0.01)(bound.attend_reference))


def merge_bounds_times_ten_thousand(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, bound_stages.merge_reference, scaled_bounds(1e4)(bound_stages.merge_reference))


def oracle_off_by_one_key(patch: pytest.MonkeyPatch) -> None:
    right = oracle.allowed_matrix
    replaced(patch, right, lambda rows, context: right(rows - (rows > 0).int(), context))


def oracle_sees_one_key_ahead(patch: pytest.MonkeyPatch) -> None:
    right = oracle.allowed_matrix

    def wrong(rows: torch.Tensor, context: int) -> torch.Tensor:
        widened = right(torch.cat([rows, rows[-1:]]), context + 1)[:-1]
        return widened[:, : context + len(rows)]

    replaced(patch, right, wrong)


def mask_reader_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = attend.unpack_bits
    replaced(patch, right, lambda rows, start, keys: right(rows, start + 1, keys))


def mask_check_ignores_bit_31(patch: pytest.MonkeyPatch) -> None:
    right = mask.expected_words
    patch.setattr(mask, "expected_words", lambda *args: right(*args) & np.uint32(0x7FFFFFFF))
    check = mask.check_mask
    replaced(patch, check, lambda call, words, *args, **kwargs: check(call, words & 0x7FFFFFFF, *args, **kwargs))


def mask_check_ignores_padding(patch: pytest.MonkeyPatch) -> None:
    check = mask.check_mask

    def wrong(call: str, words: torch.Tensor, rows: list[torch.Tensor], **kwargs: Any) -> CheckRecord:
        clean = words.clone()
        for request, own in enumerate(rows):
            clean[request, len(own) :] = 0
        return check(call, clean, rows, **kwargs)

    replaced(patch, check, wrong)


def plan_check_ignores_starts(patch: pytest.MonkeyPatch) -> None:
    check = plan.check_plan

    def wrong(chunked: Any, **kwargs: Any) -> list[CheckRecord]:
        rules = ("context_lens", "row_budget", "max_context_chunk", "split_alignment")
        must = plan.expected_plan(*(kwargs[name] for name in rules))
        if chunked is not None and len(must) == len(chunked.chunks):
            chunks = [replace(c, starts=torch.tensor(m.starts)) for c, m in zip(chunked.chunks, must, strict=True)]
            chunked = replace(chunked, chunks=chunks)
        return check(chunked, **kwargs)

    replaced(patch, check, wrong)


def links_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, link.check_call, lambda event, must: [])


def gather_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, gather.check_gather, lambda *args, **kwargs: verdict.passed("gather", "gather.rows"))


def merges_are_checked_without_lse(patch: pytest.MonkeyPatch) -> None:
    right = merge.compare_merge
    replaced(patch, right, lambda *args: [r for r in right(*args) if not r.check.endswith(".lse")])


def lse_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    right = attention.compare_attention
    replaced(patch, right, lambda *a, **k: [r for r in right(*a, **k) if not r.check.endswith(".lse")])


def nan_counts_as_right(patch: pytest.MonkeyPatch) -> None:
    right = verdict.compare_bounded

    def wrong(
        stage: str, check: str, actual: torch.Tensor, expected: torch.Tensor, *args: Any, **k: Any
    ) -> CheckRecord:
        return right(stage, check, torch.where(actual.isnan(), expected.to(actual.dtype), actual), expected, *args, **k)

    replaced(patch, right, wrong)


def empty_rows_may_be_anything(patch: pytest.MonkeyPatch) -> None:
    right = verdict.compare_bounded

    def wrong(
        stage: str, check: str, actual: torch.Tensor, expected: torch.Tensor, *args: Any, **k: Any
    ) -> CheckRecord:
        return right(stage, check, torch.where(expected.isinf(), expected.float(), actual), expected, *args, **k)

    replaced(patch, right, wrong)


def shapes_are_enough_end_to_end(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, prefill.check_fed, lambda facts, trace, views: ([], Power()))
    replaced(patch, prefill.check_raw, lambda *args: [])


def nothing_is_guarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GuardedBuffer, "check", lambda self, name: verdict.passed("guard", f"guard.{name}"))
    patch.setattr(Inputs, "broken_canary", lambda self: None)


def inputs_may_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(case, "same_bits", lambda a, b: True)


def read_outs_name_nothing(patch: pytest.MonkeyPatch) -> None:
    replaced(patch, readout.first_difference, lambda attended, allowed: None)


def the_last_accused_is_the_culprit(patch: pytest.MonkeyPatch) -> None:
    right = link.first_bad
    replaced(patch, right, lambda records: right(list(reversed(records))))


def places_are_lost(patch: pytest.MonkeyPatch) -> None:
    right = verdict.failed

    def wrong(stage: str, check: str, message: str, place: Place | None = None, **kwargs: Any) -> CheckRecord:
        return right(stage, check, message, Place(), **kwargs)

    replaced(patch, right, wrong)


WRONG_JUDGES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    accepts_everything: "projection_heads_swapped",
    accepts_every_copy: "slice_rolled",
    bounds_times_a_hundred: "kernel_lse_slightly_high",
    bounds_by_a_hundred: "right_one_chunk",
    merge_bounds_times_ten_thousand: "merge_two_percent_high",
    oracle_off_by_one_key: "right_no_context",
    oracle_sees_one_key_ahead: "right_global_mask",
    mask_reader_off_by_one: "right_remap",
    mask_check_ignores_bit_31: "mask_without_bit_31",
    mask_check_ignores_padding: "mask_padding_dirty",
    plan_check_ignores_starts: "plan_start",
    links_are_not_checked: "key_start_off_by_one",
    gather_is_not_checked: "gather_shifted",
    merges_are_checked_without_lse: "merge_largest_lse",
    lse_is_not_checked: "kernel_lse_base_2",
    nan_counts_as_right: "kernel_nan",
    empty_rows_may_be_anything: "empty_row_not_empty",
    shapes_are_enough_end_to_end: "heads_swapped_at_the_end",
    nothing_is_guarded: "output_spills",
    inputs_may_change: "input_overwritten",
    read_outs_name_nothing: "kernel_without_bit_31",
    the_last_accused_is_the_culprit: "slots_off_by_one",
    places_are_lost: "mask_causal_off_by_one",
}
"""A judge with a fault -> an entry of the panel that it judges wrongly."""


@pytest.mark.parametrize("break_judge", WRONG_JUDGES, ids=lambda function: function.__name__)
def test_the_panel_notices_a_wrong_judge(
    break_judge: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = WRONG_JUDGES[break_judge]
    assert list(surprises((entry,))) == []
    break_judge(monkeypatch)
    assert len(list(surprises((entry,)))) == 1
