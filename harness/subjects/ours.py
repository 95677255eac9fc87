"""Our own layer as a subject: translates a Problem into `optimized`'s arguments and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.checks.guards import GuardedBuffer, guarded
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs
from harness.problems.workspace import DEFAULT_MASK_WORKSPACE_WORDS, mask_words
from harness.subjects.base import NotRunnable, PrefillOutcome
from harness.subjects.contract import Contract
from harness.subjects.layer_domain import LayerDomain
from optimized.attention.api import masked_mha
from optimized.attention.fa4 import fa4_available
from optimized.mask import build_topk_mask
from optimized.merge import merge_attn_states
from optimized.metadata import PrefillMetadata, build_prefill_metadata
from optimized.sparse_mla import SparseMLAImpl
from optimized.trace import Trace
from reference.numerics import FA4_SM90, FA4_SM100, TRITON, TRITON_MQA, Numerics

FA4_HEAD_DIM_MULTIPLE = 8


class OurLayer:
    """`ours[triton]` or `ours[fa4]`: the whole prefill with a trace."""

    def __init__(self, attention: str, name: str | None = None) -> None:
        self.attention = attention
        self.name = name or f"ours[{attention}]"
        self.contract = Contract(
            strides="any",
            numerics=_numerics(attention),
            mqa_numerics=TRITON_MQA,
            head_dim_multiple=FA4_HEAD_DIM_MULTIPLE if attention == "fa4" else 1,
        )
        self.domain = LayerDomain("prefill", self.contract)
        self.mask_guard: GuardedBuffer | None = None
        """The mask workspace of the last call, for the guards."""
        self.trace: Trace | None = None
        """What the last traced call has done so far: all that is left of a call that raised."""

    def attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """One attention call alone (`readout.Attend`)."""
        return masked_mha(self.attention, *args, **kwargs)

    def build_mask(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """One mask alone, from the inputs of stage `mask` (`harness.checks.crowd.Build`)."""
        return build_topk_mask(**inputs)

    def merge(self, *args: torch.Tensor) -> None:
        """One merge alone (`harness.checks.merge.Merge`)."""
        merge_attn_states(*args)

    def require_runnable(self) -> None:
        """Raise NotRunnable where this machine cannot run the attention kernel."""
        if self.attention == "fa4":
            usable, why = fa4_available()
            if not usable:
                raise NotRunnable(f"{self.name} cannot run here: {why}")

    def layer(self, problem: Problem, inputs: Inputs) -> SparseMLAImpl:
        """The layer of this problem."""
        dims = problem.dims
        return SparseMLAImpl(
            num_heads=dims.heads,
            kv_lora_rank=dims.kv_lora_rank,
            qk_nope_head_dim=dims.nope,
            qk_rope_head_dim=dims.rope,
            v_head_dim=dims.v,
            scale=problem.scale,
            topk_tokens=dims.topk,
            kv_b_proj_weight=inputs.w_kv_b,
            tensor_parallel_size=dims.tensor_parallel_size,
            kv_cache_dtype=problem.paging.kv_cache_dtype,
            kv_cache_scale=problem.paging.kv_cache_scale,
            attention=self.attention,
        )

    def metadata(self, problem: Problem, inputs: Inputs) -> PrefillMetadata:
        """Metadata with a dirty, guarded mask workspace and a poisoned chunk workspace."""
        self.mask_guard = guarded(mask_words_held(problem), torch.int32, inputs.q.device)
        metadata = self.build(problem, inputs, self.mask_guard.view)
        if metadata.chunked_context is not None:
            metadata.chunked_context.workspace.fill_(torch.nan)
        return metadata

    def build(self, problem: Problem, inputs: Inputs, mask_workspace: torch.Tensor) -> PrefillMetadata:
        """Metadata of this batch."""
        return build_prefill_metadata(
            problem.query_lens,
            problem.context_lens,
            inputs.block_table,
            block_size=problem.paging.block_size,
            num_decode_tokens=problem.layout.num_decode_tokens,
            context_row_budget=problem.chunks.row_budget,
            max_context_chunk=problem.chunks.max_context_chunk,
            split_alignment=problem.chunks.split_alignment,
            context_row_width=problem.dims.latent,
            dtype=inputs.q.dtype,
            topk_mask_workspace=mask_workspace,
        )

    def sharing(self, problems: Sequence[Problem], device: torch.device) -> OurLayer:
        """This subject for a sequence of calls which share what an engine shares between calls."""
        from harness.subjects.ours_calls import OurCalls

        return OurCalls(self.attention, self.name, problems, device)

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        self.require_runnable()
        trace = self.trace = Trace() if traced else None
        with warnings.catch_warnings():
            # the layer warns that a workspace is small; here that is what the case asks for
            warnings.simplefilter("ignore", RuntimeWarning)
            lse = self.layer(problem, inputs).forward_mha(
                inputs.q,
                inputs.kv_c_normed,
                inputs.k_pe,
                inputs.cache,
                inputs.topk_buffer,
                self.metadata(problem, inputs),
                inputs.out,
                force=problem.force,
                trace=trace,
            )
        return PrefillOutcome(inputs.out, lse, trace)


def _numerics(attention: str) -> Numerics:
    if attention != "fa4":
        return TRITON
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    return FA4_SM100 if blackwell else FA4_SM90


def mask_words_held(problem: Problem) -> int:
    """Words to hold: what the problem asks for; of the default size only what its masks can touch.

    Filling and checking 128 MiB for every case would cost more than the case.
    """
    if problem.mask_workspace_words is not None:
        return problem.mask_workspace_words
    batch, longest_q, longest = len(problem.requests), problem.max_query_len, problem.max_seq_len
    return min(DEFAULT_MASK_WORKSPACE_WORDS, mask_words(batch, longest_q, longest, reserve=True))
