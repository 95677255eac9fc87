"""Are the top-k masks exactly the sets that they stand for, whatever the workspace held before?"""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from optimized.mask import (
    DEFAULT_TOPK_MASK_WORKSPACE_WORDS,
    build_topk_mask,
    masked_mha_workspace_fits,
    remap_topk_to_ranges,
    set_key_starts,
    slice_topk_per_req,
    topk_mask_shape,
    try_build_global_mask,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
DIRT = -1  # every bit set: a word that is not cleared shows


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_of(values: list[list[int]], topk: int) -> torch.Tensor:
    return int32(values).view(len(values), topk)


def naive_mask(
    rows_per_req: list[list[list[int]]],
    shape: tuple[int, int, int],
    max_seq_len: int,
    first_pos: list[int] | None,
) -> torch.Tensor:
    """The mask bit by bit, in Python integers."""
    batch, padded_q, words = shape
    mask = [[[0] * words for _ in range(padded_q)] for _ in range(batch)]
    for b, rows in enumerate(rows_per_req):
        for i, row in enumerate(rows):
            for key in set(row):
                allowed = first_pos is None or key <= first_pos[b] + i
                if 0 <= key < max_seq_len and allowed:
                    mask[b][i][key // 32] |= 1 << (key % 32)
    signed = [[[w - 2**32 if w >= 2**31 else w for w in row] for row in rows] for rows in mask]
    return int32(signed).view(shape)


def dirty_workspace(words: int) -> torch.Tensor:
    return torch.full((words,), DIRT, dtype=torch.int32, device=DEVICE)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[int]]], int, int, list[int] | None, bool]:
    topk = draw(st.integers(0, 9))
    max_seq_len = draw(st.one_of(st.integers(0, 140), st.sampled_from([31, 32, 33, 96, 127, 128, 129])))
    edges = [-1, INT32_MIN, INT32_MAX, 31, 32, 63, max_seq_len - 1, max_seq_len, max_seq_len + 1]
    entry = st.one_of(st.integers(-3, max_seq_len + 3), st.sampled_from(edges))
    row = st.lists(entry, min_size=topk, max_size=topk)
    rows = draw(st.lists(st.lists(row, max_size=5), max_size=4))
    first_pos = None
    if draw(st.booleans()):
        starts = st.one_of(st.integers(0, max_seq_len + 1), st.just(INT32_MAX))
        first_pos = draw(st.lists(starts, min_size=len(rows), max_size=len(rows)))
    return rows, topk, max_seq_len, first_pos, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
@example(([[[31, 63, -1, 31]], [[0, -1, 64, 1]]], 4, 64, None, False), False)
@example(([[[INT32_MAX, INT32_MIN, 5, 5]]], 4, 128, [INT32_MAX], True), False)
def test_mask_is_the_set_of_every_row(
    batch: tuple[list[list[list[int]]], int, int, list[int] | None, bool], explicit_starts: bool
) -> None:
    rows, topk, max_seq_len, first_pos, reserve = batch
    q_lens = [len(r) for r in rows]
    max_q_len = max(q_lens, default=0)
    shape = topk_mask_shape(len(rows), max_q_len, max_seq_len, reserve)
    out = dirty_workspace(math.prod(shape) + 64)
    mask = build_topk_mask(
        [rows_of(r, topk) for r in rows],
        q_lens,
        max_q_len,
        max_seq_len,
        out,
        None if first_pos is None else int32(first_pos),
        reserve_key_starts_word=reserve,
        query_start_loc=int32([0, *itertools.accumulate(q_lens)]) if explicit_starts else None,
    )
    expected = naive_mask(rows, shape, max_seq_len, first_pos)
    if reserve and expected.numel():
        expected[:, 0, -1] = DIRT  # the key-start word is the caller's
    assert tuple(mask.shape) == shape
    assert torch.equal(mask, expected)
    assert (out[math.prod(shape) :] == DIRT).all(), "words past the mask were written"


