"""vLLM's mask builder and Triton merge on this GPU. Needs `MLACHECK_VLLM_PATH`: an unpacked wheel.

Its scatter kernels clear a row and set its bits with nothing that orders the two. Whether bits get lost depends on
how the warps of a program run, so the builder is tried on long rows many times, and the counts are printed. Only our
builder has to be exact here: what vLLM's does is a finding, not a failure of this suite.
"""

from __future__ import annotations

import os

import pytest
import torch

from harness.subjects.vllm import Vllm
from harness.subjects.vllm_source import PATH_VARIABLE
from optimized.mask import build_topk_mask, topk_mask_shape

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(PATH_VARIABLE not in os.environ, reason=f"needs {PATH_VARIABLE}: an unpacked wheel"),
]

TOPK = 2048
BUILDS = 40


def drawn_rows(rows: int, keys: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    order = torch.rand(rows, keys, device="cuda", generator=generator).argsort(dim=1)
    return order[:, : min(TOPK, keys)].int().contiguous()


def packed(topk: torch.Tensor, words: int) -> torch.Tensor:
    bits = torch.zeros(topk.shape[0], words * 32, dtype=torch.bool, device="cuda")
    bits.scatter_(1, topk.long(), True)
    weights = torch.ones(32, dtype=torch.int64, device="cuda") << torch.arange(32, device="cuda")
    whole = (bits.view(topk.shape[0], words, 32).long() * weights).sum(dim=2)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def wrong_bits(found: torch.Tensor, must: torch.Tensor) -> tuple[int, int]:
    """Bits missed and bits set by mistake."""
    shifts = torch.arange(32, device="cuda", dtype=torch.int32)

    def count(words: torch.Tensor) -> int:
        return sum(int(((part[..., None] >> shifts) & 1).sum()) for part in words.split(64))

    return count(must & ~found), count(found & ~must)


@pytest.mark.parametrize("keys", [1024, 4096, 16384, 65536])
@pytest.mark.parametrize("requests", [1, 2])
def test_bits_survive_the_clearing_of_their_row(keys: int, requests: int) -> None:
    vllm = Vllm.found()
    rows = 256
    shape = topk_mask_shape(requests, rows, keys)
    lost = {"vllm": [0, 0], "ours": [0, 0]}
    for build in range(BUILDS):
        topk = [drawn_rows(rows, keys, 10 * build + b) for b in range(requests)]
        must = torch.stack([packed(part, shape[2]) for part in topk])
        for name in lost:
            out = torch.full(shape, -1, dtype=torch.int32, device="cuda")
            if name == "vllm":
                vllm.build_mask(topk, [rows] * requests, keys, out)
            else:
                build_topk_mask(topk, [rows] * requests, rows, keys, out)
            missed, extra = wrong_bits(out.flatten(0, 1), must.flatten(0, 1))
            lost[name][0] += missed
            lost[name][1] += extra
    total = BUILDS * requests * rows * min(TOPK, keys)
    print(f"\n{requests} requests, {keys} keys, {total} bits: (missed, extra) vllm {lost['vllm']}, ours {lost['ours']}")
    assert lost["ours"] == [0, 0]
