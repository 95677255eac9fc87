"""Planted faults: our layer with one of its functions replaced while a batch runs.

Unlike the mutants, which patch the text of kernels in a fresh process, these are quick: each takes one prefill in
this process. A fault goes on through the pipeline as a real one would, so that later stages see its consequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from harness.problems.tensors import Inputs
from harness.subjects.base import PrefillOutcome

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""The function under that name -> the faulty one."""


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    name: str
    batch: str
    """Name of the batch that shows it (`tests.harness.traced.PROBLEMS`)."""
    stages: tuple[str, ...]
    """Stages that name it rightly."""
    patches: tuple[tuple[str, Wrap], ...] = ()
    after: Callable[[PrefillOutcome, Inputs], PrefillOutcome] | None = None
    """What happens to the result and the inputs once the layer has run."""
    names_key: bool = False
    """The message must name row and key."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in the layer inside this context."""
        with contextlib.ExitStack() as stack:
            for target, wrap in self.patches:
                module_name, attribute = target.rsplit(".", 1)
                module = import_module(module_name)
                stack.enter_context(mock.patch.object(module, attribute, wrap(getattr(module, attribute))))
            yield


def on_result(change: Callable[[Any], Any]) -> Wrap:
    """The function's result, changed."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: change(right(*args, **kwargs))

    return wrap


def on_arguments(change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Wrap:
    """The function called with other arguments."""

    def wrap(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = change(*args, **kwargs)
            return right(*args, **kwargs)

        return wrong

    return wrap


def in_place(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of a tensor in place, as a function that returns it."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        change(tensor)
        return tensor

    return apply


def kernel(wrap: Wrap) -> tuple[tuple[str, Wrap], ...]:
    """An attention kernel with a fault: in the layer, and where it is called alone by a read-out."""
    return (("optimized.mha_path.masked_mha", wrap), ("harness.subjects.ours.masked_mha", wrap))


def on_out(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    return on_result(lambda result: (change(result[0]), result[1]))


def on_lse(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    return on_result(lambda result: (result[0], change(result[1])))


def on_mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    """An attention kernel that reads its mask wrongly."""

    def arguments(
        *args: Any, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "mask": None if mask is None else change(mask.clone())}

    return on_arguments(arguments)


# plan


def _start_of_second_chunk(plan: Any) -> Any:
    wrong = replace(plan.chunks[1], starts=plan.chunks[1].starts - 4)
    return replace(plan, chunks=[plan.chunks[0], wrong, *plan.chunks[2:]])


def _all_positions_later(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    contexts = args[2]
    return args, {**kwargs, "first_query_pos": torch.tensor([c + 1 for c in contexts], dtype=torch.int32)}


def _clear_bit_31(mask: torch.Tensor) -> torch.Tensor:
    """Everything but the reserved words loses its sign bit."""
    starts = mask[:, 0, -1].clone()
    mask &= 0x7FFFFFFF
    mask[:, 0, -1] = starts
    return mask


def _move_key_starts(mask: torch.Tensor) -> torch.Tensor:
    mask[:, 0, -1] += 1
    return mask


def _truncated(exact: torch.Tensor) -> torch.Tensor:
    words: torch.Tensor = exact.float().view(torch.int32) & -65536
    return words.view(torch.float32).to(torch.bfloat16)


def _truncating_projection(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(kv_c: Any, k_pe: Any, w: Any, heads: int, nope: int, v_dim: int) -> Any:
        k, _ = right(kv_c, k_pe, w, heads, nope, v_dim)
        exact = (kv_c.double() @ w.double()).view(-1, heads, nope + v_dim)
        return k, _truncated(exact[..., nope:])

    return wrong


def _copying_continuation(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(output: Any, lse: Any, chunk: Any, chunk_output: Any, chunk_lse: Any) -> None:
        right(output, lse, replace(chunk, continuation_token_end=chunk.token_slice.start), chunk_output, chunk_lse)

    return wrong


def _merge_in_base_two(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(out: Any, a_out: Any, a_lse: Any, b_out: Any, b_lse: Any, out_lse: Any = None, **more: Any) -> None:
        right(out, a_out, a_lse, b_out, b_lse * 1.4426950408889634, out_lse, **more)

    return wrong


def _merge_keeps_largest_lse(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(out: Any, a_out: Any, a_lse: Any, b_out: Any, b_lse: Any, out_lse: Any = None, **more: Any) -> None:
        right(out, a_out, a_lse, b_out, b_lse, out_lse, **more)
        if out_lse is not None:
            out_lse.copy_(torch.maximum(a_lse, b_lse))

    return wrong


def _merge_two_percent_high(right: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(out: Any, a_out: Any, a_lse: Any, b_out: Any, b_lse: Any, out_lse: Any = None, **more: Any) -> None:
        right(out, a_out, a_lse, b_out, b_lse, out_lse, **more)
        both = (a_lse.isfinite() & b_lse.isfinite()).T  # the others are copies, and exact
        out[both] = out[both] * 1.02

    return wrong


def _forced_mqa(path: Any) -> Any:
    return type(path).MQA


def _spill(outcome: PrefillOutcome, inputs: Inputs) -> PrefillOutcome:
    first, tokens = inputs.problem.layout.num_decode_tokens, inputs.problem.num_tokens
    inputs.buffers["out"][first + tokens, 0] = 1.0
    return outcome


def _overwrite_cache(outcome: PrefillOutcome, inputs: Inputs) -> PrefillOutcome:
    inputs.buffers["cache"][0, 0, 0] = 3.0
    return outcome


def _swap_heads_at_the_end(outcome: PrefillOutcome, inputs: Inputs) -> PrefillOutcome:
    dims = inputs.problem.dims
    heads = outcome.out.view(-1, dims.heads, dims.v)[:, [1, 0]]
    return replace(outcome, out=heads.reshape(outcome.out.shape))


FAULTS: tuple[Fault, ...] = (
    Fault(
        "plan_start",
        "global_mask",
        ("plan",),
        (("optimized.metadata.build_chunked_context", on_result(_start_of_second_chunk)),),
    ),
    Fault(
        "plan_last_chunk_lost",
        "remap",
        ("plan",),
        (("optimized.metadata.build_chunked_context", on_result(lambda plan: replace(plan, chunks=plan.chunks[:-1]))),),
    ),
    Fault("path_mqa", "no_context", ("dispatch",), (("optimized.dispatch.choose_path", on_result(_forced_mqa)),)),
    Fault(
        "slice_rolled",
        "global_mask",
        ("slice",),
        (("optimized.sparse_mla.slice_topk_per_req", on_result(lambda rows: [x.roll(1, dims=0) for x in rows])),),
    ),
    Fault(
        "remap_off_by_one",
        "remap",
        ("remap",),
        (
            (
                "optimized.mha_path.remap_topk_to_ranges",
                on_result(lambda rows: [torch.where(x > 0, x - 1, x) for x in rows]),
            ),
        ),
    ),
    Fault(
        "mask_without_bit_31",
        "bit_31_remap",
        ("mask",),
        (("optimized.mha_path.build_topk_mask", on_result(in_place(lambda mask: mask.bitwise_and_(0x7FFFFFFF)))),),
        names_key=True,
    ),
    Fault(
        "mask_causal_off_by_one",
        "global_mask",
        ("mask",),
        (("optimized.mha_path.try_build_global_mask", on_arguments(_all_positions_later)),),
        names_key=True,
    ),
    Fault(
        "mask_padding_dirty",
        "no_context",
        ("mask",),
        (("optimized.mha_path.build_topk_mask", on_result(in_place(lambda mask: mask[:, -1, 0].fill_(64)))),),
        names_key=True,
    ),
    Fault(
        "gather_shifted",
        "global_mask",
        ("gather",),
        (
            (
                "optimized.mha_path.gather_and_maybe_dequant_cache",
                lambda right: lambda cache, rows, *rest: (right(cache, rows, *rest), rows.copy_(rows.roll(1, dims=0))),
            ),
        ),
    ),
    Fault(
        "gather_without_scale",
        "fp8",
        ("gather",),
        (
            (
                "optimized.mha_path.gather_and_maybe_dequant_cache",
                on_arguments(lambda *args: ((*args[:7], 1.0, *args[8:]), {})),
            ),
        ),
    ),
    Fault(
        "projection_heads_swapped",
        "global_mask",
        ("project",),
        (("optimized.mha_path.project_kv", on_result(lambda kv: (kv[0], kv[1].flip(1).contiguous()))),),
    ),
    Fault(
        "projection_truncates", "one_chunk", ("project",), (("optimized.mha_path.project_kv", _truncating_projection),)
    ),
    Fault(
        "key_start_off_by_one",
        "global_mask",
        ("chunk_loop",),
        (("optimized.mha_path.set_key_starts", on_arguments(lambda mask, starts: ((mask, starts + 1), {}))),),
    ),
    Fault("kernel_without_bit_31", "bit_31", ("mask_mod",), kernel(on_mask(_clear_bit_31)), names_key=True),
    Fault(
        "kernel_key_start_off_by_one",
        "global_mask",
        ("mask_mod",),
        kernel(on_mask(_move_key_starts)),
        names_key=True,
    ),
    Fault("kernel_lse_base_2", "dense", ("attend",), kernel(on_lse(lambda lse: lse * 1.4426950408889634))),
    Fault("kernel_lse_rounded", "global_mask", ("attend",), kernel(on_lse(lambda lse: lse.half().float()))),
    Fault("kernel_lse_slightly_high", "no_context", ("attend",), kernel(on_lse(lambda lse: lse + 4e-5))),
    Fault("kernel_lse_transposed", "one_request", ("attend",), kernel(on_lse(lambda lse: lse.T.reshape(lse.shape)))),
    Fault("kernel_row_zeroed", "remap", ("attend",), kernel(on_out(in_place(lambda out: out[-1].zero_())))),
    Fault("kernel_nan", "fp16", ("attend",), kernel(on_out(in_place(lambda out: out[0, 0, 0].fill_(torch.nan))))),
    Fault("kernel_value_columns_swapped", "exact", ("attend",), kernel(on_out(lambda out: out.flip(2).contiguous()))),
    Fault("kernel_two_percent_high", "one_chunk", ("attend",), kernel(on_out(lambda out: out * 1.02))),
    Fault(
        "empty_row_not_empty",
        "empty_rows",
        ("attend",),
        kernel(on_lse(lambda lse: torch.where(lse.isinf(), -1e30, lse))),
    ),
    Fault(
        "continuation_copied",
        "global_mask",
        ("merge",),
        (("optimized.mha_path.accumulate_context_chunk", _copying_continuation),),
    ),
    Fault("merge_base_2", "one_chunk", ("merge",), (("optimized.mha_path.merge_attn_states", _merge_in_base_two),)),
    Fault(
        "merge_two_percent_high",
        "one_chunk",
        ("merge",),
        (("optimized.mha_path.merge_attn_states", _merge_two_percent_high),),
    ),
    Fault(
        "merge_largest_lse",
        "global_mask",
        ("merge",),
        (("optimized.mha_path.merge_attn_states", _merge_keeps_largest_lse),),
    ),
    Fault(
        "absorb_heads_swapped",
        "mqa",
        ("absorb",),
        (("optimized.mqa_path.absorb_query", on_result(lambda q: q.flip(1).contiguous())),),
    ),
    Fault(
        "slots_off_by_one",
        "mqa",
        ("slots",),
        (("optimized.mqa_path.context_slots", on_result(lambda s: torch.where(s > 0, s - 1, s))),),
    ),
    Fault(
        "mqa_lse_off",
        "mqa_no_context",
        ("mqa",),
        (("optimized.mqa_path.triton_sparse_mqa", on_lse(lambda lse: lse + 0.6931471805599453)),),
    ),
    Fault(
        "w_uv_heads_swapped",
        "mqa",
        ("unproject",),
        (("optimized.mqa_path.split_weight", on_result(lambda w: (w[0], w[1].flip(0)))),),
    ),
    Fault("heads_swapped_at_the_end", "global_mask", ("prefill",), after=_swap_heads_at_the_end),
    Fault("output_spills", "dense", ("guard",), after=_spill),
    Fault("input_overwritten", "global_mask", ("guard",), after=_overwrite_cache),
)
"""Spread over all stages; each names the batch that shows it."""
