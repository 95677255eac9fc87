"""Do the harness's own mask arithmetic, path rule and chunk planner say what the specification says?"""

from __future__ import annotations

import pytest

from harness.problems.problem import Chunks, Dims, Paging, Problem, Request, TopkSpec
from harness.problems.splits import Piece, split_context
from harness.problems.workspace import DEFAULT_MASK_WORKSPACE_WORDS, mask_words, padded_rows, words_per_row


def test_rows_and_words_are_rounded_as_specified() -> None:
    assert [padded_rows(n) for n in (0, 1, 128, 129, 256, 257)] == [0, 128, 128, 256, 256, 512]
    # 129 keys: 5 words, 6 with the key start; 8 after rounding to 128-bit loads
    assert words_per_row(129, reserve=False) == 8
    assert words_per_row(129, reserve=True) == 8
    assert words_per_row(128, reserve=False) == 4
    assert words_per_row(128, reserve=True) == 8


def test_a_prefill_of_32768_tokens_fits_the_default_workspace_and_33024_does_not() -> None:
    assert mask_words(1, 32768, 32768, reserve=False) == DEFAULT_MASK_WORKSPACE_WORDS
    assert mask_words(1, 33024, 33024, reserve=False) > DEFAULT_MASK_WORKSPACE_WORDS


@pytest.mark.parametrize(
    ("contexts", "budget", "expected"),
    [
        ([768, 512, 512], 1024, [[(0, 0, 768), (1, 0, 256)], [(1, 256, 256), (2, 0, 512)]]),
        ([64, 0, 64, 0], 1024, [[(0, 0, 64)], [(2, 0, 64)]]),
        ([], 1024, []),
        ([0, 0], 1024, []),
        ([1024], 1024, [[(0, 0, 1024)]]),
        ([1025], 1024, [[(0, 0, 1024)], [(0, 1024, 1)]]),
        ([1020, 40], 1024, [[(0, 0, 1020)], [(1, 0, 40)]]),
    ],
)
def test_the_naive_planner_gives_the_chunks_worked_out_by_hand(
    contexts: list[int], budget: int, expected: list[list[tuple[int, int, int]]]
) -> None:
    chunks = split_context(contexts, budget, budget, 16)
    assert chunks == [[Piece(*piece) for piece in chunk] for chunk in expected]


def problem(context: int, query: int, topk: int, **changes: object) -> Problem:
    base = Problem(
        dims=Dims(heads=1, kv_lora_rank=4, nope=4, rope=0, v=4, topk=topk),
        scale=0.5,
        requests=(Request(context_len=context, query_len=query),),
        chunks=Chunks(row_budget=64, max_context_chunk=64),
        topk=TopkSpec(kinds=("random",)),
    )
    return base.replace(**changes)


def test_the_path_follows_the_dispatch_rules() -> None:
    assert problem(8, 8, 16).expected_path() == "dense"
    assert problem(8, 9, 16).expected_path() == "global_mask"
    assert problem(0, 17, 16).expected_path() == "no_context"
    assert problem(8, 8, 16, force="masked").expected_path() == "global_mask"
    assert problem(8, 8, 16, force="mqa").expected_path() == "mqa"
    assert problem(8, 9, 16, force="dense").expected_path() == "dense"
    assert problem(0, 17, 16, force="masked_remap").expected_path() == "no_context"


def test_one_word_less_moves_the_batch_to_the_next_path() -> None:
    base = problem(100, 20, 16)
    whole, call = base.global_mask_words, base.call_mask_words
    assert whole > call
    paths = [problem(100, 20, 16, mask_workspace_words=n).expected_path() for n in (whole, whole - 1, call, call - 1)]
    assert paths == ["global_mask", "remap", "remap", "mqa"]
    assert problem(100, 20, 16, mask_workspace_words=call - 1, force="masked").expected_path() == "refused"


def test_a_quantised_cache_never_takes_a_masked_path() -> None:
    packed = Paging(kv_cache_dtype="fp8_e4m3")
    assert problem(100, 20, 16, paging=packed).expected_path() == "mqa"
    assert problem(100, 20, 16, paging=packed, force="masked").expected_path() == "refused"
    assert problem(8, 8, 16, paging=packed).expected_path() == "dense"
