"""The same seed draws the same cases, whatever code is loaded.

Hypothesis draws now and then an integer that stands in the source text of a loaded local module. That serves tests of
the code that they import; here it would make a seed mean other cases after each edit of the harness or of the code
under test, and on the machine of the next person.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.internal.conjecture import providers

_NAMES = ("_get_local_constants", "Constants", "CONSTANTS_CACHE", "_local_constants")


@contextmanager
def no_local_constants() -> Iterator[None]:
    """Within it, Hypothesis draws no constants of source texts.

    Its versions know no setting for it, so that its provider is changed for as long; a version without these names
    is left as it is. Not for several threads at once.
    """
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
