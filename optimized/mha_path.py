"""Dense and masked MHA over one prefill batch: suffix call, chunk loop, merge (SPEC 2.6, 2.7, 2.9).

    call                  keys            mask                                   key start
    no context            new tokens      own, over the suffix                   none
    suffix, global mask   new tokens      global                                 context_len
    suffix, remap         new tokens      own, top-k remapped to [ctx, ctx+q)    none
    chunk, global mask    gathered chunk  rows of the chunk's requests           chunk.starts
    chunk, remap          gathered chunk  own, remapped to [start, start+len)    none

The dense path makes the same calls without a mask: the suffix call is causal, a chunk call is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimized.attention.api import masked_mha
from optimized.batch import PrefillBatch
from optimized.chunks import ContextChunk
from optimized.kv_cache import gather_and_maybe_dequant_cache
from optimized.layer import Layer
from optimized.mask import build_topk_mask, remap_topk_to_ranges, set_key_starts, try_build_global_mask
from optimized.merge import accumulate_context_chunk, init_context_partial, merge_attn_states
from optimized.projection import project_kv
from optimized.trace import (
    AttendEvent,
    GatherEvent,
    MaskEvent,
    MergeEvent,
    PartialEvent,
    ProjectEvent,
    snapshot,
)


@dataclass(frozen=True)
class CallMask:
    """The mask of one attention call; `offset` says that key starts stand in the reserved word."""

    mask: torch.Tensor | None = None
    offset: bool = False
    causal: bool = False


@dataclass(frozen=True)
class MaskPlan:
    """How the calls of one masked batch get their masks."""

    topk_per_req: list[torch.Tensor]
    workspace: torch.Tensor
    global_mask: torch.Tensor | None


class MhaPath:
    """One batch through dense or masked MHA."""

    def __init__(self, layer: Layer, batch: PrefillBatch) -> None:
        self.layer = layer
        self.batch = batch
        self.meta = batch.metadata
        self.trace = batch.trace
        self.query_lens = batch.query_lens
        self.context_lens_device: torch.Tensor | None = None
        if self.meta.chunked_context is not None:
            self.context_lens_device = self.meta.chunked_context.context_lens

    def run_dense(self) -> None:
        """Causal attention over every key."""
        self._note_path("dense")
        self._run(None)

    def run_masked(self, topk_per_req: list[torch.Tensor], *, remap: bool) -> None:
        """Attention over the allowed sets of `topk_per_req` (one `[q_len, topk]` int32 tensor a request).

        `remap` skips the global mask. Raises ValueError if no mask workspace is held, or if a mask does not fit.
        """
        workspace = self.meta.topk_mask_workspace
        if workspace is None:
            raise ValueError("topk_mask_workspace is None, must be a flat int32 tensor for masked MHA")
        global_mask: torch.Tensor | None = None
        if self.meta.chunked_context is None:
            self._note_path("no_context")
        else:
            if not remap:
                global_mask = self._global_mask(topk_per_req, workspace)
            self._note_path("remap" if global_mask is None else "global_mask")
        self._run(MaskPlan(topk_per_req, workspace, global_mask))

    def _run(self, masks: MaskPlan | None) -> None:
        if self.meta.num_tokens == 0:
            return
        out = self.batch.output_heads(self.layer.dims.num_heads)
        context = self.meta.chunked_context
        name = "no_context" if context is None else "suffix"
        suffix_out, suffix_lse = self._suffix(name, masks)
        if context is None:
            out.copy_(suffix_out)
            self.batch.lse.copy_(suffix_lse)
            return
        context_out, context_lse = self._context(masks)
        merge_attn_states(out, context_out, context_lse, suffix_out, suffix_lse, self.batch.lse)
        if self.trace is not None:
            self.trace.events.append(
                MergeEvent(
                    "final",
                    0,
                    snapshot(context_out),
                    snapshot(context_lse),
                    snapshot(suffix_out),
                    snapshot(suffix_lse),
                    snapshot(out),
                    snapshot(self.batch.lse),
                )
            )

    def _suffix(self, name: str, masks: MaskPlan | None) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._project(name, self.batch.kv_c_normed, self.batch.k_pe)
        call_mask = CallMask(causal=True) if masks is None else self._suffix_mask(name, masks)
        starts = self.meta.query_start_loc
        longest = self.meta.max_query_len
        return self._attend(name, 0, self.batch.q, k, v, starts, starts, longest, longest, call_mask)

    def _suffix_mask(self, name: str, masks: MaskPlan) -> CallMask:
        if masks.global_mask is not None:
            assert self.context_lens_device is not None
            set_key_starts(masks.global_mask, self.context_lens_device)
            return CallMask(masks.global_mask, offset=True)
        own_first_pos = torch.zeros(self.meta.num_requests, dtype=torch.int32, device=self.batch.q.device)
        starts: list[int] | None = None
        topk = masks.topk_per_req
        if self.meta.chunked_context is not None:
            starts = self.meta.context_lens_cpu
            topk = remap_topk_to_ranges(topk, starts, self.query_lens)
        mask = self._build_mask(
            name,
            topk,
            self.query_lens,
            self.meta.max_query_len,
            masks.workspace,
            own_first_pos,
            starts,
            self.query_lens,
        )
        return CallMask(mask)

    def _context(self, masks: MaskPlan | None) -> tuple[torch.Tensor, torch.Tensor]:
        context = self.meta.chunked_context
        assert context is not None
        first = context.chunks[0]
        everyone = slice(0, self.meta.num_requests)
        if len(context.chunks) == 1 and first.request_slice == everyone:
            return self._chunk(first, masks)
        dims = self.layer.dims
        out, lse = init_context_partial(
            self.meta.num_tokens, dims.num_heads, dims.v_head_dim, self.batch.q.dtype, self.batch.q.device
        )
        for chunk in context.chunks:
            chunk_out, chunk_lse = self._chunk(chunk, masks)
            accumulate_context_chunk(out, lse, chunk, chunk_out, chunk_lse)
            if self.trace is not None:
                self.trace.events.append(
                    PartialEvent(f"chunk[{chunk.index}]", chunk.index, snapshot(out), snapshot(lse))
                )
        return out, lse

    def _chunk(self, chunk: ContextChunk, masks: MaskPlan | None) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"chunk[{chunk.index}]"
        context = self.meta.chunked_context
        assert context is not None
        rows = context.workspace[: chunk.num_context_tokens]
        gather_and_maybe_dequant_cache(
            self.batch.cache,
            rows,
            self.meta.block_table[chunk.request_slice],
            chunk.cu_seq_lens,
            chunk.token_to_seq,
            chunk.num_context_tokens,
            self.layer.kv_cache_dtype,
            self.layer.kv_cache_scale,
            chunk.starts,
        )
        if self.trace is not None:
            self.trace.events.append(GatherEvent(name, chunk.index, snapshot(rows)))
        lora = self.layer.dims.kv_lora_rank
        k, v = self._project(name, rows[:, :lora], rows[:, lora:].unsqueeze(1))
        call_mask = CallMask() if masks is None else self._chunk_mask(name, chunk, masks)
        return self._attend(
            name,
            chunk.request_slice.start,
            self.batch.q[chunk.token_slice],
            k,
            v,
            chunk.query_start_loc,
            chunk.cu_seq_lens,
            chunk.max_query_len,
            chunk.max_seq_len,
            call_mask,
        )

    def _chunk_mask(self, name: str, chunk: ContextChunk, masks: MaskPlan) -> CallMask:
        if masks.global_mask is not None:
            mask = masks.global_mask[chunk.request_slice]
            set_key_starts(mask, chunk.starts)
            return CallMask(mask, offset=True)
        starts: list[int] = chunk.starts.tolist()
        lens: list[int] = chunk.seq_lens.tolist()
        topk = remap_topk_to_ranges(masks.topk_per_req[chunk.request_slice], starts, lens)
        q_lens = self.query_lens[chunk.request_slice]
        mask = self._build_mask(name, topk, q_lens, chunk.max_seq_len, masks.workspace, None, starts, lens)
        return CallMask(mask)

    def _global_mask(self, topk_per_req: list[torch.Tensor], workspace: torch.Tensor) -> torch.Tensor | None:
        longest_q, longest = self.meta.max_query_len, self.meta.max_seq_len
        contexts = self.meta.context_lens_cpu
        mask = try_build_global_mask(topk_per_req, self.query_lens, contexts, longest_q, longest, workspace)
        if mask is not None:
            self._note_mask(
                "global", topk_per_req, self.query_lens, longest_q, longest, contexts, True, mask, None, None
            )
        return mask

    def _build_mask(
        self,
        name: str,
        topk_per_req: list[torch.Tensor],
        q_lens: list[int],
        max_key_len: int,
        workspace: torch.Tensor,
        first_query_pos: torch.Tensor | None,
        range_starts: list[int] | None,
        range_lens: list[int],
    ) -> torch.Tensor:
        longest_q = max(q_lens)
        mask = build_topk_mask(topk_per_req, q_lens, longest_q, max_key_len, workspace, first_query_pos)
        positions = None if first_query_pos is None else [0] * len(q_lens)
        lens = None if range_starts is None else range_lens
        self._note_mask(
            name, topk_per_req, q_lens, longest_q, max_key_len, positions, False, mask, range_starts, lens
        )
        return mask

    def _project(
        self, name: str, kv_c: torch.Tensor, k_pe: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.layer.dims
        k, v = project_kv(
            kv_c, k_pe, self.layer.kv_b_proj_weight, dims.num_heads, dims.qk_nope_head_dim, dims.v_head_dim
        )
        if self.trace is not None:
            self.trace.events.append(
                ProjectEvent(name, snapshot(kv_c), snapshot(k_pe), snapshot(k), snapshot(v))
            )
        return k, v

    def _attend(
        self,
        name: str,
        first_request: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        call_mask: CallMask,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = masked_mha(
            self.layer.attention,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            self.layer.scale,
            mask=call_mask.mask,
            offset=call_mask.offset,
            causal=call_mask.causal,
        )
        if self.trace is not None:
            mask = call_mask.mask
            key_starts = mask[:, 0, -1].tolist() if mask is not None and call_mask.offset else None
            self.trace.kernels.add("fa4" if self.layer.attention == "fa4" else "triton_mha")
            self.trace.events.append(
                AttendEvent(
                    call=name,
                    first_request=first_request,
                    first_token=int(self.meta.query_start_loc[first_request]),
                    q=snapshot(q),
                    k=snapshot(k),
                    v=snapshot(v),
                    cu_seqlens_q=cu_seqlens_q.tolist(),
                    cu_seqlens_k=cu_seqlens_k.tolist(),
                    max_seqlen_q=max_seqlen_q,
                    max_seqlen_k=max_seqlen_k,
                    scale=self.layer.scale,
                    mask=None if mask is None else snapshot(mask),
                    offset=call_mask.offset,
                    key_starts=key_starts,
                    causal=call_mask.causal,
                    out=snapshot(out),
                    lse=snapshot(lse),
                )
            )
        return out, lse

    def _note_path(self, path: str) -> None:
        if self.trace is not None:
            self.trace.path = path

    def _note_mask(
        self,
        name: str,
        topk_per_req: list[torch.Tensor],
        q_lens: list[int],
        max_query_len: int,
        max_key_len: int,
        first_query_pos: list[int] | None,
        reserved: bool,
        mask: torch.Tensor,
        range_starts: list[int] | None,
        range_lens: list[int] | None,
    ) -> None:
        if self.trace is None:
            return
        self.trace.kernels.add("mask_single" if len(q_lens) == 1 else "mask_many")
        self.trace.events.append(
            MaskEvent(
                call=name,
                topk_per_req=[snapshot(rows) for rows in topk_per_req],
                range_starts=range_starts,
                range_lens=range_lens,
                q_lens=list(q_lens),
                max_query_len=max_query_len,
                max_key_len=max_key_len,
                first_query_pos=first_query_pos,
                reserved=reserved,
                mask=snapshot(mask),
            )
        )
