"""Stage `prefill`: the whole layer, output and LSE.

Twice: on the K and V that the subject really projected (chunk-aware bound, no error of the projection in it), and
on the raw inputs (the bound adds the propagated rounding of K and V). The allowed sets come from the raw top-k
rows in both, or from the positions alone on the dense path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.checks.attention import compare_attention, head_groups, rows_of_request
from harness.checks.facts import Facts
from harness.checks.power import ROWS
from harness.checks.verdict import check_shape
from optimized.trace import ProjectEvent, Trace
from reference.bound import AttendBound, AttendReference, attend_reference
from reference.bound_stages import prefill_reference
from reference.latent import project, request_latents
from reference.oracle import allowed_matrix, causal_matrix
from reference.power import Power, attend_power
from reports.records import CheckRecord, Place

STAGE = "prefill"
POWER_HEADS = 4
"""Heads from which the power of the end-to-end check is worked out."""


@dataclass(frozen=True)
class RequestView:
    """One request of a batch and its part of the result."""

    request: int
    rows: slice
    allowed: torch.Tensor
    """bool `[q_len, seq_len]`"""
    segments: list[tuple[int, int]]
    """(start, length) of each segment that holds keys of this request; the suffix is the last."""
    out: torch.Tensor
    lse: torch.Tensor


def requests_of(facts: Facts, out: torch.Tensor, lse: torch.Tensor, *, dense: bool) -> list[RequestView]:
    """Requests with at least one query; `out [T, H, v]`, `lse [H, T]`."""
    views = []
    for request, (context, query_len) in enumerate(zip(facts.context_lens, facts.query_lens, strict=True)):
        if query_len == 0:
            continue
        first = facts.token_starts[request]
        rows = slice(first, first + query_len)
        allowed = (
            causal_matrix(query_len, context, device=out.device)
            if dense
            else allowed_matrix(facts.topk_rows[rows], context)
        )
        views.append(RequestView(request, rows, allowed, segments_of(facts, request), out[rows], lse[:, rows]))
    return views


def check_result_shape(facts: Facts, out: torch.Tensor, lse: torch.Tensor) -> CheckRecord | None:
    """Shape and dtype of the final output `[T, H * v]` and LSE `[H, T]`."""
    dims, dtype = facts.problem.dims, facts.inputs.q.dtype
    wrong = check_shape(STAGE, "prefill.out", out, (facts.num_tokens, dims.heads * dims.v), dtype)
    return wrong or check_shape(STAGE, "prefill.lse", lse, (dims.heads, facts.num_tokens), torch.float32)


def projected_request(facts: Facts, trace: Trace, view: RequestView) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one request as the subject projected them, in key order."""
    events = {event.call: event for event in trace.of(ProjectEvent)}
    keys, values = [], []
    for index, chunk in enumerate(facts.plan):
        slot = view.request - chunk.first
        if 0 <= slot < len(chunk.lengths):
            start = sum(chunk.lengths[:slot])
            part = slice(start, start + chunk.lengths[slot])
            keys.append(events[f"chunk[{index}]"].k[part])
            values.append(events[f"chunk[{index}]"].v[part])
    own = events["suffix" if facts.plan else "no_context"]
    keys.append(own.k[view.rows])
    values.append(own.v[view.rows])
    return torch.cat(keys), torch.cat(values)


def check_fed(facts: Facts, trace: Trace, views: list[RequestView]) -> tuple[list[CheckRecord], Power]:
    """MHA paths: the result on the projected K and V. Also the power of these checks."""
    records: list[CheckRecord] = []
    power = Power()
    for view in views:
        k, v = projected_request(facts, trace, view)
        place = rows_of_request(view.request, view.rows.start)
        rows, widths = view.rows.stop - view.rows.start, (k.shape[2], v.shape[2])
        for group in head_groups(rows, k.shape[0], k.shape[1], widths, k.device):
            exact = attend_reference(
                q=facts.inputs.q[view.rows, group],
                k=k[:, group],
                v=v[:, group],
                allowed=view.allowed,
                scale=facts.problem.scale,
                segments=view.segments,
                numerics=facts.numerics,
            )
            power += attend_power(
                q=facts.inputs.q[view.rows, group],
                k=k[:, group],
                v=v[:, group],
                allowed=view.allowed,
                scale=facts.problem.scale,
                reference=exact,
                max_rows=ROWS,
            )
            out, lse = view.out[:, group], view.lse[group]
            records += compare_attention(STAGE, "prefill.fed", out, lse, exact, place, first_head=group.start)
    return records, power


