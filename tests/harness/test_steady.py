"""Does a seed draw the same cases, whatever code is loaded, and each of them afresh?"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.engine import ConjectureRunner

from harness.engine import driver
from harness.engine.driver import run_hypothesis
from harness.engine.steady import no_local_constants, no_mutations
from harness.problems.problem import Problem
from harness.problems.strategies import cases

CONSTANTS = range(500_000, 500_400)


def _load_local_module(tmp_path: Path, name: str) -> ModuleType:
    file = tmp_path / f"{name}.py"
    file.write_text("NUMBERS = [" + ", ".join(str(n) for n in CONSTANTS) + "]\n")
    spec = util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _drawn_integers(around: Any) -> list[int]:
    numbers: list[int] = []

    @seed(1)
    @settings(max_examples=300, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 10**6))
    def collect(number: int) -> None:
        numbers.append(number)

    with around:
        collect()
    return numbers


def _drawn_cases() -> list[str]:
    ids: list[str] = []
    run_hypothesis(
        lambda problem: ids.append(problem.case_id),
        cases("quick"),
        run_seed=5,
        max_examples=60,
        phases=(Phase.generate,),
    )
    return ids


def test_do_numbers_in_loaded_code_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady, free, problems = _drawn_integers(no_local_constants()), _drawn_integers(nullcontext()), _drawn_cases()
    name = "local_module_full_of_numbers"
    monkeypatch.setitem(sys.modules, name, _load_local_module(tmp_path, name))
    assert _drawn_integers(nullcontext()) != free, "else this test shows nothing"
    assert _drawn_integers(no_local_constants()) == steady
    assert not set(steady) & set(CONSTANTS)
    assert _drawn_cases() == problems


def test_is_hypothesis_left_as_it_was() -> None:
    before, within = providers._get_local_constants, []

    def fails(problem: Problem) -> None:
        within.append(providers._get_local_constants)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run_hypothesis(fails, cases("quick"), run_seed=1, max_examples=1, phases=(Phase.generate,))
    assert before not in within
    assert providers._get_local_constants is before


def test_is_a_version_without_these_names_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(providers, "CONSTANTS_CACHE")
    before = providers._get_local_constants
    with no_local_constants():
        assert providers._get_local_constants is before


def test_is_each_case_drawn_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions fill most of a run with examples made of parts of others; the pinned one has nearly none."""
    calls: list[object] = []
    monkeypatch.setattr(ConjectureRunner, "generate_mutations_from", lambda self, data: calls.append(data))
    _drawn_integers(nullcontext())
    assert calls, "else this version has no mutations at this name"
    calls.clear()
    _drawn_cases()
    assert not calls
    _drawn_integers(nullcontext())
    assert calls


def test_is_a_version_without_mutations_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ConjectureRunner, "generate_mutations_from")
    with no_mutations():
        assert not hasattr(ConjectureRunner, "generate_mutations_from")


def test_are_cases_different() -> None:
    problems: list[Problem] = []
    run_hypothesis(problems.append, cases("quick"), run_seed=7, max_examples=400, phases=(Phase.generate,))
    assert len({problem.topk.seed for problem in problems}) > 0.8 * len(problems)


def test_do_all_draws_of_the_harness_go_this_way() -> None:
    root = Path(driver.__file__).parents[1]
    draws = [path.relative_to(root).as_posix() for path in root.rglob("*.py") if "@given" in path.read_text()]
    assert draws == ["engine/driver.py"]
