"""All mutants by name."""

from __future__ import annotations

from harness.mutants.first_mutants import FIRST_MUTANTS
from harness.mutants.mutant import Mutant

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in (*FIRST_MUTANTS,)}
