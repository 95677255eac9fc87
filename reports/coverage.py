"""`coverage.json` of a run: which features its cases reached, and which pairs of features together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from reports.records import Record
from reports.runs import RunError

FILE = "coverage.json"
EXCLUDED = -1
"""In the place of a count: no case can have this feature, or both features of this pair."""


class PairCount(NamedTuple):
    """How often two features held together."""

    pair: str
    cases: int
    expected: float
    """Cases that would have both if they were independent."""


class Coverage(Record):
    """Features and pairs of features, each with the number of cases that had it."""

    cases: int
    features: dict[str, int]
    """Every feature there is, in a fixed order: the number of cases, or `EXCLUDED`."""
    pairs: list[list[int]]
    """`pairs[i][k]`: cases with feature `i` and feature `i + 1 + k`, or `EXCLUDED`."""

    @cached_property
    def _counted(self) -> list[tuple[str, str, int]]:
        names = list(self.features)
        flat: Iterator[int] = (count for row in self.pairs for count in row)
        return [(a, b, n) for (a, b), n in zip(combinations(names, 2), flat, strict=True) if n != EXCLUDED]

    @property
    def features_reached(self) -> int:
        return sum(count > 0 for count in self.features.values())

    @property
    def features_possible(self) -> int:
        return sum(count != EXCLUDED for count in self.features.values())

    @property
    def pairs_possible(self) -> int:
        """Pairs that one case may have."""
        return len(self._counted)

    @property
    def pairs_excluded(self) -> int:
        """Pairs that no case can have."""
        return sum(map(len, self.pairs)) - self.pairs_possible

    @property
    def pairs_reached(self) -> int:
        return sum(count > 0 for _, _, count in self._counted)

    @property
    def pairs_reached_share(self) -> float:
        """Of the possible pairs."""
        return self.pairs_reached / max(self.pairs_possible, 1)

    def numbers(self) -> dict[str, int | float]:
        """What a summary of a run says of it."""
        return {
            "features_reached": self.features_reached,
            "features_total": self.features_possible,
            "pairs_reached": self.pairs_reached,
            "pairs_possible": self.pairs_possible,
            "pairs_reached_share": round(self.pairs_reached_share, 4),
        }

    def features_headline(self) -> str:
        """The features in one line."""
        never = len(self.features) - self.features_possible
        rest = f"; {never} cannot occur in this profile" if never else ""
        return f"Features: {self.features_reached} of {self.features_possible} reached{rest}"

    def headline(self) -> str:
        """The pairs in one line."""
        return (
            f"Pairs of features: {self.pairs_reached} of {self.pairs_possible} that can hold together reached "
            f"({self.pairs_reached_share:.1%}); {self.pairs_excluded} exclude each other"
        )

    def rarest(self, most: int = 10) -> list[PairCount]:
        """The pairs reached least, those not reached first; among equals, those whose features are frequent."""
        of = self.features
        counted = [PairCount(f"{a} + {b}", n, of[a] * of[b] / max(self.cases, 1)) for a, b, n in self._counted]
        return sorted(counted, key=lambda pair: (pair.cases, -pair.expected))[:most]

    def write(self, run: Path) -> None:
        """Write `coverage.json`."""
        (run / FILE).write_text(self.model_dump_json() + "\n", encoding="utf-8")


def read_coverage(run: Path) -> Coverage | None:
    """Read `coverage.json`; None if the run has none. Raises RunError if it cannot be read."""
    path = run / FILE
    if not path.is_file():
        return None
    try:
        return Coverage.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise RunError(f"{path}: not a coverage table ({str(error).splitlines()[0]})") from None
