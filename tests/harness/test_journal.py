"""Does a run folder survive a crash at any moment?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engine.journal import Journal
from harness.findings.store import load_case
from reports.runs import RunError, read_rows
from tests.harness import engine_fakes


def test_is_a_record_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    case = engine_fakes.problem((0, 3))
    journal = Journal(tmp_path / "run")
    journal.append(engine_fakes.good(case, "fake"))
    lines = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["case_id"] for line in lines] == [case.case_id]
    journal.close()


def test_is_a_case_pending_from_its_launch_until_it_landed(tmp_path: Path) -> None:
    case = engine_fakes.problem((5, 3)).to_json()
    with Journal(tmp_path / "run") as journal:
        journal.launch(1, "ours[triton]", case)
        stored = load_case(tmp_path / "run" / "pending" / "1.json")
        assert (stored.subject, stored.problem.to_json(), stored.expected) == ("ours[triton]", case, None)
        journal.landed(1)
        assert not list((tmp_path / "run" / "pending").iterdir())
    assert not (tmp_path / "run" / "pending").exists()


def test_does_a_case_that_never_landed_stay(tmp_path: Path) -> None:
    with Journal(tmp_path / "run") as journal:
        journal.launch(0, "fake", engine_fakes.problem((5, 3)).to_json())
    assert [path.name for path in (tmp_path / "run" / "pending").iterdir()] == ["0.json"]


def test_is_an_old_journal_never_written_over(tmp_path: Path) -> None:
    Journal(tmp_path / "run").close()
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "run")


def test_is_a_torn_last_line_left_out_but_no_other(tmp_path: Path) -> None:
    cases = [engine_fakes.problem((0, n)) for n in (1, 2, 3)]
    with Journal(tmp_path) as journal:
        for case in cases:
            journal.append(engine_fakes.good(case, "fake"))
    path = tmp_path / "journal.jsonl"
    text = path.read_text()
    path.write_text(text[:-20])
    assert [row["case_id"] for row in read_rows(tmp_path)] == [case.case_id for case in cases[:2]]
    path.write_text(text[:30] + text[50:])
    with pytest.raises(RunError, match=r"journal\.jsonl: line 1:"):
        list(read_rows(tmp_path))
