"""How many kernels FA4 would compile for many batches of one set of dims, without compiling any.

Run as a script, in a process of its own: FA4 reads its target from the environment when it is imported. FA4 works
its compile keys out on the host, so fake tensors and a compiler that does nothing are enough. Prints a JSON object:
distinct keys after half of the batches and after all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from typing import Any

BATCHES = 400
KINDS = ("dense", "offset", "causal", "all")
QUERIES = (1, 2, 31, 64, 65, 127, 128, 129, 255, 256, 257, 600)
KEYS = (1, 2, 16, 33, 900, 4000)


def main() -> None:
    os.environ["FLASH_ATTENTION_ARCH"] = "sm_90"
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = "132"

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device: Any = torch.cuda
    device.get_device_capability = lambda *_: (9, 0)
    from flash_attn.cute import interface

    from optimized.attention import fa4

    subject: Any = fa4
    subject.device_of = lambda _: contextlib.nullcontext()
    interface.cute.compile = lambda *_, **__: lambda *_, **__: None
    keys = interface._flash_attn_fwd.compile_cache.cache
    drawn = random.Random(0)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def call() -> None:
        batch, queries, longest = drawn.randint(1, 5), drawn.choice(QUERIES), drawn.choice(KEYS)
        kind = drawn.choice(KINDS)
        words = (longest // 32 + 8) // 4 * 4
        mask = None
        if kind in ("dense", "offset"):
            mask = empty(batch, -(-queries // 256) * 256, words, dtype=torch.int32)
        lens = empty(batch + 1, dtype=torch.int32)
        v = torch.empty_strided((longest, 8, 128), (8 * 256, 256, 1), dtype=torch.bfloat16, device="cuda")
        fa4.fa4_masked_mha(
            empty(drawn.randint(queries, queries * batch), 8, 192),
            empty(longest, 8, 192),
            v,
            lens,
            lens,
            queries,
            longest,
            0.1,
            mask=mask,
            offset=kind == "offset",
            causal=kind == "causal",
        )

    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for index in range(BATCHES):
            call()
            if index + 1 in (BATCHES // 2, BATCHES):
                counts.append(len(keys))
    print(json.dumps({"half": counts[0], "all": counts[1]}))


if __name__ == "__main__":
    main()
