"""What the commands share: how one says that it could not run, and the type of a time."""

from __future__ import annotations

from typing import IO, Any

import click

SECONDS = click.FloatRange(min=0, min_open=True)
"""Type of every option that takes a time."""


class Refusal(click.ClickException):
    """One line for the user; exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line to stderr."""
        click.echo(f"mlacheck: {' '.join(self.message.split())}", err=True, file=file)
