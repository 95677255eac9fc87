"""Do our mask mods compile into FA4's kernels, once for each pair of head dims? No GPU needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from optimized.attention.fa4 import fa4_available, fa4_masked_mha
from tests.attention_cases import offsets

SCRIPT = Path(__file__).with_name("compile_fa4.py")
ROOT = SCRIPT.parents[2]

DIMS = ("192_128", "256_256")
KERNELS = {
    90: [f"{dims}_{kind}" for dims in DIMS for kind in ("dense", "offset", "causal")],
    100: [f"{dims}_{kind}" for dims in DIMS for kind in ("dense", "offset")],
}

needs_fa4 = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4 (flash_attn.cute)"
)


@cache
def compiled(family: int) -> dict[str, Any]:
    """For each kernel, how many FA4 compiled for two batches, or an error; one process compiles a family."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(family), *KERNELS[family]],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@needs_fa4
@pytest.mark.slow
def test_fa4_compile_keys_are_few_and_do_not_grow_with_the_batches() -> None:
    """Four kinds of call, and FA4 has two schedulers (short and long queries): 8 kernels for one set of dims."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.optimized.fa4_keys"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"half": 8, "all": 8}


@needs_fa4
@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS[90])
def test_fa4_compile_sm90_once_for_two_batches(kernel: str) -> None:
    assert compiled(90)[kernel] == 1


@needs_fa4
@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS[100])
def test_fa4_compile_sm100_once_for_two_batches(kernel: str) -> None:
    assert compiled(100)[kernel] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_fa4_is_not_available_without_a_gpu_and_says_why() -> None:
    assert fa4_available() == (False, "no CUDA GPU")
    x = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q is on cpu, must be on a CUDA device"):
        fa4_masked_mha(x, x, x, offsets([2]), offsets([2]), 2, 2, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_fa4_refuses_a_scale_that_its_softmax_cannot_take(scale: float) -> None:
    x = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="scale is"):
        fa4_masked_mha(x, x, x, offsets([2]), offsets([2]), 2, 2, scale)


def test_fa4_refuses_mask_rows_that_are_no_whole_128_bits() -> None:
    x = torch.zeros(2, 1, 16, dtype=torch.bfloat16)
    mask = torch.zeros(1, 2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="mask has rows of 3 words"):
        fa4_masked_mha(x, x, x, offsets([2]), offsets([2]), 2, 2, 1.0, mask=mask)
