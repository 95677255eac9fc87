"""What the commands share: how one says that it could not run, and the type of a time."""

from __future__ import annotations

import math
from typing import IO, Any

import click

from harness.subjects.names import full_name, is_user_code, split_name


class _Seconds(click.FloatRange):
    """A finite time above 0: NaN passes every comparison of a plain range, and would never end a run."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds", param, ctx)
        return seconds


SECONDS = _Seconds(min=0, min_open=True)
"""Type of every option that takes a time."""


class Refusal(click.ClickException):
    """One line for the user; exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line to stderr."""
        click.echo(f"mlacheck: {' '.join(self.message.split())}", err=True, file=file)


def named_subject(name: str, stage: str | None) -> str:
    """A subject and a stage from the command line as one name. Raises Refusal."""
    try:
        return full_name(name, stage)
    except ValueError as error:
        raise Refusal(str(error)) from None


def subject_to_run(stored: str, given: str | None, stage: str | None) -> str:
    """Whom to judge a stored case for: the subject on the command line, or the stored one.

    A case file may come from anywhere, so a user's code that it names is not loaded for its word alone. Raises
    Refusal.
    """
    if given is not None:
        target, named = split_name(given)
        return named_subject(target, stage or named or (split_name(stored).stage if is_user_code(stored) else None))
    if is_user_code(stored):
        raise Refusal(f"the case is one of {stored}: name that code, or yours, by --subject, since loading it runs it")
    return named_subject(stored, stage)
