"""Profiles: how much a run does by default. What the cases look like is the strategies' business."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """Limits of a run; every one can be overridden on the command line."""

    name: str
    about: str
    max_examples: int | None
    """Cases in total, over all shards; None: only the time ends the run."""
    max_time_s: float | None
    """Seconds of search, start-up and shrinking excluded; None: only the number of cases ends it."""
    case_timeout_s: float
    """A case without an answer for so long is a HANG. Generous: the first cases of a worker compile."""
    steer: bool
    """Use Hypothesis's `target()` to climb towards the worst margins; wants a few hundred cases at least."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", "the main job: about a minute on two cores", 160, 300.0, 60.0, steer=False),
        Profile("ci", "a few minutes: every single feature", 1000, 1800.0, 120.0, steer=True),
        Profile("night", "until the time is over", None, 8 * 3600.0, 300.0, steer=True),
    )
}
