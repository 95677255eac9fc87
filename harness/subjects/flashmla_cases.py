"""Cases inside FlashMLA's contract: structure and a seed, in JSON, as everywhere in this harness."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from harness.problems.bits import F32, I64, Stream
from harness.problems.parts import Part, Seed
from harness.subjects.flashmla import VALUE_WIDTH

_Q, _KV, _INDEX, _LENGTH, _SINK = range(601, 606)
_INT32_MAX = 2**31 - 1

Family = Literal["normal", "flat", "sharp", "ties", "offset", "heavy", "counting", "naming"]
FAMILIES: tuple[Family, ...] = ("normal", "flat", "sharp", "ties", "offset", "heavy", "counting", "naming")


class FlashMlaCase(Part):
    """One call."""

    heads: int = Field(ge=1, le=128)
    width: Literal[576, 512] = 576
    queries: int = Field(ge=1, le=4096)
    rows: int = Field(ge=1, le=2**20)
    """Rows of kv."""
    topk: int = Field(ge=128, le=8192, multiple_of=128)
    filled: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of slots that hold a key."""
    empty_rows: bool = False
    """A third of the query rows have no key."""
    spread: bool = False
    """Slots without a key stand anywhere instead of at the end."""
    duplicates: Literal["none", "some", "one_key"] = "none"
    lengths: bool = False
    sinks: Literal["none", "finite", "infinite"] = "none"
    own_out: bool = False
    """The output goes into a given buffer, between canaries."""
    poison: bool = False
    """Rows of kv that no slot names are NaN."""
    family: Family = "normal"
    temperature: float = Field(default=1.0, gt=0.0, le=64.0)
    seed: Seed = 0


def draw(seed: int, head_counts: Sequence[int]) -> FlashMlaCase:
    """A case from a number: mostly small, now and then as long as published models are."""
    rng = random.Random(seed)
    large = rng.random() < 0.06
    family = rng.choice(FAMILIES)
    rows = rng.choice([1, 2, 31, 64, 65, 127, 128, 200, 400, 700, 1000]) if not large else rng.randrange(2048, 8193)
    return FlashMlaCase(
        heads=rng.choice(list(head_counts)),
        width=rng.choice([576, 576, 512]),
        queries=rng.randrange(1, 5) if large else rng.choice([1, 1, 2, 3, 5, 9]),
        rows=min(rows, VALUE_WIDTH) if family == "naming" else rows,
        topk=2048 if large else rng.choice([128, 128, 256, 384, 512, 1024]),
        filled=rng.choice([1.0, 1.0, 0.9, 0.5, 0.1, 0.01]),
        empty_rows=rng.random() < 0.3,
        spread=rng.random() < 0.5,
        duplicates=rng.choice(["none", "none", "some", "one_key"]),
        lengths=rng.random() < 0.4,
        sinks=rng.choice(["none", "none", "finite", "infinite"]),
        own_out=rng.random() < 0.3,
        poison=rng.random() < 0.4,
        family=family,
        temperature=rng.choice([0.25, 1.0, 1.0, 2.0]),
        seed=rng.randrange(2**40),
    )


@dataclass(frozen=True)
class Tensors:
    """What the kernel is given, and which slots count."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    scale: float
    topk_length: torch.Tensor | None
    sinks: torch.Tensor | None
    counted: torch.Tensor
    """Bool `[queries, topk]`: slots with a key before the row's length."""


def build(case: FlashMlaCase, device: torch.device) -> Tensors:
    """The tensors of a case, the same on every machine."""
    indices, held = _indices(case)
    counted = held
    lengths = None
    if case.lengths:
        lengths = Stream(case.seed, _LENGTH).integers(case.topk + 1, case.queries)
        counted = held & (np.arange(case.topk)[None, :] < lengths[:, None])
    kv = torch.from_numpy(_latents(case)).to(torch.bfloat16)
    if case.poison:
        named = np.zeros(case.rows, dtype=bool)
        named[indices[held]] = True
        kv[torch.from_numpy(~named)] = torch.nan
    sinks = _sinks(case)
    return Tensors(
        q=torch.from_numpy(_queries(case)).to(device, torch.bfloat16),
        kv=kv.to(device),
        indices=torch.from_numpy(indices.astype(np.int32)).to(device),
        scale=case.width**-0.5 * 1.25,
        topk_length=None if lengths is None else torch.from_numpy(lengths.astype(np.int32)).to(device),
        sinks=None if sinks is None else torch.from_numpy(sinks).to(device),
        counted=torch.from_numpy(counted).to(device),
    )


def _indices(case: FlashMlaCase) -> tuple[I64, np.ndarray]:
    """Indices `[queries, topk]`, and which of them are rows of kv."""
    stream = Stream(case.seed, _INDEX)
    shape = (case.queries, case.topk)
    held = np.arange(case.topk)[None, :] < np.full(shape, round(case.filled * case.topk))
    if case.empty_rows:
        held = held & (stream.integers(3, case.queries) > 0)[:, None]
    keys = np.empty(shape, dtype=np.int64)
    for row in range(case.queries):
        once = np.resize(stream.permutation(case.rows), case.topk)
        if case.duplicates == "none":
            held[row] &= np.arange(case.topk) < case.rows
        elif case.duplicates == "some":
            once = once[stream.integers(case.topk, case.topk)]
        else:
            once[stream.integers(2, case.topk) == 0] = once[0]
        keys[row] = once
        if case.spread:
            order = stream.permutation(case.topk)
            keys[row], held[row] = keys[row][order], held[row][order]
    invalid = np.array([-1, -1, case.rows, case.rows + 63, _INT32_MAX])[stream.integers(5, keys.size)].reshape(shape)
    return np.where(held, keys, invalid), held


def _queries(case: FlashMlaCase) -> F32:
    shape = (case.queries, case.heads, case.width)
    if case.family in ("counting", "naming"):
        return np.zeros(shape, dtype=np.float32)
    strength = {"flat": 2.0**-10, "sharp": 8.0}.get(case.family, 1.0) * case.temperature
    return Stream(case.seed, _Q).normals(*shape) * np.float32(strength)


def _latents(case: FlashMlaCase) -> F32:
    stream = Stream(case.seed, _KV)
    if case.family == "naming":
        rows = np.zeros((case.rows, case.width), dtype=np.float32)
        rows[np.arange(case.rows), np.arange(case.rows) % VALUE_WIDTH] = 1.0
        return rows
    rows = stream.normals(case.rows, case.width)
    if case.family == "ties":
        rows = rows[stream.integers(min(4, case.rows), case.rows)]
    if case.family == "offset":
        rows[:, VALUE_WIDTH // 2 : VALUE_WIDTH] += np.float32(4.0)
    if case.family == "heavy":
        half = slice(VALUE_WIDTH // 2, VALUE_WIDTH)
        rows[:, half] = np.ldexp(rows[:, half], stream.geometric(8, case.rows, VALUE_WIDTH // 2))
    return rows


def _sinks(case: FlashMlaCase) -> F32 | None:
    if case.sinks == "none":
        return None
    sinks = Stream(case.seed, _SINK).normals(case.heads) * np.float32(3.0)
    if case.sinks == "infinite":
        sinks[::3], sinks[1::3] = np.float32(np.inf), np.float32(-np.inf)
    return sinks
