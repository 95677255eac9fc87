"""Forced fails in compiled kernels, on a machine without a GPU: Triton compiles for one, and a launch does nothing.

`python -m tests.meta.compiled CAPABILITY MUTANT...` runs the cases of the kill table until the forced fail of the
mutant comes out of the compiler. One line of text for each; exit code 1 if one is not reached.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from harness.mutants.forced_fail import REACHED
from harness.mutants.patch import FORCED, install
from harness.mutants.stream import case_stream
from harness.problems.tensors import build_inputs
from reports.text import described

CASES = 40
"""Cases of the stream that may reach a place."""
_SHARED_MEMORY = 227 * 1024
"""Bytes that a block of an SM90 or SM100 may use."""


class _Driver:
    """As much of a Triton driver as the compiler asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _nothing(*_: object, **__: object) -> None:
    return None


def pretend(capability: int) -> None:
    """Compile for this GPU from now on, and launch nothing."""
    driver.set_active(_Driver(capability))
    made: Any = CompiledKernel
    made.run = property(lambda kernel: _nothing)
    made.launch_metadata = made._init_handles = _nothing
    made.function = None
    memory = SimpleNamespace(shared_memory_per_block_optin=_SHARED_MEMORY)
    torch.cuda.get_device_properties = lambda device: memory  # type: ignore[assignment, misc, return-value]


def _layer() -> Any:
    """Our layer, with those of its checks left out that ask for a GPU."""
    from harness.subjects.ours import OurLayer

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "optimized":
            for check, instead in (("require_launchable", _nothing), ("device_of", nullcontext)):
                if hasattr(module, check):
                    setattr(module, check, instead)
    return OurLayer("triton")


def reaches(capability: int, mutant: str) -> str:
    """`reached`, or what came instead of the forced fail of the mutant."""
    pretend(capability)
    install(mutant + FORCED)
    layer, said = _layer(), "nothing raised"
    for case in case_stream("quick", 1, CASES):
        try:
            layer.prefill(case, build_inputs(case), traced=False)
        except Exception as error:
            said = described(error)
            if f"{REACHED} {mutant}" in said:
                return "reached"
    return f"not reached: {said}"


def _reaches_in_a_child(capability: int, mutant: str) -> bool:
    """Print what `reaches` says, from a process that may import a patched `optimized`."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            said = reaches(capability, mutant)
        except BaseException as error:
            said = described(error)
        print(f"{mutant}: {said}", flush=True)
        os._exit(said != "reached")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(capability: int, mutants: list[str]) -> int:
    """Exit code of the command line."""
    case_stream("quick", 1, CASES)  # loads what every child needs
    reached = [_reaches_in_a_child(capability, name) for name in mutants]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
