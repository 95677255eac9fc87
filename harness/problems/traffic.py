"""Real request traces -> prefill batches, as a serving engine with chunked prefill forms them.

Arrivals are taken in order. Each step has a token budget; running requests take one token each for their
decode, and what is left goes to prefills, first come first served, so that a long prompt is spread over
several steps and its context grows. Requests of one step are one prefill batch, ragged as real ones are.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

TRACES = ("azure_llm_2023_code", "azure_llm_2023_conv", "mooncake_conversation")
STEP_MS = 100.0
"""Duration of one engine step: sets how many requests run side by side, nothing else."""
MAX_RUNNING = 64


class Arrival(NamedTuple):
    """One row of a trace."""

    time_ms: float
    prompt: int
    cached: int
    """Prompt tokens found in the prefix cache: context from the start."""
    generated: int


class Batch(NamedTuple):
    """The prefill part of one engine step."""

    lengths: tuple[tuple[int, int], ...]
    """(context_len, query_len) of each request"""
    decode_tokens: int
    """Tokens of running requests in the same step"""


@dataclass
class _Running:
    done: int
    prompt: int
    left: int
    """Tokens still to be generated"""


def read_trace(name: str) -> list[Arrival]:
    """Rows of one trace copy. Raises ValueError for an unknown name."""
    if name not in TRACES:
        raise ValueError(f"trace {name!r} is unknown, must be one of {TRACES}")
    text = (resources.files("harness.problems.traces") / f"{name}.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    if "timestamp_ms" in rows[0]:
        return [
            Arrival(
                float(r["timestamp_ms"]),
                int(r["input_length"]),
                int(r["prefix_hit_tokens"]),
                int(r["output_length"]),
            )
            for r in rows
        ]
    # seven digits of a second: one more than datetime reads
    times = [datetime.fromisoformat(r["TIMESTAMP"][:26]) for r in rows]
    return [
        Arrival((time - times[0]).total_seconds() * 1e3, int(r["ContextTokens"]), 0, int(r["GeneratedTokens"]))
        for time, r in zip(times, rows, strict=True)
    ]


def schedule(arrivals: Iterable[Arrival], token_budget: int) -> Iterator[Batch]:
    """Prefill batches of an engine with chunked prefill and `token_budget` tokens a step."""
    waiting = deque(sorted(arrivals))
    running: list[_Running] = []
    clock = 0.0
    while waiting or running:
        if not running and waiting[0].time_ms > clock:
            clock = waiting[0].time_ms
        while waiting and waiting[0].time_ms <= clock and len(running) < MAX_RUNNING:
            new = waiting.popleft()
            running.append(_Running(min(new.cached, new.prompt - 1), new.prompt, new.generated))
        decoding = [r for r in running if r.done == r.prompt]
        room = max(token_budget - len(decoding), 0)
        lengths = []
        for request in running:
            take = min(request.prompt - request.done, room)
            if take > 0:
                lengths.append((request.done, take))
                request.done += take
                room -= take
        for request in decoding:
            request.left -= 1
        running = [r for r in running if r.done < r.prompt or r.left > 0]
        clock += STEP_MS
        if lengths:
            yield Batch(tuple(lengths), len(decoding))


@lru_cache(maxsize=16)
def batches(name: str, token_budget: int) -> tuple[Batch, ...]:
    """All prefill batches of one trace copy."""
    return tuple(schedule(read_trace(name), token_budget))


def scale_down(batch: Batch, *, max_requests: int, max_tokens: int, max_keys: int) -> Batch:
    """The same batch in small: at most `max_requests` requests and about the given sums of lengths.

    Lengths shrink by one factor for the suffixes and one for the contexts, and keep their remainder modulo 32
    where they stay above one word, so that a batch of odd lengths stays one.
    """
    lengths = batch.lengths[-max_requests:]
    suffix = min(1.0, max_tokens / max(sum(q for _, q in lengths), 1))
    context = min(1.0, max_keys / max(sum(c for c, _ in lengths), 1))
    small = [(_shrink(c, context), max(_shrink(q, suffix), 1)) for c, q in lengths]
    if all(c % 32 == 0 and q % 32 == 0 for c, q in small):
        small[-1] = (small[-1][0], small[-1][1] + 1)
    return Batch(tuple(small), batch.decode_tokens)


def _shrink(length: int, factor: float) -> int:
    target = int(length * factor)
    if target == length:
        return length
    return target // 32 * 32 + length % 32 if target >= 32 else max(target, min(length, 1))
