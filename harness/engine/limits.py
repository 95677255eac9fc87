"""How much a run of a profile does by default. How large its cases are: `harness/problems/profiles.py`."""

from __future__ import annotations

from dataclasses import dataclass

from harness.problems.profiles import ProfileName


@dataclass(frozen=True)
class Limits:
    """Where a run ends. Giving one of the first two on the command line takes the place of both."""

    max_examples: int | None
    """Cases in total, over all shards."""
    max_time_s: float | None
    """Seconds of search; start-up and shrinking come on top."""
    case_timeout_s: float
    """A case without an answer for so long is a HANG. Generous: the first cases of a worker compile."""
    steer: bool = False
    """Climb towards the worst margins, and towards features not met yet, by Hypothesis's `target()`; wants hundreds
    of cases to be of use."""


LIMITS: dict[ProfileName, Limits] = {
    "quick": Limits(max_examples=160, max_time_s=300.0, case_timeout_s=60.0),
    "ci": Limits(max_examples=1500, max_time_s=1800.0, case_timeout_s=120.0),
    "gpu_small": Limits(max_examples=5000, max_time_s=1800.0, case_timeout_s=120.0, steer=True),
    "gpu_full": Limits(max_examples=2000, max_time_s=3600.0, case_timeout_s=300.0, steer=True),
}
