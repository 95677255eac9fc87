"""Do the kernels of this GPU stay in their bounds, and is one wrong key of theirs noticed?"""

from __future__ import annotations

import pytest
import torch

from harness.measure import sensitivity, tightness
from harness.measure.families import FAMILIES
from harness.measure.kernels import Kernel, kernel
from harness.measure.tightness import Shape
from harness.subjects.base import NotRunnable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def here(name: str) -> Kernel:
    try:
        return kernel(name)
    except NotRunnable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", ["ours[triton]", "ours[fa4]"])
def test_right_kernels_stay_in_their_bounds(name: str) -> None:
    found = tightness.measure(here(name), 32 * len(FAMILIES) * 8, shapes=(Shape(16, 2, 512, 200, 192, 128),))
    assert found.inexact == []
    assert found.sound
    assert max(cell.out_max for cell in found.cells["unit normal"].values()) >= 0.15


@pytest.mark.parametrize("name", ["ours[triton]", "ours[fa4]"])
def test_one_wrong_key_in_a_row_is_noticed_by_bound_and_read_out(name: str) -> None:
    found = sensitivity.measure(here(name), 128, sizes=((256, 1024),), n=16, heads=2)
    assert found.met
