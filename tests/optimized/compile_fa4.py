"""Compiles FA4 kernels without a GPU, through `fa4_masked_mha` and torch's fake tensors.

Run as a script, in a process of its own: CuTe and FA4 read their target from the environment when they are
imported. Arguments: capability family, then kernels, each `<head dim of q>_<of v>_<dense, offset or causal>`.
Prints a JSON object: how many kernels FA4 compiled for two batches of each, or what went wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def main(family: int, names: list[str]) -> None:
    os.environ["FLASH_ATTENTION_ARCH"] = f"sm_{family}"
    os.environ["CUTE_DSL_ARCH"] = f"sm_{family}a"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = "132"

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device: Any = torch.cuda
    device.get_device_capability = lambda *_: (family // 10, 0)
    from flash_attn.cute import interface

    from optimized.attention import fa4

    subject: Any = fa4
    subject.device_of = lambda _: contextlib.nullcontext()  # there is no device to make current

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def call(head_dim: int, v_dim: int, kind: str, batch: int, queries: int) -> None:
        heads, keys = 2, 900
        # v as the projection leaves it: a strided view of keys and values
        width = head_dim + v_dim
        v_layout = ((keys, heads, v_dim), (heads * width, width, 1))
        lens = empty(batch + 1, dtype=torch.int32)
        out, lse = fa4.fa4_masked_mha(
            empty(batch * queries, heads, head_dim),
            empty(keys, heads, head_dim),
            torch.empty_strided(*v_layout, dtype=torch.bfloat16, device="cuda"),
            lens,
            lens,
            queries,
            keys,
            0.1,
            mask=None if kind == "causal" else empty(batch, 512, 32, dtype=torch.int32),
            offset=kind == "offset",
            causal=kind == "causal",
        )
        assert tuple(out.shape) == (batch * queries, heads, v_dim), out.shape
        assert (tuple(lse.shape), lse.dtype) == ((heads, batch * queries), torch.float32)

    compiled = interface._flash_attn_fwd.compile_cache.cache
    results: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name in names:
            head_dim, v_dim, kind = name.split("_")
            before = len(compiled)
            try:
                # above 256 queries: FA4's scheduler for fewer asks a real GPU on SM100
                for batch, queries in ((2, 300), (3, 433)):
                    call(int(head_dim), int(v_dim), kind, batch, queries)
                results[name] = len(compiled) - before
            except Exception as error:  # each kernel is its own test
                results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
