"""The command line: `mlacheck run | replay | shrink | init | list | report | coverage | mutants | bench | ...`.

Exit codes of every command: 0 clean, 1 findings (or a replay that still fails), 2 could not run.
"""

from __future__ import annotations

import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

import mlacheck  # noqa: F401 - first of all: it refuses foreign packages of our names
from harness.commands.bench import bench
from harness.commands.common import Refusal
from harness.commands.coverage import coverage
from harness.commands.doctor import doctor
from harness.commands.init import init
from harness.commands.listing import list_group
from harness.commands.measure import measure
from harness.commands.mutants import mutants
from harness.commands.replay import replay
from harness.commands.report import report
from harness.commands.run import run
from harness.commands.shrink import shrink
from harness.interrupts import one_interrupt


def _version() -> str:
    """The installed version; a plain checkout on the import path has none."""
    try:
        return version("mlacheck")
    except PackageNotFoundError:
        return "not installed"


class Commands(click.Group):
    """Exit code 1 means findings, so nothing else may end with it: neither an interrupt nor a fault of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever is not a verdict becomes exit code 2."""
        try:
            with one_interrupt():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, SystemExit):
            raise
        except (KeyboardInterrupt, click.Abort):
            raise Refusal("interrupted") from None
        except OSError as error:
            raise Refusal(str(error)) from None
        except BaseException:
            traceback.print_exc()
            raise Refusal("a fault of mlacheck itself (see the traceback above)") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(_version(), prog_name="mlacheck")
def main() -> None:
    """Run a sparse MLA prefill beside a float64 oracle; judge every stage within a derived bound."""


for command in (run, replay, shrink, init, list_group, report, coverage, mutants, bench, measure, doctor):
    main.add_command(command)

if __name__ == "__main__":
    main()
