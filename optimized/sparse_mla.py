"""The sparse MLA layer: one prefill batch through dense MHA, masked MHA or sparse MQA.

    path = dense            if the longest sequence fits a top-k row
           masked MHA       if it can run and its masks fit the mask workspace
           sparse MQA       otherwise

    dense, masked:  suffix call over the new tokens, one call for each context chunk, merge
    sparse MQA:     keys read by slot from the cache and from the new tokens, merge, then W_UV

The public module that this layer follows is `vllm.model_executor.layers.attention.sparse_mla_attention`;
docs/names.md lists each name and every deliberate difference.
"""

from __future__ import annotations

import torch

from optimized import dispatch
from optimized.batch import PrefillBatch
from optimized.dispatch import Availability, Force, FusedOutputError, Path, Policy
from optimized.inputs import validate_prefill
from optimized.layer import Layer, LayerDims
from optimized.mask import DEFAULT_TOPK_MASK_WORKSPACE_WORDS, slice_topk_per_req
from optimized.metadata import PrefillMetadata
from optimized.mha_path import MhaPath
from optimized.mqa_path import MqaPath
from optimized.trace import Trace, snapshot


def default_mask_workspace(device: torch.device) -> torch.Tensor:
    """The engine's mask workspace: 128 MiB of int32 words, uninitialised."""
    return torch.empty(DEFAULT_TOPK_MASK_WORKSPACE_WORDS, dtype=torch.int32, device=device)


class SparseMLAImpl:
    """Sparse MLA attention of one layer on one rank.

    `kv_b_proj_weight` is `[kv_lora_rank, H * (nope + v)]`: per head `nope` key columns, then `v` value columns.
    `scale` is the softmax scale and independent of the dims. `attention` names the kernel of the MHA paths.

    Raises ValueError or TypeError for sizes, dtypes and names that cannot be served.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        scale: float,
        topk_tokens: int,
        kv_b_proj_weight: torch.Tensor,
        tensor_parallel_size: int = 1,
        dcp_world_size: int = 1,
        kv_cache_dtype: str = "auto",
        kv_cache_scale: float = 1.0,
        attention: str = "triton",
        policy: Policy = "ours",
    ) -> None:
        if tensor_parallel_size < 1 or dcp_world_size < 1:
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size} and dcp_world_size {dcp_world_size}: both must "
                "be >= 1"
            )
        self.layer = Layer(
            dims=LayerDims(num_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim),
            scale=float(scale),
            topk_tokens=topk_tokens,
            kv_b_proj_weight=kv_b_proj_weight,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_scale=kv_cache_scale,
            attention=attention,
        )
        self.tensor_parallel_size = tensor_parallel_size
        self.dcp_world_size = dcp_world_size
        self.policy: Policy = policy

    def masked_mha_availability(self) -> Availability:
        """Whether this layer's masked MHA can run on this machine, and if not, why."""
        layer, dims = self.layer, self.layer.dims
        return dispatch.is_masked_mha_available(
            dims.num_heads * self.tensor_parallel_size,
            dims.kv_lora_rank,
            dims.qk_nope_head_dim,
            dims.qk_rope_head_dim,
            dims.v_head_dim,
            layer.kv_cache_dtype,
            policy=self.policy,
            attention=layer.attention,
        )

    @staticmethod
    def masked_mha_workspace_fits(prefill: PrefillMetadata) -> bool:
        """Whether the masks of this batch fit its mask workspace (warns once if not)."""
        return dispatch.batch_fits_mask_workspace(prefill)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        topk_indices_buffer: torch.Tensor,
        prefill: PrefillMetadata,
        output: torch.Tensor,
        *,
        output_scale: torch.Tensor | None = None,
        force: Force | None = None,
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """Attention of one prefill batch; writes `output` and returns the merged LSE.

        q `[T, H, nope + rope]`, kv_c_normed `[T, kv_lora_rank]`, k_pe `[T, 1, rope]`, cache `[num_blocks,
        block_size, width]`, topk_indices_buffer `[>= num_decode_tokens + T, topk_tokens]` int32, output `[T,
        H * v]`. Returns `[H, T]` float32, natural log. A row without keys gives output 0 and LSE -inf.

        Raises TypeError or ValueError for an argument that cannot be served, FusedOutputError for
        `output_scale`, NotImplementedError for masked MHA with context under decode context parallelism; all
        before any launch, with `output` untouched.
        """
        if output_scale is not None:
            raise FusedOutputError(
                "output_scale is given, but a fused FP8 output is not offered: pass None and quantise the result"
            )
        validate_prefill(
            self.layer.dims,
            q=q,
            kv_c_normed=kv_c_normed,
            k_pe=k_pe,
            cache=kv_c_and_k_pe_cache,
            topk_indices_buffer=topk_indices_buffer,
            topk_tokens=self.layer.topk_tokens,
            output=output,
            metadata=prefill,
            kv_cache_dtype=self.layer.kv_cache_dtype,
        )
        path = dispatch.choose_path(
            prefill,
            topk_tokens=self.layer.topk_tokens,
            masked=self.masked_mha_availability(),
            force=force,
            dcp_world_size=self.dcp_world_size,
        )
        if trace is not None:
            trace.plan = prefill.chunked_context
        lse = torch.empty(
            (self.layer.dims.num_heads, prefill.num_tokens), dtype=torch.float32, device=q.device
        )
        first = prefill.num_decode_tokens
        topk = topk_indices_buffer[first : first + prefill.num_tokens]
        batch = PrefillBatch(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, prefill, output, lse, trace)
        if path is Path.MQA:
            MqaPath(self.layer, batch).run(topk)
            return lse
        mha = MhaPath(self.layer, batch)
        if path is Path.DENSE:
            mha.run_dense()
            return lse
        topk_per_req = slice_topk_per_req(topk, batch.query_lens)
        if trace is not None:
            trace.topk_per_req = [snapshot(rows) for rows in topk_per_req]
        mha.run_masked(topk_per_req, remap=force == "masked_remap")
        return lse
