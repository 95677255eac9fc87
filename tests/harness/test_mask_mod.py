"""Does the mask-mod read-out ask a mod as FA4's kernels do, see every right bit, and name every wrong one?

Plain Python mods show the calling rules on any machine. Where CuTe is installed the same questions go to mods that
it compiles for the host, or for the GPU where there is one.
"""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch

from harness.checks.mask_mod import CHECK, calls_of, check_mask_mod, check_problem, expected_bits
from harness.checks.mask_mod_python import PythonMaskMod
from harness.checks.mask_mod_readout import read_mask_mod
from harness.checks.mask_mod_shrink import shrink_fault
from harness.problems.problem import Chunks, DataSpec, Dims, Problem, Request, TopkSpec
from harness.problems.tensors import build_inputs
from harness.subjects.fa4 import python_mask_mod
from reports.records import Status

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORDS = 8
RESIDUES = [*range(32), 33, 63]

needs_cute = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTe (cutlass)")


def random_mask(batch: int, rows: int = 128, words: int = WORDS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (batch, rows, words), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32)


def words_of(function):  # type: ignore[no-untyped-def]
    """A mod from a function of (mask, batch, row, key start, keys)."""

    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        mask = aux[0]
        start = int(mask[batch[0], 0, mask.shape[2] - 1])
        return function(mask, batch[0], q_idx[0], start, list(kv_idx))

    return mod


def one_word_offset(mask, batch, row, start, keys):  # type: ignore[no-untyped-def]
    """The published fault: 32 keys from an unaligned start, taken from one word."""
    bit = start + keys[0]
    return [mask[batch, row, bit >> 5] >> (bit & 31)]


