"""Hypothesis strategies for people's own tests: `mlacheck.strategies`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

from harness.problems import strategies
from harness.problems.problem import Problem
from harness.problems.profiles import PROFILE_NAMES, ProfileName
from harness.subjects.api import StageSubject
from harness.subjects.load import as_subject
from harness.subjects.registry import resolve

Named = str | StageSubject | Callable[..., Any]
"""A subject by its name, itself, or a function that `mlacheck.subject` decorates."""


def cases(profile: ProfileName = "quick", subject: Named | None = None) -> SearchStrategy[Problem]:
    """Problems of a profile; of a subject only those that its contract allows.

    Raises SubjectError if the subject cannot be loaded, ValueError for a profile that does not exist.
    """
    if profile not in PROFILE_NAMES:
        raise ValueError(f"profile is {profile!r}, must be one of {', '.join(PROFILE_NAMES)}")
    drawn = strategies.cases(profile)
    if subject is None:
        return drawn
    found = find_subject(subject)
    return drawn.map(found.domain.fit) if isinstance(found, StageSubject) else drawn


def find_subject(subject: Named) -> Any:
    """The subject that is meant, a StageSubject or a layer. Raises SubjectError."""
    if isinstance(subject, str):
        return resolve(subject)
    if isinstance(subject, StageSubject):
        return subject
    return as_subject(subject, getattr(subject, "__name__", type(subject).__name__))
