"""What Hypothesis does beside drawing, and must not do here.

* It draws now and then an integer that stands in the source text of a loaded local module. That serves tests of the
  code that they import; here it would make a seed mean other cases after each edit of the harness or of the code
  under test, and on the machine of the next person.
* Many versions follow each example by others that repeat parts of it. Ours are large: of 800 cases of the profile
  `quick` under 6.155 that leaves 130 different seeds of top-k sets, against about 700 without.

Its versions know no settings for either, so that both are switched off at their private names, as long as one of our
runs lasts; a version without a name is left as it is. Not for several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.engine import ConjectureRunner

_NAMES = ("_get_local_constants", "Constants", "CONSTANTS_CACHE", "_local_constants")
_MUTATE = "generate_mutations_from"


@contextmanager
def plain_draws() -> Iterator[None]:
    """Within it, each case is drawn afresh, and from nothing but its strategy and seed."""
    with ExitStack() as both:
        both.enter_context(no_local_constants())
        both.enter_context(no_mutations())
        yield


@contextmanager
def no_local_constants() -> Iterator[None]:
    """Within it, Hypothesis draws no constants of source texts."""
    if not all(hasattr(providers, name) for name in _NAMES):
        yield
        return
    module: Any = providers
    nothing = type(module._local_constants)()
    before = module._get_local_constants
    module._get_local_constants = lambda: nothing
    module.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        module._get_local_constants = before
        module.CONSTANTS_CACHE.cache.clear()


@contextmanager
def no_mutations() -> Iterator[None]:
    """Within it, Hypothesis makes no examples of parts of earlier ones."""
    runner: Any = ConjectureRunner
    if not hasattr(runner, _MUTATE):
        yield
        return
    before = getattr(runner, _MUTATE)
    setattr(runner, _MUTATE, lambda self, data: None)
    try:
        yield
    finally:
        setattr(runner, _MUTATE, before)
