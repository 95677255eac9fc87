"""Does the mask-mod read-out compile for GPUs that are not here? As a script it compiles, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_cute = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs CuTe (cutlass)")


def main(arch: str) -> None:
    """Compile the read-out of our four mods for one target, from fake tensors."""
    os.environ["CUTE_DSL_ARCH"] = arch

    import cuda.bindings.driver as driver
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    from harness.checks.mask_mod_kernel import _on_device
    from optimized.mask_mods import mask_mod_for

    def fake(dims: int, align: int):  # type: ignore[no-untyped-def]
        strides = tuple(cute.sym_int64(divisibility=align // 4) for _ in range(dims - 1))
        shape = tuple(cute.sym_int32() for _ in range(dims))
        return make_fake_tensor(cutlass.Int32, shape, (*strides, 1), assumed_align=align)

    numbers = [cutlass.Int32(n) for n in (0, 128, 8)]
    stream = driver.CUstream(0)
    for family, sm90 in ((90, True), (90, False), (100, False)):
        for offset in (False, True):
            mod = mask_mod_for(family, offset)
            cute.compile(_on_device, mod, sm90, 128, fake(3, 16), fake(3, 4), fake(2, 4), *numbers, stream)
    print("compiled")


@needs_cute
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_read_out_of_our_mods_compiles_for(arch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.harness.test_mask_mod_compile", arch],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("compiled")


if __name__ == "__main__":
    main(sys.argv[1])
