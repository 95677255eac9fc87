"""FlashMLA's sparse prefill kernel as a subject of stage `mqa`.

The kernel is `torch.ops._flashmla_C.sparse_prefill_fwd`, from the extension library of a vLLM wheel, or
`flash_mla.flash_mla_sparse_fwd`. Its contract, from its own documentation and argument checks:

* q `[T, H, 576]` or `[T, H, 512]` bf16, the first 512 entries of a row of kv are its value; H is 8, 16, 32, 64 or 128
  on SM90, 64 or 128 on SM100; the number of slots is a multiple of 128;
* an index of -1 or of at least the rows of kv is no key; an index counts once for each slot that holds it; there is no
  causality; `topk_length[t]` slots of row t count, and a row that only later slots name must not be NaN;
* results are `(out, max_logits, lse)` with natural logarithms, `[T, H]`; a row without a key has output 0, LSE +inf;
* `attn_sink` shrinks the output by `1 / (1 + exp(sink - lse))` and leaves LSE alone.

`python -m harness.subjects.flashmla --cases 5000` judges the kernel on drawn cases (`flashmla_cases`,
`flashmla_judge`), which reach more of it than the stage's own cases: all head counts, sinks at infinity, a given
output buffer, poison.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.subjects.api import NotRunnable, SubjectError, subject
from harness.subjects.contract import Contract
from harness.subjects.vllm_source import find_vllm

LIBRARY_VARIABLE = "MLACHECK_FLASHMLA_LIBRARY"
"""Environment variable: path of the extension library `_flashmla_C*.so`."""
VALUE_WIDTH = 512
WIDTHS = (576, 512)
SLOT_UNIT = 128
HEADS = {9: (8, 16, 32, 64, 128), 10: (64, 128)}
"""Capability -> head counts that the kernel takes."""

SparsePrefill = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""`(q, kv [S, 1, D], indices [T, 1, topk], scale, sinks, topk_length, out)` -> out, max_logits, lse."""


@cache
def load_kernel() -> SparsePrefill:
    """The kernel of this machine.

    Raises NotRunnable without a GPU that it supports, or where neither the library nor the package is found;
    SubjectError if the library that was named cannot be loaded.
    """
    if not torch.cuda.is_available():
        raise NotRunnable("FlashMLA needs a CUDA GPU of capability 9.0 or 10.x, there is none")
    major, minor = torch.cuda.get_device_capability()
    if major not in HEADS:
        raise NotRunnable(f"FlashMLA needs a GPU of capability 9.0 or 10.x, this is {major}.{minor}")
    library = _library()
    if library is None:
        return _from_package()
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise SubjectError(f"{library} cannot be loaded: {error}") from None
    operator: Any = torch.ops._flashmla_C.sparse_prefill_fwd

    def run(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, sinks: Any, topk_length: Any, out: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, second, third = operator(q, kv, indices, scale, VALUE_WIDTH, sinks, topk_length, out)
        return first, second, third

    return run


def _library() -> Path | None:
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise SubjectError(f"{LIBRARY_VARIABLE} is {given}, which is no file")
        return path
    try:
        root = find_vllm().root
    except NotRunnable:
        return None
    return next(iter(sorted(root.glob("_flashmla_C*.so"))), None)


def _from_package() -> SparsePrefill:
    if importlib.util.find_spec("flash_mla") is None:
        raise NotRunnable(
            f"no FlashMLA is found: name its library (_flashmla_C*.so) by {LIBRARY_VARIABLE}, or install flash_mla"
        )
    from flash_mla import flash_mla_sparse_fwd

    def run(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, sinks: Any, topk_length: Any, out: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = {} if out is None else {"out": out}
        first, second, third = flash_mla_sparse_fwd(
            q, kv, indices, scale, d_v=VALUE_WIDTH, attn_sink=sinks, topk_length=topk_length, **given
        )
        return first, second, third

    return run


@subject(
    stage="mqa",
    contract=Contract(
        device="cuda",
        dtypes=("bf16",),
        cache_dtypes=("auto",),
        dims=((512, 128, 64, 128), (512, 256, 0, 256)),
        topk_length=True,
        duplicates="per_slot",
        causality="topk_only",
        attention_sink=True,
        lse_layout="TH",
        empty_lse="+inf",
        max_logits=True,
    ),
)
def mqa(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    topk_length: torch.Tensor,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel with heads and slots padded to counts that it takes, as its documentation asks of callers."""
    kernel = load_kernel()
    tokens, heads, width = q.shape
    if tokens == 0:
        empty = q.new_zeros(0, heads, dtype=torch.float32)
        return q.new_zeros(0, heads, VALUE_WIDTH), empty, empty
    counts = HEADS[torch.cuda.get_device_capability(q.device)[0]]
    padded = next((count for count in counts if count >= heads), None)
    if padded is None or width not in WIDTHS:
        raise NotRunnable(f"FlashMLA takes up to {counts[-1]} heads of width {WIDTHS}, these are {heads} of {width}")
    slots = -(-indices.shape[1] // SLOT_UNIT) * SLOT_UNIT
    q = torch.nn.functional.pad(q, (0, 0, 0, padded - heads))
    indices = torch.nn.functional.pad(indices, (0, slots - indices.shape[1]), value=-1)
    rows = kv if kv.shape[0] else kv.new_zeros(1, width)
    sinks = torch.nn.functional.pad(sinks, (0, padded - heads))
    out, largest, lse = kernel(
        q.contiguous(), rows[:, None], indices[:, None].contiguous(), scale, sinks, topk_length, None
    )
    return out[:, :heads].contiguous(), largest[:, :heads].contiguous(), lse[:, :heads].contiguous()


if __name__ == "__main__":
    from harness.subjects.flashmla_run import main

    main()
