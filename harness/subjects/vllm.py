"""vLLM's pieces of sparse MLA prefill as a subject: mask builder, mask mods, chunk planner, remap, slice, merge.

Each piece is loaded alone (`vllm_source`) and called as vLLM's own layer calls it. What vLLM promises for it:

* plan: the budget and the longest chunk are at least the alignment.
* slice, remap: any top-k entries.
* mask: negative entries are ignored, entries past the longest segment undefined; no causality; words behind that of
  the last key stay as they were.
* mask_mod: packed, for SM100 only; mask rows are 16-byte aligned; segments end inside the mask.
* merge: both outputs are finite, that of an empty side too; head strides are equal and the heads of a token lie one
  behind the other; an LSE of +inf counts as -inf.
* prefill: capability family 100, unquantised cache, the published head shapes, no context beside DCP.

Names and file layout are those of vLLM 0.33.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from harness.checks.plan import ExpectedChunk
from harness.subjects.api import NotRunnable
from harness.subjects.vllm_source import VllmSource, find_vllm, host_utils

_LAYER = "model_executor/layers/attention/sparse_mla_attention.py"
_COMMON = "model_executor/layers/attention/mla_attention.py"
_MODS = "model_executor/layers/attention/sparse_mla_mask.py"
_MERGE = "v1/attention/ops/merge_attn_states.py"
_TRITON_MERGE = "v1/attention/ops/triton_merge_attn_states.py"
_FA4_UTILS = "vllm_flash_attn/cute/utils.py"
_CUDA_OPS = "_C_stable_libtorch.abi3.so"

MergeForm = Literal["torch", "triton", "cuda"]
Merge = Callable[..., None]


def _unpinned(values: np.ndarray) -> torch.Tensor:
    """In place of vLLM's pinned staging copy."""
    return torch.from_numpy(values)


