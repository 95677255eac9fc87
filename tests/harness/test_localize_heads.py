"""Is a head that reads another mask than the others found, where the read-out shows every key through the first?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks.attend import check_attend
from harness.checks.case import check_case
from harness.checks.link import first_bad
from harness.checks.localize import explain_attend
from harness.subjects.ours import OurLayer
from optimized.attention.triton_mha import triton_masked_mha
from optimized.trace import AttendEvent
from reference.numerics import TRITON
from reports.records import CheckRecord
from tests.harness.traced import MANY, traced


def _head_1_of_neighbour(*args: Any, mask: Tensor | None, **rest: Any) -> tuple[Tensor, Tensor]:
    """Head 1 reads the mask of the next request."""
    out, lse = triton_masked_mha(*args, mask=mask, **rest)
    if mask is not None:
        other_out, other_lse = triton_masked_mha(*args, mask=mask.roll(1, 0), **rest)
        out[:, 1], lse[1] = other_out[:, 1], other_lse[1]
    return out, lse


def _empty_rows_count_one(*args: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """A right set, and LSE 0 where there is no key."""
    out, lse = triton_masked_mha(*args, **rest)
    return out, torch.where(torch.isneginf(lse), 0.0, lse)


def _lse_transposed(*args: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    out, lse = triton_masked_mha(*args, **rest)
    return out, lse.t().reshape(lse.shape)


def _explained(name: str, kernel: Any) -> tuple[CheckRecord, AttendEvent]:
    event: AttendEvent = traced(name).event(AttendEvent, "suffix")
    starts = (torch.tensor(x, dtype=torch.int32) for x in (event.cu_seqlens_q, event.cu_seqlens_k))
    lengths = (event.max_seqlen_q, event.max_seqlen_k)
    arguments = (event.q, event.k, event.v, *starts, *lengths, event.scale)
    out, lse = kernel(*arguments, mask=event.mask, offset=event.offset, causal=event.causal)
    faulty = replace(event, out=out, lse=lse)
    bad = first_bad(check_attend(faulty, TRITON, None))
    assert bad is not None
    return explain_attend(bad, faulty, kernel), event


def test_is_a_head_with_another_mask_named() -> None:
    record, event = _explained("global_mask", _head_1_of_neighbour)
    assert event.max_seqlen_k <= event.v.shape[2], "else the naming read-out may show it"
    assert record.stage == "mask_mod"
    assert record.place.head == 1
    assert record.message.startswith("suffix, request 0, head 1 alone: row 0 attended key 0 (word 1, bit 8)")
    assert (record.place.row, record.place.key, record.place.word, record.place.bit) == (0, 0, 1, 8)


def test_is_a_misplaced_lse_no_other_mask() -> None:
    record, _ = _explained("one_request", _lse_transposed)
    assert record.stage == "attend"
    assert "and the output shows the right keys: the LSE is wrong, not the set" in record.message


@pytest.mark.parametrize("kernel", [_lse_transposed, _head_1_of_neighbour])
def test_are_many_keys_not_named_through_one_head(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checks.localize.MAX_READOUT_LAUNCHES", 0.5)  # windows of one launch: 2 heads hold k
    record, event = _explained("global_mask", kernel)
    assert event.max_seqlen_k > 0.5 * event.v.shape[2]
    assert record.stage == "attend"
    assert record.message.endswith("another mask, or LSE misplaced")


def test_is_a_wrong_lse_of_an_empty_row_no_other_mask() -> None:
    record, _ = _explained("empty_rows", _empty_rows_count_one)
    assert record.stage == "attend"
    assert "the arithmetic is wrong" in record.message


def test_does_a_broken_canary_come_before_a_relation(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = OurLayer.prefill

    def clears_behind(self: OurLayer, problem: Any, inputs: Any, *, traced: bool) -> Any:
        outcome = prefill(self, problem, inputs, traced=traced)
        rows, stride = problem.num_tokens + 1, inputs.out.stride(0)
        inputs.out.as_strided((rows, 1), (stride, 1))[-1] = 0  # raises where no row is behind: in a relation's run
        return outcome

    monkeypatch.setattr(OurLayer, "prefill", clears_behind)
    for seed in range(6):  # one of them asks for a relation
        record = check_case(MANY.replace(data=MANY.data.model_copy(update={"seed": seed})), "ours[triton]")
        assert (record.stage, record.checks[0].check) == ("guard", "guard.output")
