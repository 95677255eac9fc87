"""Compiles, for a GPU that is not here, a kernel that calls a function with a `raise` in it; prints what is said of it.

Run as a script, in a process of its own: Triton compiles there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reports.text import said


@triton.jit
def _inner(x: tl.tensor) -> tl.tensor:
    raise RuntimeError("forced fail of mutant inner")
    return x + 1


@triton.jit
def _middle(x: tl.tensor) -> tl.tensor:
    return _inner(x)


@triton.jit
def _kernel(pointer: tl.tensor) -> None:
    tl.store(pointer, _middle(tl.load(pointer)))


if __name__ == "__main__":
    try:
        triton.compile(ASTSource(_kernel, {"pointer": "*i32"}), target=GPUTarget("cuda", 90, 32))
    except Exception as error:
        print(said(error))
