"""Sparse MQA over one prefill batch: absorbed queries, keys by slot, merge, W_UV (SPEC 2.8)."""

from __future__ import annotations

import torch

from optimized.batch import PrefillBatch
from optimized.layer import Layer
from optimized.merge import merge_attn_states
from optimized.slots import context_slots, suffix_rows, token_requests
from optimized.sparse_mqa import triton_sparse_mqa
from optimized.trace import AbsorbEvent, MergeEvent, MqaEvent, UnprojectEvent, snapshot


def split_weight(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """`W_UK [H, nope, lora]` and `W_UV [H, lora, v]` as views of the up-projection."""
    dims = layer.dims
    weight = layer.kv_b_proj_weight.unflatten(1, (dims.num_heads, -1))
    w_uk, w_uv = weight.split([dims.qk_nope_head_dim, dims.v_head_dim], dim=-1)
    return w_uk.permute(1, 2, 0), w_uv.permute(1, 0, 2)


def absorb_query(q: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """`q [T, H, nope + rope]`, `w_uk [H, nope, lora]` -> `[q_nope W_UK | q_pe]`, `[T, H, lora + rope]`."""
    nope, lora = w_uk.shape[1:]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), w_uk)
    absorbed = q.new_empty((q.shape[0], q.shape[1], lora + q.shape[2] - nope))
    absorbed[..., :lora] = latent.transpose(0, 1)
    absorbed[..., lora:] = q[..., nope:]
    return absorbed


class MqaPath:
    """One batch through sparse MQA: a call on the cache, a call on the new tokens, merge, W_UV."""

    def __init__(self, layer: Layer, batch: PrefillBatch) -> None:
        self.layer = layer
        self.batch = batch
        self.trace = batch.trace

    def run(self, topk: torch.Tensor) -> None:
        """`topk` is `[T, topk_tokens]` int32, the rows of this batch."""
        if self.trace is not None:
            self.trace.path = "mqa"
        meta = self.batch.metadata
        if meta.num_tokens == 0:
            return
        w_uk, w_uv = split_weight(self.layer)
        q = absorb_query(self.batch.q, w_uk)
        if self.trace is not None:
            self.trace.events.append(AbsorbEvent("absorb", snapshot(q)))
        requests = token_requests(meta.query_start_loc, self.batch.query_lens)
        contexts = torch.tensor(meta.context_lens_cpu, dtype=torch.int64, device=q.device)
        rows = torch.cat([self.batch.kv_c_normed, self.batch.k_pe.squeeze(1)], dim=-1)
        indices = suffix_rows(topk, requests, contexts, meta.query_start_loc)
        latent, lse = self._attend("suffix", q, rows, indices, "auto")
        if meta.chunked_context is not None:
            slots = context_slots(topk, requests, contexts, meta.block_table, meta.block_size)
            prefix, prefix_lse = self._attend(
                "context", q, self.batch.cache, slots, self.layer.kv_cache_dtype
            )
            latent, lse = self._merge(prefix, prefix_lse, latent, lse)
        out = self.batch.output_heads(self.layer.dims.num_heads)
        out.copy_(torch.bmm(latent.transpose(0, 1), w_uv).transpose(0, 1))
        self.batch.lse.copy_(lse)
        if self.trace is not None:
            self.trace.events.append(UnprojectEvent("unproject", snapshot(latent), snapshot(out)))

    def _attend(
        self, name: str, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, kv_cache_dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = triton_sparse_mqa(
            q,
            kv,
            indices,
            self.layer.scale,
            v_dim=self.layer.dims.kv_lora_rank,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_scale=self.layer.kv_cache_scale,
        )
        if self.trace is not None:
            self.trace.kernels.add("sparse_mqa")
            self.trace.events.append(
                MqaEvent(name, snapshot(q), snapshot(indices), snapshot(out), snapshot(lse))
            )
        return out, lse

    def _merge(
        self, prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(suffix), torch.empty_like(suffix_lse)
        merge_attn_states(out, prefix, prefix_lse, suffix, suffix_lse, lse)
        if self.trace is not None:
            tensors = (prefix, prefix_lse, suffix, suffix_lse, out, lse)
            self.trace.events.append(MergeEvent("mqa", 0, *(snapshot(tensor) for tensor in tensors)))
        return out, lse
