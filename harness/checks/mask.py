"""Stages `slice`, `remap` and `mask`: top-k rows and packed mask bits, exact.

The expected bits are set one key at a time from the top-k rows which the builder was given, so that a fault of
an earlier stage is not blamed on the builder.
"""

from __future__ import annotations

import numpy as np
import torch

from harness.checks.verdict import Locate, compare_exact, failed, passed
from reports.records import CheckRecord, Place

WORD_BITS = 32


def check_slice(actual: list[torch.Tensor], buffer_rows: torch.Tensor, query_lens: list[int]) -> CheckRecord:
    """The per-request top-k rows are the prefill rows of the buffer, in request order.

    `buffer_rows` is `[T, topk]`: the buffer behind the decode tokens.
    """
    if len(actual) != len(query_lens):
        message = f"{len(actual)} requests were sliced, must be {len(query_lens)}"
        return failed("slice", "slice.requests", message)
    start = 0
    for request, (rows, length) in enumerate(zip(actual, query_lens, strict=True)):
        record = compare_exact(
            "slice",
            "slice.rows",
            rows,
            buffer_rows[start : start + length],
            _slot_place(None, request, start),
        )
        if record.status.is_finding:
            return record
        start += length
    return passed("slice", "slice.rows")


def check_remap(
    call: str,
    actual: list[torch.Tensor],
    source: list[torch.Tensor],
    starts: list[int],
    lens: list[int],
    first_request: int,
) -> CheckRecord:
    """`t - start` where `start <= t < start + len`, else -1, slot by slot."""
    for offset, (rows, before) in enumerate(zip(actual, source, strict=True)):
        start, length = starts[offset], lens[offset]
        wide = before.to(torch.int64)
        expected = torch.where((wide >= start) & (wide < start + length), wide - start, -1).to(torch.int32)
        record = compare_exact(
            "remap",
            "remap.rows",
            rows,
            expected,
            _slot_place(call, first_request + offset, None),
        )
        if record.status.is_finding:
            return record
    return passed("remap", "remap.rows")


def _slot_place(call: str | None, request: int, first_token: int | None) -> Locate:
    """Place of an entry of a request's top-k rows; the column is the slot."""

    def place(index: tuple[int, ...]) -> Place:
        token = None if first_token is None else first_token + index[0]
        return Place(call=call, request=request, row=index[0], token=token, column=index[1])

    return place


def expected_words(rows: torch.Tensor, words: int, max_key_len: int, first_query_pos: int | None) -> np.ndarray:
    """`[rows, words]` uint32: bit `k & 31` of word `k >> 5` for each allowed key `k` of each row."""
    keys = rows.cpu().numpy().astype(np.int64)
    legal = (keys >= 0) & (keys < max_key_len)
    if first_query_pos is not None:
        limit = first_query_pos + np.arange(keys.shape[0], dtype=np.int64)
        legal &= keys <= limit[:, None]
    bits = np.zeros((keys.shape[0], words * WORD_BITS), dtype=bool)
    row_index, slot_index = np.nonzero(legal)
    bits[row_index, keys[row_index, slot_index]] = True
    weights = np.left_shift(np.uint32(1), np.arange(WORD_BITS, dtype=np.uint32))
    packed = (bits.reshape(keys.shape[0], words, WORD_BITS) * weights).sum(axis=2, dtype=np.uint64)
    result: np.ndarray = packed.astype(np.uint32)
    return result


def check_mask(
    call: str,
    mask: torch.Tensor,
    topk_per_req: list[torch.Tensor],
    *,
    max_query_len: int,
    max_key_len: int,
    first_query_pos: list[int] | None,
    reserved: bool,
    first_request: int = 0,
) -> CheckRecord:
    """Every word of every padded row, the reserved key-start word excepted."""
    batch = len(topk_per_req)
    tile = 128 if max_query_len <= 128 else 256
    padded = -(-max_query_len // tile) * tile
    words = -(-max_key_len // WORD_BITS) + int(reserved)
    words = -(-words // 4) * 4
    if tuple(mask.shape) != (batch, padded, words) or mask.dtype != torch.int32:
        message = f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, must be {(batch, padded, words)} int32"
        return failed("mask", "mask.shape", message, Place(call=call))
    actual = mask.cpu().numpy().view(np.uint32)
    for offset, rows in enumerate(topk_per_req):
        expected = np.zeros((padded, words), dtype=np.uint32)
        first_pos = None if first_query_pos is None else first_query_pos[offset]
        expected[: rows.shape[0]] = expected_words(rows, words, max_key_len, first_pos)
        found = actual[offset].copy()
        if reserved and padded:
            found[0, -1] = expected[0, -1]
        if not np.array_equal(found, expected):
            return _first_wrong_bit(call, found, expected, rows.shape[0], first_request + offset)
    return passed("mask", "mask.bits")


def bit_text(row: int, query_len: int, key: int, *, missed: bool) -> str:
    """`row 31 misses key 31 (word 0, bit 31)`, `padded row 40 has key 3 (word 0, bit 3)`."""
    word, bit = divmod(key, WORD_BITS)
    owner = "padded row" if row >= query_len else "row"
    return f"{owner} {row} {'misses' if missed else 'has'} key {key} (word {word}, bit {bit})"


def _first_wrong_bit(call: str, found: np.ndarray, expected: np.ndarray, query_len: int, request: int) -> CheckRecord:
    difference = found ^ expected
    row, word = (int(i) for i in np.argwhere(difference)[0])
    bit = (int(difference[row, word]) & -int(difference[row, word])).bit_length() - 1
    key = word * WORD_BITS + bit
    missed = bool(expected[row, word] >> np.uint32(bit) & np.uint32(1))
    total = int(np.unpackbits(difference.view(np.uint8)).sum())
    clear = ", must be clear" if row >= query_len else ""
    message = f"{bit_text(row, query_len, key, missed=missed)}{clear}; {total} wrong bits in this request"
    place = Place(call=call, request=request, row=row, key=key, word=word, bit=bit)
    return failed("mask", "mask.bits", message, place)
