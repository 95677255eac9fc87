"""Does each stage's judge pass a right function and name what is wrong with a wrong one?"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from harness.checks.stage_case import StageRun
from harness.problems.problem import DataSpec, Paging, Problem, TopkSpec
from harness.subjects.api import NotRunnable, StageSubject
from harness.subjects.contract import Contract
from harness.subjects.domain import Domain
from harness.subjects.registry import resolve
from harness.subjects.stages import STAGES
from reports.records import Status
from tests.harness.stage_problems import RAGGED, broken, first, judge, judged, problem

RIGHT: dict[str, Callable[..., Any]] = {
    stage: getattr(import_module(f"harness.subjects.skeletons.{stage}"), f"my_{stage}")
    for stage in ("attend", "mqa", "mask", "gather", "merge", "plan", "prefill")
}
my_attend, my_mqa, my_mask, my_gather, my_merge, my_plan, my_prefill = RIGHT.values()
PLAIN = Contract(cache_dtypes=("auto",))
CASES = {
    "ragged": RAGGED,
    "no context": problem((0, 5), (0, 1)),
    "empty rows": problem((20, 3), (12, 2), kinds=("all_empty", "some_empty")),
    "duplicates": problem((30, 4), kinds=("duplicates",)),
    "past the end": problem((30, 4), kinds=("past_end",)),
    "future": problem((10, 6), kinds=("future",)),
    "many requests": problem(*((n % 7, n % 3) for n in range(14))),
    "low": RAGGED.replace(data=DataSpec(family="low")),
    "very low": RAGGED.replace(data=DataSpec(family="very_low", seed=4)),
    "lowest, fp16": RAGGED.replace(dtype="fp16", data=DataSpec(family="very_low", seed=5)),
    "low rows": RAGGED.replace(data=DataSpec(family="low_rows")),
    "no queries": problem((30, 0), (0, 3)),
    "fp16, exact weights": RAGGED.replace(dtype="fp16", data=DataSpec(weights="exact", family="flat")),
    "nothing": problem(),
}
HEADS_FIRST = "q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", RIGHT)
def test_does_a_right_function_pass_whatever_the_batch(stage: str, case: str) -> None:
    record = judge(stage, RIGHT[stage], CASES[case], PLAIN)
    assert record.status in (Status.PASS, Status.WATCH, Status.VACUOUS), record.message
    assert (record.status is Status.VACUOUS) <= (case in ("nothing", "no context"))
    assert record.margin_lse is None or record.margin_lse <= 1


def test_has_a_merge_alone_a_margin_and_has_another_that_rounds_once_none() -> None:
    merge, gather = (judge(stage, RIGHT[stage], RAGGED, PLAIN) for stage in ("merge", "gather"))
    assert merge.margin_out is not None
    assert merge.margin_lse is not None
    assert 0 < merge.margin_out <= 1
    assert (gather.margin_out, gather.margin_lse) == (None, None)


@pytest.mark.parametrize("stage", RIGHT)
def test_are_the_checks_of_a_stage_those_of_its_table(stage: str) -> None:
    contract = Contract(cache_dtypes=("auto",), batch_invariant=True)
    seen = judged(judge(stage, RIGHT[stage], RAGGED, contract))
    promised = set(STAGES[stage].checks)
    assert seen <= promised
    unseen = {f"{stage}.max_logits", "guard.batch"} if stage not in ("attend", "mqa") else {f"{stage}.max_logits"}
    assert promised - seen <= unseen


@pytest.mark.parametrize("name", ["torch-dense", "torch-dense[flex]"])
@pytest.mark.parametrize("case", CASES)
def test_does_torch_dense_pass(name: str, case: str) -> None:
    subject = resolve(name)
    assert isinstance(subject, StageSubject)
    record = judge("attend", subject.function, CASES[case], subject.contract)
    assert record.status in (Status.PASS, Status.VACUOUS), record.message
    assert (record.status is Status.VACUOUS) <= (case in ("nothing", "no context"))


def wrong_attend(change: Callable[[dict[str, Any]], None] | None = None, after: Any = None) -> Callable[..., Any]:
    """`my_attend` on changed inputs, or with a changed result."""

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        given = dict(zip(HEADS_FIRST.split(", "), (q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed), strict=True))
        if change is not None:
            change(given)
        result = my_attend(**given)
        return result if after is None else after(*result)

    return attend


def lose_key_7(given: dict[str, Any]) -> None:
    given["allowed"] = given["allowed"].clone()
    given["allowed"][:, 7:8] = False


def see_key_0(given: dict[str, Any]) -> None:
    given["allowed"] = given["allowed"].clone()
    given["allowed"][:, :1] = True


def write_q(given: dict[str, Any]) -> None:
    given["q"].mul_(1.0)
    given["q"][..., 0] = 0.0


def wrong_scale(given: dict[str, Any]) -> None:
    given["scale"] = given["q"].shape[2] ** -0.5


def roll_v(given: dict[str, Any]) -> None:
    given["v"] = given["v"].roll(1, dims=2)


def test_is_a_key_that_was_not_attended_named() -> None:
    case = problem((0, 12), kinds=("all",))
    record = judge("attend", wrong_attend(lose_key_7), case)
    assert broken(record) == ["attend.keys"]
    assert "row 7 missed key 7 (word 0, bit 7)" in record.message
    assert (first(record).place.row, first(record).place.key) == (7, 7)


def test_is_a_key_that_must_not_be_attended_named() -> None:
    record = judge("attend", wrong_attend(see_key_0), problem((0, 12), kinds=("self_only",)))
    assert broken(record) == ["attend.keys"]
    assert "row 1 attended key 0 (word 0, bit 0)" in record.message


def _one_head_alone(head: int, key: int, seen: bool) -> Callable[..., Any]:
    """A right function but for one head, whose last row of each request sees one key more, or one less."""

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        other = allowed.clone()
        for b, end in enumerate(cu_seqlens_q[1:].tolist()):
            if end > cu_seqlens_q[b] and key < cu_seqlens_k[b + 1] - cu_seqlens_k[b]:
                other[end - 1, key] = seen
        wrong, wrong_lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, other)
        out[:, head], lse[head] = wrong[:, head], wrong_lse[head]
        return out, lse

    return attend


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_is_a_key_of_one_head_alone_named(head: int, seen: bool, with_lse: bool) -> None:
    """The read-out of all heads shows key 2 by head 0 and key 10 by head 1 only: the other head must be asked alone."""
    case = problem((45, 3), kinds=("window" if seen else "all",)).replace(dims=RAGGED.dims)
    case = case.replace(topk=case.topk.model_copy(update={"rows": ((40, 41, 42),) * 3 if seen else ((2, 10, 20),) * 3}))
    for key in (2, 10):
        attend = _one_head_alone(head, key, seen)

        def without_lse(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed, attend=attend):  # type: ignore[no-untyped-def]
            return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)[0]

        contract = Contract() if with_lse else Contract(lse_base=None)
        record = judge("attend", attend if with_lse else without_lse, case, contract)
        assert broken(record)[0] == "attend.keys", record.message
        assert f"row 2 {'attended' if seen else 'missed'} key {key} (word 0, bit {key})" in record.message
        place = first(record).place
        assert (place.request, place.row, place.key, place.word, place.bit) == (0, 2, key, 0, key)
        shown_by_all = key // 8 == head
        assert place.head == (None if shown_by_all else head)


ONE_ROW = problem((45, 1))
ONE_ROW = ONE_ROW.replace(topk=ONE_ROW.topk.model_copy(update={"rows": ((0, 1, 2),)}))


def _wrong_head(change: Callable[[torch.Tensor], torch.Tensor], head: int) -> Callable[[Any, Any], Any]:
    def after(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out[:, head] = change(out[:, head].clone())
        return out, lse

    return after


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("contract", [Contract(), Contract(lse_base=None), Contract(lse_base="2")])
@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, torch.neg, lambda out: out.roll(1, dims=1), lambda out: out * 1.05],
    ids=["zero", "negated", "rolled", "scaled"],
)
def test_is_wrong_arithmetic_of_one_head_not_called_a_wrong_set(change: Any, contract: Contract, head: int) -> None:
    after = _wrong_head(change, head)

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = after(*my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed))
        return out if contract.lse_base is None else (out, lse if contract.lse_base == "e" else lse / math.log(2))

    record = judge("attend", attend, ONE_ROW, contract)
    zero = change is torch.zeros_like and contract.lse_base is None and head == 0
    assert broken(record)[0] == ("attend.keys" if zero else "attend.out"), record.message


@pytest.mark.parametrize("head", [0, 1])
def test_is_a_key_of_one_head_that_stands_for_another_named(head: int) -> None:
    """As many keys as there must be, of which one is wrong: the count says nothing."""
    case = ONE_ROW.replace(topk=ONE_ROW.topk.model_copy(update={"rows": ((2, 10, 20),)}))
    lost, won = ((2, 9), (10, 3))[head]

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        if allowed.shape[1] == 46:
            other = allowed.clone()
            other[-1, lost], other[-1, won] = False, True
            wrong, wrong_lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, other)
            out[:, head], lse[head] = wrong[:, head], wrong_lse[head]
        return out, lse

    record = judge("attend", attend, case)
    assert broken(record)[0] == "attend.keys", record.message
    assert f"head {head} alone: row 0 attended key {won}" in record.message
    assert f"missed key {lost}" in record.message
    assert first(record).place.head == head


def _spoils(stage: str, name: str, spoil: Callable[[Any], Any]) -> Callable[..., Any]:
    """A right function that does something to an input after it has answered."""
    right = RIGHT[stage]

    @functools.wraps(right)
    def function(*args: Any, **given: Any) -> Any:
        own = {key: list(value) if isinstance(value, list) else value for key, value in given.items()}
        result = right(*args, **own)
        if len(given[name]):
            spoil(given[name])
        return result

    return function


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("stage", "name", "spoil"),
    [
        ("gather", "src_cache", lambda x: x.resize_(0)),
        ("gather", "block_table", lambda x: x.add_(1)),
        ("gather", "cu_seq_lens", lambda x: x.zero_()),
        ("prefill", "q", lambda x: x.unsqueeze_(0)),
        ("mask", "topk_indices_per_req", lambda x: x.__setitem__(0, None)),
        ("mask", "q_lens", lambda x: x.clear()),
        ("attend", "q", lambda x: setattr(x, "data", x * 2)),
        ("attend", "cu_seqlens_k", lambda x: x.set_(torch.zeros(3, dtype=torch.int32))),
        ("merge", "prefix_lse", lambda x: setattr(x, "data", x.clone().fill_(1.0))),
    ],
)
def test_does_a_spoilt_input_accuse_the_subject_and_not_break_the_judge(
    stage: str, name: str, spoil: Any, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageRun, "is_elsewhere", elsewhere)
    record = judge(stage, _spoils(stage, name, spoil), RAGGED, PLAIN)
    assert broken(record) == ["guard.inputs"], record.message
    assert f"changed its input {name}" in record.message


ATTEND_FAULTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "base 2": (wrong_attend(after=lambda o, s: (o, s / math.log(2))), "attend.lse", "base-2 LSE"),
    "scale": (wrong_attend(wrong_scale), "attend.lse", "x the tolerance"),
    "v columns": (wrong_attend(roll_v), "attend.out", "rows, heads or columns are mixed up"),
    "zeroed output": (
        wrong_attend(after=lambda o, s: (o * (torch.arange(len(o)) != 2)[:, None, None], s)),
        "attend.out",
        "the output is wrong, not the set",
    ),
    "one wrong output": (wrong_attend(after=lambda o, s: (o * 1.02, s)), "attend.out", "tolerance from"),
    "NaN": (wrong_attend(after=lambda o, s: (o * torch.nan, s)), "attend.keys", "NaN"),
    "layout": (wrong_attend(after=lambda o, s: (o, s.t())), "attend.shape", "lse has shape"),
    "no LSE": (wrong_attend(after=lambda o, s: o), "attend.shape", "must return (out, lse)"),
    "float32": (wrong_attend(after=lambda o, s: (o.float(), s)), "attend.shape", "torch.float32"),
    "writes q": (wrong_attend(write_q), "guard.inputs", "changed its input q"),
    "empty rows": (wrong_attend(after=lambda o, s: (o, s.masked_fill(s.isinf(), 0.0))), "attend.lse", "must be -inf"),
}


@pytest.mark.parametrize("fault", ATTEND_FAULTS)
def test_is_a_fault_of_an_attend_function_named(fault: str) -> None:
    function, check, words = ATTEND_FAULTS[fault]
    record = judge("attend", function)
    assert check in broken(record), record.message
    assert any(words in found.message for found in record.checks if found.check == check)


def test_does_an_exception_of_the_subject_say_where_it_came_from() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        raise ValueError("head dim 12 is not supported")

    record = judge("attend", attend)
    assert broken(record) == ["attend.run"]
    assert record.status is Status.CONTRACT
    assert "head dim 12 is not supported (test_stage_cases.py:" in record.message


def test_is_an_exception_that_cannot_say_why_a_verdict_too() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        raise MuteError

    record = judge("attend", attend)
    assert record.status is Status.CONTRACT
    assert "the subject raised MuteError on a legal case: (its text cannot be made)" in record.message


def test_are_bits_that_differ_from_call_to_call_racy() -> None:
    calls = itertools.count()

    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return out, lse * (1 + 1e-7 * (next(calls) % 2))

    assert broken(judge("attend", attend)) == ["guard.repeat"]
    assert broken(judge("attend", attend, contract=Contract(deterministic=False))) == []


def test_is_a_result_that_depends_on_the_batch_found_where_the_contract_denies_it() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return out, lse * (1 + 1e-7 * (len(cu_seqlens_q) > 2))

    assert broken(judge("attend", attend, contract=Contract(batch_invariant=True))) == ["guard.batch"]
    assert broken(judge("attend", attend)) == []


def test_are_results_judged_in_the_conventions_of_the_contract() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed, sinks):  # type: ignore[no-untyped-def]
        _, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        out, largest = torch.zeros(len(q), q.shape[1], v.shape[2]), torch.zeros_like(lse)
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
            s = scale * torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float())
            s = s.masked_fill(~allowed[a:b, : d - c], -torch.inf)
            largest[:, a:b] = s.amax(2) if d > c else -torch.inf
            share = torch.exp(s - torch.logaddexp(lse[:, a:b], sinks[:, None])[..., None])
            out[a:b] = torch.einsum("hqk,khd->qhd", share, v[c:d].float())
        lse2 = torch.where(lse.isinf(), torch.inf, lse / math.log(2))
        return out.to(q.dtype), largest.t(), lse2.t()

    contract = Contract(lse_base="2", lse_layout="TH", empty_lse="+inf", attention_sink=True, max_logits=True)
    for case in (CASES["empty rows"], RAGGED.replace(dtype="fp16")):
        record = judge("attend", attend, case, contract)
        assert broken(record) == [], record.message
        assert "attend.max_logits" in judged(record)
    plain = judge("attend", wrong_attend(), CASES["empty rows"], Contract(empty_lse="+inf"))
    assert broken(plain) == ["attend.lse"]
    assert "+inf of an empty row read as -inf" in plain.message


def test_is_one_head_judged_where_the_lse_has_heads_last() -> None:
    def merge(prefix_output, prefix_lse, suffix_output, suffix_lse):  # type: ignore[no-untyped-def]
        out, lse = my_merge(prefix_output, prefix_lse.t(), suffix_output, suffix_lse.t())
        return out, lse.t().contiguous()

    case = problem((45, 3), dims=RAGGED.dims.model_copy(update={"heads": 1}))
    assert judge("merge", merge, case, Contract(lse_layout="TH")).status is Status.PASS


def test_does_a_subject_without_lse_pass_and_is_its_output_still_judged() -> None:
    contract = Contract(lse_base=None)
    assert broken(judge("attend", wrong_attend(after=lambda o, s: o), contract=contract)) == []
    assert broken(judge("attend", wrong_attend(after=lambda o, s: o * 1.02), contract=contract)) == ["attend.out"]


@pytest.mark.parametrize("offset", [False, True])
def test_do_packed_masks_and_key_starts_say_the_same_as_the_boolean_matrix(offset: bool) -> None:
    seen = set()

    def compare(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed, mask, key_starts):  # type: ignore[no-untyped-def]
        for b in range(len(key_starts)):
            start = int(key_starts[b])
            seen.add(start % 32)
            assert not mask.shape[0] or int(mask[b, 0, -1]) == start
            rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = start + torch.arange(int(cu_seqlens_k[b + 1] - cu_seqlens_k[b]))
            bits = (mask[b, : rows.stop - rows.start][:, keys // 32] >> (keys % 32)) & 1
            assert torch.equal(bits.bool(), allowed[rows, : len(keys)])
        return my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    def own(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed, mask):  # type: ignore[no-untyped-def]
        for b in range(len(cu_seqlens_k) - 1):
            rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = torch.arange(int(cu_seqlens_k[b + 1] - cu_seqlens_k[b]))
            bits = (mask[b, : rows.stop - rows.start][:, keys // 32] >> (keys % 32)) & 1
            assert torch.equal(bits.bool(), allowed[rows, : len(keys)])
        return my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    assert judge("attend", compare if offset else own).status is Status.PASS
    assert not offset or len(seen) > 2


def test_is_a_slot_that_was_not_attended_named() -> None:
    def mqa(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, torch.where(indices == indices.max(), -1, indices), scale, v_dim)

    record = judge("mqa", mqa)
    assert broken(record) == ["mqa.keys"]
    assert "missed key" in record.message
    assert "(slot " in record.message


@pytest.mark.parametrize(("past", "found"), [(1, True), (3, True), (0, False)])
def test_is_an_index_just_past_the_end_given(past: int, found: bool) -> None:
    def clamped(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        taken = torch.where(indices < len(kv) + past, indices.clamp(max=len(kv) - 1), -1)
        return my_mqa(q, kv, taken, scale, v_dim)

    assert (broken(judge("mqa", clamped, CASES["past the end"])) == ["mqa.keys"]) == found


def test_is_the_first_index_past_the_end_the_most_frequent_one() -> None:
    beyond: list[int] = []

    def seen(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        beyond.extend((indices - len(kv))[indices >= len(kv)].tolist())
        return my_mqa(q, kv, indices, scale, v_dim)

    assert judge("mqa", seen, problem((60, 9), kinds=("past_end",))).status is Status.PASS
    assert beyond.count(0) > len(beyond) // 2
    assert max(beyond) > 2**30
    assert any(0 < excess < 200 for excess in beyond)


@pytest.mark.parametrize(
    ("family", "seed", "floor"),
    [("low", 0, -100.0), ("very_low", 0, -1e3), ("very_low", 1, -1e4), ("low_rows", 0, 0.0)],
)
@pytest.mark.parametrize("stage", ["attend", "mqa"])
def test_is_a_maximum_that_starts_at_a_finite_number_found(stage: str, family: str, seed: int, floor: float) -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return vanished(out, lse)

    def mqa(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return vanished(*my_mqa(q, kv, indices, scale, v_dim))

    def vanished(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gone = lse < floor - 100
        return out.masked_fill(gone.t()[..., None], 0.0), lse.masked_fill(gone, -torch.inf)

    data = DataSpec.model_validate({"family": family, "seed": seed})
    function = attend if stage == "attend" else mqa
    assert f"{stage}.lse" in broken(judge(stage, function, RAGGED.replace(data=data), repeat=False))
    assert broken(judge(stage, function, RAGGED, repeat=False)) == []


def test_are_duplicates_counted_as_the_contract_says() -> None:
    def per_slot(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        out = torch.zeros(q.shape[0], q.shape[1], v_dim, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
        for t in range(q.shape[0]):
            keys = kv[indices[t][(indices[t] >= 0) & (indices[t] < len(kv))].long()].float()
            scores = scale * (q[t].float() @ keys.t())
            lse[:, t] = scores.logsumexp(1)
            out[t] = (torch.exp(scores - lse[:, t, None]).nan_to_num(0.0) @ keys[:, :v_dim]).to(q.dtype)
        return out, lse

    case = CASES["duplicates"]
    assert broken(judge("mqa", per_slot, case, Contract(duplicates="per_slot"))) == []
    record = judge("mqa", per_slot, case)
    assert broken(record)[0] == "mqa.keys"
    assert "exp(LSE) counts" in record.message
    assert "some count more often than they must" in record.message
    assert "mqa.lse" in broken(judge("mqa", my_mqa, case, Contract(duplicates="per_slot")))


def test_are_entries_behind_the_count_of_a_row_no_keys() -> None:
    contract = Contract(topk_length=True, unselected_rows="poison")

    def counted(q, kv, indices, scale, v_dim, topk_length):  # type: ignore[no-untyped-def]
        behind = torch.arange(indices.shape[1]) >= topk_length[:, None]
        return my_mqa(q, kv, indices.masked_fill(behind, -1), scale, v_dim)

    def uncounted(q, kv, indices, scale, v_dim, topk_length):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, indices, scale, v_dim)

    case = problem((40, 3), topk=TopkSpec(kinds=("some_empty",), holes="tail", seed=3))
    assert broken(judge("mqa", counted, case, contract)) == []
    assert broken(judge("mqa", uncounted, case, contract)) == ["mqa.keys"]


def lost_bit(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    mask = my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)
    return mask & ~(1 << 9)


def not_causal(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    return my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, None)


def short_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    return my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)[:, :8]


def one_row_off(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    my_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale)
    if len(dst) > 9:
        dst[9] = dst[8]


def aligned_starts(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    size, starts = src_cache.shape[1], seq_starts.clone()
    starts[1:] = starts[1:] // size * size
    my_gather(src_cache, dst, block_table, cu_seq_lens, starts, kv_cache_dtype, scale)


def too_far(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    my_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale)
    dst.as_strided((1,), (1,), dst.storage_offset() + dst.numel()).fill_(0)


def base_2_merge(prefix_output, prefix_lse, suffix_output, suffix_lse):  # type: ignore[no-untyped-def]
    return my_merge(prefix_output, prefix_lse / math.log(2), suffix_output, suffix_lse / math.log(2))


def one_chunk_more(context_lens, row_budget, max_context_chunk, split_alignment):  # type: ignore[no-untyped-def]
    return my_plan(context_lens, row_budget - 8, max_context_chunk, split_alignment)


OTHER_FAULTS: dict[str, tuple[str, Callable[..., Any], str, str]] = {
    "a bit": ("mask", lost_bit, "mask.bits", "bit 9"),
    "causality": ("mask", not_causal, "mask.bits", "row"),
    "padding": ("mask", short_mask, "mask.shape", "must be"),
    "a row": ("gather", one_row_off, "gather.rows", "must be exactly"),
    "a start inside a block": ("gather", aligned_starts, "gather.rows", "must be exactly"),
    "a stray write": ("gather", too_far, "guard.dst", "behind"),
    "base": ("merge", base_2_merge, "merge.lse", "must be"),
    "budget": ("plan", one_chunk_more, "plan.chunks", "must be"),
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_is_a_fault_of_another_stage_named(fault: str) -> None:
    stage, function, check, words = OTHER_FAULTS[fault]
    case = problem((45, 20), (0, 2), (33, 4), kinds=("future",) * 3) if stage == "mask" else RAGGED
    record = judge(stage, function, case, PLAIN)
    assert check in broken(record), record.message
    assert any(words in found.message for found in record.checks if found.check == check)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_is_a_quantised_cache_gathered_right(kind: Any) -> None:
    case = RAGGED.replace(
        paging=Paging(block_size=8, kv_cache_dtype=kind, kv_cache_scale=0.5 if kind != "auto" else 1.0), force="mqa"
    )
    assert judge("gather", my_gather, case, Contract(cache_dtypes=("auto", "fp8_e4m3"))).status is Status.PASS


def test_does_the_read_out_of_a_black_box_name_the_key_that_was_missed() -> None:
    def prefill(topk: Any, **rest: Any) -> Any:
        wanted = ("row_budget", "max_context_chunk", "split_alignment", "out", "kv_cache_dtype", "kv_cache_scale")
        given = {name: value for name, value in rest.items() if name not in wanted}
        result = my_prefill(topk=torch.where(topk == 17, -1, topk), **given)
        rest["out"].copy_(result[0].flatten(1))
        return result

    case = problem((45, 3), kinds=("random",), dims=RAGGED.dims.model_copy(update={"topk": 40}))
    record = judge("prefill", prefill, case, PLAIN)
    assert broken(record) == ["prefill.keys"]
    assert "missed key 17 (word 0, bit 17)" in record.message
    assert "in the context" in record.message


def test_is_a_case_outside_the_contract_not_run() -> None:
    record = judge("attend", my_attend, RAGGED, Contract(head_dim_multiple=16))
    assert record.status is Status.NOT_RUN
    assert "outside the contract of the subject: dims" in record.message
    assert judge("attend", my_attend, RAGGED, Contract(device="cuda")).status is Status.NOT_RUN


def test_is_a_subject_that_cannot_run_here_not_accused() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        raise NotRunnable("needs SM90")

    record = judge("attend", attend)
    assert (record.status, record.message) == (Status.NOT_RUN, "needs SM90")


def test_are_no_empty_rows_and_no_empty_requests_made_where_the_contract_excludes_them() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        assert bool(allowed.any(dim=1).all())
        assert int(cu_seqlens_q.diff().min()) > 0
        assert int(cu_seqlens_k.diff().min()) > 0
        return my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    contract = Contract(empty_rows=False, zero_lengths=False)
    for case in (problem((20, 3), (12, 2)), problem((45, 3), (33, 1)), problem((0, 1))):
        assert judge("attend", attend, case, contract).status is Status.PASS


def test_is_a_finite_fill_right_where_the_contract_says_that_scores_lie_above_it() -> None:
    def fills(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = torch.empty(len(q), q.shape[1], v.shape[2], dtype=q.dtype), torch.empty(q.shape[1], len(q))
        for b in range(len(cu_seqlens_q) - 1):
            rows, keys = (slice(*starts[b : b + 2].tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
            scores = scale * torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float())
            scores = scores.masked_fill(~allowed[rows, : scores.shape[2]], -1e4)
            lse[:, rows] = scores.logsumexp(dim=2)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2).to(q.dtype).float(), v[keys].float())
        return out, lse

    contract = Contract(empty_rows=False, zero_lengths=False, lowest_score=-1e4)
    anything = dataclasses.replace(contract, lowest_score=None)
    plain = problem((20, 3), (12, 2))
    for seed in range(4):
        low = plain.replace(data=DataSpec(family="low", seed=seed))
        very_low = plain.replace(data=DataSpec(family="very_low", seed=seed))
        for case in (plain, low):
            assert judge("attend", fills, case, contract).status in (Status.PASS, Status.WATCH)
        assert judge("attend", fills, very_low, contract, repeat=False).status is Status.NOT_RUN
        assert Domain("attend", contract).fit(very_low).data == DataSpec(seed=seed)
        assert Domain("attend", anything).fit(very_low).data == very_low.data
    lowest = [plain.replace(data=DataSpec(family="very_low", seed=seed)) for seed in range(4)]
    assert any(judge("attend", fills, case, anything, repeat=False).status.is_finding for case in lowest)


@pytest.mark.parametrize("lowest", [0.0, 1.0, math.nan, "low"])
def test_is_a_lowest_score_that_is_none_refused(lowest: Any) -> None:
    with pytest.raises(ValueError, match=r"lowest_score is .* must be a negative number or None"):
        Contract(lowest_score=lowest)


def test_does_the_same_problem_give_the_same_verdict_twice() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        return wrong_attend(lose_key_7)(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    case: Problem = problem((0, 12), kinds=("all",))
    one, two = judge("attend", attend, case), judge("attend", attend, case)
    assert (one.message, one.tensor_hash) == (two.message, two.tensor_hash)
    assert one.tensor_hash.startswith("attend:")


@pytest.mark.parametrize("stage", ["attend", "mqa", "prefill"])
def test_does_judging_in_groups_of_heads_change_nothing(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judge(stage, RIGHT[stage], RAGGED, PLAIN)
    monkeypatch.setattr("harness.checks.attention.MAX_JUDGE_ELEMENTS", {"cpu": 1})
    parts = judge(stage, RIGHT[stage], RAGGED, PLAIN)
    assert parts.status is whole.status is Status.PASS
    assert (parts.margin_out, parts.margin_lse) == pytest.approx((whole.margin_out, whole.margin_lse))


def test_is_a_wrong_head_named_where_heads_are_judged_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checks.attention.MAX_JUDGE_ELEMENTS", {"cpu": 1})
    last_head = torch.tensor([0.0, 0.5])
    record = judge("attend", wrong_attend(after=lambda o, s: (o, s + last_head[:, None])))
    assert broken(record) == ["attend.lse"]
    assert first(record).place.head == 1


@pytest.mark.parametrize("stage", ["attend", "mqa", "prefill"])
def test_is_a_case_without_power_called_vacuous_only_where_its_keys_were_not_read_out(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharp = RAGGED.replace(data=DataSpec(family="sharp", temperature=64.0, seed=2))
    assert judge(stage, RIGHT[stage], sharp, PLAIN).vacuous == []
    monkeypatch.setattr(f"harness.checks.stage_{stage}.MAX_READOUT_LAUNCHES", 0)
    record = judge(stage, RIGHT[stage], sharp, PLAIN)
    assert record.status is Status.PASS
    assert any(name.endswith(":dropped") for name in record.vacuous)


def test_is_a_row_of_nobody_named_as_such() -> None:
    def past_the_end(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, torch.where(indices >= len(kv), 0, indices), scale, v_dim)

    def reads_nobodys(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        spare = (kv == kv[:, :1]).all(dim=1).nonzero().flatten()  # rows of one value: nobody's, or one-hot ones of 0
        spare = spare[kv[spare, 0] != 0]
        return my_mqa(q, kv, torch.where(indices < 0, spare[0].int(), indices), scale, v_dim)

    record = judge("mqa", reads_nobodys, problem((30, 4), kinds=("some_empty",)), PLAIN)
    assert broken(record) == ["mqa.keys"]
    assert "attended a row of kv that is no key of any request" in record.message
    assert broken(judge("mqa", past_the_end, problem((30, 4), kinds=("past_end",)), PLAIN))[0] == "mqa.keys"


def test_is_an_output_of_a_row_without_keys_named_as_such() -> None:
    def unwritten(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return torch.where((lse == -torch.inf).t()[..., None], 7.0, out), lse

    record = judge("attend", unwritten, problem((20, 3), kinds=("all_empty",)), PLAIN)
    assert broken(record)[0] == "attend.out"
    assert "has no key, and its LSE says so, but its output is not 0" in record.message


@pytest.mark.parametrize("stage", ["attend", "mqa", "merge"])
def test_may_a_subject_return_the_same_memory_every_time(stage: str) -> None:
    held: dict[tuple[object, ...], torch.Tensor] = {}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        key = (tuple(tensor.shape), tensor.dtype)
        return held.setdefault(key, torch.empty_like(tensor)).copy_(tensor)

    names = {
        "attend": HEADS_FIRST,
        "mqa": "q, kv, indices, scale, v_dim",
        "merge": "prefix_output, prefix_lse, suffix_output, suffix_lse",
    }[stage]
    scope: dict[str, Any] = {"right": RIGHT[stage], "kept": kept}
    exec(f"def static({names}):\n    out, lse = right({names})\n    return kept(out), kept(lse)", scope)
    for name in ("ragged", "empty rows", "duplicates"):
        assert broken(judge(stage, scope["static"], CASES[name], PLAIN)) == []


@pytest.mark.parametrize("what", ["meta", "sparse"])
def test_is_a_result_elsewhere_a_finding(what: str) -> None:
    move = {"meta": lambda out: out.to("meta"), "sparse": lambda out: out.to_sparse()}[what]
    record = judge("attend", wrong_attend(after=lambda out, lse: (move(out), lse)), RAGGED, PLAIN)
    assert (record.status, broken(record)) == (Status.SHAPE, ["attend.shape"])
    assert "must return plain ones on cpu" in record.message


def test_is_an_lse_of_one_row_with_odd_strides_compared() -> None:
    contract = Contract(cache_dtypes=("auto",), lse_layout="TH")
    for seed in range(40):  # every fourth of them is run twice, and its bits compared
        case = problem((9, 1), data=DataSpec(seed=seed))
        record = judge("attend", wrong_attend(after=lambda out, lse: (out, lse.t())), case, contract)
        assert record.status is Status.PASS, record.message
