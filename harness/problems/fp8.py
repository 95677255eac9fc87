"""Writers of the FP8 cache formats, in torch, sharing nothing with the gather under test."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
TILE = 128
"""Latent values that share one scale in `fp8_ds_mla`."""
_SMALLEST_NORMAL = 2.0**-126


def to_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 `[n, width]` -> e4m3 bytes `[n, width]` uint8 of `values / scale`, clamped to +-448."""
    scaled = (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def to_ds_mla(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """float32 latent `[n, 512]` and rope `[n, 64]` -> `[n, 656]` bytes.

    512 e4m3 values, four float32 scales (largest magnitude of the tile / 448), 64 bfloat16 rope values.
    """
    rows = latent.shape[0]
    if rows == 0:
        return torch.empty((0, 656), dtype=torch.uint8)
    tiles = latent.float().reshape(rows, latent.shape[1] // TILE, TILE)
    scales = (tiles.abs().amax(dim=2) / E4M3_MAX).clamp_min(_SMALLEST_NORMAL)
    codes = (tiles / scales[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = [
        codes.reshape(rows, latent.shape[1]).view(torch.uint8),
        scales.contiguous().view(torch.uint8),
        rope.to(torch.bfloat16).contiguous().view(torch.uint8),
    ]
    return torch.cat(parts, dim=1)
