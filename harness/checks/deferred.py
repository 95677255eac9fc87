"""CUDA's rules for asynchronous copies, on a CPU: every copy that may run late does.

`DelayedCopies` tells two sides apart, host and device. Tensors that were there before, those made with `device=` of
the device side, and what is computed from such are on the device, and `tensor.device` says so; those made in the
context without a device are on the host. What crosses the sides follows the rules of CUDA and PyTorch:

* a blocking copy, `item`, `tolist`, `nonzero` and the like wait for the device: a synchronising point;
* a non-blocking copy from pinned memory reads its source at the next synchronising point. A source with other bytes
  by then is a hazard. Until then its memory stays, as PyTorch's host allocator keeps it;
* a non-blocking copy from pageable memory has taken its source when it returns;
* `to("cpu", non_blocking=True)` gives pinned memory, which holds garbage until the next synchronising point;
* a kernel cannot read host memory: a host tensor among its arguments is a hazard.

Work on one stream runs in order, so nothing else needs to be late: device results follow from device contents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("privateuseone", 0)
"""What `tensor.device` is on the device side; no real device has this name here."""
GARBAGE_BYTE = 0xEF
_WAITING = frozenset(
    {"item", "tolist", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "numpy", "__array__"}
    | {"__bool__", "__int__", "__float__", "__index__"}
)
"""Torch functions that make the host wait for the device whenever they are given a device tensor."""
_OWN_PARTS = (str(Path(torch.__file__).parent), str(Path(__file__)))


@dataclass(frozen=True)
class Hazard:
    """Something that goes wrong on a GPU as soon as the device is late."""

    what: str
    where: str
    """`file.py:line` of the call."""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})"


@dataclass(frozen=True)
class _Late:
    """A copy from pinned memory that has not run yet: the source, and what it held when the copy was queued."""

    source: torch.Tensor
    then: torch.Tensor
    where: str


class DelayedCopies(TorchFunctionMode):
    """A context in which non-blocking copies run at the next synchronising point.

    Hazards are collected in `hazards`; leaving the context is a synchronising point. Needs Triton's interpreter for
    code that launches Triton kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hazards: list[Hazard] = []
        self.waits = 0
        """Synchronising points so far."""
        self._host: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._late: list[_Late] = []
        self._fills: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inside_kernel = False

    def __enter__(self) -> Self:
        # not at the head of this module: whether Triton interprets is decided by `optimized`, before Triton is there
        from triton.runtime.interpreter import GridExecutor

        self._executor: Any = GridExecutor
        self._launch = self._executor.__call__
        self._executor.__call__ = self._launching(self._launch)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._executor.__call__ = self._launch
        self._wait()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._inside_kernel:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return DEVICE if self._is_device(args[0]) else func(*args)
        name = getattr(func, "__name__", "")
        if name == "to":
            return self._to(func, *args, **kwargs)
        if name == "cpu":
            return self._to(torch.Tensor.to, args[0], "cpu")
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "pin_memory":
            return self._on_host(args[0].clone(), pinned=True)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            return self._made(func, args, kwargs)
        given = list(_tensors((args, kwargs)))
        on_device = any(map(self._is_device, given))
        if on_device and _waits(name, args, kwargs):
            self._wait()
            if name in _WAITING:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not on_device:
            for tensor in _tensors(result):
                self._on_host(tensor)
        return result

    def _made(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A new tensor, on a named device or pinned."""
        on_device = _is_device_name(kwargs.pop("device", None) or "cpu")
        pinned = kwargs.pop("pin_memory", False)
        if on_device and getattr(func, "__name__", "") in ("tensor", "as_tensor"):
            self._wait()
        result = func(*args, **kwargs)
        if on_device:
            # `as_tensor` may hand its argument on: a copy on the device is another memory
            return result.clone() if any(result is argument for argument in args) else result
        return self._on_host(result, pinned=pinned) if isinstance(result, torch.Tensor) else result

    def _to(self, func: Callable[..., Any], source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = kwargs.pop("device", None)
        others = list(args)
        for index, argument in enumerate(args):
            if isinstance(argument, (torch.device, str, torch.Tensor)) and target is None:
                target = others.pop(index)
        non_blocking = kwargs.pop("non_blocking", False)
        if isinstance(target, torch.Tensor):
            kwargs.setdefault("dtype", target.dtype)
            goes_to_device = self._is_device(target)
        else:
            goes_to_device = self._is_device(source) if target is None else _is_device_name(target)
        if others and isinstance(others[-1], bool) and target is not None:
            non_blocking = others.pop(1 if len(others) > 1 and isinstance(others[0], torch.dtype) else 0)
        if goes_to_device == self._is_device(source):
            moved: torch.Tensor = func(source, *others, **kwargs)
            return moved if goes_to_device else self._on_host(moved)
        converted = source.to(*others, **kwargs)
        if goes_to_device:
            result = torch.empty_like(converted)
            self._to_device(result, source, converted, non_blocking)
            return result
        result = self._on_host(torch.empty_like(converted), pinned=non_blocking)
        self._to_host(result, converted, late=non_blocking)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        to_device = self._is_device(target)
        if to_device and not self._is_device(source):
            self._to_device(target, source, source, non_blocking)
        elif not to_device and self._is_device(source):
            self._to_host(target, source, late=non_blocking and _is_marked(self._pinned, target))
        else:
            target.copy_(source)
        return target

    def _to_device(self, target: torch.Tensor, source: torch.Tensor, values: torch.Tensor, non_blocking: bool) -> None:
        if not non_blocking:
            self._wait()
        elif _is_marked(self._pinned, source):
            self._late.append(_Late(source.detach(), source.detach().clone(), _caller()))
        target.copy_(values)

    def _to_host(self, target: torch.Tensor, source: torch.Tensor, *, late: bool) -> None:
        if not late:
            self._wait()
            target.copy_(source)
            return
        self._fills.append((target, source.clone()))
        garbage = torch.full((target.numel() * target.element_size(),), GARBAGE_BYTE, dtype=torch.uint8)
        target.copy_(garbage.view(target.dtype).view(target.shape))

    def _wait(self) -> None:
        """A synchronising point: all that is late runs."""
        self.waits += 1
        late, self._late = self._late, []
        fills, self._fills = self._fills, []
        with torch._C.DisableTorchFunction():
            for copy in late:
                changed = (copy.source != copy.then) & ~(copy.source.isnan() & copy.then.isnan())
                if bool(changed.any()):
                    what = "a queued copy reads pinned memory that is overwritten before the copy has run"
                    self.hazards.append(Hazard(what, copy.where))
            for target, values in fills:
                target.copy_(values)

    def _is_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and not _is_marked(self._host, value)

    def _on_host(self, tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        if pinned:
            _mark(self._pinned, tensor)
        return _mark(self._host, tensor)

    def _launching(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launch_kernel(executor: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors((args, kwargs)):
                if not self._is_device(tensor):
                    self.hazards.append(Hazard("a kernel is given a tensor in host memory", _caller()))
            with self._in_kernel():
                return launch(executor, *args, **kwargs)

        return launch_kernel

    @contextmanager
    def _in_kernel(self) -> Iterator[None]:
        self._inside_kernel = True
        try:
            yield
        finally:
            self._inside_kernel = False


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call on a device tensor makes the host wait: it reads values, or the size of its result."""
    if name == "repeat_interleave":
        return "output_size" not in kwargs
    if name == "__getitem__":
        return any(index.dtype == torch.bool for index in _tensors(args[1:]))
    return name in _WAITING


def _is_device_name(device: object) -> bool:
    return torch.device(device).type == DEVICE.type  # type: ignore[call-overload, no-any-return]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _mark(marks: dict[int, StorageWeakRef], tensor: torch.Tensor) -> torch.Tensor:
    """Mark the memory of a tensor; the weak reference keeps its key from being used again."""
    reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    marks[reference.cdata] = reference
    return tensor


def _is_marked(marks: dict[int, StorageWeakRef], tensor: torch.Tensor) -> bool:
    reference = marks.get(tensor.untyped_storage()._cdata)
    return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]


def _caller() -> str:
    """The innermost line of the code under test."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_PARTS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
