"""Has a kernel ruined the GPU of this process?

A launch that touches memory which is not its own, or traps, is noticed later, by whatever asks the device next: mostly
the judge. From then on every request to the device fails in this process, until it ends. So each case ends with the
question whether the device still answers; where it does not, the case is a crash, and the worker is replaced.
"""

from __future__ import annotations

import os
import sys

from harness.checks.blame import frame_of_error, stage_of_error
from reports.text import one_line

BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""With it every launch waits for its end, so that the fault is raised where it was made."""
_LIMIT = 300


class DeviceLost(Exception):  # noqa: N818 - not an error of the harness
    """The device of the worker no longer answers."""

    def __init__(self, fault: str, stage: str | None = None, frame: str = "") -> None:
        super().__init__(fault, stage, frame)
        self.fault = fault
        """What the driver says of it."""
        self.stage = stage
        """The stage that launched the faulty kernel, as far as known: with BLOCKING it is."""
        self.frame = frame
        """`mask.py:120 build_topk_mask`: the launch, likewise."""


def device_fault() -> str | None:
    """What the driver says of a fault that has ended this process's use of the GPU; None while it answers.

    Waits for the device.
    """
    try:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return one_line(str(error).strip().split("\n", 1)[0], _LIMIT)
    except Exception:  # the subject has put something else in the place of torch's functions
        return None
    return None


def lost(fault: str, error: BaseException | None, stage: str | None) -> DeviceLost:
    """What to raise for `fault` in this process.

    Args:
        fault: from `device_fault`.
        error: the exception that came out of the case, if one did.
        stage: of its record, if it gave one.
    """
    if os.environ.get(BLOCKING) != "1":
        return DeviceLost(fault)  # who asked the device next says nothing of who ruined it
    first = _first_of_ours(error)
    if first is not None:
        return DeviceLost(fault, stage_of_error(first), frame_of_error(first))
    return DeviceLost(fault, stage)


def _first_of_ours(error: BaseException | None) -> BaseException | None:
    """Of an exception and those during whose handling it came up, the first that the code under test raised."""
    first, seen = None, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if stage_of_error(error) is not None:
            first = error
        error = error.__context__
    return first
