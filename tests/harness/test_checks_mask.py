"""Is a right mask passed, and one wrong bit named by row, key, word and bit? Top-k rows sliced and remapped too."""

import random

import pytest
import torch

from harness.checks.mask import check_mask, check_remap, check_slice, expected_words
from optimized.trace import MaskEvent
from reference.oracle import allowed_set
from reports.records import CheckRecord, Status
from tests.harness.traced import put, traced


def judge(event: MaskEvent, mask: torch.Tensor, positions: list[int] | None, max_key_len: int) -> CheckRecord:
    return check_mask(
        event.call,
        mask,
        event.topk_per_req,
        max_query_len=max(event.q_lens),
        max_key_len=max_key_len,
        first_query_pos=positions,
        reserved=event.reserved,
    )


def flipped(mask: torch.Tensor, request: int, row: int, word: int, bit: int) -> torch.Tensor:
    value = int(mask[request, row, word]) & 0xFFFFFFFF ^ (1 << bit)
    return put(mask, (request, row, word), value - (1 << 32) if value >> 31 else value)


def test_words_are_those_of_the_allowed_set() -> None:
    rows = torch.randint(-4, 110, (7, 30), generator=torch.Generator().manual_seed(1)).int()
    words = expected_words(rows, 4, 100, 60)
    for i, row in enumerate(rows.tolist()):
        keys = [w * 32 + b for w in range(4) for b in range(32) if int(words[i, w]) >> b & 1]
        assert keys == allowed_set([t for t in row if t < 100], 60 + i)


@pytest.mark.parametrize("name", ["global_mask", "no_context", "one_chunk"])
def test_the_mask_of_a_right_builder_passes(name: str) -> None:
    case = traced(name)
    event = case.event(MaskEvent)
    positions = case.facts.context_lens if name != "no_context" else [0, 0, 0]
    assert judge(event, event.mask, positions, max(case.facts.seq_lens)).status is Status.PASS


def test_one_flipped_bit_anywhere_is_named() -> None:
    case = traced("global_mask")
    event = case.event(MaskEvent)
    contexts, longest = case.facts.context_lens, max(case.facts.seq_lens)
    r = random.Random(2)
    batch, padded, words = event.mask.shape
    spots = [(r.randrange(batch), r.randrange(padded), r.randrange(words), r.randrange(32)) for _ in range(40)]
    spots += [(0, 0, 0, 31), (3, 2, 1, 31), (1, padded - 1, words - 1, 31), (2, 0, 0, 0), (0, 4, words - 1, 0)]
    for request, row, word, bit in spots:
        reserved_word = row == 0 and word == words - 1
        record = judge(event, flipped(event.mask, request, row, word, bit), contexts, longest)
        assert (record.status is Status.PASS) == reserved_word
        if reserved_word:
            continue
        place = record.place
        assert (place.request, place.row, place.word, place.bit, place.key) == (
            request,
            row,
            word,
            bit,
            word * 32 + bit,
        )
        was_set = int(event.mask[request, row, word]) >> bit & 1
        if row >= event.q_lens[request]:
            assert f"padded row {row} has key {word * 32 + bit}" in record.message
        else:
            verb = "misses" if was_set else "has"
            assert f"row {row} {verb} key {word * 32 + bit} (word {word}, bit {bit})" in record.message
        assert "1 wrong bits" in record.message


def test_the_reserved_word_is_the_callers_only_where_one_is_reserved() -> None:
    case = traced("no_context")
    event = case.event(MaskEvent)
    mask = put(event.mask, (0, 0, -1), 7)
    assert judge(event, mask, [0, 0, 0], max(event.q_lens)).status is Status.FAIL


@pytest.mark.parametrize("shift", [-1, 1])
def test_causality_off_by_one_is_accused(shift: int) -> None:
    case = traced("global_mask")
    event = case.event(MaskEvent)
    positions = [c + shift for c in case.facts.context_lens]
    assert judge(event, event.mask, positions, max(case.facts.seq_lens)).status is Status.FAIL
    assert judge(event, event.mask, None, max(case.facts.seq_lens)).status is Status.FAIL


