"""Is an exception, a crash or a hang blamed on the right stage?"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from harness.checks.blame import STAGE_OF_FILE, frame_of_dump, stage_of_dump, stage_of_error
from harness.checks.case import check_case
from harness.engine.context import fork_context
from harness.engine.pool import Slot
from harness.engine.worker import WorkerSpec
from harness.mutants.patch import package_folder
from harness.problems.problem import Problem
from harness.subjects.ours import OurLayer
from optimized import dispatch, mask, mha_path
from optimized.chunks import ChunkedContext
from reports.records import Status
from tests.harness.engine_fakes import problem


def test_is_every_named_file_there_and_every_stage_known() -> None:
    files = {path.name for path in package_folder().rglob("*.py")}
    assert set(STAGE_OF_FILE) <= files


def test_is_an_error_blamed_on_the_innermost_stage() -> None:
    for call, stage in (
        (lambda: mask.topk_mask_shape(-1, 1, 1), "mask"),
        (lambda: mask.slice_topk_per_req(torch.zeros(2, 3), [2]), "mask"),
        (lambda: int("no number"), None),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert stage_of_error(caught.value) == stage


def test_is_a_stack_of_the_fault_handler_read() -> None:
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/venv/triton/runtime/interpreter.py", line 310 in load\n'
        '  File "/tmp/m/optimized/gather_kernel.py", line 61 in launch_gather\n'
        '  File "/tmp/m/optimized/mha_path.py", line 200 in _chunk\n'
    )
    assert stage_of_dump(dump) == "gather"
    assert frame_of_dump(dump) == "gather_kernel.py:61 launch_gather"
    outside = dump.replace("optimized", "elsewhere")
    assert stage_of_dump(outside) is None
    assert frame_of_dump(outside) == "interpreter.py:310 load"
    assert frame_of_dump("") == ""


CASE = problem((40, 5), (0, 3))


def _judged(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, value: object) -> tuple[str, str, str]:
    monkeypatch.setattr(module, name, value)
    record = check_case(CASE, "ours[triton]")
    assert record.checks
    first = record.checks[0]
    return first.stage, first.check, record.message


def _raise(*args: object, **kwargs: object) -> None:
    raise RuntimeError("planted")


def test_is_a_raising_call_blamed_on_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, check, message = _judged(monkeypatch, mha_path, "project_kv", _raise)
    assert (stage, check) == ("chunk_loop", "prefill.run")
    assert "RuntimeError: planted" in message


def test_does_a_wrong_path_come_before_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = CASE.replace(mask_workspace_words=0)
    assert wide.expected_path() == "mqa"
    monkeypatch.setattr(dispatch, "batch_fits_mask_workspace", lambda metadata: True)
    record = check_case(wide, "ours[triton]")
    assert [(c.stage, c.check) for c in record.checks[:2]] == [("dispatch", "dispatch.path"), ("mask", "prefill.run")]
    assert record.status is Status.FAIL


def test_does_a_wrong_plan_come_before_what_it_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = OurLayer.metadata

    def shifted(self: OurLayer, case: Problem, inputs: object, *rest: object) -> object:
        built = metadata(self, case, inputs, *rest)  # type: ignore[arg-type]
        chunked = built.chunked_context
        assert isinstance(chunked, ChunkedContext)
        object.__setattr__(chunked.chunks[0], "num_context_tokens", 10**6)
        return built

    monkeypatch.setattr(OurLayer, "metadata", shifted)
    record = check_case(CASE, "ours[triton]")
    assert record.stage == "plan"
    bad = [check for check in record.checks if check.status.is_finding]
    assert [check.check for check in bad] == ["plan.num_context_tokens", "prefill.run"]


def spins(case: Problem, subject: str) -> None:
    """A judge that hangs in a file that stands for a stage."""
    space: dict[str, object] = {}
    exec(compile("def wait():\n    while True:\n        pass\n", "/x/optimized/merge.py", "exec"), space)
    space["wait"]()  # type: ignore[operator]


def test_does_a_hang_say_where(tmp_path: Path) -> None:
    spec = WorkerSpec(
        "s", str(tmp_path), log=str(tmp_path / "log"), checker=f"{__name__}:spins", resolver="builtins:str"
    )
    slot = Slot(spec, 1.5, fork_context())
    try:
        slot.prepare()
        record = slot.run(CASE.to_json())
    finally:
        slot.stop()
    assert record.status is Status.HANG
    assert record.stage == "merge"
    assert re.fullmatch(r"no answer in 1\.5 s in merge\.py:\d wait", record.message)
