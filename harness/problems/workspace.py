"""How many mask words a call needs, and which path a batch must take: plain arithmetic, on its own.

Shares nothing with the code under test, so that a fault in a fits check or in the dispatch shows as a
disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.problems.names import Force, Path

DEFAULT_MASK_WORKSPACE_WORDS = 128 * 2**20 // 4
"""128 MiB of int32 words."""


def padded_rows(max_query_len: int) -> int:
    """Query rows of a mask: the next multiple of the query tile (128 rows for short calls, else 256)."""
    tile = 128 if max_query_len <= 128 else 256
    return -(-max_query_len // tile) * tile


def words_per_row(max_key_len: int, *, reserve: bool) -> int:
    """int32 words of a mask row: one bit a key, one word for the key start if reserved, a multiple of 4."""
    words = -(-max_key_len // 32) + int(reserve)
    return -(-words // 4) * 4


def mask_words(batch_size: int, max_query_len: int, max_key_len: int, *, reserve: bool) -> int:
    """int32 words of a whole mask `[batch_size, padded_q, words]`."""
    return batch_size * padded_rows(max_query_len) * words_per_row(max_key_len, reserve=reserve)


def expected_path(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    topk: int,
    longest_chunk: int,
    workspace_words: int,
    force: Force | None,
    quantised: bool = False,
) -> Path:
    """The path that the dispatch rules give to this batch.

    `longest_chunk` is the most context keys of one request in one chunk (0 without context). `refused` means
    that a masked path was forced although its masks do not fit, or on a quantised cache: a ValueError is the
    right answer.
    """
    batch = len(query_lens)
    seq_lens = [c + q for c, q in zip(context_lens, query_lens, strict=True)]
    longest = max(seq_lens, default=0)
    if force == "dense" or (force is None and longest <= topk):
        return "dense"
    if force == "mqa":
        return "mqa"
    max_q = max(query_lens, default=0)
    per_call = mask_words(batch, max_q, max(max_q, longest_chunk), reserve=False)
    if quantised or per_call > workspace_words:
        return "mqa" if force is None else "refused"
    if not any(context_lens):
        return "no_context"
    whole = mask_words(batch, max_q, longest, reserve=True)
    return "global_mask" if whole <= workspace_words and force != "masked_remap" else "remap"
