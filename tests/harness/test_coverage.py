"""Does the coverage table count what cases reach, and do cases reach what there is?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import Phase

from harness.cli import main
from harness.engine.coverage import Counts
from harness.engine.driver import _steer, run_hypothesis
from harness.engine.search import Observer, run
from harness.problems.feature_pairs import can_coincide, impossible_features, possible_pairs
from harness.problems.features import FEATURES
from harness.problems.problem import Problem
from harness.problems.profiles import PROFILE_NAMES, ProfileName
from harness.problems.strategies import cases
from reports.coverage import EXCLUDED, Coverage, read_coverage
from reports.records import CaseRecord, Status
from reports.runs import RunError
from reports.tables import coverage_table, pair_table
from tests.harness.test_engine import config

DENSE = ["dtype:bf16", "path:dense", "requests:1"]
MQA = ["dtype:fp16", "path:mqa", "requests:1"]


def counted(*cases: list[str]) -> Coverage:
    counts = Counts("ci")
    for features in cases:
        counts.add(features)
    return counts.coverage()


def count_of(coverage: Coverage, first: str, second: str) -> int:
    names = list(coverage.features)
    low, high = sorted((names.index(first), names.index(second)))
    return coverage.pairs[low][high - low - 1]


def test_features_and_pairs_are_counted_each_once_a_case() -> None:
    coverage = counted(DENSE, DENSE, MQA, ["no:feature"])
    assert coverage.cases == 4
    assert coverage.features["requests:1"] == 3
    assert coverage.features["path:remap"] == 0
    assert count_of(coverage, "path:dense", "requests:1") == 2
    assert count_of(coverage, "requests:1", "path:mqa") == 1
    assert count_of(coverage, "path:dense", "dtype:fp16") == 0
    assert count_of(coverage, "path:dense", "path:mqa") == EXCLUDED
    assert coverage.features_reached == 5
    assert coverage.pairs_reached == 6
    assert coverage.pairs_possible == len(possible_pairs())
    assert coverage.pairs_possible + coverage.pairs_excluded == len(FEATURES) * (len(FEATURES) - 1) // 2


def test_pairs_not_reached_come_first_the_surprising_ones_before_the_others() -> None:
    rarest = counted(*[DENSE] * 9, *[MQA] * 3).rarest(3)
    assert [pair.cases for pair in rarest] == [0, 0, 0]
    # of what was reached only these two do not exclude each other
    assert {pair.pair for pair in rarest[:2]} == {"path:dense + dtype:fp16", "path:mqa + dtype:bf16"}
    assert rarest[0].expected == pytest.approx(9 * 3 / 12)
    assert rarest[2].expected == 0


def test_what_a_profile_cannot_reach_is_no_gap() -> None:
    counts = Counts("quick")
    counts.add(DENSE)
    coverage = counts.coverage()
    assert coverage.features["requests:5..8"] == EXCLUDED
    assert coverage.features_possible == len(FEATURES) - len(impossible_features("quick"))
    assert count_of(coverage, "requests:5..8", "dtype:bf16") == EXCLUDED
    requests = coverage_table(coverage).set_index("name").loc["requests"]
    assert "5..8" not in str(requests["not_reached"])
    assert requests["cannot_occur"] == "5..8"
    assert "cannot occur" in coverage.features_headline()
    assert "cannot occur" not in counted(DENSE).features_headline()


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_no_case_has_a_feature_that_its_profile_is_said_not_to_reach(profile: ProfileName) -> None:
    never = impossible_features(profile)

    def check(problem: Problem) -> None:
        assert not never & set(problem.features()), problem.to_json()

    run_hypothesis(check, cases(profile), run_seed=5, max_examples=100, phases=(Phase.generate,))


def test_unseen_counts_the_features_and_pairs_that_are_new() -> None:
    counts = Counts("ci")
    assert counts.unseen(DENSE) == 6
    counts.add(DENSE)
    assert counts.unseen(DENSE) == 0
    assert counts.unseen(["dtype:bf16", "path:mqa", "requests:1"]) == 3


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    coverage = counted(DENSE, MQA)
    assert read_coverage(tmp_path) is None
    coverage.write(tmp_path)
    assert read_coverage(tmp_path) == coverage
    (tmp_path / "coverage.json").write_text("{}")
    with pytest.raises(RunError, match="not a coverage table"):
        read_coverage(tmp_path)


def test_the_tables_name_groups_and_pairs() -> None:
    coverage = counted(DENSE, MQA)
    groups = coverage_table(coverage).set_index("name")
    assert groups.loc["path", "reached"] == "dense 1, mqa 1"
    assert "remap" in str(groups.loc["path", "not_reached"])
    assert list(pair_table(coverage).columns) == ["pair", "cases", "expected"]
    assert len(pair_table(coverage)) == 10
    assert "can hold together reached" in coverage.headline()


def test_a_run_keeps_its_coverage(tmp_path: Path) -> None:
    run(config(tmp_path / "run"), Observer())
    coverage = read_coverage(tmp_path / "run")
    assert coverage is not None
    assert coverage.cases == 40
    assert coverage.features_reached > 0


def test_the_command_draws_and_reaches_nearly_everything() -> None:
    result = CliRunner().invoke(main, ["coverage", "--profile", "ci", "--cases", "400", "--json"])
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.output.splitlines()[-1])
    assert numbers["cases"] == 400
    assert numbers["features_total"] == len(FEATURES)
    assert numbers["features_reached"] >= len(FEATURES) - 3
    assert numbers["pairs_reached_share"] > 0.85


def test_a_history_excludes_what_a_single_call_cannot_have() -> None:
    assert not can_coincide("history:none", "before:grows")
    assert not can_coincide("before:grows", "before:shrinks")
    assert not can_coincide("before:same_metadata", "before:one_request_then_many")
    assert can_coincide("before:same_metadata", "before:other_scale")


def test_steering_aims_at_margins_and_at_what_was_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    aims: list[tuple[str, float]] = []
    monkeypatch.setattr("harness.engine.driver.target", lambda value, label: aims.append((label, value)))
    counts = Counts("ci")
    for features, margin in ((DENSE, 0.5), (DENSE, float("inf")), (MQA, None)):
        record = CaseRecord(case_id="x", subject="s", status=Status.PASS, features=features, margin_lse=margin)
        _steer(record, counts)
        counts.add(features)
    assert aims == [("margin_lse", 0.5), ("unseen_features", 6), ("unseen_features", 0), ("unseen_features", 5)]
