"""`mlacheck doctor`: what is installed here and what can run."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of stdout.")
def doctor(as_json: bool) -> None:
    """Versions, GPU, FlashAttention-4, Triton's mode, and whether the package names are ours.

    Exit code 0: a run can start here; 2: it cannot (the lines marked with ! say why).
    """
    from harness.doctor import examine

    diagnosis = examine()
    click.echo(json.dumps(diagnosis.as_dict()) if as_json else "\n".join(diagnosis.lines()))
    sys.exit(0 if diagnosis.healthy else 2)
