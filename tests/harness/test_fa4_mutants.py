"""Are the faults planted in the FA4 mask mods real, in both forms? They need a GPU to be judged, not to be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.mutants.registry import MUTANTS

pytest.importorskip("cutlass", reason="needs CuTe (flash-attn-4)")

MODS = [m.name for m in MUTANTS.values() if {patch.file for patch in m.patches} & {"mask_mods.py", "mask_bits.py"}]


@pytest.mark.parametrize("name", MODS)
def test_does_a_mutant_of_the_mask_mods_answer_wrongly(name: str) -> None:
    command = [sys.executable, "-m", "tests.harness.fa4_mutant_bits", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=True)
    wrong = json.loads(done.stdout.splitlines()[-1])
    if MUTANTS[name].equivalent:
        assert not any(wrong.values())
        return
    for form in ("scalar", "packed"):
        assert wrong[f"{form} dense"] or wrong[f"{form} offset"], wrong
