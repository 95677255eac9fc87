"""Does each stage's judge pass a right function and name what is wrong with a wrong one?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.problems.problem import DataSpec, Paging, TopkSpec
from harness.subjects.api import NotRunnable, StageSubject
from harness.subjects.contract import Contract
from harness.subjects.domain import Domain
from harness.subjects.registry import resolve
from harness.subjects.stages import STAGES
from reports.records import Status
from tests.harness.stage_problems import CASES, HEADS_FIRST, PLAIN, RAGGED, RIGHT, broken, judge, judged, problem

my_attend, my_mqa, my_mask, my_gather, my_merge, my_plan, my_prefill = RIGHT.values()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", RIGHT)
def test_does_a_right_function_pass_whatever_the_batch(stage: str, case: str) -> None:
    record = judge(stage, RIGHT[stage], CASES[case], PLAIN)
    assert record.status in (Status.PASS, Status.WATCH, Status.VACUOUS), record.message
    assert (record.status is Status.VACUOUS) <= (case in ("nothing", "no context"))
    assert record.margin_lse is None or record.margin_lse <= 1


def test_has_a_merge_alone_a_margin_and_has_another_that_rounds_once_none() -> None:
    merge, gather = (judge(stage, RIGHT[stage], RAGGED, PLAIN) for stage in ("merge", "gather"))
    assert merge.margin_out is not None
    assert merge.margin_lse is not None
    assert 0 < merge.margin_out <= 1
    assert (gather.margin_out, gather.margin_lse) == (None, None)


@pytest.mark.parametrize("stage", RIGHT)
def test_are_the_checks_of_a_stage_those_of_its_table(stage: str) -> None:
    contract = Contract(cache_dtypes=("auto",), batch_invariant=True)
    seen = judged(judge(stage, RIGHT[stage], RAGGED, contract))
    promised = set(STAGES[stage].checks)
    assert seen <= promised
    unseen = {f"{stage}.max_logits", "mask.crowd"}  # asked for by a contract, and on a GPU
    assert promised - seen <= unseen | (set() if stage in ("attend", "mqa") else {"guard.batch"})


@pytest.mark.parametrize("name", ["torch-dense", "torch-dense[flex]"])
@pytest.mark.parametrize("case", CASES)
def test_does_torch_dense_pass(name: str, case: str) -> None:
    subject = resolve(name)
    assert isinstance(subject, StageSubject)
    record = judge("attend", subject.function, CASES[case], subject.contract)
    assert record.status in (Status.PASS, Status.VACUOUS), record.message
    assert (record.status is Status.VACUOUS) <= (case in ("nothing", "no context"))


def test_is_one_head_judged_where_the_lse_has_heads_last() -> None:
    def merge(prefix_output, prefix_lse, suffix_output, suffix_lse):  # type: ignore[no-untyped-def]
        out, lse = my_merge(prefix_output, prefix_lse.t(), suffix_output, suffix_lse.t())
        return out, lse.t().contiguous()

    case = problem((45, 3), dims=RAGGED.dims.model_copy(update={"heads": 1}))
    assert judge("merge", merge, case, Contract(lse_layout="TH")).status is Status.PASS


def test_is_a_slot_that_was_not_attended_named() -> None:
    def mqa(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, torch.where(indices == indices.max(), -1, indices), scale, v_dim)

    record = judge("mqa", mqa)
    assert broken(record) == ["mqa.keys"]
    assert "missed key" in record.message
    assert "(slot " in record.message


@pytest.mark.parametrize(("past", "found"), [(1, True), (3, True), (0, False)])
def test_is_an_index_just_past_the_end_given(past: int, found: bool) -> None:
    def clamped(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        taken = torch.where(indices < len(kv) + past, indices.clamp(max=len(kv) - 1), -1)
        return my_mqa(q, kv, taken, scale, v_dim)

    assert (broken(judge("mqa", clamped, CASES["past the end"])) == ["mqa.keys"]) == found


def test_is_the_first_index_past_the_end_the_most_frequent_one() -> None:
    beyond: list[int] = []

    def seen(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        beyond.extend((indices - len(kv))[indices >= len(kv)].tolist())
        return my_mqa(q, kv, indices, scale, v_dim)

    assert judge("mqa", seen, problem((60, 9), kinds=("past_end",))).status is Status.PASS
    assert beyond.count(0) > len(beyond) // 2
    assert max(beyond) > 2**30
    assert any(0 < excess < 200 for excess in beyond)


@pytest.mark.parametrize(
    ("family", "seed", "floor"),
    [("low", 0, -100.0), ("very_low", 0, -1e3), ("very_low", 1, -1e4), ("low_rows", 0, 0.0)],
)
@pytest.mark.parametrize("stage", ["attend", "mqa"])
def test_is_a_maximum_that_starts_at_a_finite_number_found(stage: str, family: str, seed: int, floor: float) -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)
        return vanished(out, lse)

    def mqa(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return vanished(*my_mqa(q, kv, indices, scale, v_dim))

    def vanished(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gone = lse < floor - 100
        return out.masked_fill(gone.t()[..., None], 0.0), lse.masked_fill(gone, -torch.inf)

    data = DataSpec.model_validate({"family": family, "seed": seed})
    function = attend if stage == "attend" else mqa
    assert f"{stage}.lse" in broken(judge(stage, function, RAGGED.replace(data=data), repeat=False))
    assert broken(judge(stage, function, RAGGED, repeat=False)) == []


def test_are_duplicates_counted_as_the_contract_says() -> None:
    def per_slot(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        out = torch.zeros(q.shape[0], q.shape[1], v_dim, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf)
        for t in range(q.shape[0]):
            keys = kv[indices[t][(indices[t] >= 0) & (indices[t] < len(kv))].long()].float()
            scores = scale * (q[t].float() @ keys.t())
            lse[:, t] = scores.logsumexp(1)
            out[t] = (torch.exp(scores - lse[:, t, None]).nan_to_num(0.0) @ keys[:, :v_dim]).to(q.dtype)
        return out, lse

    case = CASES["duplicates"]
    assert broken(judge("mqa", per_slot, case, Contract(duplicates="per_slot"))) == []
    record = judge("mqa", per_slot, case)
    assert broken(record)[0] == "mqa.keys"
    assert "exp(LSE) counts" in record.message
    assert "some count more often than they must" in record.message
    assert "mqa.lse" in broken(judge("mqa", my_mqa, case, Contract(duplicates="per_slot")))


def test_are_entries_behind_the_count_of_a_row_no_keys() -> None:
    contract = Contract(topk_length=True, unselected_rows="poison")

    def counted(q, kv, indices, scale, v_dim, topk_length):  # type: ignore[no-untyped-def]
        behind = torch.arange(indices.shape[1]) >= topk_length[:, None]
        return my_mqa(q, kv, indices.masked_fill(behind, -1), scale, v_dim)

    def uncounted(q, kv, indices, scale, v_dim, topk_length):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, indices, scale, v_dim)

    case = problem((40, 3), topk=TopkSpec(kinds=("some_empty",), holes="tail", seed=3))
    assert broken(judge("mqa", counted, case, contract)) == []
    assert broken(judge("mqa", uncounted, case, contract)) == ["mqa.keys"]


def lost_bit(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    mask = my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)
    return mask & ~(1 << 9)


def not_causal(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    return my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, None)


def short_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos):  # type: ignore[no-untyped-def]
    return my_mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos)[:, :8]


def one_row_off(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    my_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale)
    if len(dst) > 9:
        dst[9] = dst[8]


def aligned_starts(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    size, starts = src_cache.shape[1], seq_starts.clone()
    starts[1:] = starts[1:] // size * size
    my_gather(src_cache, dst, block_table, cu_seq_lens, starts, kv_cache_dtype, scale)


def too_far(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale):  # type: ignore[no-untyped-def]
    my_gather(src_cache, dst, block_table, cu_seq_lens, seq_starts, kv_cache_dtype, scale)
    dst.as_strided((1,), (1,), dst.storage_offset() + dst.numel()).fill_(0)


def base_2_merge(prefix_output, prefix_lse, suffix_output, suffix_lse):  # type: ignore[no-untyped-def]
    return my_merge(prefix_output, prefix_lse / math.log(2), suffix_output, suffix_lse / math.log(2))


def one_chunk_more(context_lens, row_budget, max_context_chunk, split_alignment):  # type: ignore[no-untyped-def]
    return my_plan(context_lens, row_budget - 8, max_context_chunk, split_alignment)


OTHER_FAULTS: dict[str, tuple[str, Callable[..., Any], str, str]] = {
    "a bit": ("mask", lost_bit, "mask.bits", "bit 9"),
    "causality": ("mask", not_causal, "mask.bits", "row"),
    "padding": ("mask", short_mask, "mask.shape", "must be"),
    "a row": ("gather", one_row_off, "gather.rows", "must be exactly"),
    "a start inside a block": ("gather", aligned_starts, "gather.rows", "must be exactly"),
    "a stray write": ("gather", too_far, "guard.dst", "behind"),
    "base": ("merge", base_2_merge, "merge.lse", "must be"),
    "budget": ("plan", one_chunk_more, "plan.chunks", "must be"),
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_is_a_fault_of_another_stage_named(fault: str) -> None:
    stage, function, check, words = OTHER_FAULTS[fault]
    case = problem((45, 20), (0, 2), (33, 4), kinds=("future",) * 3) if stage == "mask" else RAGGED
    record = judge(stage, function, case, PLAIN)
    assert check in broken(record), record.message
    assert any(words in found.message for found in record.checks if found.check == check)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_is_a_quantised_cache_gathered_right(kind: Any) -> None:
    case = RAGGED.replace(
        paging=Paging(block_size=8, kv_cache_dtype=kind, kv_cache_scale=0.5 if kind != "auto" else 1.0), force="mqa"
    )
    assert judge("gather", my_gather, case, Contract(cache_dtypes=("auto", "fp8_e4m3"))).status is Status.PASS


def test_does_the_read_out_of_a_black_box_name_the_key_that_was_missed() -> None:
    def prefill(topk: Any, **rest: Any) -> Any:
        wanted = ("row_budget", "max_context_chunk", "split_alignment", "out", "kv_cache_dtype", "kv_cache_scale")
        given = {name: value for name, value in rest.items() if name not in wanted}
        result = my_prefill(topk=torch.where(topk == 17, -1, topk), **given)
        rest["out"].copy_(result[0].flatten(1))
        return result

    case = problem((45, 3), kinds=("random",), dims=RAGGED.dims.model_copy(update={"topk": 40}))
    record = judge("prefill", prefill, case, PLAIN)
    assert broken(record) == ["prefill.keys"]
    assert "missed key 17 (word 0, bit 17)" in record.message
    assert "in the context" in record.message


def test_is_a_case_outside_the_contract_not_run() -> None:
    record = judge("attend", my_attend, RAGGED, Contract(head_dim_multiple=16))
    assert record.status is Status.NOT_RUN
    assert "outside the contract of the subject: dims" in record.message
    assert judge("attend", my_attend, RAGGED, Contract(device="cuda")).status is Status.NOT_RUN


def test_is_a_subject_that_cannot_run_here_not_accused() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        raise NotRunnable("needs SM90")

    record = judge("attend", attend)
    assert (record.status, record.message) == (Status.NOT_RUN, "needs SM90")


def test_are_no_empty_rows_and_no_empty_requests_made_where_the_contract_excludes_them() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        assert bool(allowed.any(dim=1).all())
        assert int(cu_seqlens_q.diff().min()) > 0
        assert int(cu_seqlens_k.diff().min()) > 0
        return my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)

    contract = Contract(empty_rows=False, zero_lengths=False)
    for case in (problem((20, 3), (12, 2)), problem((45, 3), (33, 1)), problem((0, 1))):
        assert judge("attend", attend, case, contract).status is Status.PASS


def test_is_a_finite_fill_right_where_the_contract_says_that_scores_lie_above_it() -> None:
    def fills(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        out, lse = torch.empty(len(q), q.shape[1], v.shape[2], dtype=q.dtype), torch.empty(q.shape[1], len(q))
        for b in range(len(cu_seqlens_q) - 1):
            rows, keys = (slice(*starts[b : b + 2].tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
            scores = scale * torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float())
            scores = scores.masked_fill(~allowed[rows, : scores.shape[2]], -1e4)
            lse[:, rows] = scores.logsumexp(dim=2)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=2).to(q.dtype).float(), v[keys].float())
        return out, lse

    contract = Contract(empty_rows=False, zero_lengths=False, lowest_score=-1e4)
    anything = dataclasses.replace(contract, lowest_score=None)
    plain = problem((20, 3), (12, 2))
    for seed in range(4):
        low = plain.replace(data=DataSpec(family="low", seed=seed))
        very_low = plain.replace(data=DataSpec(family="very_low", seed=seed))
        for case in (plain, low):
            assert judge("attend", fills, case, contract).status in (Status.PASS, Status.WATCH)
        assert judge("attend", fills, very_low, contract, repeat=False).status is Status.NOT_RUN
        assert Domain("attend", contract).fit(very_low).data == DataSpec(seed=seed)
        assert Domain("attend", anything).fit(very_low).data == very_low.data
    lowest = [plain.replace(data=DataSpec(family="very_low", seed=seed)) for seed in range(4)]
    assert any(judge("attend", fills, case, anything, repeat=False).status.is_finding for case in lowest)


@pytest.mark.parametrize("lowest", [0.0, 1.0, math.nan, "low"])
def test_is_a_lowest_score_that_is_none_refused(lowest: Any) -> None:
    with pytest.raises(ValueError, match=r"lowest_score is .* must be a negative number or None"):
        Contract(lowest_score=lowest)


@pytest.mark.parametrize("stage", ["attend", "mqa", "prefill"])
def test_does_judging_in_groups_of_heads_change_nothing(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judge(stage, RIGHT[stage], RAGGED, PLAIN)
    monkeypatch.setattr("harness.checks.attention.MAX_JUDGE_ELEMENTS", {"cpu": 1})
    parts = judge(stage, RIGHT[stage], RAGGED, PLAIN)
    assert parts.status is whole.status is Status.PASS
    assert (parts.margin_out, parts.margin_lse) == pytest.approx((whole.margin_out, whole.margin_lse))


@pytest.mark.parametrize("stage", ["attend", "mqa", "prefill"])
def test_is_a_case_without_power_called_vacuous_only_where_its_keys_were_not_read_out(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharp = RAGGED.replace(data=DataSpec(family="sharp", temperature=64.0, seed=2))
    assert judge(stage, RIGHT[stage], sharp, PLAIN).vacuous == []
    monkeypatch.setattr(f"harness.checks.stage_{stage}.MAX_READOUT_LAUNCHES", 0)
    record = judge(stage, RIGHT[stage], sharp, PLAIN)
    assert record.status is Status.PASS
    assert any(name.endswith(":dropped") for name in record.vacuous)


def test_is_a_row_of_nobody_named_as_such() -> None:
    def past_the_end(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        return my_mqa(q, kv, torch.where(indices >= len(kv), 0, indices), scale, v_dim)

    def reads_nobodys(q, kv, indices, scale, v_dim):  # type: ignore[no-untyped-def]
        spare = (kv == kv[:, :1]).all(dim=1).nonzero().flatten()  # rows of one value: nobody's, or one-hot ones of 0
        spare = spare[kv[spare, 0] != 0]
        return my_mqa(q, kv, torch.where(indices < 0, spare[0].int(), indices), scale, v_dim)

    record = judge("mqa", reads_nobodys, problem((30, 4), kinds=("some_empty",)), PLAIN)
    assert broken(record) == ["mqa.keys"]
    assert "attended a row of kv that is no key of any request" in record.message
    assert broken(judge("mqa", past_the_end, problem((30, 4), kinds=("past_end",)), PLAIN))[0] == "mqa.keys"


@pytest.mark.parametrize("stage", ["attend", "mqa", "merge"])
def test_may_a_subject_return_the_same_memory_every_time(stage: str) -> None:
    held: dict[tuple[object, ...], torch.Tensor] = {}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        key = (tuple(tensor.shape), tensor.dtype)
        return held.setdefault(key, torch.empty_like(tensor)).copy_(tensor)

    names = {
        "attend": HEADS_FIRST,
        "mqa": "q, kv, indices, scale, v_dim",
        "merge": "prefix_output, prefix_lse, suffix_output, suffix_lse",
    }[stage]
    scope: dict[str, Any] = {"right": RIGHT[stage], "kept": kept}
    exec(f"def static({names}):\n    out, lse = right({names})\n    return kept(out), kept(lse)", scope)
    for name in ("ragged", "empty rows", "duplicates"):
        assert broken(judge(stage, scope["static"], CASES[name], PLAIN)) == []
