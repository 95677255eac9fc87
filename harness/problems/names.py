"""The closed vocabularies of a problem: names that a case file may use."""

from __future__ import annotations

from typing import Literal, get_args

DType = Literal["bf16", "fp16"]
CacheDType = Literal["auto", "fp8_e4m3", "fp8_ds_mla"]
BlockOrder = Literal["identity", "permuted", "reversed", "high"]
Force = Literal["dense", "masked", "masked_remap", "mqa"]
Path = Literal["dense", "no_context", "global_mask", "remap", "mqa", "refused"]
Poison = Literal["nan", "inf", "large", "zero"]

Family = Literal[
    "normal",
    "flat",
    "zero_q",
    "sharp",
    "offset_v",
    "heavy_v",
    "positive",
    "chunk_gap",
    "rising",
    "ties",
    "repeated",
    "near_overflow",
    "tiny",
    "one_hot",
    "powers_of_two",
    "rope_heavy",
    "low",
    "very_low",
    "low_rows",
]
Weights = Literal["normal", "exact"]

TopkKind = Literal[
    "random",
    "window",
    "sinks",
    "sinks_window",
    "all",
    "one_block",
    "one_column",
    "bit_31",
    "last_word",
    "boundary_bits",
    "context_only",
    "suffix_only",
    "one_chunk",
    "straddle",
    "self_only",
    "past_end",
    "future",
    "duplicates",
    "overlap",
    "some_empty",
    "all_empty",
    "alternate",
]
SlotOrder = Literal["shuffled", "ascending", "descending"]
Holes = Literal["tail", "front", "middle", "spread"]

FAMILIES: tuple[Family, ...] = get_args(Family)
LOWEST_SCORES: dict[Family, float] = {"low": -512.0, "low_rows": -4096.0, "very_low": -32768.0}
"""Families whose scores lie far below 0, with the largest shift; the others stay within a few hundred."""
TOPK_KINDS: tuple[TopkKind, ...] = get_args(TopkKind)
SLOT_ORDERS: tuple[SlotOrder, ...] = get_args(SlotOrder)
HOLES: tuple[Holes, ...] = get_args(Holes)
POISONS: tuple[Poison, ...] = get_args(Poison)
BLOCK_ORDERS: tuple[BlockOrder, ...] = get_args(BlockOrder)
CACHE_DTYPES: tuple[CacheDType, ...] = get_args(CacheDType)
PATHS: tuple[Path, ...] = get_args(Path)
