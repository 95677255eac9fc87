"""The system under test: sparse MLA prefill by Triton and FlashAttention-4.

Triton fixes its mode (compiled or interpreted) when it is imported. On a machine without a CUDA GPU the only
mode that can run is the interpreter, so the variable is set here, before any module of this package imports
Triton. A value that the user set is left alone.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
