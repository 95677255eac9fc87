"""Does the kill table tell what was killed from what was not, by which cases, and can it fail?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.mutants import table
from harness.mutants.forced_fail import REACHED
from harness.mutants.mutant import Mutant, mutant
from harness.mutants.patch import FORCED
from harness.mutants.registry import MUTANTS
from harness.mutants.stream import case_stream, most_new_first
from harness.mutants.table import Row, Table, TableConfig, TableError, all_right, choose, summary
from harness.problems.problem import Problem
from harness.subjects.contract import Contract
from harness.subjects.domain import Domain
from harness.subjects.layer_domain import LayerDomain
from reports.records import CaseRecord, CheckRecord, Status
from tests.harness.engine_fakes import problem

ROOT = Path(__file__).parents[2]


def test_are_the_cases_the_same_for_the_same_seed() -> None:
    first, second = (case_stream("quick", 5, 12) for _ in range(2))
    assert [p.case_id for p in first] == [p.case_id for p in second]
    assert len({p.case_id for p in first}) == 12
    other = case_stream("quick", 6, 12)
    assert {p.case_id for p in first}.isdisjoint(p.case_id for p in other)


def test_do_cases_with_more_new_features_come_first() -> None:
    def elements(*numbers: int) -> frozenset[tuple[int, int, int]]:
        return frozenset((number, 0, 0) for number in numbers)

    sets = [elements(1), elements(1, 2, 3), elements(4, 5, 6, 1), elements(2, 7, 8)]
    assert most_new_first([(sets, 1)], 9) == [2, 3, 1, 0]
    assert most_new_first([(sets, 1)], 2) == [2, 3]
    assert most_new_first([([elements(1), elements(2)], 1)], 2) == [0, 1]
    others = [elements(7), elements(), elements(), elements()]
    assert most_new_first([(sets, 1), (others, 1)], 4) == [2, 3, 0, 1]
    assert most_new_first([(sets, 1), (others, 9)], 4) == [0, 2, 3, 1]


def _fault(name: str, detector: str = "mask.bits", **fields: object) -> Mutant:
    return mutant(name, "own", "mask", "TOPK", detector, "A fault.", ("mask.py", "a", "b"), **fields)  # type: ignore[arg-type]


def test_are_mutants_chosen_by_name_and_by_lot() -> None:
    many = [_fault(f"m{i}") for i in range(20)] + [_fault("gpu", needs="cuda"), _fault("same", equivalent="Proof.")]
    assert choose(many, ["m1*", "m2"], None, 1, "triton", cuda=False)[0] == [many[1], many[2], *many[10:20]]
    usable, skipped = choose(many, [], None, 1, "triton", cuda=False)
    assert [m.name for m in skipped] == ["gpu"]
    assert len(usable) == 21
    draws = [choose(many, [], 5, seed, "triton", cuda=False)[0] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(draw) == 5 and not any(m.equivalent for m in draw) for draw in draws)
    with pytest.raises(TableError, match="none of the 1 mutants applies"):
        choose(many, ["gpu"], None, 1, "triton", cuda=False)
    assert choose(many, ["same"], 1, 1, "triton", cuda=False)[0] == [many[-1]]
    with pytest.raises(TableError, match="--only x"):
        choose(many, ["x*"], None, 1, "triton", cuda=False)
    assert _fault("a", needs="fa4").applies("fa4", cuda=True)
    assert not _fault("a", needs="fa4").applies("fa4", cuda=False)
    assert not _fault("a", needs="triton").applies("fa4", cuda=True)
    assert not _fault("a", needs="cuda").applies("fa4", cuda=True)
    assert not _fault("a", needs="cpu").applies("triton", cuda=True)


Answer = Callable[[str, Problem, float | None], CaseRecord]


DOMAIN = LayerDomain("prefill", Contract(head_dim_multiple=32))


class FakeSlot:
    """A worker that answers what the test says, by subject and case."""

    def __init__(self, subject: str, answer: Answer) -> None:
        self.subject, self.answer = subject, answer

    def prepare(self) -> dict[str, str]:
        return {}

    def domain(self) -> Domain | None:
        return DOMAIN

    def run(self, problem_json: str, timeout_s: float | None = None) -> CaseRecord:
        return self.answer(self.subject, Problem.from_json(problem_json), timeout_s)

    def stop(self) -> None:
        pass


CASES = [problem((0, n)) for n in range(1, 6)]
MORE = [problem((9, n)) for n in range(1, 4)]


def _record(case: Problem, status: Status = Status.PASS, stage: str | None = None, message: str = "") -> CaseRecord:
    checks = [CheckRecord(stage=stage, check=f"{stage}.bits", status=status)] if stage else []
    return CaseRecord(case_id=case.case_id, subject="s", status=status, stage=stage, message=message, checks=checks)


def _run(
    monkeypatch: pytest.MonkeyPatch,
    mutants: list[Mutant],
    answer: Answer,
    shrink_s: float = 0.0,
    unsound: list[str] | None = None,
) -> list[Row]:
    def make(self: Table, subject: str, name: str) -> FakeSlot:
        return FakeSlot(subject, answer)

    monkeypatch.setattr(Table, "_slot", make)
    seen: list[Row] = []
    made = Table(TableConfig("triton", 2, 5.0, shrink_s), lambda i: MORE if i else CASES)
    rows = made.run(mutants, seen.append)
    assert sorted(r.mutant.name for r in seen) == sorted(r.mutant.name for r in rows)
    (unsound if unsound is not None else []).extend(record.case_id for record in made.unsound)
    return rows


def _reaching(subject: str, case: Problem, where: int = 1) -> CaseRecord | None:
    if subject.endswith(FORCED) and case.num_tokens >= where:
        return _record(case, Status.CONTRACT, "prefill", f"InterpreterError: {REACHED} {subject[7 : -len(FORCED)]}")
    return None


def test_what_becomes_of_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(subject: str, case: Problem, timeout_s: float | None) -> CaseRecord:
        name = subject.removeprefix("mutant:")
        if name == "never" + FORCED:
            return _record(case)
        reached = _reaching(subject, case)
        if reached is not None:
            return reached
        if name == "third" and case.num_tokens == 3:
            return _record(case, Status.FAIL, "mask", "wrong bit")
        if name == "late" and case.max_context_len and case.num_tokens == 2:
            return _record(case, Status.FAIL, "attend", "wrong sum")
        if name == "slow" and timeout_s is None:
            return _record(case, Status.HANG)
        if name == "spins" and case.num_tokens == 2:
            return _record(case, Status.HANG)
        if name == "sick":
            return _record(case, Status.NOT_RUN, "harness")
        return _record(case)

    names = ["third", "late", "never", "slow", "spins", "sick"]
    mutants = [_fault(name, "HANG" if name == "spins" else "mask.bits") for name in names]
    rows = {row.mutant.name: row for row in _run(monkeypatch, mutants, answer)}
    third, late, spins = rows["third"], rows["late"], rows["spins"]
    assert (third.verdict, third.by, third.named, third.cases, third.localized) == (
        "killed",
        "mask.bits",
        "mask",
        3,
        True,
    )
    assert (late.verdict, late.by, late.cases, late.localized) == ("killed", "attend.bits", 7, False)
    assert rows["never"].verdict == "unreached"
    assert rows["slow"].verdict == "survived"
    assert rows["slow"].cases == 8
    assert (spins.verdict, spins.by, spins.cases, spins.localized) == ("killed", "HANG", 2, True)
    assert rows["sick"].verdict == "broken"
    figures = summary(list(rows.values()))
    assert (figures["mutants"], figures["killed"], figures["median_cases"], figures["localized"]) == (6, 3, 3, 2)
    assert not all_right(list(rows.values()))


def test_are_all_cases_legal_for_the_layer_under_test(monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[tuple[str, int, int]] = set()

    def answer(subject: str, case: Problem, timeout_s: float | None) -> CaseRecord:
        met.add((subject, case.dims.qk, case.dims.v))
        wrong = subject == "mutant:m" and case.num_tokens >= 4
        return _reaching(subject, case) or (_record(case, Status.FAIL, "mask") if wrong else _record(case))

    (row,) = _run(monkeypatch, [_fault("m")], answer, shrink_s=2.0)
    assert row.verdict == "killed"
    assert (CASES[0].dims.qk % 32, CASES[0].dims.v % 32) == (24, 16), "the drawn cases are not"
    assert {subject for subject, *_ in met} == {"ours[triton]", "mutant:m" + FORCED, "mutant:m"}
    assert all(qk % 32 == v % 32 == 0 for _, qk, v in met)


def test_does_a_case_that_our_own_layer_fails_kill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(subject: str, case: Problem, timeout_s: float | None) -> CaseRecord:
        wrong = case.num_tokens == 2 or (subject == "mutant:m" and case.num_tokens == 4)
        return _reaching(subject, case) or (_record(case, Status.FAIL, "mask") if wrong else _record(case))

    unsound: list[str] = []
    (row,) = _run(monkeypatch, [_fault("m")], answer, unsound=unsound)
    assert (row.verdict, row.cases) == ("killed", 4)
    assert unsound == [DOMAIN.fit(CASES[1]).case_id]


def test_is_a_layer_that_cannot_run_here_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(subject: str, case: Problem, timeout_s: float | None) -> CaseRecord:
        return _record(case, Status.NOT_RUN, "prefill", "no CUDA GPU")

    with pytest.raises(TableError, match="no CUDA GPU"):
        _run(monkeypatch, [_fault("m")], answer)


def test_is_a_killing_case_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(subject: str, case: Problem, timeout_s: float | None) -> CaseRecord:
        wrong = subject == "mutant:m" and case.num_tokens >= 2
        return _reaching(subject, case) or (_record(case, Status.FAIL, "mask") if wrong else _record(case))

    (row,) = _run(monkeypatch, [_fault("m")], answer, shrink_s=5.0)
    assert row.size is not None
    assert row.size["query_tokens"] == 2
    assert row.size["requests"] == 1
    assert summary([row])["median_query_tokens"] == 2


def test_when_is_a_table_all_right() -> None:
    real, same = _fault("m"), _fault("e", equivalent="Proof.")
    assert all_right([Row(real, "killed"), Row(same, "survived")])
    for wrong in (Row(real, "survived"), Row(real, "unreached"), Row(real, "broken"), Row(same, "killed")):
        assert not all_right([Row(real, "killed"), wrong])
    assert summary([Row(same, "survived")])["kill_rate"] is None
    assert table.Row(real, "survived").localized is False


def _mlacheck(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "harness.cli", "mutants", "--json", "--jobs", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_are_planted_faults_killed_and_named_from_end_to_end() -> None:
    killed = ["mask_bit31_lost", "merge_plain_average", "topk_rows_start_at_requests", "chunk_key_start_off_by_one"]
    same = "merge_weights_added_in_other_order"
    only = [part for name in (*killed, same) for part in ("--only", name)]
    code, result = _mlacheck(*only, "--max-cases", "8")
    rows = result["mutants"]
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == sorted(killed, key=list(MUTANTS).index)
    assert all(row["killed"] and row["localized"] and 1 <= row["cases"] <= 16 and row["seconds"] > 0 for row in rows)
    assert [(row["name"], row["verdict"]) for row in result["equivalent"]] == [(same, "survived")]
    assert code == 0


def test_does_the_command_fail_if_a_fault_survives() -> None:
    wanted = ("--only", "decode_rope_as_fp16", "--only", "fa4_lse_base2")
    code, result = _mlacheck(*wanted, "--max-cases", "1", "--seed", "2")
    assert code == 1
    (row,) = result["mutants"]
    assert not row["killed"]
    assert row["verdict"] in ("unreached", "survived")
    assert result["not_applicable"] == [{"name": "fa4_lse_base2", "needs": "fa4"}]
