"""How worker processes begin, and how their end is read."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
import threading
from contextlib import suppress
from multiprocessing import popen_forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOAD = ("harness.engine.preload",)
SERVER = ("__main__", "harness.engine.server_group")
"""Loaded by every server process, before what is preloaded."""
EXITED_WITH_0 = 256
"""In place of exit code 0: pebble takes that for an end that it asked for, and would wait for the answer."""


class WorkerPopen(popen_forkserver.Popen):
    """A child whose exit code is read once, and whose own children end with it.

    The exit code comes through a pipe; of two threads that read it together the second one finds nothing, and Python
    then says 255. Pebble polls from several threads.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, or None while it is not known."""
        if not self._reading.acquire(blocking=flag == 0):
            return self.returncode
        try:
            known = self.returncode is not None
            code: int | None = super().poll(flag)
            if code is not None and not known:
                with suppress(ProcessLookupError, PermissionError):  # mostly nobody is left
                    os.killpg(self.pid, signal.SIGKILL)
            return code
        finally:
            self._reading.release()


class WorkerProcess(ForkServerProcess):
    """A process of the fork server. It leads a process group: its own children are known by that."""

    def run(self) -> None:
        """In the child."""
        os.setpgid(0, 0)
        _end_with_the_run()
        super().run()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; never 0."""
        code = super().exitcode
        return EXITED_WITH_0 if code == 0 else code

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the name that multiprocessing calls
        return WorkerPopen(process_obj)


class WorkerContext(ForkServerContext):
    """The fork server's context, with exit codes that are not lost."""

    Process = WorkerProcess


def _end_with_the_run() -> None:
    """Let the kernel kill this process when the run ends: when nobody holds the other end of their pipe any more.

    A run that is killed outright ends nobody itself, and a worker that hangs reads no pipe. Linux only.
    """
    run = multiprocessing.parent_process()
    if run is None or not hasattr(fcntl, "F_SETSIG"):
        return
    pipe = run.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os._exit(1)


def _start_tracker() -> None:
    """Multiprocessing's tracker of semaphores, deaf to the closing of the terminal: the run outlives that for a while.

    It takes care of the other signals itself.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def fork_context(preload: tuple[str, ...] = PRELOAD) -> ForkServerContext:
    """Context whose server process preloads the modules; only the first call of a process can choose them."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    _start_tracker()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*SERVER, *preload])
    return WorkerContext()
