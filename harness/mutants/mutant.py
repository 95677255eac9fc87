"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Needs = Literal["triton", "fa4", "cuda", "cpu"]
"""Where a mutant applies: `triton` our Triton attention kernel, `fa4` FlashAttention-4 on a GPU, `cuda` a compiled
kernel on a GPU (the interpreter runs one thread, so that no order of threads can be lost in it), `cpu` code that only
interpreted kernels have."""


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
    """Check that is expected to notice it: `mask.bits`, `attend.out`, ...; `CRASH` or `HANG` for a fault of the
    engine's kind, which no check can name."""
    what: str
    """The fault in one sentence."""
    patches: tuple[Patch, ...]
    also: tuple[str, ...] = ()
    """Further stages which name the fault just as well."""
    needs: Needs | None = None
    """None: applies wherever the layer runs."""
    equivalent: str = ""
    """Proof that no legal input can tell this mutant from the original; empty for a real fault."""

    def applies(self, attention: str, *, cuda: bool) -> bool:
        """Whether the patched code can run with this attention kernel, on a GPU or without one."""
        if self.needs is None:
            return True
        usable = {
            "triton": attention == "triton",
            "fa4": attention == "fa4" and cuda,
            "cuda": attention == "triton" and cuda,
            "cpu": not cuda,
        }
        return usable[self.needs]


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
    needs: Needs | None = None,
    equivalent: str = "",
) -> Mutant:
    """A mutant from `(file, old, new)` triples."""
    parts = tuple(Patch(*patch) for patch in patches)
    return Mutant(name, fault, stage, family, detector, what, parts, also, needs, equivalent)
