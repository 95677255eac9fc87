"""Counts what the cases of a run reach: features, and pairs of features that hold at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from harness.problems.feature_pairs import impossible_features, possible_pairs
from harness.problems.features import FEATURES
from harness.problems.profiles import ProfileName
from reports.coverage import EXCLUDED, Coverage

_NUMBER = {name: index for index, name in enumerate(FEATURES)}


@lru_cache(maxsize=8)
def _possible(profile: ProfileName) -> npt.NDArray[np.bool_]:
    """`[F, F]`: whether two features can hold at once (upper triangle), and whether one can at all (diagonal)."""
    table = np.eye(len(FEATURES), dtype=np.bool_)
    for first, second in possible_pairs():
        table[_NUMBER[first], _NUMBER[second]] = True
    never = _numbers(impossible_features(profile))
    table[never, :] = table[:, never] = False
    return table


class Counts:
    """How many cases of a profile had each feature, and each pair of features."""

    def __init__(self, profile: ProfileName) -> None:
        self.profile = profile
        self.cases = 0
        self._counts = np.zeros((len(FEATURES), len(FEATURES)), dtype=np.int64)

    def add(self, features: Iterable[str]) -> None:
        """Count one case. Names that are no features are left out."""
        numbers = _numbers(features)
        self.cases += 1
        self._counts[np.ix_(numbers, numbers)] += 1

    def unseen(self, features: Iterable[str]) -> int:
        """Features and pairs of this case that no counted case had."""
        numbers = _numbers(features)
        return int(np.count_nonzero(np.triu(self._counts[np.ix_(numbers, numbers)] == 0)))

    def coverage(self) -> Coverage:
        """The table of the cases counted so far."""
        table = np.where(_possible(self.profile) | (self._counts > 0), self._counts, EXCLUDED)
        return Coverage(
            cases=self.cases,
            features=dict(zip(FEATURES, np.diag(table).tolist(), strict=True)),
            pairs=[table[index, index + 1 :].tolist() for index in range(len(FEATURES))],
        )


def _numbers(features: Iterable[str]) -> list[int]:
    return [_NUMBER[name] for name in features if name in _NUMBER]