def test_both_kernels_loop_over_long_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    topk, max_seq_len = 2500, 40_000  # more slots and more words than one step of a program
    q_lens = [3, 2]
    rows = [
        torch.randint(-5, max_seq_len + 5, (q, topk), generator=generator, dtype=torch.int32) for q in q_lens
    ]
    for used in (1, 2):
        shape = topk_mask_shape(used, 3, max_seq_len)
        out = dirty_workspace(math.prod(shape))
        mask = build_topk_mask([r.to(DEVICE) for r in rows[:used]], q_lens[:used], 3, max_seq_len, out)
        assert torch.equal(mask, naive_mask([r.tolist() for r in rows[:used]], shape, max_seq_len, None))


@pytest.mark.parametrize("first_pos", [None, [4, 0, 9]])
def test_request_alone_has_the_mask_that_it_has_in_a_batch(first_pos: list[int] | None) -> None:
    rows = [[[0, 3, 7], [40, -1, 5]], [], [[9, 9, 10], [11, 12, -7], [63, 64, 31]]]
    q_lens = [len(r) for r in rows]
    tensors = [rows_of(r, 3) for r in rows]
    positions = None if first_pos is None else int32(first_pos)
    together = build_topk_mask(tensors, q_lens, 3, 70, dirty_workspace(5000), positions)
    for b, tensor in enumerate(tensors):
        own = None if positions is None else positions[b : b + 1]
        alone = build_topk_mask([tensor], [q_lens[b]], 3, 70, dirty_workspace(5000), own)
        assert torch.equal(alone[0], together[b])


def test_second_call_does_not_add_to_the_first() -> None:
    out = dirty_workspace(1024)
    build_topk_mask([rows_of([[1, 2, 40]], 3)], [1], 1, 64, out)
    mask = build_topk_mask([rows_of([[5, 6, 7]], 3)], [1], 1, 64, out)
    assert mask[0, 0].tolist() == [0b11100000, 0, 0, 0]


def test_key_start_word_is_kept_and_set_apart_from_the_bits() -> None:
    rows = [rows_of([[0, 95], [1, 2]], 2), rows_of([[3, 4], [95, 5]], 2)]
    out = dirty_workspace(4096)
    mask = try_build_global_mask(rows, [2, 2], [94, 94], 2, 96, out)
    assert mask is not None
    assert mask.shape == (2, 128, 4)  # three words of bits, one of key start
    set_key_starts(mask, int32([7, INT32_MAX]))
    assert mask[:, 0, -1].tolist() == [7, INT32_MAX]
    assert (mask[:, 1:, -1] == 0).all()
    before = mask[:, 0, :-1].clone()
    again = try_build_global_mask(rows, [2, 2], [94, 94], 2, 96, out)
    assert again is not None
    assert again[:, 0, -1].tolist() == [7, INT32_MAX], "the builder wrote the reserved word"
    assert torch.equal(again[:, 0, :-1], before)


def test_position_past_int32_does_not_wrap_into_the_past() -> None:
    mask = build_topk_mask(
        [rows_of([[0, 1], [2, 3]], 2)], [2], 2, 32, dirty_workspace(512), int32([INT32_MAX])
    )
    assert mask[0, :2, 0].tolist() == [0b0011, 0b1100]


@pytest.mark.parametrize("q_lens", [[2, 0, 3], [4]])
def test_rows_are_found_in_any_layout(q_lens: list[int]) -> None:
    topk, total = 4, sum(q_lens)
    values = torch.arange(total * topk, dtype=torch.int32).view(total, topk) * 3 - 4
    padded = torch.full((total, topk + 5), 77, dtype=torch.int32)
    padded[:, :topk] = values
    spread = torch.full((total, 2 * topk), 77, dtype=torch.int32)
    spread[:, ::2] = values
    layouts = {
        "packed": slice_topk_per_req(values.to(DEVICE), q_lens),
        "row stride": slice_topk_per_req(padded.to(DEVICE)[:, :topk], q_lens),
        "column stride": slice_topk_per_req(spread.to(DEVICE)[:, ::2], q_lens),
        "column major": slice_topk_per_req(values.to(DEVICE).t().contiguous().t(), q_lens),
        "own storages": [r.clone() for r in slice_topk_per_req(values.to(DEVICE), q_lens)],
        "reversed storage": list(
            reversed([r.clone() for r in reversed(slice_topk_per_req(values.to(DEVICE), q_lens))])
        ),
    }
    rows = [r.tolist() for r in layouts["packed"]]
    shape = topk_mask_shape(len(q_lens), max(q_lens), 60)
    expected = naive_mask(rows, shape, 60, None)
    for name, tensors in layouts.items():
        mask = build_topk_mask(tensors, q_lens, max(q_lens), 60, dirty_workspace(4096))
        assert torch.equal(mask, expected), name


