"""A call on a CUDA stream of its own, while the device is busy with something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
BUSY_CYCLES = 20_000_000
"""About 10 ms of a GPU: longer than the host needs to queue a call."""


def on_side_stream(device: torch.device, call: Callable[[], T]) -> T:
    """What `call` returns when it runs on a new stream behind a long kernel; waits for its end.

    Host code that takes a queued result for a finished one, and work that is put on another stream without an event,
    meet a device that has not started yet.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        result = call()
    stream.synchronize()
    return result
