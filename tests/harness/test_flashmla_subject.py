"""Is FlashMLA judged by its own contract? A float model of its kernel stands in for it where there is no GPU."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from harness.subjects import flashmla
from harness.subjects.api import NotRunnable, SubjectError
from harness.subjects.flashmla_cases import FAMILIES, FlashMlaCase, build, draw
from harness.subjects.flashmla_judge import check
from harness.subjects.flashmla_run import first_finding, main, shrink
from reports.records import Status
from tests.harness.flashmla_model import sparse_prefill

CPU = torch.device("cpu")
HEADS = (8, 16, 32)


def small(number: int) -> FlashMlaCase:
    """A drawn case that a CPU judges in a fraction of a second."""
    case = draw(number, HEADS)
    return case.model_copy(
        update={"rows": min(case.rows, 200), "topk": min(case.topk, 256), "heads": 8, "queries": min(case.queries, 3)}
    )


@pytest.mark.parametrize("number", range(40))
def test_the_float_model_is_never_accused(number: int) -> None:
    case = small(number)
    records = check(case, sparse_prefill, CPU, repeat=True)
    finding = first_finding(records)
    assert finding is None, (case, finding)
    names = {record.check for record in records}
    assert {"mqa.shape", "mqa.lse", "mqa.out", "mqa.max_logits", "guard.repeat"} <= names
    assert ("mqa.keys" in names) == (case.family in ("counting", "naming"))


@pytest.mark.parametrize(
    ("fault", "changes", "checks"),
    [
        ("duplicates once", {"duplicates": "some"}, {"mqa.lse"}),
        ("duplicates once", {"duplicates": "one_key", "family": "counting"}, {"mqa.keys"}),
        ("index at the end is a key", {"filled": 0.5, "family": "naming"}, {"mqa.keys"}),
        ("length ignored", {"lengths": True}, {"mqa.lse"}),
        ("length off by one", {"lengths": True, "family": "flat"}, {"mqa.lse"}),
        ("sink in LSE", {"sinks": "finite"}, {"mqa.lse"}),
        ("empty LSE -inf", {"empty_rows": True, "queries": 9}, {"mqa.lse"}),
        ("LSE in base 2", {}, {"mqa.lse"}),
        ("output elsewhere", {"own_out": True}, {"guard.output"}),
    ],
)
def test_planted_faults_are_found(fault: str, changes: dict[str, object], checks: set[str]) -> None:
    case = FlashMlaCase(heads=8, queries=3, rows=200, topk=256, seed=5).model_copy(update=changes)
    assert first_finding(check(case, sparse_prefill, CPU)) is None
    finding = first_finding(check(case, partial(sparse_prefill, fault=fault), CPU))
    assert finding is not None
    assert finding.check in checks, finding


def test_a_base_2_lse_is_called_one() -> None:
    records = check(
        FlashMlaCase(heads=8, queries=3, rows=99, topk=128), partial(sparse_prefill, fault="LSE in base 2"), CPU
    )
    finding = first_finding(records)
    assert finding is not None
    assert "base-2 LSE" in finding.message


def test_a_refusal_and_a_wrong_shape_are_verdicts() -> None:
    case = FlashMlaCase(heads=8, queries=1, rows=3, topk=128)

    def refuses(*_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise RuntimeError("Unsupported h_q: 8")

    def transposed(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, largest, lse = sparse_prefill(*arguments)  # type: ignore[arg-type]
        return out, largest, lse.t()

    assert [r.status for r in check(case, refuses, CPU)] == [Status.CONTRACT]
    assert [r.status for r in check(case, transposed, CPU)] == [Status.SHAPE]


def test_a_finding_shrinks_to_a_small_case_of_the_same_check() -> None:
    case = FlashMlaCase(heads=32, queries=5, rows=200, topk=256, lengths=True, sinks="finite", empty_rows=True, seed=1)
    kernel = partial(sparse_prefill, fault="length ignored")
    less = shrink(case, kernel, CPU, HEADS)
    assert (less.heads, less.queries, less.topk) == (8, 1, 128)
    assert (less.sinks, less.empty_rows, less.lengths) == ("none", False, True)
    assert FlashMlaCase.model_validate_json(json.dumps(less.model_dump(exclude_defaults=True))) == less


def test_draws_reach_every_feature_of_the_contract() -> None:
    cases = [draw(number, HEADS) for number in range(400)]
    assert {case.family for case in cases} == set(FAMILIES)
    assert {case.heads for case in cases} == set(HEADS)
    assert {case.width for case in cases} == {576, 512}
    for name in ("empty_rows", "spread", "lengths", "own_out", "poison"):
        assert {getattr(case, name) for case in cases} == {True, False}
    assert {case.sinks for case in cases} == {"none", "finite", "infinite"}
    assert max(case.topk for case in cases) == 2048
    assert cases[7] == draw(7, HEADS)


def test_poison_lies_only_in_rows_that_no_slot_names() -> None:
    given = build(FlashMlaCase(heads=8, queries=2, rows=300, topk=128, poison=True, lengths=True), CPU)
    named = given.indices[(given.indices >= 0) & (given.indices < 300)].long()
    assert given.kv[named].isfinite().all()
    assert given.kv.isnan().any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_the_kernel_and_the_command_say_why() -> None:
    flashmla.load_kernel.cache_clear()
    with pytest.raises(NotRunnable, match="needs a CUDA GPU"):
        flashmla.load_kernel()
    result = CliRunner().invoke(main, ["--cases", "1"])
    assert result.exit_code == 2
    assert "could not run: FlashMLA needs a CUDA GPU" in result.output


def test_a_library_that_is_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flashmla.LIBRARY_VARIABLE, "/nowhere/_flashmla_C.so")
    with pytest.raises(SubjectError, match=r"is /nowhere/_flashmla_C.so, which is no file"):
        flashmla._library()


def test_the_stage_function_pads_heads_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def kernel(q, kv, indices, scale, sinks, topk_length, out):  # type: ignore[no-untyped-def]
        seen.update(q=q.shape, kv=kv.shape, indices=indices.shape, sinks=sinks.shape, last=indices[0, 0, -1].item())
        return sparse_prefill(q, kv, indices, scale, sinks, topk_length, out)

    monkeypatch.setattr(flashmla, "load_kernel", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))
    q = torch.randn(2, 3, 576).bfloat16()
    arguments = (torch.zeros(2, 5, dtype=torch.int32), 0.1, torch.tensor([5, 2], dtype=torch.int32), torch.zeros(3))
    out, largest, lse = flashmla.mqa(q, torch.randn(4, 576).bfloat16(), *arguments)
    assert seen == {"q": (2, 8, 576), "kv": (4, 1, 576), "indices": (2, 1, 128), "sinks": (8,), "last": -1}
    assert (tuple(out.shape), tuple(largest.shape), tuple(lse.shape)) == ((2, 3, 512), (2, 3), (2, 3))
    with pytest.raises(NotRunnable, match="up to 128 heads"):
        flashmla.mqa(torch.zeros(1, 129, 576).bfloat16(), torch.zeros(4, 576).bfloat16(), *arguments)
