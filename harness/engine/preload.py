"""Imported by the server process that workers are forked from: what every worker needs, and nothing more.

`optimized` is not among it (a mutant's worker imports a patched copy), and CUDA is never touched here, because a
CUDA context does not survive a fork. Triton fixes its mode when it is imported; `optimized` would choose it by
asking CUDA, so the same choice is made here without.
"""

import os

import torch

from harness.engine.pool import gpu_count

if gpu_count() == 0 or torch.version.cuda is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis  # noqa: F401
import triton  # noqa: F401

import harness.problems.strategies
import harness.problems.tensors  # noqa: F401