@dataclass(frozen=True)
class Vllm:
    """The pieces of one vLLM."""

    source: VllmSource
    name: str = "vllm"

    @classmethod
    def found(cls) -> Vllm:
        """The vLLM of this machine. Raises NotRunnable, SubjectError (see `find_vllm`)."""
        return cls(find_vllm())

    @cached_property
    def layer_module(self) -> ModuleType:
        """The single functions of its sparse MLA layer."""
        import triton
        import triton.language as tl

        names = [
            "_topk_mask_shape",
            "_masked_mha_workspace_fits",
            "_scatter_topk_kernel",
            "_scatter_topk_single_req_kernel",
            "_build_topk_mask",
            "SparseMLACommonImpl._slice_topk_per_req",
            "SparseMLACommonImpl._remap_topk_to_ranges",
            "SparseMLACommonImpl._try_build_global_mask",
        ]
        uses = {
            "torch": torch,
            "np": np,
            "math": math,
            "triton": triton,
            "tl": tl,
            "np_to_pinned_tensor": _unpinned,
        }
        return self.source.load(_LAYER, names, uses)

    def topk_mask_shape(self, batch: int, longest_query: int, longest_key: int, reserve: bool) -> tuple[int, int, int]:
        """Requests, padded query rows and words of a mask."""
        shape: tuple[int, int, int] = self.layer_module._topk_mask_shape(batch, longest_query, longest_key, reserve)
        return shape

    def masks_fit(self, batch: int, longest_query: int, longest_chunk: int, words: int) -> bool:
        """Whether the masks of single calls fit a workspace of so many words."""
        fits: bool = self.layer_module._masked_mha_workspace_fits(batch, longest_query, longest_chunk, words)
        return fits

    def build_mask(
        self, topk_per_req: list[torch.Tensor], q_lens: list[int], longest_key: int, out: torch.Tensor
    ) -> torch.Tensor:
        """Top-k rows -> mask in `out` `[B, padded_q, words]`."""
        mask: torch.Tensor = self.layer_module._build_topk_mask(topk_per_req, q_lens, out.shape[1], longest_key, out)
        return mask

    def slice_topk(self, rows: torch.Tensor, q_lens: list[int]) -> list[torch.Tensor]:
        """Top-k rows of each request."""
        sliced: list[torch.Tensor] = self.layer_module._slice_topk_per_req(rows, q_lens)
        return sliced

    def remap_topk(
        self, topk_per_req: list[torch.Tensor], starts: list[int] | torch.Tensor, lens: list[int]
    ) -> list[torch.Tensor]:
        """Entries of each request counted from the start of a range, -1 outside it."""
        remapped: list[torch.Tensor] = self.layer_module._remap_topk_to_ranges(topk_per_req, starts, lens)
        return remapped

    @cached_property
    def _planner(self) -> ModuleType:
        uses = {"dataclass": dataclass, "round_down": lambda value, unit: value // unit * unit}
        return self.source.load(_COMMON, ["_ContextChunkPlan", "plan_mla_context_chunks"], uses)

    def plan(
        self, context_lens: list[int], row_budget: int, max_context_chunk: int, split_alignment: int
    ) -> list[ExpectedChunk]:
        """Context chunks."""
        plans = self._planner.plan_mla_context_chunks(
            context_lens, row_budget, max_context_chunk, split_alignment, lambda rows: rows
        )
        return [ExpectedChunk(p.request_start, tuple(p.starts), tuple(p.seq_lens)) for p in plans]

    def merge(self, form: MergeForm) -> Merge:
        """`merge_attn_states` in one of its three forms. Raises NotRunnable where this machine has not that form."""
        merge: Merge
        if form == "torch":
            merge = self.source.load(_MERGE, ["_merge_attn_states_torch"], {"torch": torch})._merge_attn_states_torch
        elif form == "triton":
            import triton
            import triton.language as tl

            uses = {"torch": torch, "triton": triton, "tl": tl, "float8_info": torch.finfo(torch.float8_e4m3fn)}
            names = ["merge_attn_states_kernel", "merge_attn_states"]
            merge = self.source.load(_TRITON_MERGE, names, uses).merge_attn_states
        else:
            self._load_cuda_ops()
            uses = {"torch": torch}
            merge = self.source.load("_custom_ops.py", ["merge_attn_states"], uses).merge_attn_states
        return merge

    def _load_cuda_ops(self) -> None:
        library = self.source.root / _CUDA_OPS
        if not torch.cuda.is_available():
            raise NotRunnable("vLLM's CUDA merge needs a CUDA GPU")
        if not library.is_file():
            raise NotRunnable(f"vLLM's CUDA merge needs {_CUDA_OPS}, which this copy lacks")
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise NotRunnable(f"{_CUDA_OPS} cannot be loaded: {error}") from None

    def mask_mod(self, offset: bool, device: torch.device) -> Callable[..., Any]:
        """The mask mod for calls without or with a key start; packed, to be called as SM100 does.

        On the CPU its shifts are CuTe's own instead of PTX instructions. Raises NotRunnable without CuTe.
        """
        try:
            import cutlass
            import cutlass.cute as cute
        except ImportError as error:
            raise NotRunnable(f"vLLM's mask mods need CuTe (nvidia-cutlass-dsl): {error}") from None
        name = "offset_dense_mask_mod" if offset else "dense_mask_mod"
        utils: Any = host_utils() if device.type == "cpu" else self._fa4_utils()
        module = self.source.load(_MODS, [name], {"cutlass": cutlass, "cute": cute, "utils": utils})
        mod: Callable[..., Any] = getattr(module, name)
        return mod

    def _fa4_utils(self) -> Any:
        """vLLM's own copy, or upstream's if that copy does not suit the installed CuTe."""
        try:
            return self.source.import_file(_FA4_UTILS, "fa4_utils")
        except Exception:  # a copy made for another CuTe fails in many ways
            from flash_attn.cute import utils

            return utils

    def why_no_prefill(self) -> str:
        """Why vLLM's whole `forward_mha` cannot run on this machine."""
        if not torch.cuda.is_available():
            return "vLLM's masked MHA needs a GPU of capability family 100 (Blackwell), there is no CUDA GPU"
        major, minor = torch.cuda.get_device_capability()
        if major != 10:
            return (
                f"vLLM's masked MHA needs a GPU of capability family 100 (Blackwell), this is {major}.{minor}: "
                "its mask mods are packed, and FA4 refuses packed mods elsewhere"
            )
        return (
            "vLLM's whole layer needs vLLM's engine around it (config, KV-cache and attention metadata builders); "
            "vllm[mods] runs its host code and its mask mods without"
        )
