"""Did a worker that gave no answer have a core at all?

A time-out by the clock on the wall accuses a right kernel when the machine is overloaded. What counts is the time in
which the worker ran, or waited for something of its own; the time in which it was ready to run while others had the
cores is told by Linux and taken off.
"""

from __future__ import annotations

from pathlib import Path


def waited_for_core(pid: int) -> float | None:
    """Seconds for which the main thread of a process has waited for a core so far; None where nobody says."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return None
    return int(fields[1]) / 1e9 if len(fields) == 3 else None


def pid_file(log: str) -> Path:
    """Where the worker with this log writes its process id when it begins."""
    return Path(f"{log}.pid")


class CoreWait:
    """How long the worker of a slot has waited for a core since this was made; `look` while it lives."""

    def __init__(self, log: str | None) -> None:
        self._file = None if log is None else pid_file(log)
        self._first = self._of_worker()
        self.seconds = 0.0

    def _of_worker(self) -> tuple[int, float] | None:
        if self._file is None:
            return None
        try:
            pid = int(self._file.read_text())
        except (OSError, ValueError):
            return None
        waited = waited_for_core(pid)
        return None if waited is None else (pid, waited)

    def look(self) -> None:
        """Note the wait so far. A worker that has ended leaves the last number."""
        now = self._of_worker()
        if now is None:
            return
        before = self._first[1] if self._first is not None and self._first[0] == now[0] else 0.0
        self.seconds = max(now[1] - before, 0.0)
