"""How a subject is named: `TARGET` or `TARGET@STAGE`.

TARGET is a bundled name (`ours[triton]`, `mutant:NAME`), a name of the entry-point group `mlacheck.subjects`,
`package.module:function`, or `path/to/file.py:function`. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.subjects.stages import STAGES

MUTANT_PREFIX = "mutant:"


class SubjectName(NamedTuple):
    """A name taken apart."""

    target: str
    stage: str | None


def split_name(name: str) -> SubjectName:
    """`TARGET@STAGE` -> both parts; anything behind another `@` belongs to the target."""
    target, at, stage = name.rpartition("@")
    return SubjectName(target, stage) if at and stage in STAGES else SubjectName(name, None)


def is_user_code(name: str) -> bool:
    """Whether loading this subject imports a module or file that the name itself points at."""
    return ":" in name and not name.startswith(MUTANT_PREFIX)


def is_file(target: str) -> bool:
    """Whether the target is `file.py:function`."""
    return target.rpartition(":")[0].endswith(".py")


def full_name(name: str, stage: str | None = None, folder: Path | None = None) -> str:
    """The name that means the same in every working folder and carries the stage.

    A relative file is taken from `folder` (default: here). Raises ValueError for an unknown stage, or if the name
    says another one.
    """
    target, named = split_name(name)
    if stage is not None and stage not in STAGES:
        raise ValueError(f"stage {stage!r} is unknown, must be one of {', '.join(STAGES)}")
    if stage is not None and named is not None and stage != named:
        raise ValueError(f"subject {name!r} names stage {named!r}, but stage {stage!r} is asked for")
    if is_user_code(target) and is_file(target):
        file, _, function = target.rpartition(":")
        target = f"{((folder or Path.cwd()) / file).resolve()}:{function}"
    stage = stage or named
    return f"{target}@{stage}" if stage else target


def short_name(name: str) -> str:
    """The name without folders: the same for every checkout of the same file."""
    target, stage = split_name(name)
    if is_user_code(target) and is_file(target):
        file, _, function = target.rpartition(":")
        target = f"{Path(file).name}:{function}"
    return f"{target}@{stage}" if stage else target
