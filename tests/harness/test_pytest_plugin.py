"""Does the plugin behave as pytest users expect: ids, -k, xdist, junit, xfail files, configuration, messages?

Each test runs pytest in a process and a folder of its own, as a user would; one run of the engine is a few seconds,
so the tests share one where they can.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from harness import pytest_plugin
from harness.checks.stages import STAGES as LAYER_STAGES
from harness.pytest_run import Campaign

KERNELS = '''
import mlacheck
from harness.subjects.skeletons.plan import my_plan
from harness.subjects.skeletons.merge import my_merge


@mlacheck.subject(stage="plan")
def right(context_lens, row_budget, max_context_chunk, split_alignment):
    return my_plan(context_lens, row_budget, max_context_chunk, split_alignment)


@mlacheck.subject(stage="plan")
def crashes(context_lens, row_budget, max_context_chunk, split_alignment):
    import os
    if len(context_lens) > 1:
        os.abort()
    return my_plan(context_lens, row_budget, max_context_chunk, split_alignment)


@mlacheck.subject(stage="plan")
def judges_itself(context_lens, row_budget, max_context_chunk, split_alignment):
    import pytest
    pytest.skip("not today")


@mlacheck.subject(stage="plan", contract=mlacheck.Contract(device="cuda"))
def elsewhere(context_lens, row_budget, max_context_chunk, split_alignment):
    return []


def wrong(prefix_output, prefix_lse, suffix_output, suffix_lse):
    """Wrong LSE, and wrong outputs by the same factor: two broken checks."""
    out, lse = my_merge(prefix_output, prefix_lse, suffix_output, suffix_lse)
    return out * 1.5, lse + 0.25
'''
FAST = ("--mlacheck-examples", "8", "--mlacheck-jobs", "1", "--mlacheck-shrink", "0", "-p", "no:cacheprovider")
WRONG = ("--mlacheck-subject", "kernels.py:wrong", "--mlacheck-stage", "merge")
BROKEN = ["merge.lse", "merge.out"]


@dataclass(frozen=True)
class Done:
    """One finished pytest."""

    code: int
    text: str
    folder: Path

    def lines(self, beginning: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(beginning)]


def run_pytest(folder: Path, *args: str, config: str = "", within: str = ".") -> Done:
    """pytest with the kernels and the configuration in a folder, started there or in a folder within."""
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "pyproject.toml").write_text(config or "[tool.pytest.ini_options]\n")
    # under CI pytest prints every message twice: once more, whole, in its summary
    outside = ("PYTEST_", "COV_", "CI", "BUILD_NUMBER")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    env |= {"COLUMNS": "300", "PYTHONPATH": str(Path(__file__).parents[2])}
    installed = any(point.value == "mlacheck_pytest" for point in entry_points(group="pytest11"))
    command = [sys.executable, "-m", "pytest", *(() if installed else ("-p", "mlacheck_pytest")), *args]
    here = folder / within
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=240, check=False)
    return Done(done.returncode, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A failing subject under two xdist workers, with a JUnit file."""
    folder = tmp_path_factory.mktemp("wrong")
    return run_pytest(folder, *FAST, *WRONG, "-n", "2", "--junitxml", "junit.xml", "-v")


def test_does_a_failing_subject_show_one_failure_for_each_broken_check(wrong: Done) -> None:
    assert wrong.code == 1
    failures = [line.rpartition("::")[2].split(" ")[0] for line in wrong.lines("FAILED")]
    assert sorted(failures) == BROKEN
    assert len(wrong.lines("the check: ")) == 2
    assert "Traceback" not in wrong.text


