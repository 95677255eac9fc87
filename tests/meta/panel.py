"""A fixed panel of faulty and right results, and what the judge makes of them.

The layer runs once for each entry; the recorded outcome is judged again and again, by the true judge and by judges
with a fault of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch

from harness.checks import case as judge
from harness.problems.problem import Problem
from harness.problems.tensors import Inputs, build_inputs
from harness.subjects.base import PrefillOutcome
from harness.subjects.ours import OurLayer
from reports.records import CaseRecord
from tests.harness.traced import PROBLEMS
from tests.meta.faults import FAULTS, Fault

RIGHT = tuple(Fault(f"right_{name}", name, ()) for name in PROBLEMS)
ENTRIES = {entry.name: entry for entry in (*FAULTS, *RIGHT)}
NEVER = 10**40
"""Second runs are for live subjects, not for recorded ones."""


class Recorded:
    """A subject that gives one recorded outcome, whatever it is asked."""

    def __init__(self, fault: Fault) -> None:
        problem = PROBLEMS[fault.batch]
        self.fault = fault
        self.name = fault.name
        self.layer = OurLayer("triton")
        self.contract = self.layer.contract
        with fault.planted():
            self.outcome = self.layer.prefill(problem, build_inputs(problem), traced=True)
        self.mask_guard = self.layer.mask_guard

    def prefill(self, problem: Problem, inputs: Inputs, *, traced: bool) -> PrefillOutcome:
        """The recorded outcome; what the fault does to its inputs is done again."""
        return self.outcome if self.fault.after is None else self.fault.after(self.outcome, inputs)

    def attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention call with the same fault."""
        with self.fault.planted():
            return self.layer.attend(*args, **kwargs)


@cache
def recorded(name: str) -> Recorded:
    """The entry of this name, run."""
    return Recorded(ENTRIES[name])


@dataclass(frozen=True)
class Surprise:
    """An entry that was not judged as it should be."""

    entry: str
    expected: tuple[str, ...]
    record: CaseRecord

    def __str__(self) -> str:
        found = f"{self.record.status} {self.record.stage}: {self.record.message[:200]}"
        return f"{self.entry}: must be {self.expected or 'right'}, was {found}"


def judged(name: str) -> CaseRecord:
    """What the judge says of one entry."""
    entry = recorded(name)
    with (
        mock.patch.object(judge, "resolve", return_value=entry),
        mock.patch.object(judge, "RELATION_EVERY", NEVER),
        mock.patch.object(judge, "REPEAT_EVERY", NEVER),
    ):
        return judge.check_case(PROBLEMS[ENTRIES[name].batch], name)


def surprises(names: Iterable[str] = ENTRIES) -> Iterator[Surprise]:
    """Entries that the judge gets wrong: a right result accused, a fault not noticed, or blamed on another stage."""
    for name in names:
        entry, record = ENTRIES[name], judged(name)
        accused = record.status.is_finding
        if (
            accused != bool(entry.stages)
            or (accused and record.stage not in entry.stages)
            or (entry.names_key and not names_a_key(record))
        ):
            yield Surprise(name, entry.stages, record)


def names_a_key(record: CaseRecord) -> bool:
    """Whether the first record that accuses names row, key, word and bit, in words too."""
    bad = next(check for check in record.checks if check.status.is_finding)
    place = bad.place
    if None in (place.request, place.row, place.key, place.word, place.bit):
        return False
    return f"key {place.key}" in bad.message and f"row {place.row}" in bad.message
