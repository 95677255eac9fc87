"""Guards: memory around and behind a call that must not change, and memory that must not be read.

A guarded buffer is a view in the middle of a larger allocation whose margins hold a canary; what must not be read
is poisoned. Neither needs the subject's help.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.checks.verdict import failed, passed
from reports.records import CheckRecord, Status

MARGIN = 256
CANARY = 0x5A
DIRT = 0x7B
"""Byte that fills a workspace before use: as int32 words, bits set all over; as bf16, huge finite numbers."""


@dataclass(frozen=True)
class GuardedBuffer:
    """`view` between two canary margins of one allocation."""

    whole: torch.Tensor
    view: torch.Tensor

    def check(self, name: str) -> CheckRecord:
        """GUARD record if a margin was written."""
        size = self.view.numel()
        head = self.whole[:MARGIN].view(torch.uint8)
        tail = self.whole[MARGIN + size :].view(torch.uint8)
        for side, margin in (("before", head), ("behind", tail)):
            wrong = (margin != CANARY).nonzero()
            if wrong.numel():
                at = int(wrong[0]) // self.view.element_size()
                message = f"{name}: element {at} of the guard {side} it was written"
                return failed("guard", f"guard.{name}", message, status=Status.GUARD)
        return passed("guard", f"guard.{name}")

    def part(self, numel: int) -> GuardedBuffer:
        """The first `numel` elements as they are, with the canary right behind them."""
        whole = self.whole[: numel + 2 * MARGIN]
        whole[MARGIN + numel :].view(torch.uint8).fill_(CANARY)
        return GuardedBuffer(whole, whole[MARGIN : MARGIN + numel])


def guarded(numel: int, dtype: torch.dtype, device: torch.device, dirt: int = DIRT) -> GuardedBuffer:
    """A dirty flat buffer of `numel` elements between canaries."""
    whole = torch.empty(numel + 2 * MARGIN, dtype=dtype, device=device)
    raw = whole.view(torch.uint8)
    raw.fill_(CANARY)
    size = whole.element_size()
    raw[MARGIN * size : (MARGIN + numel) * size] = dirt
    return GuardedBuffer(whole, whole[MARGIN : MARGIN + numel])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN payloads included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return bool(torch.equal(bytes_of(a), bytes_of(b)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in order, `[n]` uint8. In one dimension no stride can be odd, as that of a row of
    length 1 may."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the whole allocation behind a tensor: padding between its rows included."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