def test_wrong_shapes_are_accused() -> None:
    case = traced("global_mask")
    event = case.event(MaskEvent)
    for mask in (event.mask[:, :, :-4], event.mask[:, :-1], event.mask[:3], event.mask.long()):
        record = judge(event, mask, case.facts.context_lens, max(case.facts.seq_lens))
        assert record.status is Status.FAIL
        assert record.check == "mask.shape"


def test_rows_of_two_requests_swapped_are_accused() -> None:
    case = traced("global_mask")
    event = case.event(MaskEvent)
    swapped = event.mask[[0, 1, 3, 2]].contiguous()
    record = judge(event, swapped, case.facts.context_lens, max(case.facts.seq_lens))
    assert record.place.request == 2


# slice and remap


def test_slices_are_the_prefill_rows_in_order() -> None:
    case = traced("global_mask")
    rows, lens = case.trace.topk_per_req, case.facts.query_lens
    assert rows is not None
    assert check_slice(rows, case.facts.topk_rows, lens).status is Status.PASS
    shifted = torch.split(case.facts.inputs.topk_buffer[: sum(lens)], lens)  # the decode rows not skipped
    record = check_slice(list(shifted), case.facts.topk_rows, lens)
    assert (record.stage, record.place.request, record.place.row) == ("slice", 0, 0)
    wrong = [rows[0], rows[1], put(rows[2], (3, 7), 99), rows[3]]
    record = check_slice(wrong, case.facts.topk_rows, lens)
    assert (record.place.request, record.place.row, record.place.column) == (2, 3, 7)
    assert record.place.token == 5 + 3 + 3
    assert check_slice(rows[:3], case.facts.topk_rows, lens).status is Status.FAIL


def test_remapped_rows_are_checked_slot_by_slot() -> None:
    source = [torch.tensor([[0, 5, 9, 10, -1, 14, 15, -(2**31), 2**31 - 1]]).int()]
    right = torch.tensor([[-1, 0, 4, 5, -1, 9, -1, -1, -1]]).int()
    assert check_remap("chunk[1]", [right], source, [5], [10], 3).status is Status.PASS
    for slot, value in [(0, 0), (1, -1), (5, -1), (6, 10), (7, 5)]:
        record = check_remap("chunk[1]", [put(right, (0, slot), value)], source, [5], [10], 3)
        assert (record.stage, record.place.call, record.place.request) == ("remap", "chunk[1]", 3)
        assert (record.place.row, record.place.column) == (0, slot)


# in the walk of a trace


@pytest.mark.parametrize("name", ["global_mask", "remap", "no_context"])
def test_the_walk_accuses_a_wrong_bit(name: str) -> None:
    case = traced(name)
    calls = [event.call for event in case.trace.of(MaskEvent)]
    for call in calls:
        event = case.event(MaskEvent, call)
        bad = case.accused(case.with_event(MaskEvent, call, mask=flipped(event.mask, 0, 1, 0, 31)))
        assert (bad.stage, bad.check, bad.place.call) == ("mask", "mask.bits", call)
        assert (bad.place.row, bad.place.key) == (1, 31)


def test_the_walk_accuses_what_a_mask_was_built_from() -> None:
    case = traced("remap")
    event = case.event(MaskEvent, "chunk[2]")
    rows = [put(event.topk_per_req[0], (0, 0), 3), *event.topk_per_req[1:]]
    bad = case.accused(case.with_event(MaskEvent, "chunk[2]", topk_per_req=rows))
    assert (bad.stage, bad.place.call, bad.place.request) == ("remap", "chunk[2]", 2)
    case = traced("global_mask")
    event = case.event(MaskEvent)
    rows = [*event.topk_per_req[:3], put(event.topk_per_req[3], (0, 0), 3)]
    bad = case.accused(case.with_event(MaskEvent, "global", topk_per_req=rows))
    assert bad.check == "chunk_loop.topk"
    bad = case.accused(case.with_event(MaskEvent, "global", q_lens=[5, 3, 4, 2]))
    assert bad.check == "mask.requests"
