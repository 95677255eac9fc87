"""What a subject promises: the inputs that are legal for it and the answers that are right.

The harness generates only inputs inside the contract and judges by it. Everything here is fixed before a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from reference.numerics import TRITON, TRITON_MQA, Numerics


@dataclass(frozen=True)
class Contract:
    """Contract of one subject (JUDGEMENT section 6). Defaults are those of our own layer."""

    invalid_index: Literal["ignored", "negative_only"] = "ignored"
    """`ignored`: negative and past-the-end entries are no keys; `negative_only`: past the end is undefined."""
    duplicates: Literal["once", "per_slot"] = "once"
    causality: Literal["topk_and_causal", "topk_only"] = "topk_and_causal"
    lse_base: Literal["e", "2"] | None = "e"
    """None where no LSE is returned."""
    empty_lse: Literal["-inf", "+inf"] = "-inf"
    lse_layout: Literal["HT", "TH"] = "HT"
    deterministic: bool = True
    """Two identical calls give the same bits."""
    batch_invariant: bool = False
    """A request alone gives the bits that it gives in a batch."""
    numerics: Numerics = field(default_factory=lambda: TRITON)
    """Storage dtypes, exponential and accumulation chain of the attention calls."""
    mqa_numerics: Numerics = field(default_factory=lambda: TRITON_MQA)

    def numerics_for(self, dtype: Literal["bf16", "fp16"]) -> Numerics:
        """Declared arithmetic of the attention calls for tensors of `dtype`."""
        return replace(self.numerics, storage=dtype)

    def mqa_numerics_for(self, dtype: Literal["bf16", "fp16"]) -> Numerics:
        """Declared arithmetic of the sparse MQA calls for tensors of `dtype`."""
        return replace(self.mqa_numerics, storage=dtype)
