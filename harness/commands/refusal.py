"""How a command says that it could not run: one line on stderr, exit code 2."""

from __future__ import annotations

from typing import IO, Any

import click


class Refusal(click.ClickException):
    """One line for the user; exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line to stderr."""
        click.echo(f"mlacheck: {' '.join(self.message.split())}", err=True, file=file)
