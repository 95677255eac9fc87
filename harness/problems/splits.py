"""A naive context-chunk planner: says which context rows share a chunk.

Generators and features need the chunk boundaries of a batch. It shares nothing with the planner under
test, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """The context rows `[start, start + length)` of one request in one chunk."""

    request: int
    start: int
    length: int


def split_context(
    context_lens: Sequence[int], row_budget: int, max_context_chunk: int, alignment: int
) -> list[list[Piece]]:
    """Chunks of a batch, greedy and in request order; each chunk is a list of pieces.

    A chunk takes whole remaining contexts while they fit into `row_budget` rows. When the next does not fit,
    it takes an aligned prefix (a multiple of `alignment`, at most `max_context_chunk` rows and less than the
    whole rest) and closes; without room for a prefix it closes as it is. A request without context closes it
    too. `max_context_chunk` limits split prefixes only. Raises ValueError for a budget or limit below the
    alignment.
    """
    if alignment < 1 or row_budget < alignment or max_context_chunk < alignment:
        raise ValueError(
            f"row_budget={row_budget} and max_context_chunk={max_context_chunk} must be at least "
            f"alignment={alignment}, which must be at least 1"
        )
    chunks: list[list[Piece]] = []
    current: list[Piece] = []
    room = row_budget

    def close() -> None:
        nonlocal current, room
        if current:
            chunks.append(current)
        current, room = [], row_budget

    for request, context in enumerate(context_lens):
        if context == 0:
            close()
        done = 0
        while done < context:
            rest = context - done
            if rest <= room:
                current.append(Piece(request, done, rest))
                room -= rest
                break
            prefix = min(room, max_context_chunk, rest - 1) // alignment * alignment
            if prefix:
                current.append(Piece(request, done, prefix))
                done += prefix
            elif room == row_budget:
                # rest > budget >= alignment and yet no prefix: cannot happen, and must not loop for ever
                raise AssertionError("an empty chunk has room for an aligned prefix")
            close()
    close()
    return chunks