def test_views_of_one_buffer_in_another_order_keep_their_own_rows() -> None:
    buffer = rows_of([[0, 1], [2, 3], [4, 5]], 2)
    mask = build_topk_mask([buffer[2:], buffer[:1]], [1, 1], 1, 32, dirty_workspace(1024))
    assert mask[:, 0, 0].tolist() == [0b110000, 0b11]


def test_mask_may_be_written_into_a_tensor_of_its_shape() -> None:
    out = dirty_workspace(512).view(1, 128, 4)
    mask = build_topk_mask([rows_of([[3]], 1)], [1], 1, 128, out)
    assert mask.data_ptr() == out.data_ptr()
    assert out[0, 0].tolist() == [8, 0, 0, 0]
    assert (out[0, 1:] == 0).all()


def test_empty_batches_and_empty_requests_give_empty_masks() -> None:
    out = dirty_workspace(1024)
    assert build_topk_mask([], [], 0, 10, out).shape == (0, 0, 4)
    assert build_topk_mask([rows_of([], 3)], [0], 0, 10, out).shape == (1, 0, 4)
    assert build_topk_mask([rows_of([[1, 2]], 2)], [1], 1, 0, out).shape == (1, 128, 0)
    assert (out == DIRT).all()
    mask = build_topk_mask([rows_of([], 3), rows_of([], 3)], [0, 0], 1, 10, out)
    assert mask.shape == (2, 128, 4)
    assert (mask == 0).all()


@pytest.mark.parametrize(
    ("args", "shape"),
    [
        ((2, 129, 129), (2, 256, 8)),  # 5 words, rounded to a multiple of 4
        ((2, 129, 129, True), (2, 256, 8)),
        ((1, 128, 128), (1, 128, 4)),
        ((1, 128, 128, True), (1, 128, 8)),
        ((1, 128, 96, True), (1, 128, 4)),
        ((1, 1, 1), (1, 128, 4)),
        ((3, 257, 32), (3, 512, 4)),
        ((4, 0, 0), (4, 0, 0)),
        ((0, 5, 33), (0, 128, 4)),
        ((1, 1, 0, True), (1, 128, 4)),
    ],
)
def test_shape_rounds_rows_to_the_tile_and_words_to_a_vector(
    args: tuple[int, int, int], shape: tuple[int, int, int]
) -> None:
    assert topk_mask_shape(*args) == shape


def test_default_workspace_holds_one_prefill_of_32768_tokens_exactly() -> None:
    assert math.prod(topk_mask_shape(1, 32_768, 32_768)) == DEFAULT_TOPK_MASK_WORKSPACE_WORDS == 33_554_432
    assert masked_mha_workspace_fits(1, 32_768, 0, DEFAULT_TOPK_MASK_WORKSPACE_WORDS)
    assert not masked_mha_workspace_fits(1, 33_024, 0, DEFAULT_TOPK_MASK_WORKSPACE_WORDS)


def test_workspace_fits_up_to_the_last_word_and_counts_the_longer_segment() -> None:
    needed = 3 * 256 * 64  # longest chunk 2,048 keys
    assert masked_mha_workspace_fits(3, 200, 2048, needed)
    assert not masked_mha_workspace_fits(3, 200, 2048, needed - 1)
    assert masked_mha_workspace_fits(3, 200, 10, 3 * 256 * 8)  # the suffix is longer than the chunk
    assert not masked_mha_workspace_fits(3, 200, 10, 3 * 256 * 8 - 1)


