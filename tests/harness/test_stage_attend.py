"""Functions of stage `attend`: is what is wrong with one named, and in which of its keys or heads?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.problems.problem import DataSpec, Problem
from harness.subjects.contract import Contract
from reports.records import Status
from tests.harness.stage_problems import CASES, HEADS_FIRST, PLAIN, RAGGED, RIGHT, broken, first, judge, judged, problem

my_attend = RIGHT["attend"]


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
    assert "head dim 12 is not supported (test_stage_attend.py:" in record.message


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


def test_is_a_wrong_head_named_where_heads_are_judged_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checks.attention.MAX_JUDGE_ELEMENTS", {"cpu": 1})
    last_head = torch.tensor([0.0, 0.5])
    record = judge("attend", wrong_attend(after=lambda o, s: (o, s + last_head[:, None])))
    assert broken(record) == ["attend.lse"]
    assert first(record).place.head == 1


def test_is_an_output_of_a_row_without_keys_named_as_such() -> None:
    def unwritten(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return torch.where((lse == -torch.inf).t()[..., None], 7.0, out), lse

    record = judge("attend", unwritten, problem((20, 3), kinds=("all_empty",)), PLAIN)
    assert broken(record)[0] == "attend.out"
    assert "has no key, and its LSE says so, but its output is not 0" in record.message


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


def test_does_the_same_problem_give_the_same_verdict_twice() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        return wrong_attend(lose_key_7)(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    case: Problem = problem((0, 12), kinds=("all",))
    one, two = judge("attend", attend, case), judge("attend", attend, case)
    assert (one.message, one.tensor_hash) == (two.message, two.tensor_hash)
    assert one.tensor_hash.startswith("attend:")
