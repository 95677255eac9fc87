"""Make a patched copy of `optimized/` and put it first on the import path of this process."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from harness.mutants.forced_fail import forced_texts
from harness.mutants.mutant import Mutant, MutantError
from harness.mutants.registry import MUTANTS

PACKAGE = "optimized"
FORCED = "!forced"
"""Behind a mutant's name: its forced-fail variant."""


def find_mutant(name: str) -> Mutant:
    """Mutant of this name. Raises MutantError."""
    if name not in MUTANTS:
        raise MutantError(f"no mutant is called {name!r}; `mlacheck list mutants` names them")
    return MUTANTS[name]


def package_folder() -> Path:
    """Folder of the package under test, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MutantError(f"the package {PACKAGE!r} cannot be found")
    return Path(spec.origin).parent


def patched_texts(mutant: Mutant, folder: Path) -> dict[str, str]:
    """New text of each file that the mutant changes. Raises MutantError unless every patch applies exactly once."""
    texts: dict[str, str] = {}
    for patch in mutant.patches:
        path = folder / patch.file
        if not path.is_file():
            raise MutantError(f"mutant {mutant.name}: {patch.file} is not in {PACKAGE}/")
        text = texts.get(patch.file) or path.read_text(encoding="utf-8")
        count = text.count(patch.old)
        if count != 1:
            raise MutantError(
                f"mutant {mutant.name}: its patch of {patch.file} applies {count} times, must be exactly once"
            )
        texts[patch.file] = text.replace(patch.old, patch.new)
    return texts


def install(name: str) -> Path:
    """Copy the package, apply the mutant and make this process import the copy.

    `NAME!forced` is the forced-fail variant of mutant NAME. Returns the folder that was put first on `sys.path`;
    it is removed when the process ends. Raises MutantError for an unknown mutant, for a patch that does not apply
    exactly once, and if the package was imported before.
    """
    mutant = find_mutant(name.removesuffix(FORCED))
    if PACKAGE in sys.modules:
        raise MutantError(f"mutant {name}: {PACKAGE!r} is imported already; a mutant needs a fresh process")
    source = package_folder()
    texts = patched_texts(mutant, source)
    if name.endswith(FORCED):
        texts = forced_texts(mutant, source)
    root = Path(tempfile.mkdtemp(prefix="mlacheck-mutant-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    shutil.copytree(source, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in texts.items():
        (root / PACKAGE / file).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(root))
    return root