def test_workspace_one_word_short_is_refused_with_the_three_numbers() -> None:
    out = dirty_workspace(2 * 128 * 4 - 1)
    rows = [rows_of([[1]], 1), rows_of([[2]], 1)]
    with pytest.raises(ValueError, match=r"1023 int32 words, must hold 1024 .*\(2, 128, 4\)"):
        build_topk_mask(rows, [1, 1], 1, 128, out)
    assert (out == DIRT).all()


def test_global_mask_is_refused_only_when_it_does_not_fit() -> None:
    rows = [rows_of([[0, 40, 41], [1, 41, 3]], 3)]
    needed = math.prod(topk_mask_shape(1, 2, 42, True))
    assert try_build_global_mask(rows, [2], [40], 2, 42, None) is None
    assert try_build_global_mask(rows, [2], [40], 2, 42, dirty_workspace(needed - 1)) is None
    mask = try_build_global_mask(rows, [2], [40], 2, 42, dirty_workspace(needed))
    assert mask is not None
    # row 0 stands at position 40: key 41 is in its future
    expected = naive_mask([rows[0].tolist()], (1, 128, 4), 42, [40])
    expected[0, 0, -1] = DIRT
    assert torch.equal(mask, expected)


def bits_of(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """`[B, padded_q, keys]` Boolean."""
    key = torch.arange(keys, device=mask.device)
    return ((mask[..., key >> 5] >> (key & 31).to(torch.int32)) & 1).bool()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_remapped_masks_hold_the_bits_of_the_global_mask(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    contexts = [data.draw(st.integers(0, 70)) for _ in range(batch)]
    q_lens = [data.draw(st.integers(0, 4)) for _ in range(batch)]
    seq_lens = [c + q for c, q in zip(contexts, q_lens, strict=True)]
    entry = st.integers(-2, max(seq_lens) + 2)
    rows = [
        rows_of([data.draw(st.lists(entry, min_size=6, max_size=6)) for _ in range(q)], 6) for q in q_lens
    ]
    starts = [data.draw(st.integers(0, c)) for c in contexts]
    lens = [data.draw(st.integers(0, c - s)) for c, s in zip(contexts, starts, strict=True)]
    max_q, max_seq = max(q_lens), max(seq_lens)
    whole = try_build_global_mask(rows, q_lens, contexts, max_q, max_seq, dirty_workspace(8192))
    assert whole is not None
    chunk = remap_topk_to_ranges(rows, int32(starts), lens)
    chunk_mask = build_topk_mask(chunk, q_lens, max_q, max(lens), dirty_workspace(8192))
    suffix = remap_topk_to_ranges(rows, contexts, q_lens)
    zeros = int32([0] * batch)
    suffix_mask = build_topk_mask(suffix, q_lens, max_q, max(q_lens), dirty_workspace(8192), zeros)
    whole_bits = bits_of(whole, max_seq)
    chunk_bits, suffix_bits = bits_of(chunk_mask, max(lens)), bits_of(suffix_mask, max_q)
    for b in range(batch):
        part = whole_bits[b, :, starts[b] : starts[b] + lens[b]]
        assert torch.equal(chunk_bits[b, :, : lens[b]], part)
        assert not chunk_bits[b, :, lens[b] :].any()
        part = whole_bits[b, :, contexts[b] : seq_lens[b]]
        assert torch.equal(suffix_bits[b, :, : q_lens[b]], part)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(-3, 60), st.sampled_from([INT32_MIN, INT32_MAX])), min_size=1, max_size=12
    ),
    st.one_of(st.integers(0, 50), st.just(INT32_MAX)),
    st.integers(0, 50),
    st.booleans(),
)
def test_remap_keeps_the_range_and_drops_the_rest(
    entries: list[int], start: int, length: int, as_tensor: bool
) -> None:
    rows = rows_of([entries], len(entries))
    starts = int32([start]) if as_tensor else [start]
    (remapped,) = remap_topk_to_ranges([rows], starts, [length])
    expected = [t - start if start <= t < start + length else -1 for t in entries]
    assert remapped.dtype == torch.int32
    assert remapped[0].tolist() == expected
    assert rows[0].tolist() == entries, "the input rows were changed"


