"""Do a global mask and remapped masks select the same keys? Bit for bit, over many drawn batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.measure.draws import random_problem
from harness.problems.problem import Problem
from harness.problems.splits import Piece
from harness.problems.topk import topk_rows
from optimized.mask import build_topk_mask, remap_topk_to_ranges, try_build_global_mask
from reference.oracle import allowed_matrix

ALONE_EVERY = 25
"""One batch in this many is built by itself, call by call as the layer does it; the others are folded."""
FOLDED = 64
"""Batches whose masks are built by the same launches: an interpreted launch costs 10 ms however small."""

Bits = list[np.ndarray]
"""For each request bool `[query_len, seq_len]`."""


@dataclass(frozen=True)
class Batch:
    """Requests whose masks are built together."""

    numbers: list[int]
    """Number of the drawn batch of each request."""
    rows: list[torch.Tensor]
    """`[query_len, topk]` int32 each"""
    query_lens: list[int]
    context_lens: list[int]
    calls: list[list[Piece]]
    """Context pieces whose masks are built by one launch each."""

    @property
    def seq_lens(self) -> list[int]:
        return [c + q for c, q in zip(self.context_lens, self.query_lens, strict=True)]


@dataclass
class MaskAgreement:
    """What `measure` found."""

    batches: int = 0
    requests: int = 0
    pieces: int = 0
    """Context pieces and suffixes whose masks were compared."""
    bits: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def measure(batches: int, *, seed: int = 0, device: torch.device | str = "cpu") -> MaskAgreement:
    """Draw batches; build their masks by both roads; compare them with each other and with the allowed sets."""
    start = time.monotonic()
    found = MaskAgreement()
    for batch in draw_batches(range(seed, seed + batches), torch.device(device)):
        found.batches += len(set(batch.numbers))
        found.requests += len(batch.rows)
        found.pieces += len(batch.rows) + sum(len(call) for call in batch.calls)
        roads = {
            "global mask": from_global_mask(batch),
            "remapped masks": from_remapped_masks(batch),
            "allowed sets": from_sets(batch),
        }
        compare(batch, roads, found)
    found.seconds = time.monotonic() - start
    return found


def compare(batch: Batch, roads: dict[str, Bits], found: MaskAgreement) -> None:
    """Every road against the first."""
    (first, expected), *others = roads.items()
    for name, bits in others:
        for request, (x, y) in enumerate(zip(expected, bits, strict=True)):
            found.bits += x.size
            if not np.array_equal(x, y):
                row, key = (int(i) for i in np.argwhere(x != y)[0])
                found.wrong.append(
                    f"batch {batch.numbers[request]}: {first} and {name} differ in row {row}, key {key} of a request "
                    f"with context {batch.context_lens[request]} and {batch.query_lens[request]} queries"
                )


def draw_batches(numbers: range, device: torch.device) -> Iterator[Batch]:
    """Batches that are built together: some alone, the others folded."""
    waiting: list[tuple[int, Problem]] = []
    for number in numbers:
        problem = random_problem(number)
        if number % ALONE_EVERY == 0:
            yield _fold([(number, problem)], device)
            continue
        waiting.append((number, problem))
        if len(waiting) == FOLDED:
            yield _fold(waiting, device)
            waiting = []
    if waiting:
        yield _fold(waiting, device)


def _fold(members: list[tuple[int, Problem]], device: torch.device) -> Batch:
    """One batch of all requests; the chunks of several batches share one launch."""
    width = max(problem.dims.topk for _, problem in members)
    batch = Batch([], [], [], [], [])
    for number, problem in members:
        first = len(batch.rows)
        keys = torch.from_numpy(topk_rows(problem)).to(torch.int32)
        keys = torch.nn.functional.pad(keys, (0, width - keys.shape[1]), value=-1).to(device)
        batch.rows.extend(torch.split(keys, problem.query_lens))
        batch.numbers.extend([number] * len(problem.requests))
        batch.query_lens.extend(problem.query_lens)
        batch.context_lens.extend(problem.context_lens)
        for chunk in problem.planned_chunks:
            pieces = [Piece(first + piece.request, piece.start, piece.length) for piece in chunk]
            if len(members) > 1 and batch.calls:
                batch.calls[0].extend(pieces)
            else:
                batch.calls.append(pieces)
    return batch


def from_global_mask(batch: Batch) -> Bits:
    """Every request's bits from one mask over the whole sequences."""
    longest = max(batch.seq_lens)
    words = len(batch.rows) * (max(batch.query_lens) + 256) * (longest // 32 + 8)
    mask = try_build_global_mask(
        batch.rows,
        batch.query_lens,
        batch.context_lens,
        max(batch.query_lens),
        longest,
        dirty_workspace(words, batch.rows[0].device),
    )
    assert mask is not None
    bits = unpack(mask)
    return [bits[b, :q, :seq] for b, (q, seq) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True))]


def from_remapped_masks(batch: Batch) -> Bits:
    """The same bits put together from the masks of the single calls."""
    found = [np.zeros((q, seq), dtype=bool) for q, seq in zip(batch.query_lens, batch.seq_lens, strict=True)]
    suffix = [Piece(b, context, batch.query_lens[b]) for b, context in enumerate(batch.context_lens)]
    _add_call(batch, suffix, found, causal=True)
    for call in batch.calls:
        _add_call(batch, call, found, causal=False)
    return found


def _add_call(batch: Batch, pieces: list[Piece], found: Bits, *, causal: bool) -> None:
    device = batch.rows[0].device
    lens = [piece.length for piece in pieces]
    q_lens = [batch.query_lens[piece.request] for piece in pieces]
    if max(q_lens) == 0:
        return
    rows = remap_topk_to_ranges([batch.rows[p.request] for p in pieces], [p.start for p in pieces], lens)
    words = len(pieces) * (max(q_lens) + 256) * (max(lens) // 32 + 8)
    first = torch.zeros(len(pieces), dtype=torch.int32, device=device) if causal else None
    bits = unpack(build_topk_mask(rows, q_lens, max(q_lens), max(lens), dirty_workspace(words, device), first))
    for slot, piece in enumerate(pieces):
        keys = slice(piece.start, piece.start + piece.length)
        found[piece.request][:, keys] = bits[slot, : q_lens[slot], : piece.length]


def from_sets(batch: Batch) -> Bits:
    """The allowed sets that the oracle attends."""
    return [
        allowed_matrix(rows.cpu(), context).numpy()
        for rows, context in zip(batch.rows, batch.context_lens, strict=True)
    ]


def dirty_workspace(words: int, device: torch.device) -> torch.Tensor:
    """A workspace full of set bits."""
    return torch.full((words,), -1, dtype=torch.int32, device=device)


def unpack(mask: torch.Tensor) -> np.ndarray:
    """`[B, rows, words]` int32 -> bool `[B, rows, 32 * words]`, least significant bit first."""
    words = mask.cpu().contiguous().numpy().astype("<i4", copy=False)
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
