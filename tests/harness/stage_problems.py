"""Small problems for the tests of stage subjects."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from harness.checks.stage_case import check_stage
from harness.problems.problem import Chunks, DataSpec, Dims, Paging, Problem, Request, TopkSpec
from harness.subjects.api import StageSubject
from harness.subjects.contract import Contract
from reports.records import CaseRecord, CheckRecord

DIMS = Dims(heads=2, kv_lora_rank=16, nope=8, rope=4, v=8, topk=8)


def problem(*lengths: tuple[int, int], **fields: Any) -> Problem:
    """A problem with these (context, query) lengths, two or three context chunks where there is context."""
    requests = tuple(Request(context_len=c, query_len=q) for c, q in lengths)
    kinds = fields.pop("kinds", ("random",) * len(requests))
    given: dict[str, Any] = {
        "dims": DIMS,
        "scale": 0.25,
        "requests": requests,
        "paging": Paging(block_size=8, order="reversed", spare_blocks=1),
        "chunks": Chunks(row_budget=40, max_context_chunk=40, split_alignment=8),
        "topk": TopkSpec(kinds=kinds, seed=5),
        "data": DataSpec(seed=7),
        "force": "masked",
    }
    return Problem.model_validate(given | fields)


RAGGED = problem((45, 3), (0, 2), (33, 4))
"""Chunks, a request without context, no multiple of anything."""

RIGHT: dict[str, Callable[..., Any]] = {
    stage: getattr(import_module(f"harness.subjects.skeletons.{stage}"), f"my_{stage}")
    for stage in ("attend", "mqa", "mask", "gather", "merge", "plan", "prefill")
}
HEADS_FIRST = "q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed"
PLAIN = Contract(cache_dtypes=("auto",))
CASES = {
    "ragged": RAGGED,
    "no context": problem((0, 5), (0, 1)),
    "empty rows": problem((20, 3), (12, 2), kinds=("all_empty", "some_empty")),
    "duplicates": problem((30, 4), kinds=("duplicates",)),
    "past the end": problem((30, 4), kinds=("past_end",)),
    "future": problem((10, 6), kinds=("future",)),
    "many requests": problem(*((n % 7, n % 3) for n in range(14))),
    "low": RAGGED.replace(data=DataSpec(family="low")),
    "very low": RAGGED.replace(data=DataSpec(family="very_low", seed=4)),
    "lowest, fp16": RAGGED.replace(dtype="fp16", data=DataSpec(family="very_low", seed=5)),
    "low rows": RAGGED.replace(data=DataSpec(family="low_rows")),
    "no queries": problem((30, 0), (0, 3)),
    "fp16, exact weights": RAGGED.replace(dtype="fp16", data=DataSpec(weights="exact", family="flat")),
    "nothing": problem(),
}


def judge(
    stage: str, function: Any, case: Problem = RAGGED, contract: Contract | None = None, *, repeat: bool = True
) -> CaseRecord:
    """Judge a function on one case; by default a case whose calls are repeated."""
    if repeat:
        while int(case.case_id, 16) % 4:
            case = case.replace(data=case.data.model_copy(update={"seed": case.data.seed + 1}))
    return check_stage(case, StageSubject("it", stage, function, contract or Contract()), torch.device("cpu"))


def broken(record: CaseRecord) -> list[str]:
    """Names of the checks that accuse, in order, each once."""
    return list(dict.fromkeys(check.check for check in record.checks if check.status.is_finding))


def first(record: CaseRecord) -> CheckRecord:
    """The first record that accuses."""
    return next(check for check in record.checks if check.status.is_finding)


def judged(record: CaseRecord) -> set[str]:
    """Names of the checks that passed or failed."""
    return {check.check for check in record.checks}
