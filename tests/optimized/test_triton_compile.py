"""Do the attention kernels compile for GPUs, to the instructions that make them fast? No GPU needed.

The interpreter accepts much that the compiler refuses, so each kernel is compiled here too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_triton.py")
ROOT = SCRIPT.parents[2]
FAST = [f"90:mha_{dims}_{kind}" for dims in ("192_128", "256_256") for kind in ("full", "causal", "masked", "offset")]
NARROW = "90:mha_192_128_offset_narrow"
OTHERS = [
    "80:mha_192_128_offset",
    "86:mha_256_256_offset",
    "86:mha_192_128_causal",
    "90:mha_24_16_offset",
    "90:mha_40_8_masked",
    "90:list_masked",
    "90:list_offset",
    "80:mqa_plain",
    "86:mqa_plain",
    "90:mqa_plain",
    "90:mqa_no_rope",
    "90:mqa_fp8_e4m3",
    "90:mqa_fp8_ds_mla",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Per kernel: [warp-group products, 128-bit asynchronous copies], or an error."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *FAST, NARROW, *OTHERS],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", FAST)
def test_published_dims_compile_to_wide_instructions(compiled: dict[str, Any], name: str) -> None:
    assert not isinstance(compiled[name], str), compiled[name]
    products, copies = compiled[name]
    assert products > 0
    assert copies > 0


def test_rows_that_are_not_aligned_get_no_wide_copies(compiled: dict[str, Any]) -> None:
    assert compiled[NARROW][1] == 0


@pytest.mark.parametrize("name", OTHERS)
def test_kernel_compiles(compiled: dict[str, Any], name: str) -> None:
    assert not isinstance(compiled[name], str), compiled[name]
