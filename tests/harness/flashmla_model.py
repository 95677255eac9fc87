"""A float model of FlashMLA's sparse prefill kernel for the CPU, with faults to plant."""

from __future__ import annotations

import torch

VALUE_WIDTH = 512
BLOCK = 64


def sparse_prefill(  # type: ignore[no-untyped-def]
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor | None,
    fault: str | None = None,
):
    """Blocks of 64 slots: float32 scores and sums, running maximum in base 2, probabilities rounded to bf16."""
    slots, rows = indices[:, 0].long(), kv.shape[0]
    valid = (slots >= 0) & (slots < rows)
    if fault == "index at the end is a key":
        valid = (slots >= 0) & (slots <= rows)
    if fault == "duplicates once":
        valid &= ~torch.stack([slots[:, : i + 1].eq(slots[:, i : i + 1]).sum(1) > 1 for i in range(slots.shape[1])], 1)
    if topk_length is not None and fault != "length ignored":
        last = topk_length[:, None] + (1 if fault == "length off by one" else 0)
        valid &= torch.arange(slots.shape[1]) < last
    keys = kv[slots.clamp(0, rows - 1), 0].float().masked_fill(~valid[..., None], 0.0)
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * (scale * 1.4426950408889634)
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    largest = torch.full(q.shape[:2], -1e30)
    total, acc = torch.zeros(q.shape[:2]), torch.zeros(*q.shape[:2], VALUE_WIDTH)
    for first in range(0, slots.shape[1], BLOCK):
        part = scores[..., first : first + BLOCK]
        new = torch.maximum(largest, part.amax(-1))
        p = torch.exp2(part - new[..., None])
        shrink = torch.exp2(largest - new)
        total = total * shrink + p.sum(-1)
        p16 = p.bfloat16().float()
        values = keys[:, first : first + BLOCK, :VALUE_WIDTH]
        acc = acc * shrink[..., None] + torch.einsum("thk,tkd->thd", p16, values)
        largest = new
    empty = total == 0
    lse = (largest + torch.log2(total)) * 0.6931471805599453
    weight = total if sinks is None else total + torch.exp2(sinks * 1.4426950408889634 - largest)
    if fault == "sink in LSE" and sinks is not None:
        lse = (largest + torch.log2(weight)) * 0.6931471805599453
    result = torch.where(empty[..., None], 0.0, acc / weight[..., None]).bfloat16()
    lse = torch.where(empty, -torch.inf if fault == "empty LSE -inf" else torch.inf, lse)
    if fault == "LSE in base 2":
        lse = lse * 1.4426950408889634
    if out is not None and fault != "output elsewhere":
        out.copy_(result)
        result = out
    return result, largest * 0.6931471805599453, lse
