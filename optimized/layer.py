"""What one layer on one rank is: its sizes, its weight and its cache format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ATTENTIONS = ("triton", "fa4")


@dataclass(frozen=True)
class LayerDims:
    """Sizes of one layer on this rank."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Elements of one dequantised cache row: latent, then the roped shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def validate(self) -> None:
        """Raise ValueError for a size that cannot be."""
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be >= 1")
        if self.qk_rope_head_dim < 0:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}, must be >= 0")


@dataclass(frozen=True)
class Layer:
    """One layer on one rank. `kv_b_proj_weight` is `[kv_lora_rank, H * (nope + v)]`.

    Raises ValueError when it is made with a size, shape or name that cannot be served.
    """

    dims: LayerDims
    scale: float
    topk_tokens: int
    kv_b_proj_weight: torch.Tensor
    kv_cache_dtype: str
    kv_cache_scale: float
    attention: str

    def __post_init__(self) -> None:
        dims = self.dims
        dims.validate()
        columns = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        if tuple(self.kv_b_proj_weight.shape) != (dims.kv_lora_rank, columns):
            raise ValueError(
                f"kv_b_proj_weight has shape {tuple(self.kv_b_proj_weight.shape)}, must be "
                f"({dims.kv_lora_rank}, {columns})"
            )
        if self.topk_tokens < 1:
            raise ValueError(f"topk_tokens is {self.topk_tokens}, must be >= 1")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention is {self.attention!r}, must be one of {', '.join(ATTENTIONS)}")
