"""Do the planted faults apply, where they say, and does the forced fail show that they are reached?"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from harness.checks.stages import STAGES
from harness.mutants.forced_fail import REACHED, changed_line, forced_texts
from harness.mutants.mutant import Mutant, MutantError, Patch, mutant
from harness.mutants.patch import find_mutant, install, package_folder, patched_texts
from harness.mutants.registry import FAULT_ROWS, MUTANTS, NOT_PLANTED

ROOT = Path(__file__).parents[2]
EVERY = list(MUTANTS.values())
REAL = [m for m in EVERY if not m.equivalent]


@cache
def _original(file: str) -> str:
    return ast.dump(ast.parse((package_folder() / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", MUTANTS)
def test_does_the_patch_apply_once_and_give_other_valid_code(name: str) -> None:
    for file, text in patched_texts(MUTANTS[name], package_folder()).items():
        assert ast.dump(ast.parse(text)) != _original(file), "the code is the same"


@pytest.mark.parametrize("name", MUTANTS)
def test_does_the_forced_fail_stand_inside_a_function(name: str) -> None:
    for text in forced_texts(MUTANTS[name], package_folder()).values():
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        raised = [node for f in functions for node in ast.walk(f) if isinstance(node, ast.Raise)]
        assert any(f"{REACHED} {name}" in ast.unparse(node) for node in raised)


def test_is_every_row_of_the_corpus_planted_or_excused() -> None:
    rows = [row for family in FAULT_ROWS.values() for row in family]
    assert len(rows) == len(set(rows)) == 104
    planted = {m.fault for m in EVERY} - {"own"}
    assert planted | set(NOT_PLANTED) == set(rows)
    assert not planted & set(NOT_PLANTED)
    assert all(len(reason) > 40 for reason in NOT_PLANTED.values())
    assert len(REAL) >= 100


def test_is_every_mutant_described() -> None:
    families = {row: family for family, rows in FAULT_ROWS.items() for row in rows}
    for m in EVERY:
        assert m.family == families.get(m.fault, m.family), m.name
        assert m.family in FAULT_ROWS, m.name
        assert {m.stage, *m.also} <= set(STAGES), m.name
        assert m.what.endswith("."), m.name
        assert min(len(m.what) - 20, len(m.stage), len(m.detector)) > 0, m.name
        assert not m.equivalent or len(m.equivalent) > 60, m.name


def test_is_a_patch_that_does_not_apply_an_error() -> None:
    for file, old, message in (
        ("mask.py", "no such text", r"m: its patch of mask\.py applies 0 times, must be exactly once"),
        ("mask.py", "return", r"m: its patch of mask\.py applies \d\d times, must be exactly once"),
        ("nowhere.py", "return", r"m: nowhere\.py is not in"),
    ):
        wrong = mutant("m", "own", "mask", "TOPK", "mask.bits", "A fault.", (file, old, "x"))
        with pytest.raises(MutantError, match=message):
            patched_texts(wrong, package_folder())
    with pytest.raises(MutantError, match="no mutant is called"):
        find_mutant("unknown")
    import_module("optimized")
    with pytest.raises(MutantError, match="imported already"):
        install("merge_base2")


SOURCE = '''
LIMIT = 3
def f(a, b=1):
    """Documented."""
    if a:
        x = 1
    elif b:
        x = (2 +
             3)
    else:
        x = 4
    return x
'''


@pytest.mark.parametrize(
    ("old", "new", "fails"),
    [
        ("x = 1", "x = 7", {(1, 0)}),
        ("elif b", "elif not b", {(0, 1), (0, 0)}),
        ("             3)", "             5)", {(0, 1)}),
        ("b=1", "b=2", {(1, 0), (0, 1), (0, 0)}),
        ("return x", "return -x", {(1, 0), (0, 1), (0, 0)}),
    ],
)
def test_does_the_forced_fail_strike_where_the_change_is_run(
    tmp_path: Path, old: str, new: str, fails: set[tuple[int, int]]
) -> None:
    (tmp_path / "s.py").write_text(SOURCE)
    text = forced_texts(mutant("m", "own", "mask", "TOPK", "c", "A fault.", ("s.py", old, new)), tmp_path)["s.py"]
    space: dict[str, Callable[[int, int], int]] = {}
    exec(text, space)

    def forced(a: int, b: int) -> bool:
        try:
            space["f"](a, b)
        except RuntimeError as error:
            return str(error) == f"{REACHED} m"
        return False

    assert {(a, b) for a, b in ((1, 0), (0, 1), (0, 0)) if forced(a, b)} == fails


def test_is_a_change_outside_functions_alone_refused(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SOURCE)
    with pytest.raises(MutantError, match="no patch changes a function"):
        forced_texts(mutant("m", "own", "mask", "TOPK", "c", "A fault.", ("s.py", "LIMIT = 3", "LIMIT = 4")), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("LIMIT = 3", "LIMIT = 4", 2),
        ("LIMIT = 3\n", "LIMIT = 3\nMORE = 1\n", 3),
        ("x = 1", "x = 1 + 1", 6),
        ("        x = 1\n", "        x = 1\n        x += 1\n", 7),
        ("        x = 1\n", "", 6),
        ("             3)", "             4)", 9),
    ],
)
def test_which_line_does_a_patch_change(old: str, new: str, line: int) -> None:
    assert changed_line(SOURCE, Patch("s.py", old, new)) == line


def _jitted(m: Mutant) -> set[str]:
    """The Triton functions that a mutant changes; empty if it changes anything else too."""
    found = set()
    for patch in m.patches:
        text = (package_folder() / patch.file).read_text(encoding="utf-8")
        line = changed_line(text, patch)
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        around = [f for f in functions if f.lineno <= line <= (f.end_lineno or 0)]
        if not any("triton.jit" in ast.unparse(decorator) for f in around for decorator in f.decorator_list):
            return set()
        found.add(around[-1].name)
    return found


def test_is_a_forced_fail_in_each_compiled_kernel_and_function_seen() -> None:
    """On a GPU it is a compile error, which a called function hands to its caller; here nothing is launched."""
    by_function = {name: m.name for m in REAL if m.needs in (None, "triton") for name in _jitted(m)}
    by_function.pop("concat_k_kernel")  # only tensors of a GPU take this kernel
    assert len(by_function) >= 9, by_function
    chosen = sorted(set(by_function.values()))
    done = subprocess.run(
        [sys.executable, "-m", "tests.meta.compiled", "90", *chosen],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{name}: reached" for name in chosen], done.stdout + done.stderr[-2000:]
