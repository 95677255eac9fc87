"""Checks shared by the functions that launch kernels; each raises before anything is launched or written.

A wrong type or dtype is a TypeError, a wrong value, shape, stride or device a ValueError. Every message names
the argument, what it is and what it must be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from optimized.rounding import IS_INTERPRETED

INT32_MAX = 2**31 - 1
MAX_KERNEL_ROWS = 2**30
"""Rows that one launch can number in int32, with room for the last program's unused ones."""
VECTOR_BYTES = 16
FLOAT_16_BIT_DTYPES = (torch.bfloat16, torch.float16)


def require_int(name: str, value: object, minimum: int, maximum: int = INT32_MAX) -> int:
    """`value` as an int; `minimum <= value <= maximum` or ValueError, an int (bool is none) or TypeError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
    if not minimum <= value <= maximum:
        bound = f">= {minimum}" if value < minimum else f"<= {maximum}"
        raise ValueError(f"{name} is {value}, must be {bound}")
    return value


def require_lengths(name: str, values: Sequence[int], count: int | None = None) -> list[int]:
    """`values` as a list of ints >= 0 that fit int32; `count` of them when given."""
    lengths = list(values)
    if count is not None and len(lengths) != count:
        raise ValueError(f"{name} has {len(lengths)} entries, must have {count}")
    for index, value in enumerate(lengths):
        require_int(f"{name}[{index}]", value, 0)
    return lengths


def require_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Collection[torch.dtype],
    device: torch.device | None = None,
) -> torch.Tensor:
    """`tensor` of the given shape (None: any size), one of `dtypes`, on `device` when given."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}, must be {' or '.join(map(str, allowed))}")
    fits = tensor.dim() == len(shape) and all(
        size is None or size == found for size, found in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        wanted += "," if len(shape) == 1 else ""
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be ({wanted})")
    if device is not None and not _is_on(tensor, device):
        raise ValueError(f"{name} is on {tensor.device}, must be on {device}")
    return tensor


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; a device without an index stands for any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """The last dimension of `tensor` is contiguous (or has at most one element)."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, must be 1")


def require_distinct_elements(name: str, tensor: torch.Tensor) -> None:
    """No dimension of a tensor that is written repeats its memory (stride 0, as `expand` makes)."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError(f"{name} has strides {tensor.stride()} and is written: no stride may be 0")


def require_launchable(name: str, tensor: torch.Tensor) -> None:
    """Compiled Triton reads device memory only; interpreted Triton reads both."""
    if not IS_INTERPRETED and not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, must be on a CUDA device (or set TRITON_INTERPRET=1 before "
            "Triton is imported)"
        )


def rows_are_aligned(*tensors: torch.Tensor) -> bool:
    """Whether every row (the last dimension) of every tensor starts at a multiple of 16 bytes.

    Kernels take the answer as a compile-time flag, which allows 128-bit accesses where addresses and strides,
    being run-time arguments, would not.
    """
    return all(
        tensor.data_ptr() % VECTOR_BYTES == 0
        and all(stride * tensor.element_size() % VECTOR_BYTES == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of `tensor` the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
