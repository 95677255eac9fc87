"""Is a mask builder judged by a launch of thousands of rows, and what is said of a wrong one? Small launches here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from harness.checks import case, stage_small
from harness.checks.case import check_case
from harness.checks.crowd import Crowd, check_crowd, crowd_of
from harness.checks.stage_case import check_stage
from harness.findings.shrink import shrink
from harness.problems.problem import Problem
from harness.subjects.api import NotRunnable, StageSubject
from harness.subjects.contract import Contract
from harness.subjects.ours import OurLayer
from optimized.mask import build_topk_mask
from reports.records import CheckRecord, Status
from tests.harness.engine_fakes import problem
from tests.harness.traced import batch

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Edit = Callable[[torch.Tensor, int], Any]


def small(requests: int = 2, seed: int = 3) -> Crowd:
    return Crowd(seed, requests, rows=48, context=64, topk=24)


def crowd(edit: Edit | None = None, *, requests: int = 2, seed: int = 3) -> CheckRecord:
    """What is said of our builder, after `edit(mask, number of the launch)`."""
    calls = 0

    def build(given: Mapping[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        mask = build_topk_mask(**given)
        return mask if edit is None else edit(mask, calls)

    (record,) = check_crowd(build, CPU, small(requests, seed))
    return record


def flip(mask: torch.Tensor, *at: int, bit: int) -> torch.Tensor:
    mask[at] ^= 1 << bit
    return mask


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_a_right_builder_passes(requests: int) -> None:
    for seed in range(3):
        record = crowd(requests=requests, seed=seed)
        assert (record.status, record.stage, record.check) == (Status.PASS, "mask", "mask.crowd")


def test_each_row_lists_different_keys() -> None:
    given: list[Mapping[str, Any]] = []

    def build(inputs: Mapping[str, Any]) -> torch.Tensor:
        given.append(inputs)
        assert bool((inputs["out"] != 0).all()), "the workspace is dirty"
        return build_topk_mask(**inputs)

    check_crowd(build, CPU, small())
    (inputs,) = given
    rows = torch.cat(inputs["topk_indices_per_req"])
    assert rows.shape == (48, 24)
    assert all(len(set(row.tolist())) == 24 for row in rows)
    assert int(rows.min()) >= 0
    assert int(rows.max()) < 64
    assert len({tuple(row.tolist()) for row in rows}) > 40


def test_wrong_bits_are_named() -> None:
    record = crowd(lambda mask, _: flip(mask, 1, 30, 2, bit=7))
    assert record.status is Status.FAIL
    assert record.place.model_dump(exclude_none=True) == {"request": 1, "row": 30, "key": 71, "word": 2, "bit": 7}
    assert "for 2 x 24 rows of 24 keys: padded row 30 has key 71 (word 2, bit 7); 1 wrong bits" in record.message
    assert "the same in a second launch" in record.message


def test_missing_bits_are_named() -> None:
    def lose_all(mask: torch.Tensor, _: int) -> torch.Tensor:
        mask[1, 5] = 0
        return mask

    record = crowd(lose_all)
    assert record.place.request == 1
    assert record.place.row == 5
    assert f"row 5 misses key {record.place.key} " in record.message
    assert "; 24 wrong bits" in record.message


def test_bits_of_the_sign_count() -> None:
    record = crowd(lambda mask, _: flip(mask, 0, 40, 0, bit=31))
    assert (record.place.word, record.place.bit) == (0, 31)


KEPT = torch.zeros(2, 128, 4, dtype=torch.int32)


def _in_one_memory(mask: torch.Tensor, launch: int) -> torch.Tensor:
    KEPT.copy_(flip(mask, 0, launch, 0, bit=0))
    return KEPT


@pytest.mark.parametrize(
    "edit",
    [
        lambda mask, launch: flip(mask, 0, launch, 0, bit=0),
        lambda mask, launch: mask if launch > 1 else flip(mask, 0, 0, 0, bit=0),
        lambda mask, launch: None if launch > 1 else flip(mask, 0, 0, 0, bit=0),
        _in_one_memory,
    ],
)
def test_other_bits_each_time_are_a_race(edit: Edit) -> None:
    record = crowd(edit)
    assert record.status is Status.RACY
    assert "others in a second launch" in record.message


def test_wrong_bits_are_not_lost_where_a_second_launch_fails() -> None:
    def once(error: Exception) -> Edit:
        def edit(mask: torch.Tensor, launch: int) -> torch.Tensor:
            if launch > 1:
                raise error
            return flip(mask, 0, 0, 0, bit=0)

        return edit

    for error, said in (
        (RuntimeError("no more"), "raised RuntimeError: no more"),
        (MemoryError(), "could not be made"),
    ):
        record = crowd(once(error))
        assert record.status is Status.FAIL
        assert f"1 wrong bits; a second launch {said}" in record.message


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda mask, _: mask[:, :24], "of shape (2, 24, 4), torch.int32, on cpu, must be of shape (2, 128, 4), int32"),
        (lambda mask, _: mask.long(), "torch.int64, on cpu, must be"),
        (lambda mask, _: mask.to("meta"), "on meta, must be"),
        (lambda mask, _: mask.to_sparse(), "a torch.sparse_coo tensor, must be"),
        (lambda mask, _: torch.empty(3, dtype=torch.int32), "of shape (3,)"),
        (lambda mask, _: torch.nested.nested_tensor([mask[0], mask[1]]), "a nested tensor, must be"),
        (lambda mask, _: None, "the mask is a NoneType"),
    ],
)
def test_another_kind_of_result_is_told(edit: Edit, said: str) -> None:
    record = crowd(edit)
    assert record.status is Status.SHAPE
    assert said in record.message


def test_what_the_builder_raises_is_a_finding() -> None:
    def build(_: Mapping[str, Any]) -> torch.Tensor:
        raise ValueError("at most 64 rows")

    (record,) = check_crowd(build, CPU, small(1))
    assert (record.status, record.check) == (Status.CONTRACT, "mask.crowd")
    assert "one launch for 48 rows of 24 keys: the builder raised ValueError: at most 64 rows" in record.message


@pytest.mark.parametrize("error", [NotRunnable("no"), MemoryError(), torch.OutOfMemoryError()])
def test_a_launch_that_cannot_be_made_says_nothing(error: Exception) -> None:
    def build(_: Mapping[str, Any]) -> torch.Tensor:
        raise error

    assert check_crowd(build, CPU, small()) == []


def _behind(out: torch.Tensor) -> torch.Tensor:
    return out.as_strided((1,), (1,), out.storage_offset() + out.numel())


def test_what_is_written_besides_is_found() -> None:
    def build(given: Mapping[str, Any]) -> torch.Tensor:
        mask = build_topk_mask(**given)
        _behind(given["out"]).zero_()
        given["topk_indices_per_req"][1][3] = 0
        given["q_lens"].append(3)
        given["first_query_pos"].zero_()
        return mask

    records = check_crowd(build, CPU, small())
    assert {(record.stage, record.check, record.status) for record in records} == {("mask", "mask.crowd", Status.GUARD)}
    text = "\n".join(record.message for record in records)
    assert "for 2 x 24 rows of 24 keys: workspace: element 0 of the guard behind it was written" in text
    for name in ("topk_indices_per_req", "q_lens", "first_query_pos"):
        assert f"the builder changed its input {name}" in text


def test_what_a_second_launch_writes_and_one_that_raises_is_found() -> None:
    launches = 0

    def second_writes(given: Mapping[str, Any]) -> torch.Tensor:
        nonlocal launches
        launches += 1
        if launches > 1:
            _behind(given["out"]).zero_()
        return flip(build_topk_mask(**given), 0, 0, 0, bit=0)

    records = check_crowd(second_writes, CPU, small())
    assert [record.status for record in records] == [Status.FAIL, Status.GUARD]

    def raises(given: Mapping[str, Any]) -> torch.Tensor:
        _behind(given["out"]).zero_()
        raise ValueError("late")

    records = check_crowd(raises, CPU, small())
    assert [record.status for record in records] == [Status.CONTRACT, Status.GUARD]


def _seeded(seed: int) -> Problem:
    judged = problem((5, 3))
    return judged.replace(topk=judged.topk.model_copy(update={"seed": seed}))


def test_one_case_of_four_on_a_gpu_makes_it() -> None:
    def requests(contract: Contract, device: torch.device = CUDA) -> list[int | None]:
        crowds = [crowd_of(_seeded(seed), contract, device) for seed in range(8)]
        return [None if one is None else one.requests for one in crowds]

    assert requests(Contract()) == [None, None, 8, None, None, None, 1, None]
    assert requests(Contract(max_requests=3)) == [None, None, 3, None, None, None, 1, None]
    assert not any(requests(Contract(), CPU))


@pytest.mark.parametrize(("multiple", "topk"), [(1, 2048), (64, 2048), (96, 2016), (2048, 2048)])
def test_the_contract_is_kept(multiple: int, topk: int) -> None:
    made = crowd_of(_seeded(2), Contract(topk_multiple=multiple), CUDA)
    assert made is not None
    assert (made.topk, made.rows) == (topk, 4096)
    assert crowd_of(_seeded(2), Contract(topk_multiple=2049), CUDA) is None


def test_shrinking_and_earlier_calls_keep_the_launch() -> None:
    start = batch((9, 3), (4, 40)).replace(scale=0.3, history=(batch((2, 2)),))
    start = start.replace(topk=start.topk.model_copy(update={"seed": 6}))
    small = shrink(start, lambda one: crowd_of(one, Contract(), CUDA) is not None, seconds=20).problem
    assert (len(small.requests), small.num_tokens, sum(small.seq_lens), small.history) == (1, 1, 1, ())


def _nested(topk_indices_per_req, q_lens, max_q_len, max_seq_len):  # type: ignore[no-untyped-def]
    return torch.nested.nested_tensor([torch.zeros(128, 4, dtype=torch.int32) for _ in q_lens])


def test_the_layer_and_builders_are_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (case, stage_small):
        monkeypatch.setattr(module, "crowd_of", lambda problem, contract, device: small(1))
    judged = problem((5, 3))
    assert "mask.crowd" in [check.check for check in check_case(judged, "ours[triton]").checks]

    def crowd_loses_a_row(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
        mask = build_topk_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)
        if max_q_len == 48:
            mask[0, 47] = 0
        return mask

    def few_rows(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
        if max_q_len == 48:
            raise NotRunnable("at most 40 rows")
        return build_topk_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)

    record = check_stage(judged, StageSubject("mine", "mask", crowd_loses_a_row, Contract()), CPU)
    assert (record.status, record.stage) == (Status.FAIL, "mask")
    assert "row 47 misses key" in record.message
    record = check_stage(judged, StageSubject("mine", "mask", few_rows, Contract()), CPU)
    assert record.status is Status.PASS
    assert "mask.crowd" not in [check.check for check in record.checks]
    record = check_stage(judged, StageSubject("mine", "mask", _nested, Contract()), CPU)
    assert (record.status, record.stage) == (Status.SHAPE, "mask")
    assert "it returned a nested tensor on cpu" in record.message
    monkeypatch.setattr(OurLayer, "build_mask", lambda self, given: 1 / 0)
    record = check_case(judged, "ours[triton]")
    assert (record.status, record.stage) == (Status.CONTRACT, "mask")
