"""Small Hypothesis strategies, made once: making and checking a strategy costs more than drawing from it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

T = TypeVar("T", bound=Hashable)


@lru_cache(maxsize=1024)
def weighted(*options: tuple[T, int]) -> SearchStrategy[T]:
    """One of the options, in proportion to its weight; shrinks towards the first."""
    return st.sampled_from([value for value, weight in options for _ in range(weight)])


@lru_cache(maxsize=1024)
def among(*options: T) -> SearchStrategy[T]:
    """One of the options; shrinks towards the first."""
    return st.sampled_from(options)


@lru_cache(maxsize=1024)
def between(low: int, high: int) -> SearchStrategy[int]:
    """An integer of `[low, high]`; shrinks towards `low`."""
    return st.integers(low, high)


@lru_cache(maxsize=128)
def chance(percent: int) -> SearchStrategy[bool]:
    """True in `percent` of 100 draws; shrinks towards False."""
    return st.sampled_from([False] * (100 - percent) + [True] * percent)


SEEDS = between(0, 2**32 - 1)
