"""From a wrong bit of a mask mod to the smallest call that shows it: one request, one row, one or two keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.checks.mask_mod import check_mask_mod
from harness.checks.mask_mod_readout import TILE_KEYS, WORD_BITS, Calling, MaskMod
from reports.records import CheckRecord

_ROWS = 128


@dataclass(frozen=True)
class MaskModFault:
    """A call with one query row, and the verdict on it."""

    keys: tuple[int, ...]
    """Selected keys, counted from the start of the segment."""
    key_start: int | None
    key_len: int
    record: CheckRecord

    def describe(self) -> str:
        """`smallest such call: one row that selects key 31 alone, key_start 1`."""
        keys = f"key {self.keys[0]} alone" if len(self.keys) == 1 else "keys " + " and ".join(map(str, self.keys))
        start = "" if self.key_start is None else f", key_start {self.key_start}"
        return f"smallest such call: one row that selects {keys}{start}"


def shrink_fault(
    mod: MaskMod,
    record: CheckRecord,
    key_start: int | None,
    calling: Calling,
    *,
    device: torch.device,
    tile_keys: int = TILE_KEYS,
) -> MaskModFault | None:
    """The smallest fault of the kind that `record` found; None if none so small shows it.

    Tries the record's own key alone, then beside its neighbour, from the smallest key start and segment up.
    """
    starts = [None] if key_start is None else sorted({key_start % WORD_BITS, key_start})
    key = max((record.place.key or 0) - (key_start or 0), 0)
    for start in starts:
        for target in sorted({key % WORD_BITS, key}):
            for keys in ((target,), (target, target + 1)):
                found = single_row(mod, keys, start, calling, device=device, tile_keys=tile_keys)
                if found.record.status.is_finding:
                    return found
    return None


def single_row(
    mod: MaskMod,
    keys: tuple[int, ...],
    key_start: int | None,
    calling: Calling,
    *,
    device: torch.device,
    tile_keys: int = TILE_KEYS,
) -> MaskModFault:
    """One request with one query, whose row selects `keys` of a segment that ends behind the last of them."""
    key_len = max(keys) + 1
    first = key_start or 0
    words = -(-(first + key_len) // WORD_BITS) + int(key_start is not None)
    bits = torch.zeros(1, _ROWS, -(-words // 4) * 4, dtype=torch.int64)
    for key in keys:
        bits[0, 0, (first + key) // WORD_BITS] |= 1 << (first + key) % WORD_BITS
    mask = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).to(device)
    starts = None if key_start is None else [key_start]
    record = check_mask_mod("single", mod, mask, [1], [key_len], starts, calling, tile_keys=tile_keys)
    return MaskModFault(keys, key_start, key_len, record)