def raw_reference(facts: Facts, path: str, *, chunked: bool = True) -> AttendReference:
    """Exact result on the raw inputs; the bound holds the propagated rounding of K and V.

    `chunked`: the context is attended in the planned chunks and merged; otherwise all keys of a request at once.
    A full-size batch is worked out group of heads by group of heads, and without the named terms.
    """
    dims = facts.problem.dims
    widths = (dims.latent, dims.kv_lora_rank) if path == "mqa" else (dims.qk, dims.v)
    rows = max(facts.query_lens, default=0)
    groups = head_groups(rows, max(facts.seq_lens, default=0), dims.heads, widths, facts.inputs.q.device)
    if len(groups) <= 1:
        return _raw_of_heads(facts, path, slice(0, dims.heads), chunked=chunked, keep_terms=True)
    parts = [_raw_of_heads(facts, path, group, chunked=chunked, keep_terms=False) for group in groups]
    return AttendReference(
        torch.cat([part.out for part in parts], dim=1),
        torch.cat([part.lse for part in parts]),
        AttendBound(
            torch.cat([part.bound.tol_out for part in parts], dim=1),
            torch.cat([part.bound.tol_lse for part in parts]),
        ),
    )


def _raw_of_heads(facts: Facts, path: str, group: slice, *, chunked: bool, keep_terms: bool) -> AttendReference:
    problem, inputs = facts.problem, facts.inputs
    dims, paging = problem.dims, problem.paging
    mqa = path == "mqa"
    weight = inputs.w_kv_b.view(-1, dims.heads, dims.nope + dims.v)[:, group]
    return prefill_reference(
        q=inputs.q[:, group],
        kv_c_normed=inputs.kv_c_normed,
        k_pe=inputs.k_pe,
        cache=inputs.cache,
        block_table=inputs.block_table,
        w_kv_b=weight.flatten(1),
        topk_rows=facts.topk_rows,
        query_lens=facts.query_lens,
        context_lens=facts.context_lens,
        num_heads=group.stop - group.start,
        nope=dims.nope,
        rope=dims.rope,
        v_head_dim=dims.v,
        scale=problem.scale,
        numerics=facts.mqa_numerics if mqa else facts.numerics,
        dense=path == "dense",
        kv_cache_dtype=paging.kv_cache_dtype,
        kv_cache_scale=paging.kv_cache_scale,
        path="mqa" if mqa else "mha",
        segments=[
            segments_of(facts, request) if chunked else [(0, seq_len)] for request, seq_len in enumerate(facts.seq_lens)
        ],
        exact_projection=problem.data.weights == "exact",
        keep_terms=keep_terms,
    )


def check_raw(facts: Facts, out: torch.Tensor, lse: torch.Tensor, exact: AttendReference) -> list[CheckRecord]:
    """The result `out [T, H, v]`, `lse [H, T]` against `raw_reference`."""

    def place(token: int) -> Place:
        request = facts.request_of(token)
        return Place(request=request, row=token - facts.token_starts[request], token=token)

    return compare_attention(STAGE, "prefill.raw", out, lse, exact, place)


def raw_power(facts: Facts, exact: AttendReference, views: list[RequestView]) -> Power:
    """Power of `check_raw`, `exact` being its reference: from a few heads, whose K and V are projected here."""
    inputs, dims, paging = facts.inputs, facts.problem.dims, facts.problem.paging
    heads = min(dims.heads, POWER_HEADS)
    weight = inputs.w_kv_b.view(-1, dims.heads, dims.nope + dims.v)[:, :heads].flatten(1)
    power = Power()
    for view in views:
        latents = request_latents(
            kv_c_normed=inputs.kv_c_normed[view.rows],
            k_pe=inputs.k_pe[view.rows],
            cache=inputs.cache,
            block_table_row=inputs.block_table[view.request],
            context_len=facts.context_lens[view.request],
            rope=dims.rope,
            kv_cache_dtype=paging.kv_cache_dtype,
            kv_cache_scale=paging.kv_cache_scale,
        )
        k, v = project(latents, weight, heads, dims.nope, dims.v)
        bound = AttendBound(exact.bound.tol_out[view.rows, :heads], exact.bound.tol_lse[:heads, view.rows])
        power += attend_power(
            q=inputs.q[view.rows, :heads],
            k=k,
            v=v,
            allowed=view.allowed,
            scale=facts.problem.scale,
            reference=AttendReference(exact.out[view.rows, :heads], exact.lse[:heads, view.rows], bound),
            max_rows=ROWS,
        )
    return power


def segments_of(facts: Facts, request: int) -> list[tuple[int, int]]:
    """(start, length) of the segments that hold keys of one request, in merge order: chunks, then the suffix."""
    segments = [
        (chunk.starts[request - chunk.first], chunk.lengths[request - chunk.first])
        for chunk in facts.plan
        if chunk.first <= request < chunk.first + len(chunk.lengths)
    ]
    return [*segments, (facts.context_lens[request], facts.query_lens[request])]
