"""Is a case file the same case everywhere, and does a bad one say what is wrong?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.problems.features import FEATURES
from harness.problems.problem import (
    Chunks,
    DataSpec,
    Dims,
    Layout,
    Paging,
    Problem,
    ProblemError,
    Request,
    TopkSpec,
)

DIMS = Dims(heads=2, kv_lora_rank=16, nope=8, rope=4, v=8, topk=16)


def make(lengths: tuple[tuple[int, int], ...] = ((100, 20), (0, 7), (40, 33)), **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "dims": DIMS,
        "scale": 0.3,
        "requests": tuple(Request(context_len=c, query_len=q) for c, q in lengths),
        "topk": TopkSpec(kinds=tuple("random" for _ in lengths)),
        "chunks": Chunks(row_budget=48, max_context_chunk=32),
    }
    return Problem(**(fields | changes))


RICH = make(
    dtype="fp16",
    paging=Paging(order="high", shared_prefix=True, spare_blocks=3, table_pad=2, cache_row_pad=8, seed=11),
    mask_workspace_words=4096,
    topk=TopkSpec(kinds=("sinks", "all", "future"), order="descending", holes="middle", seed=2**40),
    data=DataSpec(family="heavy_v", weights="exact", temperature=0.1),
    layout=Layout(num_decode_tokens=3, q_pad=8, poison="inf"),
    force="masked_remap",
)


@pytest.mark.parametrize("problem", [make(), RICH, make(()), RICH.replace(history=(make(), RICH))])
def test_a_problem_survives_its_json(problem: Problem) -> None:
    text = problem.to_json()
    again = Problem.from_json(text)
    assert again == problem
    assert again.to_json() == text
    assert again.case_id == problem.case_id


def test_canonical_json_does_not_depend_on_key_order_or_spacing() -> None:
    shuffled = json.dumps(dict(reversed(json.loads(RICH.to_json()).items())), indent=3)
    assert Problem.from_json(shuffled).to_json() == RICH.to_json()


def test_case_id_names_the_inputs_and_not_where_they_come_from() -> None:
    assert make(source="traffic").case_id == make().case_id
    assert make(scale=0.31).case_id != make().case_id
    assert make().case_id == "694a73b196b37c74"
    after = make().replace(history=(make(scale=0.31),))
    assert after.case_id != make().case_id
    assert after.case_id != make().replace(history=(make(scale=0.33),)).case_id
    assert after.case_id == make().replace(history=(make(scale=0.31, source="traffic"),)).case_id


MALFORMED: dict[str, tuple[str | dict[str, Any], str]] = {
    "not JSON": ("{", "Invalid JSON"),
    "not an object": ("[]", "object"),
    "deep nesting": ("[" * 100_000, "recursion"),
    "negative size": ({"dims": {"heads": -2}}, "dims.heads"),
    "unknown field": ({"colour": 3}, "colour"),
    "unknown part field": ({"dims": {"colour": 3}}, "dims.colour"),
    "text for a number": ({"paging": {"seed": "1"}}, "paging.seed"),
    "fraction for a number": ({"paging": {"block_size": 1.5}}, "paging.block_size"),
    "unknown family": ({"data": {"family": "odd"}}, "data.family"),
    "unknown kind": ({"topk": {"kinds": ["random", "odd", "random"]}}, "topk.kinds[1]"),
    "too few kinds": ({"topk": {"kinds": ["random"]}}, "topk.kinds has 1"),
    "too few rows": ({"topk": {"kinds": [], "rows": [[1]]}}, "topk.rows has 1 rows"),
    "row too wide": ({"topk": {"kinds": [], "rows": [[1] * 17] * 60}}, "row of 17"),
    "index past int32": ({"topk": {"kinds": [], "rows": [[2**31]] * 60}}, "topk.rows[0][0]"),
    "future version": ({"version": 2}, "version"),
    "scale of zero": ({"scale": 0.0}, "scale"),
    "scale not finite": ({"scale": float("nan")}, "scale"),
    "budget below alignment": ({"chunks": {"row_budget": 4}}, "split_alignment=16"),
    "packed cache of other width": ({"paging": {"kv_cache_dtype": "fp8_ds_mla"}}, "kv_lora_rank=512"),
    "long history": ({"history": [make().model_dump(mode="json")] * 3}, "history"),
    "history of a history": (
        {"history": [make().replace(history=(make(),)).model_dump(mode="json")]},
        "history[0] has a history of 1",
    ),
    "illegal history": ({"history": [make().model_dump(mode="json") | {"scale": 0.0}]}, "history[0].scale"),
    "one huge length": ({"requests": [{"context_len": 2**40, "query_len": 1}]}, "requests[0].context_len"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_gives_one_line_that_names_the_field(name: str) -> None:
    change, expected = MALFORMED[name]
    text = change if isinstance(change, str) else json.dumps(_merged(json.loads(make().to_json()), change))
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(text)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 500


HOSTILE: dict[str, dict[str, Any]] = {
    "long requests": {"requests": [{"context_len": 2**22, "query_len": 2**20}] * 3},
    "wide model": {"dims": {"heads": 1024, "kv_lora_rank": 4096, "nope": 1024, "v": 1024}},
    "huge cache": {"paging": {"spare_blocks": 2**24, "block_size": 4096}},
    "wide table": {"paging": {"block_size": 1, "table_pad": 2**16}, "requests": "many"},
    "endless chunks": {
        "requests": [{"context_len": 2**20, "query_len": 1}] * 3,
        "chunks": {"split_alignment": 1, "row_budget": 1},
    },
    "huge gather workspace": {"chunks": {"row_budget": 2**22}, "dims": {"kv_lora_rank": 4096}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_cannot_ask_for_more_memory_or_work_than_the_limits(name: str) -> None:
    raw = _merged(json.loads(make().to_json()), HOSTILE[name])
    if raw["requests"] == "many":
        raw["requests"] = [{"context_len": 2**12, "query_len": 1}] * 4096
    raw["topk"]["kinds"] = ["random"] * len(raw["requests"])
    with pytest.raises(ProblemError, match="must be at most"):
        Problem.from_json(json.dumps(raw))


def test_replace_checks_again() -> None:
    assert make().replace(scale=1.0).scale == 1.0
    with pytest.raises(ProblemError, match="kinds has 3"):
        make().replace(requests=(Request(context_len=1, query_len=1),))


def test_derived_sizes_agree_with_counting_by_hand() -> None:
    problem = make()
    assert problem.seq_lens == [120, 7, 73]
    assert problem.token_offsets == [0, 20, 27, 60]
    assert (problem.max_query_len, problem.max_context_len, problem.max_seq_len) == (33, 100, 120)
    assert problem.block_counts == [7, 0, 3]
    assert problem.num_blocks == 10
    shared = make(paging=Paging(shared_prefix=True))
    assert (shared.shared_blocks, shared.num_blocks) == (2, 8)
    # 120 keys are 4 words, one more for the key start, rounded up to 8; 33 queries are a tile of 128
    assert problem.global_mask_words == 3 * 128 * 8
    # longest own mask: 33 suffix keys, 2 words, rounded up to 4
    assert problem.call_mask_words == 3 * 128 * 4


def test_every_feature_that_a_problem_has_is_a_listed_one() -> None:
    for problem in (make(), RICH, make(())):
        features = problem.features()
        assert set(features) <= set(FEATURES)
        assert features == sorted(set(features))


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{k: _merged(base[k], v) if isinstance(v, dict) and k in base else v for k, v in change.items()},
    }
