"""Does a call that is hurt by the calls before it get noticed, and only such a call?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import optimized.mha_path
import optimized.sparse_mla
from harness.checks.case import _judge_plainly, check_case, default_device
from harness.checks.guards import DIRT, guarded
from harness.checks.link import first_bad
from harness.checks.sequence import Calls
from harness.findings.shrink import shrink
from harness.problems.parts import DataSpec, Layout, Paging, TopkSpec
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs, build_inputs
from harness.subjects.base import PrefillOutcome
from harness.subjects.ours import OurLayer
from harness.subjects.ours_calls import OurCalls
from optimized.attention.api import masked_mha
from optimized.metadata import build_prefill_metadata
from reports.records import CaseRecord, Status
from tests.harness.traced import batch

SMALL = batch((9, 3))
LARGE = batch((33, 5), (0, 2), (20, 17))
NEXT_LAYER = LARGE.replace(data=DataSpec(seed=11), topk=LARGE.topk.model_copy(update={"seed": 12}))


def after(judged: Problem, *history: Problem) -> Problem:
    return judged.replace(history=history)


def check(problem: Problem) -> CaseRecord:
    return check_case(problem, "ours[triton]")


def record_of(problem: Problem) -> CaseRecord:
    return CaseRecord(case_id=problem.case_id, subject="ours[triton]", status=Status.PASS)


def failing(record: CaseRecord) -> set[str]:
    return {check.check for check in record.checks if check.status.is_finding}


@pytest.mark.parametrize(
    "problem",
    [
        after(LARGE, SMALL),
        after(SMALL, LARGE),
        after(LARGE, NEXT_LAYER),
        after(LARGE.replace(force="masked_remap"), LARGE, SMALL.replace(scale=0.7)),
        after(LARGE.replace(force="mqa"), LARGE.replace(force="dense")),
        after(LARGE, batch((40, 2), mask_workspace_words=0, force="masked")),
    ],
)
def test_our_layer_passes_in_every_order(problem: Problem) -> None:
    record = check(problem)
    assert record.status in (Status.PASS, Status.WATCH), record.message
    assert {"guard.sequence", "guard.results"} <= {check.check for check in record.checks}


def test_a_history_changes_the_tensors_of_the_case_but_not_those_of_the_call() -> None:
    hashes = {check(problem).tensor_hash for problem in (SMALL, after(SMALL, LARGE), after(SMALL, NEXT_LAYER))}
    assert len(hashes) == 3


def test_calls_share_what_an_engine_shares() -> None:
    problems = (LARGE, NEXT_LAYER, SMALL, LARGE.replace(scale=0.7))
    device = default_device()
    subject = OurLayer("triton").sharing(problems, device)
    assert isinstance(subject, OurCalls)
    inputs = [build_inputs(problem, device) for problem in problems]
    pairs = list(zip(problems, inputs, strict=True))
    layers = [subject.layer(problem, given) for problem, given in pairs]
    metadata = [subject.metadata(problem, given) for problem, given in pairs]
    assert len({id(layer) for layer in layers}) == 3, "other weights and another scale are other layers"
    assert layers[2] is layers[0], "SMALL is another batch of the layer of LARGE"
    assert metadata[0] is metadata[1] is metadata[3]
    starts = {m.topk_mask_workspace.data_ptr() for m in metadata if m.topk_mask_workspace is not None}
    rows = {m.chunked_context.workspace.data_ptr() for m in metadata if m.chunked_context is not None}
    assert len(starts) == len(rows) == 1


def test_a_part_of_a_guarded_buffer_keeps_its_content_and_is_guarded_anew() -> None:
    buffer = guarded(1000, torch.int32, torch.device("cpu"))
    buffer.view[:10] = 7
    part = buffer.part(300)
    assert part.view[:10].tolist() == [7] * 10
    assert part.view[10:].view(torch.uint8).eq(DIRT).all()
    assert not part.check("x").status.is_finding
    buffer.view[300] = 0
    assert "behind it was written" in part.check("x").message


# planted faults: each leaves a single call alone


def scale_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is missing from a compile key."""
    seen: list[float] = []
    real: Callable[..., Any] = masked_mha

    def attend(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[8])
        return real(*args[:8], seen[0], **kwargs)

    monkeypatch.setattr(optimized.mha_path, "masked_mha", attend)


def offsets_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of as many requests use the first one's query offsets."""
    first: dict[int, Any] = {}

    def cached(*args: Any, **kwargs: Any) -> Any:
        metadata = build_prefill_metadata(*args, **kwargs)
        starts = first.setdefault(metadata.num_requests, metadata.query_start_loc)
        object.__setattr__(metadata, "query_start_loc", starts)
        return metadata

    monkeypatch.setattr("harness.subjects.ours.build_prefill_metadata", cached)


