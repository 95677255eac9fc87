"""Is a mask right that is built in a crowd: thousands of rows in one launch?

Threads that are not ordered, and programs that write where others do, are mostly ordered by luck: in a launch of a few
hundred rows, as a small case has, all of its threads run at once and in step. A launch that fills a GPU pulls them
apart. Our own builder without the barrier between clearing and setting a row passed 400 small cases on an H200, and
gave wrong bits in each of 60 launches of this size. So some cases make such a launch beside their own; it needs no
case of that size, whose oracle would cost seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from harness.checks.attend import unpack_bits
from harness.checks.guards import guarded, same_bits
from harness.checks.verdict import failed, passed, unravel
from harness.problems.bits import Stream
from harness.problems.workspace import padded_rows, words_per_row
from harness.subjects.api import NotRunnable
from reports.records import CheckRecord, Place, Status
from reports.text import said

CHECK = "mask.crowd"
CROWD_EVERY = 4
"""One case in so many (by its id) makes the launch, on a GPU."""
ROWS = 4096
"""Mask rows of the launch, about."""
CONTEXT = 4096
"""Context keys of each request, a power of two. Top-k rows list these alone: no order of causality shuts one out."""
TOPK = 2048
REQUESTS = (8, 1)
"""Builders have a kernel for many requests and one for a single one: by the id of the case, in turn."""
WORD_BITS = 32
_TAG = 704
_ROWS_AT_ONCE = 512
"""Rows whose bits are compared at a time: 17 MiB."""

Build = Callable[[Mapping[str, Any]], Any]
"""The inputs of stage `mask` by name -> the mask."""


def crowd_requests(case_id: str, device: torch.device, most: int | None = None) -> int | None:
    """Requests of the launch that a case makes; None if it makes none. `most`: a contract's `max_requests`."""
    number = int(case_id, 16)
    if device.type != "cuda" or number % CROWD_EVERY != 2:
        return None
    requests = REQUESTS[number // CROWD_EVERY % len(REQUESTS)]
    return requests if most is None else min(requests, most)


def check_crowd(
    build: Build,
    device: torch.device,
    seed: int,
    requests: int,
    *,
    rows: int = ROWS,
    context: int = CONTEXT,
    topk: int = TOPK,
) -> CheckRecord:
    """Build one mask of `rows` rows in `requests` requests and compare every bit.

    RACY if a second launch gives other bits, FAIL if it gives the same wrong ones, CONTRACT if the builder raises.
    NotRunnable and exhausted memory go through.
    """
    query_len = rows // requests
    keys = _keys(seed, requests, query_len, context, topk, device)
    try:
        mask = _built(build, keys, context)
        wrong = _wrong(mask, keys, context)
        if wrong is None:
            return passed("mask", CHECK)
        again = _built(build, keys, context)
    except (NotRunnable, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        message = f"{_launch(keys)}: the builder raised {type(error).__name__}: {said(error)}"
        return failed("mask", CHECK, message, status=Status.CONTRACT)
    message, place = wrong
    same = isinstance(again, torch.Tensor) and isinstance(mask, torch.Tensor) and same_bits(again, mask)
    if same:
        return failed("mask", CHECK, f"{_launch(keys)}: {message}; the same in a second launch", place)
    return failed("mask", CHECK, f"{_launch(keys)}: {message}; others in a second launch", place, status=Status.RACY)


def _launch(keys: torch.Tensor) -> str:
    requests, query_len, topk = keys.shape
    each = f"{requests} x {query_len:,}" if requests > 1 else f"{query_len:,}"
    return f"one launch for {each} rows of {topk:,} keys"


def _keys(seed: int, requests: int, query_len: int, context: int, topk: int, device: torch.device) -> torch.Tensor:
    """`[requests, query_len, topk]` int64: different keys in each row, all below `context`."""
    drawn = torch.from_numpy(Stream(seed, _TAG).integers(context, 2 * requests * query_len))
    # eight million keys: made on the device from a factor and an offset of each row
    factors, offsets = drawn.to(device).view(2, requests, query_len, 1)
    # an odd factor permutes the residues of a power of two
    keys: torch.Tensor = ((2 * factors + 1) * torch.arange(topk, device=device) + offsets) % context
    return keys


def _built(build: Build, keys: torch.Tensor, context: int) -> Any:
    requests, query_len, _ = keys.shape
    device, longest = keys.device, context + query_len
    words = requests * padded_rows(query_len) * words_per_row(longest, reserve=False)
    mask = build(
        {
            "topk_indices_per_req": list(keys.to(torch.int32).unbind()),
            "q_lens": [query_len] * requests,
            "max_q_len": query_len,
            "max_seq_len": longest,
            "out": guarded(words, torch.int32, device).view,
            "first_query_pos": torch.full((requests,), context, dtype=torch.int32, device=device),
            "reserve_key_starts_word": False,
        }
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return mask


def _wrong(mask: Any, keys: torch.Tensor, context: int) -> tuple[str, Place] | None:
    """What is wrong with the mask, and its first wrong bit."""
    requests, query_len, _ = keys.shape
    shape = (requests, padded_rows(query_len), words_per_row(context + query_len, reserve=False))
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape or mask.dtype != torch.int32:
        given = f"shape {tuple(mask.shape)}, {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        return f"the mask is {given}, must be {shape} int32", Place()
    count, first = 0, None
    for request in range(requests):
        for start in range(0, shape[1], _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            wanted = _bits_of(keys[request, part], *mask[request, part].shape)
            different = unpack_bits(mask[request, part].to(keys.device), 0, wanted.shape[1]) != wanted
            wrong = int(different.sum())
            if wrong and first is None:
                row, key = unravel(int(different.flatten().byte().argmax()), different.shape)
                first = request, start + row, key, bool(wanted[row, key])
            count += wrong
    if first is None:
        return None
    request, row, key, missed = first
    word, bit = divmod(key, WORD_BITS)
    kind = "misses" if missed else "has"
    owner = f"padded row {row}" if row >= query_len else f"row {row}"
    message = f"{owner} {kind} key {key} (word {word}, bit {bit}); {count} wrong bits"
    return message, Place(request=request, row=row, key=key, word=word, bit=bit)


def _bits_of(keys: torch.Tensor, rows: int, words: int) -> torch.Tensor:
    """`[rows, words * 32]` bool with the keys of the first rows set."""
    bits = torch.zeros(rows, words * WORD_BITS, dtype=torch.bool, device=keys.device)
    bits[: keys.shape[0]].scatter_(1, keys, True)
    return bits
