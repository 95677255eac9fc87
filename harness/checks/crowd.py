"""Is a mask right that is built in a crowd: thousands of rows in one launch?

Threads that are not ordered, and programs that write where others do, are mostly ordered by luck: in a launch of a few
hundred rows, as a small case has, all of its threads run at once and in step. A launch that fills a GPU pulls them
apart. Our own builder without the barrier between clearing and setting a row passed 400 small cases on an H200, and
gave wrong bits in each of 60 launches of 4,096 rows of 128 words. So some cases make such a launch beside their own;
it needs no case of that size, whose oracle would cost seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.checks.attend import unpack_bits
from harness.checks.blame import is_out_of_memory
from harness.checks.guards import guarded, same_bits
from harness.checks.mask import WORD_BITS, bit_text
from harness.checks.places import is_made_on
from harness.checks.untouched import copy_of, same_as
from harness.checks.verdict import failed, passed, unravel
from harness.problems.bits import Stream
from harness.problems.problem import Problem
from harness.problems.workspace import padded_rows, words_per_row
from harness.subjects.api import NotRunnable
from harness.subjects.contract import Contract
from reports.records import CheckRecord, Place, Status
from reports.text import said

CHECK = "mask.crowd"
CROWD_EVERY = 4
"""One case in so many makes the launch, on a GPU."""
ROWS = 4096
"""Mask rows of the launch, about."""
CONTEXT = 4096
"""Context keys of each request, a power of two. Top-k rows list these alone: no order of causality shuts one out."""
TOPK = 2048
REQUESTS = (8, 1)
"""Builders have a kernel for many requests and one for a single one: in turn."""
_TAG = 704
_ROWS_AT_ONCE = 512
"""Rows whose bits are compared at a time: 17 MiB."""

Build = Callable[[Mapping[str, Any]], Any]
"""The inputs of stage `mask` by name -> the mask."""
Wrong = tuple[Status, str, Place]
"""Status, message and place of what is wrong with a mask."""


@dataclass(frozen=True)
class Crowd:
    """One large launch."""

    seed: int
    requests: int
    rows: int = ROWS
    context: int = CONTEXT
    topk: int = TOPK

    @property
    def query_len(self) -> int:
        """Rows of each request."""
        return self.rows // self.requests

    @property
    def longest(self) -> int:
        """Keys that the mask covers."""
        return self.context + self.query_len

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the mask."""
        return self.requests, padded_rows(self.query_len), words_per_row(self.longest, reserve=False)

    def __str__(self) -> str:
        each = f"{self.requests} x {self.query_len:,}" if self.requests > 1 else f"{self.query_len:,}"
        return f"one launch for {each} rows of {self.topk:,} keys"

    def keys(self, device: torch.device) -> torch.Tensor:
        """`[requests, query_len, topk]` int64: different keys in each row, all below `context`."""
        drawn = torch.from_numpy(Stream(self.seed, _TAG).integers(self.context, 2 * self.requests * self.query_len))
        # eight million keys: made on the device from a factor and an offset of each row
        factors, offsets = drawn.to(device).view(2, self.requests, self.query_len, 1)
        # an odd factor permutes the residues of a power of two
        keys: torch.Tensor = ((2 * factors + 1) * torch.arange(self.topk, device=device) + offsets) % self.context
        return keys