def test_slices_are_views_of_each_requests_rows() -> None:
    buffer = rows_of([[0], [1], [2]], 1)
    slices = slice_topk_per_req(buffer, [1, 0, 2])
    assert [s.tolist() for s in slices] == [[[0]], [], [[1], [2]]]
    assert slices[2].data_ptr() == buffer[1:].data_ptr()
    assert slice_topk_per_req(buffer[:0], []) == []
    with pytest.raises(ValueError, match="q_lens add up to 2, must be 3"):
        slice_topk_per_req(buffer, [1, 1])


def good_arguments() -> dict[str, object]:
    return {
        "topk_indices_per_req": [rows_of([[1, 2]], 2), rows_of([[1, 2], [3, 4]], 2)],
        "q_lens": [1, 2],
        "max_q_len": 2,
        "max_seq_len": 40,
        "out": dirty_workspace(4096),
        "first_query_pos": int32([0, 0]),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_lens": [1]}, ValueError, "q_lens has 1 entries, must have 2"),
        ({"q_lens": [1, 1]}, ValueError, r"topk_indices_per_req\[1\] has shape \(2, 2\), must be \(1, 2\)"),
        ({"q_lens": [1, -2]}, ValueError, r"q_lens\[1\] is -2, must be >= 0"),
        ({"max_q_len": 1}, ValueError, "max_q_len is 1, must be >= 2"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len is -1, must be >= 0"),
        ({"max_seq_len": 4.0}, TypeError, "max_seq_len is a float, must be an int"),
        (
            {"out": torch.zeros(4096, dtype=torch.int64, device=DEVICE)},
            TypeError,
            "out has dtype torch.int64",
        ),
        ({"out": dirty_workspace(8192)[::2]}, ValueError, "out has strides"),
        (
            {"out": dirty_workspace(4096).view(2, 256, 8)},
            ValueError,
            r"out has shape .* must be \(2, 128, 4\)",
        ),
        ({"first_query_pos": int32([0])}, ValueError, r"first_query_pos has shape \(1,\), must be \(2,\)"),
        ({"query_start_loc": int32([0, 1])}, ValueError, "query_start_loc has shape"),
        (
            {"topk_indices_per_req": [rows_of([[1, 2]], 2), rows_of([[1], [3]], 1)]},
            ValueError,
            r"topk_indices_per_req\[1\] has shape \(2, 1\), must be \(2, 2\)",
        ),
        (
            {"topk_indices_per_req": [rows_of([[1, 2]], 2), rows_of([[1, 2], [3, 4]], 2).long()]},
            TypeError,
            r"topk_indices_per_req\[1\] has dtype torch.int64, must be torch.int32",
        ),
        ({"topk_indices_per_req": [[1, 2], [3, 4]]}, TypeError, r"topk_indices_per_req\[0\] is a list"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments = good_arguments() | change
    with pytest.raises(error, match=message):
        build_topk_mask(**arguments)  # type: ignore[arg-type]
    out = arguments["out"]
    assert isinstance(out, torch.Tensor)
    assert bool((out == (0 if out.dtype == torch.int64 else DIRT)).all())


def test_key_starts_of_a_wrong_length_are_refused() -> None:
    mask = dirty_workspace(1024).view(2, 128, 4)
    with pytest.raises(ValueError, match=r"key_starts has shape \(1,\), must be \(2,\)"):
        set_key_starts(mask, int32([1]))


def test_sequence_longer_than_the_global_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len is 41, must be >= 42"):
        try_build_global_mask([rows_of([[0], [1]], 1)], [2], [40], 2, 41, dirty_workspace(4096))
