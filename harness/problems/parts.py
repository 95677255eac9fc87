"""The parts of a problem: typed, bounded, frozen records without behaviour. See `problem.py`."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.problems.names import (
    BlockOrder,
    CacheDType,
    Family,
    Holes,
    Poison,
    SlotOrder,
    TopkKind,
    Weights,
)

Seed = Annotated[int, Field(ge=0, lt=2**53)]
Length = Annotated[int, Field(ge=0, le=2**22)]
Index = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class Part(BaseModel):
    """Base of every part: frozen, strict, no unknown field, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Dims(Part):
    """Sizes of the model on this rank."""

    heads: int = Field(ge=1, le=1024)
    kv_lora_rank: int = Field(ge=1, le=4096)
    nope: int = Field(ge=1, le=1024)
    rope: int = Field(ge=0, le=1024)
    v: int = Field(ge=1, le=1024)
    topk: int = Field(ge=1, le=65536)
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)

    @property
    def qk(self) -> int:
        """Width of a query and of a key, per head."""
        return self.nope + self.rope

    @property
    def latent(self) -> int:
        """Values of one cache entry: latent, then the rope part."""
        return self.kv_lora_rank + self.rope

    @property
    def heads_total(self) -> int:
        """Heads of the whole model, over all tensor-parallel ranks."""
        return self.heads * self.tensor_parallel_size


class Request(Part):
    """One request of the batch: tokens already in the cache, and new tokens."""

    context_len: Length
    query_len: Length

    @property
    def seq_len(self) -> int:
        """All tokens of the request."""
        return self.context_len + self.query_len


class Paging(Part):
    """The paged cache and the block table."""

    block_size: int = Field(default=16, ge=1, le=4096)
    order: BlockOrder = "identity"
    """`high`: the block ids at the end of the pool, so that spare blocks come first."""
    shared_prefix: bool = False
    """Requests share the physical blocks of their common whole-block prefix."""
    spare_blocks: int = Field(default=0, ge=0, le=2**24)
    """Blocks that no request refers to: poison."""
    table_pad: int = Field(default=0, ge=0, le=2**16)
    """Columns by which the block table's row stride is larger than its width."""
    cache_row_pad: int = Field(default=0, ge=0, le=4096)
    """Elements (bytes for the fp8 caches) between the rows of the cache: poison."""
    kv_cache_dtype: CacheDType = "auto"
    kv_cache_scale: float = Field(default=1.0, ge=2**-20, le=2**20)
    """Per-tensor scale of `fp8_e4m3`."""
    seed: Seed = 0


class Chunks(Part):
    """How the context is split into chunks."""

    row_budget: int = Field(default=1024, ge=1, le=2**22)
    """Rows of the gather workspace."""
    max_context_chunk: int = Field(default=1024, ge=1, le=2**22)
    split_alignment: int = Field(default=16, ge=1, le=2**16)

    @model_validator(mode="after")
    def _room_for_one_step(self) -> Self:
        least = min(self.row_budget, self.max_context_chunk)
        if least < self.split_alignment:
            raise ValueError(
                f"row_budget={self.row_budget} and max_context_chunk={self.max_context_chunk} must be at "
                f"least split_alignment={self.split_alignment}"
            )
        return self


class TopkSpec(Part):
    """The top-k rows: a kind for each request, or explicit rows."""

    kinds: tuple[TopkKind, ...] = ()
    order: SlotOrder = "shuffled"
    holes: Holes = "tail"
    """Where the slots without a key stand."""
    any_negative: bool = False
    """Slots without a key hold negative numbers of any size, not only -1."""
    lowest: bool = False
    """With `any_negative`: every fourth of them or so holds the lowest int32, whose magnitude is no int32."""
    seed: Seed = 0
    rows: tuple[tuple[Index, ...], ...] | None = None
    """One row a token, each at most `topk` long and filled up with -1; then `kinds` may be empty."""


class DataSpec(Part):
    """The numbers: an input family, its weights and its seed."""

    family: Family = "normal"
    weights: Weights = "normal"
    """`exact`: each K and V column selects or sign-flips one latent entry, so that projection is exact."""
    seed: Seed = 0
    temperature: float = Field(default=1.0, ge=0.0, le=1024.0)
    """Standard deviation of the scores of the plain families."""


class Layout(Part):
    """Where tensors lie in their buffers, and what lies around them."""

    num_decode_tokens: int = Field(default=0, ge=0, le=65536)
    """Decode tokens in front of the prefill tokens, in q, output and top-k buffers."""
    q_pad: int = Field(default=0, ge=0, le=1024)
    """Elements between the heads of q."""
    kv_pad: int = Field(default=0, ge=0, le=4096)
    """Elements between the rows of `kv_c_normed` and `k_pe`."""
    out_pad: int = Field(default=0, ge=0, le=4096)
    """Elements between the rows of the output: canary."""
    topk_pad: int = Field(default=0, ge=0, le=4096)
    """Slots between the rows of the top-k buffer: garbage in range."""
    poison: Poison = "nan"