def shift_by_32(mask, batch, row, start, keys):  # type: ignore[no-untyped-def]
    bit = start + keys[0]
    low, high = mask[batch, row, bit >> 5], mask[batch, row, min((bit >> 5) + 1, mask.shape[2] - 1)]
    return [(low >> (bit & 31)) | (high << (32 - (bit & 31)))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_right_logic_passes_from_every_key_start_and_in_last_partial_words(packed: bool, offset: bool) -> None:
    mod = python_mask_mod(offset, packed)
    starts = RESIDUES if offset else None
    keys = [1 + (7 * i) % 150 for i in range(len(RESIDUES))]
    for calling in ["sm100"] if packed else ["sm90", "sm100"]:
        mask = random_mask(len(RESIDUES), rows=2)
        record = check_mask_mod("suffix", mod, mask, [2] * len(RESIDUES), keys, starts, calling)  # type: ignore[arg-type]
        assert (record.status, record.check) == (Status.PASS, CHECK), record.message


def test_one_word_offset_reads_are_found_named_and_shrunk_to_one_key() -> None:
    mod = PythonMaskMod(words_of(one_word_offset), 32)
    mask = random_mask(4, rows=3)
    starts = [0, 32, 5, 31]
    record = check_mask_mod("chunk[1]", mod, mask, [3] * 4, [100] * 4, starts, "sm100", first_request=6)
    assert record.status is Status.FAIL
    place = record.place
    assert (place.request, place.call, place.row) == (8, "chunk[1]", 0)
    seen = read_mask_mod(mod, mask, [3] * 4, [100] * 4, starts, "sm100")[2]
    allowed = expected_bits(mask, [3] * 4, [100] * 4, starts)[2]
    row, key = (int(i) for i in (seen != allowed).nonzero()[0])
    assert (place.row, place.key, place.word, place.bit) == (row, key + 5, (key + 5) // 32, (key + 5) % 32)
    assert key % 32 >= 27, "only the keys of the second word are lost"
    assert "missed key" in record.message
    assert "key_start 5" in record.message
    fault = shrink_fault(mod, record, 5, "sm100", device=torch.device("cpu"))
    assert fault is not None
    assert (fault.keys, fault.key_start, fault.key_len) == ((key % 32,), 5, key % 32 + 1)
    assert fault.record.place.request == 0


@pytest.mark.parametrize("start", range(32))
def test_one_word_offset_reads_are_right_only_from_whole_words(start: int) -> None:
    mod = PythonMaskMod(words_of(one_word_offset), 32)
    mask = torch.full((1, 1, WORDS), -1, dtype=torch.int32)
    record = check_mask_mod("suffix", mod, mask, [1], [64], [start], "sm100")
    assert record.status is (Status.PASS if start == 0 else Status.FAIL)


def test_a_shift_by_the_width_of_a_word_is_a_fault_whatever_it_gives() -> None:
    mod = PythonMaskMod(words_of(shift_by_32), 32)
    assert check_mask_mod("x", mod, random_mask(1), [1], [40], [7], "sm100").status is Status.PASS
    record = check_mask_mod("x", mod, random_mask(1), [1], [40], [64], "sm100")
    assert record.status is Status.GUARD
    assert "shifted a word by 32" in record.message


def test_a_read_outside_the_mask_is_a_fault_whatever_it_gives() -> None:
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        return [aux[0][batch[0], q_idx[0], (kv_idx[0] >> 5) + 1] & 1]

    record = check_mask_mod("x", PythonMaskMod(mod), random_mask(1, words=4), [1], [128], None, "sm90")
    assert record.status is Status.GUARD
    assert "read word (0, 0, 4) of a mask of shape (1, 128, 4)" in record.message


def test_rows_in_the_wrong_order_are_found() -> None:
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        row = q_idx[0] ^ 1
        return [aux[0][batch[0], row, kv_idx[0] >> 5] >> (kv_idx[0] & 31) & 1]

    record = check_mask_mod("x", PythonMaskMod(mod), random_mask(1, rows=2), [2], [30], None, "sm90")
    assert record.status is Status.FAIL
    assert "attended key" in record.message


def test_a_128_wide_mod_is_wrong_in_tiles_of_64_keys() -> None:
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        load = kv_idx[0] // 128
        return [aux[0][batch[0], q_idx[0], 4 * load + i] for i in range(4)]

    wide = PythonMaskMod(mod, 128)
    arguments = (random_mask(1, rows=1), [1], [200], None, "sm100")
    assert check_mask_mod("x", wide, *arguments).status is Status.PASS  # type: ignore[arg-type]
    assert check_mask_mod("x", wide, *arguments, tile_keys=64).status is Status.FAIL  # type: ignore[arg-type]


def asked(calling: str, vec_size: int, q_len: int, k_len: int, tile_keys: int) -> list[tuple[int, list[int]]]:
    """(row, keys) of every call."""
    calls = []

    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        assert (seqlen_info.seqlen_q, seqlen_info.seqlen_k) == (q_len, k_len)
        assert len(set(q_idx)) == len(set(batch)) == len(set(head)) == 1
        assert len(q_idx) == len(batch) == len(head) == len(kv_idx) == vec_size
        calls.append((q_idx[0], list(kv_idx)))
        return [0] * max(1, vec_size // 32)

    mask = torch.zeros(1, 256, 32, dtype=torch.int32)
    read_mask_mod(PythonMaskMod(mod, vec_size), mask, [q_len], [k_len], None, calling, tile_keys=tile_keys)  # type: ignore[arg-type]
    return calls


def test_sm90_asks_once_an_element_and_wraps_indices_in_the_last_tile_only() -> None:
    calls = asked("sm90", 1, 3, 130, 80)
    assert len(calls) == 128 * 160
    first = [(row, keys[0]) for row, keys in calls if keys[0] < 80]
    assert {row for row, _ in first if row >= 3} == set(range(3, 128)), "rows past the end are asked about"
    assert max(keys[0] for _, keys in calls) == 129, "keys past the end are wrapped"


def test_sm100_asks_with_adjacent_keys_and_never_wraps_rows() -> None:
    calls = asked("sm100", 32, 3, 200, 128)
    assert len(calls) == 128 * 2 * 4
    assert {row for row, _ in calls} == set(range(128))
    assert calls[1] == (0, list(range(32, 64)))
    assert calls[6] == (0, [*range(192, 200), *range(24)])
    assert len(asked("sm100", 32, 129, 1, 128)) == 256 * 4, "long suffixes come in tiles of 256 rows"
    assert asked("sm100", 128, 1, 64, 64)[0] == (0, [*range(64), *[0] * 64]), "keys past the tile have no index"


def test_eight_wide_mods_fill_a_word_with_four_calls() -> None:
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        first = kv_idx[0]
        garbage = 0xFFFFFF00
        return [(aux[0][batch[0], q_idx[0], first >> 5] >> (first & 31)) & 0xFF | garbage]

    record = check_mask_mod("x", PythonMaskMod(mod, 8), random_mask(2, rows=2), [2, 1], [100, 33], None, "sm100")
    assert record.status is Status.PASS, record.message


def test_empty_requests_and_segments_are_asked_about_nothing() -> None:
    def mod(batch, head, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        raise AssertionError("asked")

    seen = read_mask_mod(PythonMaskMod(mod), random_mask(2), [0, 3], [5, 0], None, "sm90")
    assert [tuple(s.shape) for s in seen] == [(0, 5), (3, 0)]
    assert read_mask_mod(PythonMaskMod(mod), torch.zeros(0, 128, 4, dtype=torch.int32), [], [], None, "sm90") == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"calling": "sm80"}, ValueError, "calling is 'sm80'"),
        ({"mod": PythonMaskMod(lambda *_: [0], 32)}, ValueError, "__vec_size__ 32, must be 1"),
        ({"mod": PythonMaskMod(lambda *_: [0], 48), "calling": "sm100"}, ValueError, "must divide 32"),
        (
            {"mod": PythonMaskMod(lambda *_: [0], 32), "calling": "sm100", "tile_keys": 80},
            ValueError,
            "tile_keys is 80",
        ),
        ({"mask": torch.zeros(1, 2, 3)}, TypeError, "dtype torch.float32, must be int32"),
        ({"mask": torch.zeros(2, 3, dtype=torch.int32)}, ValueError, "mask has shape"),
        ({"q_lens": [1, 2]}, ValueError, "q_lens has 2 entries, must have 1"),
        ({"q_lens": [5]}, ValueError, "at most the mask's 4 rows"),
        ({"k_lens": [-1]}, ValueError, "must not be negative"),
        ({"key_starts": []}, ValueError, "key_starts has 0 entries"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "mod": python_mask_mod(False, False),
        "mask": torch.zeros(1, 4, 4, dtype=torch.int32),
        "q_lens": [1],
        "k_lens": [1],
    }
    with pytest.raises(error, match=message):
        read_mask_mod(**(arguments | changes))  # type: ignore[arg-type]


def batch(contexts: list[int], queries: list[int], budget: int, seed: int) -> Problem:
    return Problem(
        dims=Dims(heads=1, kv_lora_rank=8, nope=8, rope=0, v=8, topk=16),
        scale=0.5,
        requests=tuple(Request(context_len=c, query_len=q) for c, q in zip(contexts, queries, strict=True)),
        chunks=Chunks(row_budget=budget, max_context_chunk=budget, split_alignment=1),
        topk=TopkSpec(kinds=("random",) * len(contexts), seed=seed),
        data=DataSpec(seed=seed),
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_call_of_a_batch_is_read_out(seed: int) -> None:
    draw = random.Random(seed)
    problem = batch([draw.randrange(90) for _ in range(3)], [draw.randrange(4) for _ in range(3)], 40, seed)
    rows = build_inputs(problem, torch.device("cpu")).prefill_topk
    for offset in (False, True):
        calls = list(calls_of(problem, rows, offset=offset))
        assert calls[0].call == "suffix"
        assert len(calls) == 1 + min(len(problem.planned_chunks), 4)
        records = check_problem(python_mask_mod(offset, True), problem, rows, offset=offset, device=torch.device("cpu"))
        assert {record.status for record in records} == {Status.PASS}
        assert [record.place.call is None for record in records] == [True] * len(calls)


def test_the_calls_of_a_batch_show_a_mod_that_reads_one_word() -> None:
    problem = batch([70], [3], 33, 1)
    rows = build_inputs(problem, torch.device("cpu")).prefill_topk
    bad = PythonMaskMod(words_of(one_word_offset), 32)
    records = check_problem(bad, problem, rows, offset=True, device=torch.device("cpu"))
    wrong = [record.place for record in records if record.status is Status.FAIL]
    assert [(place.call, place.chunk) for place in wrong] == [("chunk[1]", 1)], "only that segment crosses a word"
    assert all(place.key is not None and place.key // 32 == place.word for place in wrong)


@needs_cute
@pytest.mark.parametrize(("family", "calling"), [(90, "sm90"), (90, "sm100"), (100, "sm100")])
@pytest.mark.parametrize("offset", [False, True])
def test_cute_mods_pass_from_every_key_start_and_in_last_partial_words(family: int, calling: str, offset: bool) -> None:
    from optimized.mask_mods import mask_mod_for

    keys = [1 + (7 * i) % 150 for i in range(len(RESIDUES))]
    starts = RESIDUES if offset else None
    mask = random_mask(len(RESIDUES)).to(DEVICE)
    for tile in (128, 80) if calling == "sm90" else (128,):
        record = check_mask_mod(
            "x", mask_mod_for(family, offset), mask, [3] * len(RESIDUES), keys, starts, calling, tile_keys=tile  # type: ignore[arg-type]
        )  # fmt: skip
        assert record.status is Status.PASS, record.message


@needs_cute
@pytest.mark.parametrize(("vec_size", "tile_keys"), [(1, 128), (1, 80), (8, 128), (32, 128), (64, 64), (128, 64)])
def test_cute_is_asked_as_the_python_model_is(vec_size: int, tile_keys: int) -> None:
    """A mod that answers with a hash of what it was asked: the answers agree bit for bit."""
    from tests.harness.mask_mod_probes import probe, python_probe

    mask = torch.zeros(2, 128, 4, dtype=torch.int32)
    lens = ([3, 130 - 3], [77, 140])
    for calling in ("sm90", "sm100") if vec_size == 1 else ("sm100",):
        found = read_mask_mod(probe(vec_size), mask.to(DEVICE), *lens, None, calling, tile_keys=tile_keys, head=2)  # type: ignore[arg-type]
        model = read_mask_mod(python_probe(vec_size), mask, *lens, None, calling, tile_keys=tile_keys, head=2)  # type: ignore[arg-type]
        for b in range(2):
            assert torch.equal(found[b], model[b]), (calling, b)
        assert 0.2 < float(model[1].float().mean()) < 0.8


@needs_cute
def test_a_cute_mod_that_reads_one_word_is_found() -> None:
    from tests.harness.mask_mod_probes import one_word_mod

    mask = random_mask(3).to(DEVICE)
    record = check_mask_mod("x", one_word_mod, mask, [3] * 3, [90] * 3, [0, 32, 33], "sm100")
    assert record.status is Status.FAIL
    assert record.place.request == 2
    fault = shrink_fault(one_word_mod, record, 33, "sm100", device=DEVICE)
    assert fault is not None
    assert (fault.keys, fault.key_start) == ((31,), 1)


def test_without_cute_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    record = check_mask_mod("x", lambda *_: None, random_mask(1), [1], [1], None, "sm90")
    assert record.status is Status.NOT_RUN
    assert "not installed" in record.message
