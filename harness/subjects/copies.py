"""Copies of the process that code under test makes by `os.fork`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def copies_end_here() -> Iterator[None]:
    """A copy of this process that was forked within ends when it gets here; the process itself goes on.

    It would else go on as well: judge the case a second time, answer for it, and be copied at each further call.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(1)
