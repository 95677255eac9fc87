"""What is installed on this machine, what can run on it, and what would be in the way."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlacheck
from harness.engine.pool import gpu_count

PACKAGES = (
    "torch",
    "triton",
    "flash-attn-4",
    "hypothesis",
    "pydantic",
    "numpy",
    "pandas",
    "pebble",
    "rich",
    "click",
)


@dataclass
class Diagnosis:
    """Facts by name, and the problems that keep a run from starting."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether a run can start."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"healthy": self.healthy, "facts": self.facts, "problems": self.problems}

    def lines(self) -> list[str]:
        """For people: one fact a line, then the problems."""
        width = max(map(len, self.facts), default=0)
        verdict = "ready: `mlacheck run` can start" if self.healthy else "not ready"
        return [
            *(f"{name:<{width}}  {value}" for name, value in self.facts.items()),
            *(f"! {problem}" for problem in self.problems),
            verdict,
        ]


def examine() -> Diagnosis:
    """Look at this process and its machine. Imports torch, and `optimized` if its name is ours."""
    diagnosis = Diagnosis()
    facts = diagnosis.facts
    facts["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    facts["cores"] = str(os.cpu_count())
    for package in PACKAGES:
        facts[package] = _version(package) or "not installed"
    clashes = mlacheck.name_clashes()
    diagnosis.problems += clashes
    facts["packages"] = f"from {Path(mlacheck.__file__).parent}" if not clashes else "CLASH"
    if not clashes:
        _device(diagnosis)
    return diagnosis


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(diagnosis: Diagnosis) -> None:
    facts = diagnosis.facts
    try:
        import torch

        from optimized.attention.fa4 import fa4_available
        from optimized.rounding import INTERPRETED
    except ImportError as error:
        diagnosis.problems.append(f"cannot import what a run needs: {error}")
        return
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        facts["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, sm_{major}{minor}"
    else:
        facts["gpu"] = "none" if not gpu_count() else f"{gpu_count()} seen, but this torch cannot use CUDA"
    facts["triton mode"] = "interpreted (CPU)" if bool(INTERPRETED) else "compiled"
    available, reason = fa4_available()
    facts["ours[fa4]"] = "can run" if available else f"cannot run: {reason}"
