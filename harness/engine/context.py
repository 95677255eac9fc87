"""How worker processes begin, and how their end is read."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOAD = ("harness.engine.preload",)


class OnePollAtATime(popen_forkserver.Popen):
    """A child whose exit code is read once.

    It comes through a pipe; of two threads that read it together the second one finds nothing, and Python then says
    255. Pebble polls from several threads.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, or None while it is not known."""
        if not self._reading.acquire(blocking=flag == 0):
            return self.returncode
        try:
            code: int | None = super().poll(flag)
            return code
        finally:
            self._reading.release()


class WorkerProcess(ForkServerProcess):
    """A process of the fork server."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the name that multiprocessing calls
        return OnePollAtATime(process_obj)


class WorkerContext(ForkServerContext):
    """The fork server's context, with exit codes that are not lost."""

    Process = WorkerProcess


def fork_context(preload: tuple[str, ...] = PRELOAD) -> ForkServerContext:
    """Context whose server process preloads the modules; only the first call of a process can choose them."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *preload])
    return WorkerContext()
