"""`mlacheck init STAGE`: a working check of one stage, to put a kernel into."""

from __future__ import annotations

from importlib.resources import files

import click


def _skeletons() -> dict[str, str]:
    """Stage -> the text of its skeleton."""
    folder = files("harness.subjects.skeletons")
    found = {file.name.removesuffix(".py"): file for file in folder.iterdir() if file.name.endswith(".py")}
    return {stage: file.read_text(encoding="utf-8") for stage, file in sorted(found.items()) if stage != "__init__"}


@click.command()
@click.argument("stage", type=click.Choice(sorted(_skeletons())))
def init(stage: str) -> None:
    """Print a check of one stage: a plain PyTorch implementation that passes, and whose body you replace.

    For example: mlacheck init attend > my_kernel_check.py
    """
    click.echo(_skeletons()[stage], nl=False)
