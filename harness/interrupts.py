"""Ctrl-C, SIGTERM and the closing of the terminal end a command in one way: by KeyboardInterrupt, once."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GRACE_S = 20.0
"""An interrupt is left so long to stop workers and write reports before another one may break that off."""
DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""What is handled by anybody else, or ignored (nohup, background jobs), is left as it is."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Within it, each of the signals raises KeyboardInterrupt, and further ones of the next seconds are dropped."""
    last = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal last
        if time.monotonic() - last > GRACE_S:
            last = time.monotonic()
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    taken = [kind for kind, default in DEFAULTS.items() if ours and signal.getsignal(kind) == default]
    for kind in taken:
        signal.signal(kind, interrupt)
    try:
        yield
    finally:
        if last == -math.inf:  # else the process is about to end, and is not to be killed on its way
            for kind in taken:
                signal.signal(kind, DEFAULTS[kind])
