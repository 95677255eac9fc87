"""`--vllm-path`: where an unpacked vLLM wheel lies, for the subjects `vllm` and `flashmla`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from harness.subjects.vllm_source import PATH_VARIABLE

F = TypeVar("F", bound=Callable[..., Any])


def _remember(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None:
        # workers are other processes: they inherit it
        os.environ[PATH_VARIABLE] = str(value.resolve())


def vllm_path_option(command: F) -> F:
    """Add the option to a command; its value goes into the environment, not to the command."""
    option = click.option(
        "--vllm-path",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        expose_value=False,
        is_eager=True,
        callback=_remember,
        help=f"Folder of an unpacked vLLM wheel, for the subject vllm; also {PATH_VARIABLE}.",
    )
    return option(command)