def crowd_of(problem: Problem, contract: Contract, device: torch.device) -> Crowd | None:
    """The launch that a case makes; None if it makes none.

    By the seed of its top-k sets, which shrinking and earlier calls leave alone: the fault is not lost on the way.
    """
    seed = problem.topk.seed
    if not is_made_on(CHECK, device.type) or seed % CROWD_EVERY != 2 or contract.topk_multiple > TOPK:
        return None
    requests = REQUESTS[seed // CROWD_EVERY % len(REQUESTS)]
    if contract.max_requests is not None:
        requests = min(requests, contract.max_requests)
    return Crowd(seed, requests, topk=TOPK // contract.topk_multiple * contract.topk_multiple)


def check_crowd(build: Build, device: torch.device, crowd: Crowd | None) -> list[CheckRecord]:
    """Build the mask of `crowd` and compare every bit, the memory around it and the inputs.

    Nothing is said without a crowd, and where the builder cannot make the launch or has no memory for it: its size is
    ours, and not that of the case. RACY if a second launch gives other bits. All is said under one name: no other
    check tells what only such a launch shows.
    """
    if crowd is None:
        return []
    try:
        findings = _findings(build, crowd, crowd.keys(device))
    except Exception as error:
        if _cannot(error):
            return []
        raise
    said_of = [failed("mask", CHECK, f"{crowd}: {text}", place, status=status) for status, text, place in findings]
    return said_of or [passed("mask", CHECK)]


def _cannot(error: Exception) -> bool:
    """Whether it says that the launch cannot be made."""
    return isinstance(error, NotRunnable) or is_out_of_memory(error)


@dataclass(frozen=True)
class _Launch:
    """What one call of the builder gave."""

    mask: Any
    besides: list[Wrong]
    """What it raised and wrote besides."""
    raised: str = ""


def _findings(build: Build, crowd: Crowd, keys: torch.Tensor) -> list[Wrong]:
    first = _launch(build, crowd, keys)
    wrong = None if first.raised else _wrong(first.mask, crowd, keys)
    if wrong is None:
        return first.besides
    status, message, place = wrong
    besides = first.besides
    if status is Status.FAIL:
        before = first.mask.clone()  # a builder may give its results in one memory
        try:
            again = _launch(build, crowd, keys)
        except Exception as error:
            if not _cannot(error):
                raise
            message += "; a second launch could not be made"
        else:
            besides = besides or [one for one in again.besides if one[0] is Status.GUARD]
            if again.raised:
                message += f"; a second launch raised {again.raised}"
            elif _wrong_kind(again.mask, crowd, keys.device) is None and same_bits(again.mask, before):
                message += "; the same in a second launch"
            else:
                message, status = message + "; others in a second launch", Status.RACY
    return [(status, message, place), *besides]


def _launch(build: Build, crowd: Crowd, keys: torch.Tensor) -> _Launch:
    """Call the builder once. What says that it cannot be called goes through."""
    device = keys.device
    requests, rows, words = crowd.shape
    workspace = guarded(requests * rows * words, torch.int32, device)
    inputs = {
        "topk_indices_per_req": list(keys.to(torch.int32).unbind()),
        "q_lens": [crowd.query_len] * requests,
        "max_q_len": crowd.query_len,
        "max_seq_len": crowd.longest,
        "out": workspace.view,
        "first_query_pos": torch.full((requests,), crowd.context, dtype=torch.int32, device=device),
        "reserve_key_starts_word": False,
    }
    before = {name: copy_of(value) for name, value in inputs.items() if name != "out"}
    mask, raised = None, ""
    besides: list[Wrong] = []
    try:
        mask = build(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        if _cannot(error):
            raise
        raised = f"{type(error).__name__}: {said(error)}"
        besides.append((Status.CONTRACT, f"the builder raised {raised}", Place()))
    guard = workspace.check("workspace")
    if guard.status.is_finding:
        besides.append((Status.GUARD, guard.message, Place()))
    for name, old in before.items():
        if not same_as(inputs[name], old):
            besides.append((Status.GUARD, f"the builder changed its input {name}", Place()))
    return _Launch(mask, besides, raised)


def _wrong_kind(mask: Any, crowd: Crowd, device: torch.device) -> str | None:
    """What the mask is, unless it is a plain tensor of the right kind."""
    if not isinstance(mask, torch.Tensor):
        return f"a {type(mask).__name__}"
    if mask.is_nested or mask.layout is not torch.strided:
        return f"a {'nested' if mask.is_nested else mask.layout} tensor"
    if (tuple(mask.shape), mask.dtype, mask.device) != (crowd.shape, torch.int32, device):
        return f"of shape {tuple(mask.shape)}, {mask.dtype}, on {mask.device}"
    return None


def _wrong(mask: Any, crowd: Crowd, keys: torch.Tensor) -> Wrong | None:
    """What is wrong with the mask, and its first wrong bit."""
    kind = _wrong_kind(mask, crowd, keys.device)
    if kind is not None:
        return Status.SHAPE, f"the mask is {kind}, must be of shape {crowd.shape}, int32, on {keys.device}", Place()
    count, first = 0, None
    for request in range(crowd.requests):
        for start in range(0, crowd.shape[1], _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            wanted = _bits_of(keys[request, part], *mask[request, part].shape)
            different = unpack_bits(mask[request, part], 0, wanted.shape[1]) != wanted
            wrong = int(different.sum())
            if wrong and first is None:
                row, key = unravel(int(different.flatten().byte().argmax()), different.shape)
                first = request, start + row, key, bool(wanted[row, key])
            count += wrong
    if first is None:
        return None
    request, row, key, missed = first
    word, bit = divmod(key, WORD_BITS)
    message = f"{bit_text(row, crowd.query_len, key, missed=missed)}; {count} wrong bits"
    return Status.FAIL, message, Place(request=request, row=row, key=key, word=word, bit=bit)


def _bits_of(keys: torch.Tensor, rows: int, words: int) -> torch.Tensor:
    """`[rows, words * 32]` bool with the keys of the first rows set."""
    bits = torch.zeros(rows, words * WORD_BITS, dtype=torch.bool, device=keys.device)
    bits[: keys.shape[0]].scatter_(1, keys, True)
    return bits
