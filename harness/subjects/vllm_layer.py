"""vLLM's masked prefill as a whole, with the kernels that need Blackwell replaced: `vllm[layer]`.

What runs is vLLM's own host code: top-k slices, choice of the mask, remap, mask builds by its Triton kernels, chunk
plan and chunk metadata, chunk loop, running partials, final merge. Replaced are

* FA4: by our Triton attention over exactly the keys that the given mask, key starts and `causal` select (in vLLM's
  copy of FA4 `causal` holds beside a mask mod: both must allow a key). `vllm[mods]` asks vLLM's own mask mods which
  keys these are, as FA4 on Blackwell would; the others take them from the mask itself;
* the CUDA gather: by vLLM's own PyTorch form for CPUs;
* the CUDA merge: by vLLM's PyTorch form on a CPU, its Triton form on a GPU;
* `kv_b_proj`: by one matrix product, rounded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from harness.checks.attend import unpack_bits
from harness.checks.mask_mod_readout import read_mask_mod
from harness.subjects.api import subject
from harness.subjects.contract import Contract
from harness.subjects.vllm import Vllm
from optimized.attention.api import masked_mha

_COMMON = "model_executor/layers/attention/mla_attention.py"
_LAYER = "model_executor/layers/attention/sparse_mla_attention.py"
_METHODS = (
    "_slice_topk_per_req",
    "_remap_topk_to_ranges",
    "_project_kv",
    "_try_build_global_mask",
    "_run_masked_mha",
    "_compute_context_mha",
    "forward_mha",
)
_STATIC = ("_slice_topk_per_req", "_remap_topk_to_ranges", "_try_build_global_mask")
_WORD_BITS = 32


def _to_device(data: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """In place of vLLM's pinned copy."""
    return torch.as_tensor(data).to(dtype).to(device)


def _unlike_the_segment(*_: Any) -> None:
    """Stands for `offset_dense_mask_mod`: the call adds the key start of the mask's reserved word."""


def _like_the_segment(*_: Any) -> None:
    """Stands for `dense_mask_mod`."""


def attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    return_softmax_lse: bool,
    mask_mod: Callable[..., None],
    aux_tensors: list[torch.Tensor],
    causal: bool,
    **_: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What vLLM asks of FA4: varlen attention over the keys that mask and `causal` both allow.

    The keys are read from the mask one request at a time, and packed anew for our kernel.
    """
    mask = aux_tensors[0]
    q_lens, k_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    words = 4 * -(-max_seqlen_k // (4 * _WORD_BITS))
    own = torch.zeros(len(q_lens), mask.shape[1], words, dtype=torch.int32, device=mask.device)
    for b, allowed in enumerate(_selected(mask_mod, mask, q_lens, k_lens)):
        if causal:
            last = k_lens[b] - q_lens[b] + torch.arange(q_lens[b], device=mask.device)
            allowed = allowed & (torch.arange(k_lens[b], device=mask.device) <= last[:, None])
        own[b, : q_lens[b]] = _packed(allowed, words)
    out, lse = masked_mha(
        "triton", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
        mask=own, offset=False, causal=False,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _selected(mask_mod: Any, mask: torch.Tensor, q_lens: list[int], k_lens: list[int]) -> list[torch.Tensor]:
    """For each request bool `[q_len, k_len]`: by vLLM's own mod, or by what it stands for."""
    if hasattr(mask_mod, "__vec_size__"):
        return [seen.to(mask.device) for seen in read_mask_mod(mask_mod, mask, q_lens, k_lens, None, "sm100")]
    starts = mask[:, 0, -1].tolist() if mask_mod is _unlike_the_segment else [0] * len(q_lens)
    return [unpack_bits(mask[b, : q_lens[b]], starts[b], k_lens[b]) for b in range(len(q_lens))]


