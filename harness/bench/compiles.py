"""How many kernels unseen batches compile after a warm-up: 0 is right, sizes are run-time arguments."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass

from hypothesis import Phase

import optimized
from harness.checks.case import default_device
from harness.engine.driver import run_hypothesis
from harness.problems.problem import Problem
from harness.problems.strategies import cases
from harness.problems.tensors import build_inputs
from harness.subjects.ours import OurLayer


@dataclass(frozen=True)
class CompileCount:
    """Compiled kernels before and after a stretch of unseen batches."""

    batches: int
    warm_up: int
    triton_before: int
    triton_after: int
    fa4_before: int
    fa4_after: int

    @property
    def new_triton(self) -> int:
        return self.triton_after - self.triton_before

    @property
    def new_fa4(self) -> int:
        return self.fa4_after - self.fa4_before


def compiled_triton() -> int:
    """Variants that all Triton kernels of `optimized` hold in this process; 0 under the interpreter."""
    count = 0
    for module_info in pkgutil.walk_packages(optimized.__path__, "optimized."):
        module = sys.modules.get(module_info.name) or _imported(module_info.name)
        for value in vars(module).values() if module is not None else ():
            if getattr(value, "__module__", None) == module_info.name and hasattr(value, "device_caches"):
                count += sum(len(cache[0]) for cache in value.device_caches.values())
    return count


def _imported(name: str) -> object | None:
    """The module, or None where it needs a package that is not installed (mask mods without FA4)."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def compiled_fa4() -> int:
    """Kernels that FA4 holds in this process; 0 where it is not imported."""
    interface = sys.modules.get("flash_attn.cute.interface")
    if interface is None:
        return 0
    cache = interface._flash_attn_fwd.compile_cache
    held = getattr(cache, "cache", cache)
    return len(held)


def unseen_problems(count: int, search_seed: int) -> list[Problem]:
    """Drawn problems of one set of dims, so that only lengths, layouts and top-k sets differ."""
    found: list[Problem] = []

    def collect(problem: Problem) -> None:
        if len(found) < count and problem.num_tokens and problem.paging.kv_cache_dtype == "auto":
            found.append(problem)

    run_hypothesis(
        collect, cases("gpu_small"), run_seed=search_seed, max_examples=40 * count, phases=(Phase.generate,)
    )
    return found


def count_compiles(attention: str, batches: int, search_seed: int) -> CompileCount:
    """Warm up on as many drawn batches as are counted, then count the compiles of `batches` unseen ones."""
    subject = OurLayer(attention)
    subject.require_runnable()
    warm = _with_common_dims(unseen_problems(batches, search_seed))
    fresh = _with_common_dims(unseen_problems(batches, search_seed + 1))

    def run(problem: Problem) -> None:
        try:
            subject.prefill(problem, build_inputs(problem, default_device()), traced=False)
        except ValueError:  # a forced path that does not fit: nothing is launched
            return

    for problem in warm:
        run(problem)
    triton_before, fa4_before = compiled_triton(), compiled_fa4()
    for problem in fresh:
        run(problem)
    return CompileCount(len(fresh), len(warm), triton_before, compiled_triton(), fa4_before, compiled_fa4())


def _with_common_dims(problems: list[Problem]) -> list[Problem]:
    """Every problem on the same sizes and dtype: what may differ between two batches of one model."""
    common: list[Problem] = []
    for problem in problems:
        dims = problem.dims.model_copy(update={"heads": 8, "kv_lora_rank": 128, "nope": 64, "rope": 32, "v": 64})
        common.append(problem.replace(dims=dims, dtype="bf16"))
    return common
