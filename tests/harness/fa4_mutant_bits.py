"""`python -m tests.harness.fa4_mutant_bits NAME`: wrong bits of a mutant's FA4 mask mods, run on the CPU.

Prints a JSON object: form (`scalar` as on SM90, `packed` as on SM100), then `dense` or `offset`, then a count.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")

from harness.mutants.patch import install

KEYS, STARTS = 224, (5, 96)
WORDS = 12


def main(name: str) -> None:
    """Count them; the mutant is installed before anything imports the patched package."""
    install(name)
    import torch

    from tests.optimized.mask_mod_host import run_packed, run_scalar

    generator = torch.Generator().manual_seed(1)
    mask = torch.randint(-(2**31), 2**31, (len(STARTS), 4, WORDS), generator=generator, dtype=torch.int64)
    mask = mask.to(torch.int32)
    mask[:, 0, -1] = torch.tensor(STARTS, dtype=torch.int32)
    bits = ((mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1).flatten(2)
    dense = bits[..., :256]
    offset = torch.stack([bits[request, :, start : start + KEYS] for request, start in enumerate(STARTS)])
    found = {}
    for form, run in (("scalar", run_scalar), ("packed", run_packed)):
        for kind, expected in (("dense", dense), ("offset", offset)):
            got = run(mask, kind == "offset", expected.shape[2])
            found[f"{form} {kind}"] = int((got.int() != expected.int()).sum())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