def _packed(allowed: torch.Tensor, words: int) -> torch.Tensor:
    bits = torch.nn.functional.pad(allowed, (0, words * _WORD_BITS - allowed.shape[1])).long()
    weights = torch.ones(_WORD_BITS, dtype=torch.int64, device=bits.device) << torch.arange(
        _WORD_BITS, device=bits.device
    )
    whole = (bits.view(len(bits), words, _WORD_BITS) * weights).sum(dim=2)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


@dataclass(frozen=True)
class VllmLayer:
    """The host code of one vLLM's masked prefill."""

    vllm: Vllm
    on_gpu: bool
    own_mods: bool
    """Ask vLLM's mask mods which keys a call attends."""

    @cached_property
    def common(self) -> ModuleType:
        """Chunk metadata and running partials."""
        names = [
            "_ContextChunkPlan",
            "plan_mla_context_chunks",
            "MLACommonPrefillMetadata",
            "build_mla_chunked_context_metadata",
            "neutralize_empty_context_partials",
            "init_mla_context_partial",
            "accumulate_mla_context_chunk",
        ]
        uses = {
            "dataclass": dataclass,
            "round_down": lambda value, unit: value // unit * unit,
            "cdiv": lambda a, b: -(-a // b),
            "itertools": itertools,
            "math": math,
            "np": np,
            "torch": torch,
            "PIN_MEMORY": False,
            "async_tensor_h2d": _to_device,
            "merge_attn_states": self.merge,
        }
        return self.vllm.source.load(_COMMON, names, uses)

    @cached_property
    def merge(self) -> Callable[..., None]:
        return self.vllm.merge("triton" if self.on_gpu else "torch")

    @cached_property
    def layer(self) -> type:
        """A class with vLLM's methods and nothing else of its class."""
        pieces = self.vllm.layer_module
        gather = self.vllm.source.load("_custom_ops.py", ["gather_mla_context_cache_cpu"], {"torch": torch})

        def gather_rows(*, token_to_seq: Any, num_tokens: int, kv_cache_dtype: str, scale: Any, **given: Any) -> None:
            given["starts"] = given.pop("seq_starts")
            gather.gather_mla_context_cache_cpu(**given)

        device = torch.device("cuda" if self.on_gpu else "cpu")
        mods = [self.vllm.mask_mod(offset, device) for offset in (False, True)] if self.own_mods else None
        uses = {
            "torch": torch,
            "math": math,
            "ops": SimpleNamespace(gather_and_maybe_dequant_cache=gather_rows),
            "_topk_mask_shape": pieces._topk_mask_shape,
            "_build_topk_mask": pieces._build_topk_mask,
            "dense_mask_mod": mods[0] if mods else _like_the_segment,
            "offset_dense_mask_mod": mods[1] if mods else _unlike_the_segment,
            "flash_attn_varlen_func": attention,
            "init_mla_context_partial": self.common.init_mla_context_partial,
            "accumulate_mla_context_chunk": self.common.accumulate_mla_context_chunk,
            "merge_attn_states": self.merge,
        }
        module = self.vllm.source.load(_LAYER, [f"SparseMLACommonImpl.{name}" for name in _METHODS], uses)
        methods = {name: getattr(module, name) for name in _METHODS}
        methods |= {name: staticmethod(methods[name]) for name in _STATIC}
        return type("SparseMLACommonImpl", (), methods)

    def chunks(
        self,
        context_lens: list[int],
        query_starts: torch.Tensor,
        workspace: torch.Tensor,
        max_context_chunk: int,
        split_alignment: int,
    ) -> Any:
        """vLLM's chunk metadata, planned by its planner with this case's limits."""
        common = self.common
        if "planner" not in vars(common):
            common.planner = common.plan_mla_context_chunks  # type: ignore[attr-defined]

        def plan(lens: list[int], budget: int, _: int, alignment: int, rows: Callable[[int], int]) -> Any:
            return common.planner(lens, budget, max_context_chunk, alignment, rows)

        common.plan_mla_context_chunks = plan  # type: ignore[attr-defined]
        return common.build_mla_chunked_context_metadata(
            context_lens_cpu=torch.tensor(context_lens, dtype=torch.int32),
            prefill_query_start_loc_cpu=query_starts.cpu(),
            chunked_prefill_workspace=workspace,
            chunked_prefill_workspace_size=workspace.shape[0],
            block_size=split_alignment,
            align_chunk_to_block=True,
            device=workspace.device,
            dcp_world_size=1,
            dcp_local_block_size=1,
            dcp_virtual_block_size=1,
        )


@cache
def _loaded(on_gpu: bool, own_mods: bool) -> VllmLayer:
    return VllmLayer(Vllm.found(), on_gpu, own_mods)


def _concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Keys of each head: its own part, then the part that all heads share."""
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], dim=-1)


CONTRACT = Contract(
    cache_dtypes=("auto",),
    invalid_index="negative_only",
    zero_lengths=False,
    lse_base=None,
)


def _prefill(
    global_mask: bool,
    own_mods: bool,
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    w_kv_b: torch.Tensor,
    topk: torch.Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    nope: int,
    rope: int,
    v_dim: int,
    row_budget: int,
    max_context_chunk: int,
    split_alignment: int,
    out: torch.Tensor,
) -> None:
    loaded = _loaded(q.is_cuda, own_mods)
    device, heads = q.device, q.shape[1]
    seq_lens = [c + n for c, n in zip(context_lens, query_lens, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=device)
    workspace = torch.full((row_budget, kv_c_normed.shape[1] + rope), torch.nan, dtype=q.dtype, device=device)
    chunked = loaded.chunks(context_lens, starts, workspace, max_context_chunk, split_alignment)
    vllm = loaded.vllm
    longest = [max(query_lens, default=0)]
    if chunked is not None:
        longest.append(max(chunk.max_seq_len for chunk in chunked.chunks))
    shape = vllm.topk_mask_shape(len(query_lens), longest[0], max(longest), False)
    if global_mask:
        shape = vllm.topk_mask_shape(len(query_lens), longest[0], max(seq_lens, default=0), True)
    words = math.prod(shape)
    layer = loaded.layer()
    vars(layer).update(
        num_heads=heads,
        qk_nope_head_dim=nope,
        v_head_dim=v_dim,
        kv_lora_rank=kv_c_normed.shape[1],
        scale=scale,
        dcp_world_size=1,
        kv_cache_dtype="auto",
        masked_mha_available=True,
        _sparse_mla_force_masked_mha=True,
        topk_indices_buffer=topk,
        kv_b_proj=lambda x: ((x.float() @ w_kv_b.float()).to(x.dtype),),
        _concat_k_nope_k_pe=_concat,
    )
    prefill = loaded.common.MLACommonPrefillMetadata(
        block_table=block_table,
        query_start_loc=starts,
        max_query_len=longest[0],
        chunked_context=chunked,
        query_lens_cpu=torch.tensor(query_lens, dtype=torch.int32),
        topk_mask_workspace=torch.full((words,), 0x5A5A5A5A, dtype=torch.int32, device=device),
    )
    metadata = SimpleNamespace(
        prefill=prefill,
        prefill_max_seq_len=max(seq_lens, default=0),
        topk_tokens=topk.shape[1],
        num_decode_tokens=0,
    )
    layer.forward_mha(q, kv_c_normed, k_pe, cache, metadata, None, out)


prefill_global = subject(stage="prefill", contract=CONTRACT)(partial(_prefill, True, False))
"""With a workspace that holds the global mask."""
prefill_remap = subject(stage="prefill", contract=CONTRACT)(partial(_prefill, False, False))
"""With a workspace that holds the masks of single calls."""
prefill_mods = subject(stage="prefill", contract=CONTRACT)(partial(_prefill, True, True))
"""The same as `prefill_global`, with vLLM's own mask mods."""
