"""The command line: `mlacheck run | replay | shrink | list | report | doctor`.

Exit codes of every command: 0 clean, 1 findings (or a replay that still fails), 2 could not run.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

import mlacheck  # noqa: F401 - first of all: it refuses foreign packages of our names
from harness.commands.bench import bench
from harness.commands.doctor import doctor
from harness.commands.listing import list_group
from harness.commands.replay import replay
from harness.commands.report import report
from harness.commands.run import run
from harness.commands.shrink import shrink


def _version() -> str:
    """The installed version; a plain checkout on the import path has none."""
    try:
        return version("mlacheck")
    except PackageNotFoundError:
        return "not installed"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(_version(), prog_name="mlacheck")
def main() -> None:
    """Run a sparse MLA prefill beside a float64 oracle; judge every stage within a derived bound."""


for command in (run, replay, shrink, list_group, report, bench, doctor):
    main.add_command(command)

if __name__ == "__main__":
    main()
