"""Is a kernel that ruins the GPU a crash of the stage that launched it, and the next case judged by a sound worker?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.engine.context import fork_context
from harness.engine.pool import Slot
from harness.engine.worker import WorkerSpec
from harness.problems.problem import Problem
from reports.records import CaseRecord, Status
from tests.harness.engine_fakes import good, problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LAUNCH = "def launch(x, i):\n    return x[i]"


def asserts(case: Problem, subject: str) -> CaseRecord:
    """A judge whose case of one token reads past the end of a tensor, in a file that stands for a stage."""
    space: dict[str, object] = {}
    exec(compile(LAUNCH, "/x/optimized/merge.py", "exec"), space)
    at = torch.tensor([10**6 if case.num_tokens == 1 else 1], device="cuda")
    read = space["launch"](torch.zeros(4, device="cuda"), at)  # type: ignore[operator]
    if case.num_tokens == 1:
        return good(case, subject)
    assert read.item() == 0.0
    return good(case, subject)


def test_a_device_that_stopped_is_a_crash_with_its_stage(tmp_path: Path) -> None:
    spec = WorkerSpec(
        "s", str(tmp_path), log=str(tmp_path / "log"), checker=f"{__name__}:asserts", resolver="builtins:str"
    )
    slot = Slot(spec, 60.0, fork_context())
    try:
        for _ in range(2):
            record = slot.run(problem((0, 1)).to_json())
            assert record.status is Status.CRASH
            assert record.message.startswith("the GPU stopped: CUDA error: device-side assert triggered")
            assert record.message.endswith(" in merge.py:2 launch")
            assert record.stage == "merge"
            assert slot.run(problem((0, 2)).to_json()).status is Status.PASS
    finally:
        slot.stop()
