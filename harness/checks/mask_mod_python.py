"""The calling rules of FA4's kernels in plain Python, for mask mods that are written in plain Python.

Needs neither CuTe nor a GPU: the model against which the compiled read-out (`mask_mod_kernel`) is tested, and a
way to try the logic of a mod on integers. The rules are those of `mask_mod_kernel`, spelt out once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

WORD_KEYS = 32
_WORD = 0xFFFFFFFF


class Lengths(NamedTuple):
    """What `seqlen_info` says about one request."""

    seqlen_q: int
    seqlen_k: int


class ModFault(Exception):  # noqa: N818 - said of a mod, not of this program
    """A mod did what no mod may do; the message says what."""


class Word(int):
    """An unsigned 32-bit word, as a GPU has it: what is shifted past bit 31 is lost.

    A shift by 32 or more is undefined there (it depends on the compiler), and is a ModFault here.
    """

    def _shiftable(self, by: int) -> None:
        if not 0 <= by < WORD_KEYS:
            raise ModFault(f"the mod shifted a word by {int(by)}, which is undefined")

    def __lshift__(self, by: int) -> Word:
        self._shiftable(by)
        return Word(int(self) << int(by) & _WORD)

    def __rshift__(self, by: int) -> Word:
        self._shiftable(by)
        return Word(int(self) >> int(by))

    def __or__(self, other: int) -> Word:
        return Word(int(self) | int(other))

    def __and__(self, other: int) -> Word:
        return Word(int(self) & int(other))

    def __add__(self, other: int) -> Word:
        return Word(int(self) + int(other) & _WORD)

    def __sub__(self, other: int) -> Word:
        return Word(int(self) - int(other) & _WORD)


class MaskWords:
    """A mask `[B, rows, words]` as a mod sees it: `mask[b, row, word]` is a Word, `shape` the three sizes."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.shape = tuple(mask.shape)
        self._words = mask.tolist()

    def __getitem__(self, index: tuple[int, int, int]) -> Word:
        if any(not 0 <= i < size for i, size in zip(index, self.shape, strict=True)):
            place = tuple(int(i) for i in index)
            raise ModFault(f"the mod read word {place} of a mask of shape {self.shape}, which is outside it")
        b, row, word = index
        return Word(self._words[b][row][word] & _WORD)


Indices = Sequence[int]
ModFunction = Callable[[Indices, Indices, Indices, Indices, Lengths, Sequence[MaskWords]], Sequence[int]]


@dataclass(frozen=True)
class PythonMaskMod:
    """A mask mod on integers.

    `function(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors)` takes lists of `vec_size` indices, and returns
    one truth value (`vec_size` 1) or `ceil(vec_size / 32)` packed words.
    """

    function: ModFunction
    vec_size: int = 1

    @property
    def __vec_size__(self) -> int:
        return self.vec_size


def read_words(
    mod: PythonMaskMod,
    mask: torch.Tensor,
    lens: Sequence[tuple[int, int, int]],
    columns: int,
    *,
    sm90: bool,
    tile_keys: int,
    head: int,
) -> torch.Tensor:
    """As `mask_mod_kernel.read_words`, element by element. Raises ModFault."""
    batch, rows, _ = mask.shape
    out = torch.zeros(batch, rows, columns * WORD_KEYS, dtype=torch.bool)
    aux = [MaskWords(mask)]
    for b, (q_len, k_len, asked_rows) in enumerate(lens):
        info = Lengths(q_len, k_len)
        tiles = -(-k_len // tile_keys)
        for row in range(asked_rows):
            for first in range(0, tiles * tile_keys, tile_keys):
                last = first == (tiles - 1) * tile_keys
                asked_row = row % q_len if sm90 and last else row
                for column in range(0, tile_keys, mod.vec_size):
                    lanes = range(first + column, first + min(column + mod.vec_size, tile_keys))
                    keys = [key % k_len if last else key for key in lanes]
                    keys += [0] * (mod.vec_size - len(keys))
                    index = [[x] * mod.vec_size for x in (b, head, asked_row)]
                    answer = mod.function(index[0], index[1], index[2], keys, info, aux)
                    for lane, key in enumerate(lanes):
                        bit = answer[0] if mod.vec_size == 1 else answer[lane // 32] >> (lane % 32) & 1
                        out[b, row, key] = bool(bit)
    weights = torch.bitwise_left_shift(torch.ones(WORD_KEYS, dtype=torch.int64), torch.arange(WORD_KEYS))
    words = (out.view(batch, rows, columns, WORD_KEYS) * weights).sum(dim=3)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
