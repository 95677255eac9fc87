"""Is a finding one small folder that means the same everywhere, and is a bad file refused in one line?"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from harness.findings.journaled import journaled_case
from harness.findings.replay import Replay, replay_case
from harness.findings.store import (
    CaseFile,
    CaseFileError,
    FindingStore,
    cause_of,
    fingerprint,
    load_case,
    locate,
    note_replay,
    read_state,
)
from harness.problems.problem import Problem
from reports.records import CaseRecord, Status
from tests.harness import engine_fakes

LONG = engine_fakes.problem((0, 25))
PRELOAD = ("hypothesis", "harness.engine.worker")


def failing(case: Problem = LONG, subject: str = "fake") -> CaseRecord:
    return engine_fakes.bad_when_long(case, subject)


def replay(case: CaseFile, checker: str = "bad_when_long", subject: str | None = None) -> Replay:
    return replay_case(
        case,
        subject=subject,
        timeout_s=20.0,
        checker=f"tests.harness.engine_fakes:{checker}",
        resolver="tests.harness.engine_fakes:resolve",
        preload=PRELOAD,
    )


def test_do_two_cases_of_one_fault_share_their_fingerprint() -> None:
    other = failing(engine_fakes.problem((7, 30), (0, 2)))
    assert fingerprint(failing()) == fingerprint(other)


@pytest.mark.parametrize(
    "change", [{"status": Status.NONFINITE}, {"stage": "merge"}, {"subject": "other"}, {"checks": []}]
)
def test_do_kind_stage_subject_and_cause_tell_faults_apart(change: dict[str, object]) -> None:
    assert fingerprint(failing()) != fingerprint(failing().model_copy(update=change))


def test_do_numbers_in_a_message_not_make_a_new_fault() -> None:
    a, b = (
        CaseRecord(case_id="x", subject="s", status=Status.CRASH, message=f"died at 0x{n:x} after {n} of -1.5e-3")
        for n in (17, 4242)
    )
    assert cause_of(a) == cause_of(b) == "died at # after # of #"


def test_does_the_case_file_give_back_what_was_stored(tmp_path: Path) -> None:
    stored = CaseFile.of(failing(), LONG)
    path = tmp_path / "case.json"
    path.write_text(stored.text())
    loaded = load_case(path)
    assert loaded == stored
    assert loaded.tensor_hash == LONG.case_id[::-1]


def test_is_a_bare_problem_a_case_file_too(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(LONG.to_json())
    case = load_case(path)
    assert (case.subject, case.problem, case.expected) == ("ours[triton]", LONG, None)


def _edited(**changes: object) -> str:
    content = json.loads(CaseFile.of(failing(), LONG).text())
    return json.dumps(content | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[1, 2]", "should be an object"),
        ('{"requests": "many"}', "dims"),
        (_edited(extra=1), "extra"),
        (_edited(version=2), "version"),
        (_edited(subject=""), "subject"),
        (_edited(expected={"status": "GREAT"}), "expected.status"),
        (_edited(problem={"version": 1}), "problem"),
        ("\x00\x01", "Invalid JSON"),
    ],
)
def test_is_a_malformed_file_refused_in_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(text)
    with pytest.raises(CaseFileError, match=message) as caught:
        load_case(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_is_a_file_that_is_not_text_or_too_large_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(CaseFileError, match="not UTF-8"):
        load_case(path)
    monkeypatch.setattr("harness.findings.store.MAX_JSON_CHARS", 10)
    path.write_text(LONG.to_json())
    with pytest.raises(CaseFileError, match="must be at most 10"):
        load_case(path)


def test_is_a_case_found_by_file_folder_and_id(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    store = FindingStore(runs / "r1" / "findings", {})
    finding = store.add(failing(), LONG)
    assert finding is not None
    case = (finding.folder / "case.json").resolve()
    for name in (str(case), str(finding.folder), finding.id, finding.id[:12]):
        assert locate(name, runs) == case
    with pytest.raises(CaseFileError, match="nothing: no such case file"):
        locate("nothing", runs)


def test_is_a_known_fault_counted_and_not_stored_again(tmp_path: Path) -> None:
    store = FindingStore(tmp_path, {"device": "cpu"})
    first = store.add(failing(), LONG)
    assert first is not None
    assert store.add(failing(engine_fakes.problem((1, 31))), engine_fakes.problem((1, 31))) is None
    store.close()
    assert len(list(tmp_path.iterdir())) == 1
    assert read_state(first.folder) == {"state": "open", "count": 2}
    report = (first.folder / "report.md").read_text()
    assert "row 19 missed key 31" in report
    assert first.replay_line in report


def test_does_the_replay_line_survive_a_folder_with_spaces(tmp_path: Path) -> None:
    finding = FindingStore(tmp_path / "my runs", {}).add(failing(), LONG)
    assert finding is not None
    assert shlex.split(finding.replay_line) == ["mlacheck", "replay", str(finding.folder / "case.json")]


def test_does_a_replay_say_that_nothing_has_changed() -> None:
    result = replay(CaseFile.of(failing(), LONG))
    assert (result.failing, result.same_verdict, result.same_tensors, result.exit_code) == (True, True, True, 1)
    assert any("same as stored" in line for line in result.lines(Path("case.json")))


def test_does_a_replay_notice_a_fixed_fault_and_mark_it(tmp_path: Path) -> None:
    finding = FindingStore(tmp_path, {}).add(failing(), LONG)
    assert finding is not None
    case = finding.folder / "case.json"
    result = replay(load_case(case), "good")
    assert (result.failing, result.same_verdict, result.exit_code) == (False, False, 0)
    note_replay(case, failing=result.failing)
    assert read_state(finding.folder)["state"] == "fixed"
    note_replay(case, failing=True)
    assert read_state(finding.folder)["state"] == "open"


def test_does_a_replay_notice_other_tensors() -> None:
    stored = CaseFile.of(engine_fakes.good(LONG, "fake"), LONG).model_copy(update={"tensor_hash": "0" * 16})
    result = replay(stored, "good")
    assert (result.failing, result.same_tensors, result.exit_code) == (False, False, 2)


@pytest.mark.parametrize(
    ("cause", "where"),
    [
        ("mask.crowd", "on a GPU alone"),
        ("relation.side_stream", "on a GPU alone"),
        ("relation.delayed_copies", "without a GPU alone"),
    ],
)
def test_does_a_replay_say_nothing_of_what_was_not_looked_for(cause: str, where: str) -> None:
    stored = CaseFile.of(failing(), LONG)
    expected = stored.expected.model_copy(update={"cause": cause})  # type: ignore[union-attr]
    stored = stored.model_copy(update={"expected": expected})
    result = replay(stored, "good")
    assert (result.silent, result.tells, result.exit_code) == (f"{cause} is made {where}", False, 2)
    assert f"nothing is said of the finding: {cause} is made {where}" in result.lines(Path("case.json"))
    again = replay(stored)
    assert (again.silent, again.tells, again.exit_code) == (None, True, 1)


def test_does_a_case_that_was_not_run_close_nothing() -> None:
    result = replay(CaseFile.of(failing(), LONG), "not_here")
    assert (result.record.status, result.tells, result.exit_code) == (Status.NOT_RUN, False, 2)
    assert result.silent == "the case was not run"


def test_is_another_subject_not_compared_with_the_stored_verdict() -> None:
    result = replay(CaseFile.of(failing(), LONG), subject="another")
    assert (result.record.subject, result.same_verdict, result.exit_code) == ("another", None, 1)


def _journal(folder: Path, *records: CaseRecord, torn: str = "") -> Path:
    folder.mkdir(parents=True)
    text = "".join(record.model_dump_json() + "\n" for record in records) + torn
    (folder / "journal.jsonl").write_text(text, encoding="utf-8")
    return folder


def _near(case: Problem, *, kept: bool = True) -> CaseRecord:
    record = engine_fakes.good(case, "fake").model_copy(update={"status": Status.WATCH})
    return record.model_copy(update={"problem": case.model_dump(mode="json")}) if kept else record


def test_is_a_case_of_a_journal_found_by_its_id(tmp_path: Path) -> None:
    other = engine_fakes.problem((3, 4))
    old, new = (_journal(tmp_path / "runs" / name, _near(other), _near(LONG)) for name in ("old", "new"))
    os.utime(old / "journal.jsonl", (1, 1))
    for what, run in ((f"{old}/{LONG.case_id}", old), (f"{new}/{LONG.case_id}", new), (LONG.case_id, new)):
        found = journaled_case(what, tmp_path / "runs")
        assert found is not None
        path, case = found
        assert path == run / "journal.jsonl"
        assert case.problem == LONG
        assert case.expected is not None
        assert case.expected.status is Status.WATCH
        assert not replay(case, "good").failing
    for what in ("mask-fail-0123456789", f"{tmp_path}/none/{LONG.case_id}", "0" * 16, str(old), f"{old}/case.json"):
        assert journaled_case(what, tmp_path / "runs") is None


def test_is_a_case_that_a_journal_does_not_hold_refused_in_one_line(tmp_path: Path) -> None:
    run = _journal(tmp_path / "run", _near(LONG, kept=False))
    with pytest.raises(CaseFileError, match="not what it is"):
        journaled_case(f"{run}/{LONG.case_id}", tmp_path)
    torn = f'{{"case_id": "{LONG.case_id}", "sub'
    damaged = _journal(tmp_path / "damaged", torn=torn)
    with pytest.raises(CaseFileError, match="is damaged"):
        journaled_case(f"{damaged}/{LONG.case_id}", tmp_path)
    for text in (torn + "\n", ""):  # a whole line behind a torn one, and in an older run
        whole = _journal(tmp_path / "runs" / f"whole{len(text)}", torn=text + _near(LONG).model_dump_json() + "\n")
        assert journaled_case(f"{whole}/{LONG.case_id}", tmp_path) is not None
    _journal(tmp_path / "runs" / "torn", torn=torn)
    assert journaled_case(LONG.case_id, tmp_path / "runs") is not None


def test_is_an_id_in_the_text_of_another_case_no_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _near(engine_fakes.problem((3, 4))).model_copy(update={"message": f"as {LONG.case_id}"})
    run = _journal(tmp_path / "run", other, torn=other.model_dump_json()[:-200])
    assert journaled_case(f"{run}/{LONG.case_id}", tmp_path) is None
    monkeypatch.chdir(run)
    found = journaled_case(f"./{other.case_id}", tmp_path)
    assert found is not None
    assert found[0] == run / "journal.jsonl"