def metadata_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call leaves its metadata changed."""
    run = optimized.mha_path.MhaPath.run_masked

    def moving(self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        self.meta.query_start_loc.add_(1)

    monkeypatch.setattr(optimized.mha_path.MhaPath, "run_masked", moving)


def one_lse_buffer_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call returns its LSE in the same memory."""
    forward = optimized.sparse_mla.SparseMLAImpl.forward_mha
    held = torch.empty(4096)

    def returning(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        lse = forward(self, *args, **kwargs)
        return held[: lse.numel()].view(lse.shape).copy_(lse)

    monkeypatch.setattr(optimized.sparse_mla.SparseMLAImpl, "forward_mha", returning)


@pytest.mark.parametrize(
    ("plant", "problem", "noticed"),
    [
        (scale_of_the_first_call, after(SMALL, LARGE.replace(scale=0.4)), "attend.lse"),
        (offsets_of_the_first_call, after(SMALL, batch((9, 5))), "prefill.run"),
        (metadata_used_up, after(LARGE.replace(force="masked"), NEXT_LAYER.replace(force="masked")), "prefill.run"),
        (one_lse_buffer_for_all, after(SMALL, LARGE), "guard.results"),
    ],
)
def test_a_fault_that_needs_an_earlier_call_is_noticed_and_named(
    plant: Callable[[pytest.MonkeyPatch], None], problem: Problem, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        assert not failing(check(problem.replace(history=()))), "the call alone must be right"
    plant(monkeypatch)
    record = check(problem)
    assert noticed in failing(record), record.message
    assert "call 2 of the sequence" in record.message


def test_bits_that_depend_on_earlier_calls_are_noticed_within_all_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(self: OurCalls, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        outcome = OurLayer.prefill(self, problem, inputs, traced=traced)
        if problem == judged:
            outcome.lse.copy_(torch.nextafter(outcome.lse, torch.full_like(outcome.lse, torch.inf)))
        return outcome

    judged = batch((0, 6), (0, 3))
    monkeypatch.setattr(OurCalls, "prefill", prefill)
    sequence = Calls(OurLayer("triton"), (SMALL, judged), default_device(), _judge_plainly)
    records = [
        sequence.call(problem, build_inputs(problem, default_device()), record_of(problem))
        for problem in (SMALL, judged)
    ]
    assert first_bad(records[0]) is None
    bad = first_bad(records[1])
    assert bad is not None
    assert bad.check == "guard.sequence"
    assert "LSE depends on the calls before: 18 elements differ" in bad.message


def test_an_earlier_call_that_is_wrong_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_of_the_first_call(monkeypatch)
    record = check(after(SMALL, LARGE, LARGE.replace(scale=0.9)))
    assert record.status is Status.FAIL
    assert record.stage == "attend"
    assert record.message.startswith("call 2 of the sequence: ")


FIRST_SIZE = """
from optimized.mask import build_topk_mask
sizes = []
def mask(topk_indices_per_req, q_lens, max_q_len, max_seq_len, out, first_query_pos=None):
    sizes.append(max_seq_len)
    keys = sizes[0] if max_seq_len % 16 == sizes[0] % 16 == 0 else max_seq_len
    return build_topk_mask(topk_indices_per_req, q_lens, max_q_len, keys, out, first_query_pos)
"""


def test_a_stage_subject_meets_the_earlier_calls_too(tmp_path: Path) -> None:
    for name in ("alone", "sequence"):
        (tmp_path / f"{name}.py").write_text(FIRST_SIZE)
    judged = batch((0, 48), topk=TopkSpec(kinds=("window",)), layout=Layout())
    first = batch((0, 32), layout=Layout())
    assert check_case(judged, f"{tmp_path / 'alone.py'}:mask@mask").status is Status.PASS
    record = check_case(after(judged, first), f"{tmp_path / 'sequence.py'}:mask@mask")
    assert record.stage == "mask"
    assert record.case_id == after(judged, first).case_id


@pytest.mark.parametrize(
    ("fault", "history"),
    [
        (lambda p: p.num_tokens > 4, ()),
        (lambda p: len(p.history) > 1 and p.num_tokens > 0, ((0, 1), (0, 1))),
        (lambda p: any(h.scale != p.scale for h in p.history), ((0, 1),)),
        (lambda p: any(h.max_context_len > 30 for h in p.history) and p.max_query_len > 2, ((31, 1),)),
    ],
)
def test_a_history_shrinks_with_its_case(
    fault: Callable[[Problem], bool], history: tuple[tuple[int, int], ...]
) -> None:
    start = after(
        batch((100, 40), (7, 30), topk=TopkSpec(kinds=("sinks", "window"))),
        batch((64, 9), (50, 60), (0, 7), paging=Paging(block_size=8)),
        batch((33, 5), scale=0.7),
    )
    small = shrink(start, fault, seconds=20).problem
    assert fault(small)
    lengths = [[(r.context_len, r.query_len) for r in call.requests] for call in small.history]
    assert lengths == [[length] for length in history]
