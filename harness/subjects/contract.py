"""What a subject promises: the inputs that are legal for it and the answers that are right.

The harness generates only inputs inside the contract and judges by it. Everything here is fixed before a run.
Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from harness.problems.names import CACHE_DTYPES, CacheDType, DType
from reference.numerics import Numerics


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Contract of one subject (JUDGEMENT section 6). Every field has a default: say only what differs.

    Raises ValueError for a value that is not one of those listed, naming the field.
    """

    # what it takes
    device: Literal["any", "cuda"] = "any"
    """`cuda`: it cannot run on a CPU, and is not run there."""
    dtypes: tuple[DType, ...] = ("bf16", "fp16")
    """Storage types of q, k, v and the output."""
    cache_dtypes: tuple[CacheDType, ...] = CACHE_DTYPES
    """Formats of the paged cache (stages `gather` and `prefill`)."""
    dims: tuple[tuple[int, int, int, int], ...] = ()
    """Allowed sizes `(kv_lora_rank, nope, rope, v)`; empty: any. A query has `nope + rope` entries."""
    head_dim_multiple: int = 1
    """Each of `kv_lora_rank`, `nope`, `rope` and `v` is a multiple of this."""
    heads_multiple: int = 1
    """The number of heads is a multiple of this."""
    topk_multiple: int = 1
    """The number of slots of a top-k row is a multiple of this."""
    max_requests: int | None = None
    """Requests of a batch at most."""
    zero_lengths: bool = True
    """Empty batches, and requests without queries or without keys, are legal."""
    strides: Literal["contiguous", "any"] = "contiguous"
    """`any`: inputs may be views with padding between their rows or heads."""
    unselected_rows: Literal["finite", "poison"] = "finite"
    """Cache rows that no index names: `poison` fills them with NaN, which must not reach a result;
    `finite` is for kernels that multiply them by zero."""
    invalid_index: Literal["ignored", "negative_only"] = "ignored"
    """`ignored`: negative and past-the-end entries are no keys; `negative_only`: past the end is undefined."""
    topk_length: bool = False
    """Stage `mqa`: it takes a count for each row, and entries behind the count are no keys, whatever they are."""
    duplicates: Literal["once", "per_slot", "none"] = "once"
    """A key listed twice counts once, or once for each slot; `none`: it must not happen."""
    causality: Literal["topk_and_causal", "topk_only"] = "topk_and_causal"
    """`topk_only`: entries behind the query's own position are undefined where it is given top-k rows."""
    empty_rows: bool = True
    """Rows without any key are legal; their output is 0."""
    lowest_score: float | None = None
    """Scores (times scale) lie above this: for a kernel that fills masked scores with a finite number, say -1e4, and
    whose users never come near it. Input families that do are not drawn. None: any score is legal."""
    attention_sink: bool = False
    """It takes `sinks [H]`: one more logit in the softmax of each head, without a value. LSE leaves it out."""

    # what it gives
    lse_base: Literal["e", "2"] | None = "e"
    """None where no LSE is returned."""
    lse_layout: Literal["HT", "TH"] = "HT"
    """`[heads, tokens]` or `[tokens, heads]`; of the largest logits too."""
    empty_lse: Literal["-inf", "+inf"] = "-inf"
    """LSE of a row without any key."""
    max_logits: bool = False
    """Stages `attend` and `mqa`: it returns each row's largest score, `(out, max_logits, lse)`."""
    deterministic: bool = True
    """Two identical calls give the same bits."""
    batch_invariant: bool = False
    """A request alone gives the bits that it gives in a batch."""

    # how it computes
    numerics: Numerics = field(default_factory=Numerics)
    """Exponential, row sum and products of the attention calls. The default promises nothing about the order
    of the row sum; the storage type follows the case."""
    mqa_numerics: Numerics = field(default_factory=Numerics)
    """The same for the calls of stage `mqa`, and of an absorbed `prefill`."""
    absorbed: bool = False
    """Stage `prefill`: it attends latent rows (MQA), instead of projecting K and V and rounding them."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be one of {choices}")
        for name in ("head_dim_multiple", "heads_multiple", "topk_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be positive")
        for name, known in (("dtypes", ("bf16", "fp16")), ("cache_dtypes", CACHE_DTYPES)):
            given = getattr(self, name)
            if not given or isinstance(given, str) or not set(given) <= set(known):
                raise ValueError(f"{name} is {given!r}, must be a tuple of some of {known}")
        if self.max_requests is not None and self.max_requests < 1:
            raise ValueError(f"max_requests is {self.max_requests}, must be positive or None")
        lowest = self.lowest_score
        if lowest is not None and not (isinstance(lowest, int | float) and lowest < 0):
            raise ValueError(f"lowest_score is {lowest!r}, must be a negative number or None")
        for name in ("numerics", "mqa_numerics"):
            if not isinstance(getattr(self, name), Numerics):
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be a Numerics")
        for sizes in self.dims:
            if not isinstance(sizes, tuple | list):
                raise ValueError(f"dims has {sizes!r}, must be a tuple of sizes {_SIZES}: dims=((512, 128, 64, 128),)")
            if len(sizes) != len(_SIZES) or min(sizes) < 0 or min(sizes[0], sizes[1], sizes[3]) < 1:
                raise ValueError(f"dims has {sizes!r}, must be sizes {_SIZES}, positive but for rope")
            if any(size % self.head_dim_multiple for size in sizes):
                raise ValueError(f"dims has {sizes!r}, must be multiples of {self.head_dim_multiple}")

    def numerics_for(self, dtype: DType) -> Numerics:
        """Declared arithmetic of the attention calls for tensors of `dtype`."""
        return replace(self.numerics, storage=dtype)

    def mqa_numerics_for(self, dtype: DType) -> Numerics:
        """Declared arithmetic of the sparse MQA calls for tensors of `dtype`."""
        return replace(self.mqa_numerics, storage=dtype)


_SIZES = ("kv_lora_rank", "nope", "rope", "v")
_CHOICES: dict[str, tuple[object, ...]] = {
    "device": ("any", "cuda"),
    "strides": ("contiguous", "any"),
    "unselected_rows": ("finite", "poison"),
    "invalid_index": ("ignored", "negative_only"),
    "duplicates": ("once", "per_slot", "none"),
    "causality": ("topk_and_causal", "topk_only"),
    "lse_base": ("e", "2", None),
    "lse_layout": ("HT", "TH"),
    "empty_lse": ("-inf", "+inf"),
}
