"""One thread a test process: xdist runs one process a core, and small tensors gain nothing from more."""

from __future__ import annotations

import torch

import optimized  # noqa: F401  (fixes Triton's mode before anything imports Triton)

torch.set_num_threads(1)
