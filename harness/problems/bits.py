"""Random numbers that are the same on every machine: raw Philox bits and exact arithmetic only.

Philox is a counter-based generator, fixed by its publication (Salmon et al., SC11), and `random_raw` hands
out its words without any distribution code of numpy, which may change between versions. Everything else here
is integer arithmetic and single IEEE operations (one product, one quotient): no logarithm, no sine, no sum
whose order a library chooses.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_LOW16 = np.uint64(0x0000FFFF0000FFFF)
_LOW32 = np.uint64(0xFFFFFFFF)
_BLOCK = 2**18
"""Numbers made at a time: keeps the words in the cache and the peak of memory low."""
_NORMAL_STEP = np.float32(1.0 / math.sqrt((2**32 - 1) / 3))
"""1 / standard deviation of the sum of four uniform 16-bit integers."""


class Stream:
    """One independent stream of numbers, named by a seed and a tag."""

    def __init__(self, seed: int, tag: int) -> None:
        self._philox = np.random.Philox(key=np.array([seed, tag], dtype=np.uint64))

    def raw(self, count: int) -> U64:
        """`count` raw 64-bit words."""
        return np.asarray(self._philox.random_raw(count), dtype=np.uint64)

    def integers(self, bound: int, count: int) -> I64:
        """`count` integers in `[0, bound)`; the bias of the remainder is below `bound * 2**-63`."""
        return (self.raw(count) >> np.uint64(1)).astype(np.int64) % bound

    def normals(self, *shape: int) -> F32:
        """Nearly normal numbers, variance 1, at most 3.47 in magnitude (Irwin-Hall, four 16-bit uniforms)."""
        result = np.empty(math.prod(shape), dtype=np.float32)
        for start in range(0, result.size, _BLOCK):
            block = result[start : start + _BLOCK]
            words = self.raw(block.size)
            pairs = (words & _LOW16) + ((words >> np.uint64(16)) & _LOW16)
            sums = ((pairs & _LOW32) + (pairs >> np.uint64(32))).astype(np.int32)
            np.multiply((sums - np.int32(2 * 65535)).astype(np.float32), _NORMAL_STEP, out=block)
        return result.reshape(shape)

    def uniforms(self, *shape: int) -> F32:
        """Numbers in `[0, 1)`, multiples of `2**-24`."""
        words = self.raw(math.prod(shape)) >> np.uint64(40)
        return (words.astype(np.float32) * np.float32(2.0**-24)).reshape(shape)

    def signs(self, *shape: int) -> F32:
        """+1 and -1."""
        bits = (self.raw(math.prod(shape)) >> np.uint64(63)).astype(np.int32)
        return (1 - 2 * bits).astype(np.float32).reshape(shape)

    def geometric(self, cap: int, *shape: int) -> NDArray[np.int32]:
        """Integers `e` with probability `2**-(e+1)`, at most `cap`."""
        words = self.raw(math.prod(shape))
        result = np.zeros(words.shape, dtype=np.int32)
        alive = np.ones(words.shape, dtype=bool)
        for bit in range(cap):
            alive &= ((words >> np.uint64(bit)) & np.uint64(1)) == 0
            result += alive
        return result.reshape(shape)

    def permutation(self, count: int) -> I64:
        """A random order of `range(count)`."""
        return np.argsort(self.raw(count), kind="stable").astype(np.int64)
