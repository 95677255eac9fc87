"""Are the reports readable and true, also for runs that broke off?"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from reports.finding import finding_markdown, headline, place_text, terms_text
from reports.markdown import markdown_table, run_markdown
from reports.records import CaseRecord, CheckRecord, Place, Status
from reports.runs import RunError, RunMeta, read_meta

BAD = CaseRecord(
    case_id="c0ffee",
    subject="ours[triton]",
    status=Status.FAIL,
    stage="attend",
    paths=["remap"],
    chunks=2,
    tensor_hash="abc",
    checks=[
        CheckRecord(
            stage="attend",
            check="attend.lse",
            status=Status.FAIL,
            margin=12.5,
            place=Place(request=1, row=17, key=513, word=16, bit=1),
            message="LSE | too small",
            terms={"row sum": 0.2, "P rounding": 0.62},
        )
    ],
)


def make_run(folder: Path, *rows: CaseRecord, tail: str = "") -> Path:
    folder.mkdir()
    meta = RunMeta(
        subject="ours[triton]",
        profile="quick",
        seed=7,
        jobs=2,
        facts={"torch": "2.13", "device": "cpu"},
        features=["dims:small", "dims:published"],
        started="2025-01-01T00:00:00+00:00",
    )
    meta.write(folder)
    text = "".join(json.dumps(row.model_dump(mode="json", exclude_defaults=True)) + "\n" for row in rows)
    (folder / "journal.jsonl").write_text(text + tail)
    return folder


def test_does_a_finding_report_say_what_where_and_how_to_reproduce() -> None:
    text = finding_markdown(BAD, case_json='{"a": 1}', facts={"torch": "2.13"}, replay="mlacheck replay /x/case.json")
    assert text.startswith("# FAIL at attend: ours[triton]")
    assert "| attend.lse | FAIL | 12.5 | request 1, row 17, key 513, word 16, bit 1 | LSE \\| too small |" in text
    assert "P rounding 62 %, row sum 20 %" in text
    for part in ("- torch: 2.13", "`abc`", "mlacheck replay /x/case.json", '{"a": 1}', "remap"):
        assert part in text


def test_is_a_long_case_named_and_not_pasted() -> None:
    text = finding_markdown(BAD, case_json="x" * 30_000, facts={}, replay="mlacheck replay /x/case.json")
    assert len(text) < 2_000


def test_are_places_and_terms_short() -> None:
    assert place_text(Place()) == ""
    assert place_text(Place(call="suffix", head=0)) == "call suffix, head 0"
    assert terms_text({"a": 0.1, "b": 0.9}) == "b 90 %, a 10 %"
    assert headline(BAD) == "attend.lse: LSE | too small"


def test_does_the_run_report_hold_the_counts_and_the_seed(tmp_path: Path) -> None:
    good = CaseRecord(case_id="1", subject="s", status=Status.PASS, paths=["dense"], features=["dims:small"])
    text = run_markdown(make_run(tmp_path / "run", good, BAD))
    for part in ("2 cases: 1 passed, 1 failing", "seed 7", "None.", "| remap | 1 | 50 % |", "published"):
        assert part in text


def test_does_the_run_report_name_each_finding_with_its_replay_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", BAD)
    finding = run / "findings" / "attend-fail-1"
    finding.mkdir(parents=True)
    (finding / "case.json").write_text("{}")
    (finding / "report.md").write_text(finding_markdown(BAD, case_json="{}", facts={}, replay="replay"))
    text = run_markdown(run)
    assert "- **FAIL at attend: ours[triton]**: attend.lse: LSE | too small" in text
    assert f"mlacheck replay {finding / 'case.json'}" in text


def test_is_a_run_that_was_killed_reported_with_the_cases_that_were_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", BAD, tail='{"case_id": "torn')
    (run / "pending").mkdir()
    (run / "pending" / "1.json").write_text("{}")
    text = run_markdown(run)
    assert "1 cases" in text
    assert "not finished" in text
    assert f"mlacheck replay {run / 'pending' / '1.json'}" in text


def test_is_a_folder_that_is_no_run_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run folder"):
        run_markdown(tmp_path)
    (tmp_path / "run.json").write_text('{"subject": 1}')
    with pytest.raises(RunError, match=r"run\.json"):
        read_meta(tmp_path)


def test_are_numbers_in_markdown_tables_aligned_right() -> None:
    frame = pd.DataFrame({"name": ["a|b"], "share": [0.254], "worst": [float("nan")]})
    assert markdown_table(frame).splitlines() == [
        "| name | share | worst |",
        "| --- | ---: | ---: |",
        "| a\\|b | 25 % | - |",
    ]
