"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """Replace `old` by `new` in `file` (relative to `optimized/`); `old` must occur exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One planted fault."""

    name: str
    fault: str
    """Row of the fault corpus, `B041`, or `own` for a fault of ours."""
    stage: str
    """Stage that the judge has to name."""
    family: str
    detector: str
    """What is expected to notice it: `mask.bits`, `attend.out`, `guard`, ..."""
    what: str
    """The fault in one sentence."""
    patches: tuple[Patch, ...]
    also: tuple[str, ...] = ()
    """Further stages which name the fault just as well."""


class MutantError(ValueError):
    """A mutant that does not exist or whose patch no longer applies; one clear line."""


def mutant(
    name: str,
    fault: str,
    stage: str,
    family: str,
    detector: str,
    what: str,
    *patches: tuple[str, str, str],
    also: tuple[str, ...] = (),
) -> Mutant:
    """A mutant from `(file, old, new)` triples."""
    return Mutant(name, fault, stage, family, detector, what, tuple(Patch(*patch) for patch in patches), also)
