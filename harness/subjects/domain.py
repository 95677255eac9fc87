"""The problems that are legal for a subject of one stage: its contract, and what its stage looks at.

A drawn problem is moved inside (`fit`), never thrown away, so that a narrow contract costs no draws. A given
problem (replay, shrinking) is only tested (`outside`). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.problems.names import LOWEST_SCORES
from harness.problems.parts import DataSpec, Dims, Layout, Paging, Request, TopkSpec
from harness.problems.problem import Problem
from harness.subjects.contract import Contract

PAGED_STAGES = ("gather", "prefill")
MAYBE_EMPTY = frozenset(
    {"some_empty", "all_empty", "bit_31", "one_column", "context_only", "straddle", "past_end", "future"}
)
"""Kinds of top-k rows that can leave a row without any key."""


@dataclass(frozen=True)
class Domain:
    """Legal problems of one stage under one contract."""

    stage: str
    contract: Contract

    def fit(self, problem: Problem) -> Problem:
        """The problem moved inside; a legal one comes back as it is. Always deterministic."""
        return self._legal(self.view(problem))

    def outside(self, problem: Problem) -> str | None:
        """Which parts of the problem are not legal, in words; None if all are."""
        before, after = self.view(problem), self.fit(problem)
        names = [name for name in Problem.model_fields if getattr(before, name) != getattr(after, name)]
        return ", ".join(names) or None

    def view(self, problem: Problem) -> Problem:
        """The same problem as this subject sees it.

        Gone is what its stage never sees (path, mask workspace, for most stages the cache format), and what its
        contract asks to be left out around the same numbers (strides, poison).
        """
        paging = problem.paging
        if self.stage not in PAGED_STAGES:
            paging = paging.model_copy(update={"kv_cache_dtype": "auto", "kv_cache_scale": 1.0})
        if self.contract.strides == "contiguous":
            paging = paging.model_copy(update={"cache_row_pad": 0, "table_pad": 0})
        force = "masked" if paging.kv_cache_dtype == "auto" else "mqa"
        if self.stage == "attend" and problem.expected_path() == "dense":
            force = "dense"
        changes: dict[str, Any] = {
            "paging": paging,
            "force": force,
            "mask_workspace_words": None,
            "history": tuple(map(self.view, problem.history)),
            "layout": self._layout(problem.layout),
        }
        same = all(getattr(problem, name) == value for name, value in changes.items())
        return problem if same else problem.replace(**changes)

    def _legal(self, problem: Problem) -> Problem:
        contract = self.contract
        requests = self._requests(problem)
        kept = [index for index, request in enumerate(requests) if request is not None]
        dims = self._dims(problem.dims)
        paging = self._paging(problem, dims)
        changes: dict[str, Any] = {
            "requests": tuple(request for request in requests if request is not None),
            "dims": dims,
            "dtype": problem.dtype if problem.dtype in contract.dtypes else contract.dtypes[0],
            "paging": paging,
            "data": self._data(problem.data),
            "history": tuple(map(self.fit, problem.history)),
        }
        if paging.kv_cache_dtype == "fp8_ds_mla" and changes["dtype"] != "bf16":
            changes["paging"] = paging.model_copy(update={"kv_cache_dtype": "auto"})
        changes["topk"] = self._topk(problem, kept, changes["requests"], dims)
        changes["force"] = self._force(problem, changes["paging"])
        same = all(getattr(problem, name) == value for name, value in changes.items())
        return problem if same else problem.replace(**changes)

    def _data(self, data: DataSpec) -> DataSpec:
        """Scores below what the contract allows become plain ones."""
        lowest = self.contract.lowest_score
        reaches = LOWEST_SCORES.get(data.family, 0.0)
        return data if lowest is None or reaches > lowest else data.model_copy(update={"family": "normal"})

    def _force(self, problem: Problem, paging: Paging) -> str:
        if problem.force == "dense":
            return "dense"
        return "masked" if paging.kv_cache_dtype == "auto" else "mqa"

    def _requests(self, problem: Problem) -> list[Request | None]:
        """The requests, None for each one that is left out."""
        contract = self.contract
        requests: list[Request | None] = list(problem.requests)
        if not contract.zero_lengths:
            requests = [request if request and request.query_len else None for request in requests]
        if contract.max_requests is not None:
            seen = 0
            for index, request in enumerate(requests):
                seen += request is not None
                requests[index] = request if seen <= contract.max_requests else None
        if not contract.zero_lengths and not any(requests):
            requests.append(Request(context_len=0, query_len=1))
        return requests

    def _dims(self, dims: Dims) -> Dims:
        contract = self.contract
        sizes = (dims.kv_lora_rank, dims.nope, dims.rope, dims.v)
        if contract.dims and sizes not in contract.dims:
            sizes = contract.dims[sum(sizes) % len(contract.dims)]
        lora, nope, rope, v = (_up(size, contract.head_dim_multiple) for size in sizes)
        changes = {
            "kv_lora_rank": lora,
            "nope": nope,
            "rope": rope,
            "v": v,
            "heads": _up(dims.heads, contract.heads_multiple),
            "topk": _up(dims.topk, contract.topk_multiple),
        }
        return dims.model_copy(update=changes)

    def _paging(self, problem: Problem, dims: Dims) -> Paging:
        contract, paging = self.contract, problem.paging
        changes: dict[str, Any] = {}
        kind = paging.kv_cache_dtype
        packed = (dims.kv_lora_rank, dims.rope) == (512, 64)
        if self.stage in PAGED_STAGES and (kind not in contract.cache_dtypes or (kind == "fp8_ds_mla" and not packed)):
            kind = "auto" if "auto" in contract.cache_dtypes else contract.cache_dtypes[0]
            if kind == "fp8_ds_mla" and not packed:
                raise ValueError("cache_dtypes is ('fp8_ds_mla',): dims must be sizes with kv_lora_rank 512, rope 64")
            changes = {"kv_cache_dtype": kind, "kv_cache_scale": 1.0}
        return paging.model_copy(update=changes)

    def _layout(self, layout: Layout) -> Layout:
        changes: dict[str, Any] = {}
        if self.contract.strides == "contiguous":
            changes = {"q_pad": 0, "kv_pad": 0, "out_pad": 0, "topk_pad": 0}
        if self.stage == "prefill" and self.contract.unselected_rows == "finite":
            changes["poison"] = "zero"
        return layout.model_copy(update=changes)

    def _topk(self, problem: Problem, kept: Sequence[int], requests: Sequence[Request], dims: Dims) -> TopkSpec:
        """Kinds that the contract excludes become `random`; explicit rows lose what it excludes."""
        contract, spec = self.contract, problem.topk
        changes: dict[str, Any] = {}
        if contract.topk_length and self.stage == "mqa":
            changes["holes"] = "tail"
        if spec.rows is None:
            excluded = set[str]()
            if self._no_duplicates:
                excluded.add("duplicates")
            if contract.invalid_index == "negative_only":
                excluded.add("past_end")
            if self._no_future:
                excluded.add("future")
            if not contract.empty_rows:
                excluded |= MAYBE_EMPTY
            kinds = [spec.kinds[index] if index < len(spec.kinds) else "random" for index in kept]
            changes["kinds"] = tuple("random" if kind in excluded else kind for kind in kinds)
        else:
            changes["rows"] = self._rows(problem, kept, requests)
        return spec.model_copy(update=changes)

    @property
    def _no_duplicates(self) -> bool:
        """Whether no key must be listed twice. Only stage `mqa` judges by slots."""
        duplicates = self.contract.duplicates
        return duplicates == "none" or (duplicates == "per_slot" and self.stage == "prefill")

    @property
    def _no_future(self) -> bool:
        """Whether entries behind the query's own position must not be drawn."""
        return self.contract.causality == "topk_only" and self.stage in ("mask", "prefill")

    def _rows(self, problem: Problem, kept: Sequence[int], requests: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
        """Explicit rows of the kept requests."""
        contract, old = self.contract, problem.topk.rows or ()
        rows: list[tuple[int, ...]] = []
        for index, request in zip(kept, requests, strict=True):
            for i in range(request.query_len):
                first = problem.token_offsets[index] if index < len(problem.requests) else len(old)
                row = old[first + i] if first + i < len(old) else (0,)
                limit = request.seq_len - 1 if contract.invalid_index == "negative_only" else 2**31
                if self._no_future:
                    limit = min(limit, request.context_len + i)
                row = tuple(key for key in row if key <= limit)
                if self._no_duplicates:
                    row = tuple(dict.fromkeys(row))
                if not contract.empty_rows and not any(0 <= key <= request.context_len + i for key in row):
                    row = (request.context_len + i,)
                rows.append(row)
        return tuple(rows)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
