"""Does the doctor see what is here, and does `mlacheck` refuse packages that are not its own?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlacheck
from harness.doctor import examine

ROOT = Path(mlacheck.__file__).parent


def python(code: str, *, path: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_does_a_healthy_machine_look_healthy() -> None:
    diagnosis = examine()
    assert diagnosis.healthy, diagnosis.problems
    assert {"python", "torch", "triton", "flash-attn-4", "gpu", "triton mode", "ours[fa4]"} <= set(diagnosis.facts)
    assert diagnosis.lines()[-1].startswith("ready")
    assert json.loads(json.dumps(diagnosis.as_dict()))["healthy"] is True


@pytest.mark.parametrize("name", mlacheck.PACKAGES)
def test_is_a_foreign_package_of_our_name_refused_before_it_is_executed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("print('the foreign package was executed')")
    done = python("import mlacheck", path=tmp_path)
    assert done.returncode == 1
    assert f"NameClash: package '{name}' resolves to {tmp_path}" in done.stderr
    assert "foreign" not in done.stdout


def test_does_the_command_say_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("")
    done = python("import sys; sys.argv = ['/usr/bin/mlacheck', 'doctor']; import mlacheck", path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mlacheck: package 'reports' resolves to")
    assert len(done.stderr.splitlines()) == 1


def test_is_a_plain_folder_of_our_name_harmless(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    assert python("import mlacheck; mlacheck.Status", path=tmp_path).returncode == 0


def test_does_the_public_face_hand_on_its_names() -> None:
    assert mlacheck.Status.FAIL.is_finding
    for name in mlacheck.__all__:
        assert getattr(mlacheck, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlacheck.nothing