def test_does_a_failure_show_the_judges_message_and_a_replay_line_that_works(wrong: Done) -> None:
    assert "every error fits a constant +0.25" in wrong.text
    replays = wrong.lines("mlacheck replay ")
    assert len(replays) == 2
    for line in replays:
        words = line.split(" ")
        assert Path(words[2]).is_file()
        assert words[3:] == ["--subject", f"{wrong.folder}/kernels.py:wrong@merge"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "harness.cli", *replays[0].split(" ")[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "FAIL at merge (same as stored)" in done.stdout


def test_do_xdist_workers_share_one_run(wrong: Done) -> None:
    assert len(list(wrong.folder.glob("runs/pytest-*/*/journal.jsonl"))) == 1
    assert len(wrong.lines("mlacheck: kernels.py:wrong@merge: 8 cases")) == 1


def test_does_the_junit_file_have_a_case_for_each_check(wrong: Done) -> None:
    cases = list(ElementTree.parse(wrong.folder / "junit.xml").iter("testcase"))
    names = {str(case.get("name")) for case in cases}
    assert {"merge.run", "merge.shape", "guard.inputs", *BROKEN} <= names
    failed = [str(case.get("name")) for case in cases if case.find("failure") is not None]
    assert sorted(failed) == BROKEN
    margins = [p.get("value") for case in cases for p in case.iter("property") if p.get("name") == "worst_margin"]
    assert margins


def test_can_checks_be_chosen_and_known_failures_be_listed(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("# what we know\nmerge.lse  # off by a quarter\n")
    done = run_pytest(tmp_path, *FAST, *WRONG, "--mlacheck-xfail", "known.txt", "-k", "merge.lse or merge.run", "-rx")
    assert done.code == 0
    assert "1 passed, 5 deselected, 1 xfailed" in done.text
    assert done.lines("XFAIL mlacheck::kernels.py:wrong@merge::merge.lse")
    assert "off by a quarter" in done.text


def test_have_subjects_ids_of_their_own_without_brackets() -> None:
    names = ["ours[triton]", "/a/k.py:f@plan", "/b/k.py:f@plan", "/b/k.py:f@mask"]
    assert pytest_plugin._titles(names) == ["ours(triton)", "k.py:f@plan", "k.py:f@plan#2", "k.py:f@mask"]
    assert pytest_plugin.checks_of("ours[triton]").keys() == LAYER_STAGES.keys()


def test_is_a_wrong_name_in_the_xfail_file_an_error(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("merge.les\n")
    done = run_pytest(tmp_path, *FAST, *WRONG, "--mlacheck-xfail", "known.txt")
    assert done.code == 4
    assert "no check is called 'merge.les'; there are merge.run, " in done.text


def test_do_options_come_from_the_configuration_file_and_does_a_right_subject_pass(tmp_path: Path) -> None:
    config = """[tool.pytest.ini_options]
mlacheck_subject = ["kernels.py:right"]
mlacheck_examples = "8"
mlacheck_jobs = "1"
addopts = "--strict-markers -p no:cacheprovider"
"""
    (tmp_path / "test_own.py").write_text("def test_name(mlacheck_subject):\n    assert mlacheck_subject\n")
    done = run_pytest(tmp_path, "-v", config=config)
    assert done.code == 0, done.text
    assert "mlacheck::kernels.py:right::plan.chunks PASSED" in done.text
    assert "test_own.py::test_name PASSED" in done.text
    done = run_pytest(tmp_path, "-m", "not mlacheck", config=config)
    assert "1 passed, 3 deselected" in done.text
    assert len(list(tmp_path.glob("runs/*"))) == 1


def test_is_a_crash_one_failed_check_and_a_subject_that_cannot_run_here_skipped_with_its_reason(tmp_path: Path) -> None:
    subjects = ("--mlacheck-subject", "kernels.py:crashes", "--mlacheck-subject", "kernels.py:elsewhere")
    done = run_pytest(tmp_path, *FAST, *subjects, "-rsf")
    assert done.code == 1
    (failed,) = done.lines("FAILED")
    assert failed.startswith("FAILED mlacheck::kernels.py:crashes::plan.run")
    assert "SIGABRT" in done.text
    assert "in kernels.py:" in done.text
    assert "its contract asks for a CUDA GPU" in done.text


def test_is_an_interrupted_run_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.engine.search.run", lambda *_: SimpleNamespace(interrupted=True))
    campaign = Campaign("any", tmp_path / "run", pytest_plugin.Options("quick", 8, 0, 1, 0.0))
    with pytest.raises(KeyboardInterrupt):
        campaign.outcome("plan.run")


def test_is_an_outcome_of_pytest_no_way_out_for_a_subject(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, *FAST, "--mlacheck-subject", "kernels.py:judges_itself", "-rsf")
    assert done.code == 1
    (failed,) = done.lines("FAILED")
    assert failed.startswith("FAILED mlacheck::kernels.py:judges_itself::plan.run")
    assert "raised Skipped(not today)" in done.text


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--mlacheck-subject", "kernels.py:nosuch"), "has no 'nosuch'"),
        (("--mlacheck-subject", "kernels.py:wrong", "--mlacheck-stage", "merg"), "stage 'merg' is unknown"),
        ((*WRONG, "--mlacheck-profile", "huge"), "profile is 'huge', must be one of quick"),
        ((*WRONG, "--mlacheck-examples", "0"), "examples is '0', must be a whole number, at least 1"),
    ],
)
def test_is_a_wrong_option_one_clear_line(tmp_path: Path, args: tuple[str, ...], complaint: str) -> None:
    done = run_pytest(tmp_path, *args)
    assert done.code == 4
    assert complaint in done.text
    assert "Traceback" not in done.text


@pytest.mark.parametrize("subject", ["nosuch.py:f", "kernels.py:nosuch", "nosuch"])
def test_is_a_wrong_subject_one_clear_line_under_xdist_too(tmp_path: Path, subject: str) -> None:
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass\n")
    for workers in ((), ("-n", "2")):
        done = run_pytest(tmp_path, *FAST, "--mlacheck-subject", subject, *workers)
        assert done.code == 4, done.text
        (complaint,) = done.lines("ERROR: mlacheck: ")
        assert subject.split(":")[-1 if subject.startswith("kernels") else 0] in complaint
        assert "INTERNALERROR" not in done.text


def test_is_a_subject_of_the_configuration_file_found_from_any_folder(tmp_path: Path) -> None:
    config = '[tool.pytest.ini_options]\nmlacheck_subject = ["kernels.py:right"]\n'
    (tmp_path / "sub").mkdir()
    for within in (".", "sub"):
        done = run_pytest(tmp_path, *FAST, "-k", "plan.chunks", config=config, within=within)
        assert done.code == 0, done.text


def test_is_torch_left_alone_where_no_option_is_used(tmp_path: Path) -> None:
    test = "import sys\ndef test_light():\n    assert not {'torch', 'harness', 'hypothesis.core'} & set(sys.modules)\n"
    (tmp_path / "test_light.py").write_text(test)
    done = run_pytest(tmp_path, "-p", "no:hypothesispytest")
    assert done.code == 0, done.text


def test_does_a_foreign_package_of_our_names_leave_other_peoples_tests_alone(tmp_path: Path) -> None:
    """The plugin is imported in every test run of the environment, so it must not fail where it is not used."""
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("")
    (tmp_path / "test_reports.py").write_text("import reports\ndef test_it():\n    assert reports.__file__\n")
    assert run_pytest(tmp_path).code == 0
