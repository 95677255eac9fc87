"""vLLM's pieces under the stage signatures of this harness (`vllm` says what each promises).

Stage `mask` asks for more than vLLM promises, and the difference is taken out here, nowhere else: words that vLLM
leaves as they were (behind that of the last key) are cleared after the call; entries past the last key, whose effect
is undefined, become -1 before it; so does what causality excludes, which vLLM leaves to the attention kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from harness.checks.mask_mod import mod_factory
from harness.checks.plan import ExpectedChunk
from harness.problems.names import DType
from harness.subjects.api import NotRunnable, subject
from harness.subjects.contract import Contract
from harness.subjects.vllm import MergeForm, Vllm

WORD_BITS = 32


@cache
def _vllm() -> Vllm:
    return Vllm.found()


@subject(stage="plan", contract=Contract())
def plan(
    context_lens: list[int], row_budget: int, max_context_chunk: int, split_alignment: int
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """`plan_mla_context_chunks` for one rank."""
    chunks: list[ExpectedChunk] = _vllm().plan(context_lens, row_budget, max_context_chunk, split_alignment)
    return [(chunk.first, chunk.starts, chunk.lengths) for chunk in chunks]


@subject(stage="mask", contract=Contract(invalid_index="negative_only", causality="topk_only"))
def mask(
    topk_indices_per_req: list[torch.Tensor],
    q_lens: list[int],
    max_q_len: int,
    max_seq_len: int,
    out: torch.Tensor,
    first_query_pos: torch.Tensor | None,
    reserve_key_starts_word: bool,
) -> torch.Tensor:
    """`_build_topk_mask`, and the shape that `_topk_mask_shape` gives."""
    vllm = _vllm()
    shape = vllm.topk_mask_shape(len(q_lens), max_q_len, max_seq_len, reserve_key_starts_word)
    view = out[: shape[0] * shape[1] * shape[2]].view(shape)
    limits = None if first_query_pos is None else first_query_pos.tolist()
    rows = []
    for b, topk in enumerate(topk_indices_per_req):
        last = torch.full((topk.shape[0], 1), max_seq_len - 1, dtype=torch.int32, device=topk.device)
        if limits is not None:
            last = last.clamp(max=limits[b] + torch.arange(topk.shape[0], device=topk.device)[:, None].int())
        rows.append(torch.where(topk <= last, topk, -1))
    built = vllm.build_mask(rows, q_lens, max_seq_len, view)
    built[:, :, -(-max_seq_len // WORD_BITS) :] = 0
    return built


@subject(stage="mask_mod", contract=Contract())
@mod_factory
def mask_mod(offset: bool, device: torch.device) -> Callable[..., Any]:
    """`dense_mask_mod` and `offset_dense_mask_mod`, each loaded once, so that CuTe compiles it once."""
    return _mod(offset, device.type)


@cache
def _mod(offset: bool, device: str) -> Callable[..., Any]:
    return _vllm().mask_mod(offset, torch.device(device))


@cache
def _merge_of(form: MergeForm) -> Callable[..., None]:
    return _vllm().merge(form)


_TRITON_DTYPES: tuple[DType, ...] = ("bf16", "fp16") if torch.cuda.is_available() else ("fp16",)
"""Triton's interpreter has no bf16 arithmetic, and vLLM's kernel multiplies what it loads."""


@subject(stage="merge", contract=Contract(dtypes=_TRITON_DTYPES))
def merge_triton(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """The Triton form."""
    _merge_of("triton")(
        output=output,
        prefix_output=prefix_output,
        prefix_lse=prefix_lse,
        suffix_output=suffix_output,
        suffix_lse=suffix_lse,
        output_lse=output_lse,
    )


@subject(stage="merge", contract=Contract())
def merge_torch(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """The PyTorch form, which vLLM takes on CPUs."""
    _merge_of("torch")(
        output=output,
        prefix_output=prefix_output,
        prefix_lse=prefix_lse,
        suffix_output=suffix_output,
        suffix_lse=suffix_lse,
        output_lse=output_lse,
    )


@subject(stage="merge", contract=Contract(device="cuda", head_dim_multiple=8))
def merge_cuda(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor,
) -> None:
    """The CUDA form, which vLLM takes on NVIDIA GPUs where the head dim allows 16-byte copies."""
    _merge_of("cuda")(
        output=output,
        prefix_output=prefix_output,
        prefix_lse=prefix_lse,
        suffix_output=suffix_output,
        suffix_lse=suffix_lse,
        output_lse=output_lse,
    )


@subject(stage="prefill", contract=Contract(cache_dtypes=("auto",)))
def prefill(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    w_kv_b: torch.Tensor,
    topk: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The whole layer. Raises NotRunnable: says why not."""
    raise NotRunnable(_vllm().why_no_prefill())
