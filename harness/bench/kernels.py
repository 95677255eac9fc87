"""Timings of the pieces and of whole prefills, by device events on a GPU and by the clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.checks.case import default_device
from harness.problems.problem import Chunks, DataSpec, Dims, Paging, Problem, Request, TopkSpec
from harness.problems.tensors import Inputs, build_inputs
from harness.subjects.ours import OurLayer
from optimized.trace import AttendEvent, Trace

REPEATS = 10


@dataclass(frozen=True)
class Timing:
    """Median of some repeats."""

    what: str
    shape: str
    milliseconds: float
    note: str = ""


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of `call` in ms after two warm-up calls."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(float(start.elapsed_time(end)))
        else:
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def published_problem(heads: int, query: int, context: int, topk: int, budget: int) -> Problem:
    """One request of a published model: 512/128/64/128, `heads` on this rank."""
    return Problem(
        dims=Dims(heads=heads, kv_lora_rank=512, nope=128, rope=64, v=128, topk=topk),
        scale=192**-0.5,
        requests=(Request(context_len=context, query_len=query),),
        paging=Paging(block_size=64, order="permuted"),
        chunks=Chunks(row_budget=budget, max_context_chunk=budget, split_alignment=16),
        topk=TopkSpec(kinds=("random",), seed=1),
        data=DataSpec(seed=1),
    )


def shapes(device: torch.device) -> list[tuple[int, int, int, int, int]]:
    """(heads, query, context, top-k, chunk rows) that are timed on this device."""
    if device.type == "cuda":
        return [(16, 2048, 8192, 2048, 8192), (128, 2048, 8192, 2048, 8192), (128, 8192, 0, 2048, 8192)]
    return [(2, 16, 48, 16, 32), (2, 24, 0, 16, 32)]


def time_prefills(attentions: list[str]) -> Iterator[Timing]:
    """Whole prefills by path, then each attention call of the masked path alone."""
    device = default_device()
    for heads, query, context, topk, budget in shapes(device):
        problem = published_problem(heads, query, context, topk, budget)
        inputs = build_inputs(problem, device)
        name = f"H={heads} q={query} ctx={context} top-k={topk}"
        for attention in attentions:
            subject = OurLayer(attention)
            for force in ("masked", "masked_remap", "dense", "mqa"):
                if (force == "masked_remap" and not context) or (force == "mqa" and attention != attentions[0]):
                    continue
                yield Timing(
                    f"prefill {force} [{attention}]", name, _prefill_ms(subject, problem, inputs, force, device)
                )
            yield from _attention_calls(subject, problem, inputs, name, device)


def _prefill_ms(subject: OurLayer, problem: Problem, inputs: Inputs, force: str, device: torch.device) -> float:
    forced = problem.replace(force=force)
    layer, metadata = subject.layer(forced, inputs), subject.metadata(forced, inputs)
    return median_ms(
        lambda: layer.forward_mha(
            inputs.q,
            inputs.kv_c_normed,
            inputs.k_pe,
            inputs.cache,
            inputs.topk_buffer,
            metadata,
            inputs.out,
            force=forced.force,
        ),
        device,
    )


def _attention_calls(
    subject: OurLayer, problem: Problem, inputs: Inputs, name: str, device: torch.device
) -> Iterator[Timing]:
    outcome = subject.prefill(problem.replace(force="masked"), inputs, traced=True)
    trace = outcome.trace or Trace()
    for event in trace.of(AttendEvent):
        offsets = [
            torch.tensor(starts, dtype=torch.int32, device=device)
            for starts in (event.cu_seqlens_q, event.cu_seqlens_k)
        ]

        def call(event: AttendEvent = event, offsets: list[torch.Tensor] = offsets) -> object:
            return subject.attend(
                event.q,
                event.k,
                event.v,
                *offsets,
                event.max_seqlen_q,
                event.max_seqlen_k,
                event.scale,
                mask=event.mask,
                offset=event.offset,
                causal=event.causal,
            )

        milliseconds = median_ms(call, device)
        width = event.q.shape[2] + event.v.shape[2]
        products = 2 * event.q.shape[0] * event.k.shape[0] * event.q.shape[1] * width
        rate = f"{products / milliseconds / 1e9:.0f} TFLOP/s of the unmasked products"
        yield Timing(f"attention {event.call} [{subject.attention}]", name, milliseconds, rate)
