"""Does `mlacheck init` print a check that works as it is?"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import mlacheck
from harness.cli import main
from harness.subjects.api import StageSubject
from harness.subjects.registry import resolve
from harness.subjects.stages import STAGES
from reports.records import Status
from tests.harness.stage_problems import RAGGED

WITH_SKELETON = [stage for stage in STAGES if stage != "mask_mod"]


@pytest.mark.parametrize("stage", WITH_SKELETON)
def test_does_the_printed_check_load_and_pass(stage: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["init", stage])
    assert done.exit_code == 0
    file = tmp_path / "my_kernel_check.py"
    file.write_text(done.output)
    subject = resolve(f"{file}:my_{stage}")
    assert isinstance(subject, StageSubject)
    assert subject.stage == stage
    assert mlacheck.check(RAGGED, f"{file}:my_{stage}").status is Status.PASS
    assert f"mlacheck run --subject my_kernel_check.py:my_{stage}" in done.output


def test_is_an_unknown_stage_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(main, ["init", "attention"])
    assert done.exit_code == 2
    assert "attend" in done.output
