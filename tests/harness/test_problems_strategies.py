"""Do drawn cases reach what they must, in the shares that are promised, and shrink to something small?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from harness.problems.feature_pairs import can_coincide, possible_pairs
from harness.problems.features import FEATURES
from harness.problems.history import same_layer, same_metadata, same_sizes
from harness.problems.names import TOPK_KINDS, Path
from harness.problems.problem import Problem
from harness.problems.profiles import PROFILE_NAMES, PROFILES, ProfileName
from harness.problems.sequences import KINDS
from harness.problems.splits import split_context
from harness.problems.strategies import cases
from harness.problems.tensors import build_inputs
from harness.problems.traffic import TRACES, batches, read_trace, scale_down, schedule
from optimized.chunks import plan_context_chunks

QUIET = settings(
    max_examples=300,
    database=None,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@cache
def drawn(profile: ProfileName) -> tuple[Problem, ...]:
    problems: list[Problem] = []

    @QUIET
    @given(cases(profile))
    def collect(problem: Problem) -> None:
        problems.append(problem)

    collect()
    return tuple(problems)


def share(profile: ProfileName, holds: Callable[[Problem], bool]) -> float:
    problems = drawn(profile)
    return sum(map(holds, problems)) / len(problems)


@pytest.mark.parametrize("profile", ["quick", "ci"])
def test_every_path_and_chunk_count_has_its_share(profile: ProfileName) -> None:
    paths = Counter(problem.expected_path() for problem in drawn(profile))
    least: dict[Path, float] = {"dense": 0.08, "no_context": 0.1, "global_mask": 0.18, "remap": 0.18, "mqa": 0.1}
    for path, wanted in least.items():
        assert paths[path] / 300 >= wanted, paths
    assert paths["refused"] == 0
    assert share(profile, lambda p: len(p.planned_chunks) >= 2) >= 0.25
    assert share(profile, lambda p: len(p.requests) > 1) >= 0.4
    assert share(profile, lambda p: len(p.requests) == 1) >= 0.2
    assert share(profile, lambda p: "traffic" in p.source) >= 0.13
    assert share(profile, lambda p: "dims:published" in p.features()) >= 0.07


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_some_batches_have_many_tiny_requests(profile: ProfileName) -> None:
    many = [problem for problem in drawn(profile) if len(problem.requests) > PROFILES[profile].max_requests]
    assert 0.015 <= len(many) / len(drawn(profile)) <= 0.1
    assert all("requests:9.." in problem.features() for problem in many)
    assert max(len(problem.requests) for problem in many) > 12
    for problem in many:
        assert len(problem.requests) <= 40
        # the first may be of any size, and the second its twin
        assert max(problem.query_lens[2:]) <= 3
        assert max(problem.context_lens[2:]) <= 12


def test_scores_far_below_0_and_the_lowest_int32_have_their_share() -> None:
    assert share("quick", lambda p: p.data.family in ("low", "very_low", "low_rows")) >= 0.06
    assert share("quick", lambda p: "topk_rows:lowest_negative" in p.features()) >= 0.12


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_cases_are_not_drawn_twice(profile: ProfileName) -> None:
    assert len({problem.case_id for problem in drawn(profile)}) >= 280


def test_cases_of_the_quick_profile_are_small_enough_for_a_cpu() -> None:
    for problem in drawn("quick"):
        assert problem.num_tokens <= 330
        assert sum(problem.context_lens) <= 400
        assert len(problem.planned_chunks) <= 14
        assert problem.dims.heads <= 8


def test_the_ci_profile_reaches_nearly_every_feature_in_300_cases() -> None:
    reached = {feature for problem in drawn("ci") for feature in problem.features()}
    assert len(reached) / len(FEATURES) >= 0.95
    kinds = {kind for problem in drawn("ci") for kind in problem.topk.kinds}
    assert kinds == set(TOPK_KINDS)


def test_full_size_cases_are_full_sized() -> None:
    full = drawn("gpu_full")
    assert max(problem.num_tokens for problem in full) >= 8000  # the limit is 8,192; a draw need not reach it
    assert max(problem.max_context_len for problem in full) >= 30_000
    assert max(problem.dims.heads for problem in full) == 128
    assert max(problem.dims.topk for problem in full) <= 2048 + 64
    assert share("gpu_full", lambda p: p.dims.topk == 2048) >= 0.3
    sizes = {(p.dims.kv_lora_rank, p.dims.nope, p.dims.rope, p.dims.v) for p in full}
    assert {(512, 128, 64, 128), (512, 192, 64, 256), (512, 256, 0, 256)} <= sizes


@pytest.mark.parametrize("profile", ["quick", "ci"])
def test_no_case_holds_two_features_that_are_said_to_exclude_each_other(profile: ProfileName) -> None:
    for problem in drawn(profile):
        features = problem.features()
        wrong = [(a, b) for a in features for b in features if not can_coincide(a, b)]
        assert not wrong, problem.to_json()


def test_most_pairs_of_features_can_hold_together() -> None:
    pairs = possible_pairs()
    assert 0.9 < len(pairs) / (len(FEATURES) * (len(FEATURES) - 1) / 2) < 0.99
    assert not can_coincide("dtype:bf16", "dtype:fp16")
    assert not can_coincide("path:no_context", "chunks:2")
    assert can_coincide("path:remap", "chunks:2")


@pytest.mark.parametrize("profile", ["quick", "ci"])
def test_the_naive_planner_and_the_planner_under_test_agree(profile: ProfileName) -> None:
    for problem in drawn(profile):
        chunks = problem.chunks
        arguments = (problem.context_lens, chunks.row_budget, chunks.max_context_chunk, chunks.split_alignment)
        naive = [[tuple(piece) for piece in chunk] for chunk in split_context(*arguments)]
        planned = [
            [(c.first_request + i, s, n) for i, (s, n) in enumerate(zip(c.starts, c.lengths, strict=True))]
            for c in plan_context_chunks(*arguments)
        ]
        assert naive == planned


def test_drawn_cases_can_be_built_and_read_back() -> None:
    for problem in drawn("quick")[:120]:
        assert Problem.from_json(problem.to_json()) == problem
        inputs = build_inputs(problem)
        assert inputs.broken_canary() is None
        assert bool(inputs.q.isfinite().all())


SMALL = settings(database=None, derandomize=True, max_examples=100, suppress_health_check=list(HealthCheck))


def test_a_fault_of_the_chunk_loop_shrinks_to_one_small_request() -> None:
    least = find(
        cases("quick"), lambda p: any(piece.start % 32 for c in p.planned_chunks for piece in c), settings=SMALL
    )
    assert len(least.requests) == 1
    assert least.num_tokens <= 2
    assert sum(least.seq_lens) <= 20
    assert least.data.family == "normal"
    assert least.paging.order == "identity"


def test_a_fault_of_the_second_request_shrinks_to_two_small_requests() -> None:
    least = find(
        cases("quick"),
        lambda p: len(p.requests) > 1 and p.requests[1].context_len > 2,
        settings=SMALL,
    )
    assert len(least.requests) == 2
    assert least.num_tokens <= 4
    assert sum(least.seq_lens) <= 64


def test_some_cases_have_calls_before_them_that_share_what_an_engine_shares() -> None:
    after = [problem for problem in drawn("ci") if problem.history]
    assert 0.1 <= len(after) / len(drawn("ci")) <= 0.25
    kinds = Counter(earlier.source for problem in after for earlier in problem.history)
    assert set(kinds) == {f"before: {kind}" for kind, _ in KINDS}
    for problem in after:
        for earlier in problem.history:
            assert earlier.expected_path() != "refused"
            if earlier.source == "before: batch":
                assert same_layer(earlier, problem)
                assert earlier.workspace_words == problem.workspace_words
            if earlier.source == "before: metadata":
                assert same_metadata(earlier, problem)
            if earlier.source == "before: scale":
                assert same_sizes(earlier, problem)
                assert earlier.scale != problem.scale


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("budget", [2048, 8192])
def test_the_scheduler_serves_every_prompt_token_once_within_the_budget(name: str, budget: int) -> None:
    arrivals = read_trace(name)
    assert len(arrivals) == 300
    served = 0
    for batch in schedule(arrivals, budget):
        new = sum(query for _, query in batch.lengths)
        assert 0 < new + batch.decode_tokens <= budget
        assert all(query > 0 for _, query in batch.lengths)
        served += new
    assert served == sum(a.prompt - min(a.cached, a.prompt - 1) for a in arrivals)


def test_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="trace 'nine' is unknown"):
        read_trace("nine")


@pytest.mark.parametrize("name", TRACES)
def test_scaled_batches_stay_small_and_ragged(name: str) -> None:
    remainders: Counter[int] = Counter()
    for batch in batches(name, 2048):
        small = scale_down(batch, max_requests=4, max_tokens=72, max_keys=200)
        assert 1 <= len(small.lengths) <= 4
        assert sum(q for _, q in small.lengths) <= 72 + 4 * 32
        assert sum(c for c, _ in small.lengths) <= 200 + 4 * 32
        assert any(n % 32 and n % 64 for lengths in small.lengths for n in lengths)
        for (context, query), (before, _) in zip(small.lengths, batch.lengths[-4:], strict=True):
            assert (context > 0) == (before > 0)
            assert query > 0
            remainders[context % 32] += 1
    assert len(remainders) >= 16
