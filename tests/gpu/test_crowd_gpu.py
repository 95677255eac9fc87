"""Does a launch of thousands of rows show a race of a mask builder, and nothing in a right one?"""

from __future__ import annotations

import pytest
import torch

from harness.checks.crowd import REQUESTS, Crowd, check_crowd
from harness.subjects.ours import OurLayer
from reports.records import Status

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("requests", [*REQUESTS, 3])
def test_our_builder_passes(requests: int) -> None:
    builder = OurLayer("triton").build_mask
    for seed in range(20):
        (record,) = check_crowd(builder, torch.device("cuda", 0), Crowd(seed, requests))
        assert record.status is Status.PASS, record.message
