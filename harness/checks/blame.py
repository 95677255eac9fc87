"""Whom an exception accuses: the stage of the code under test, by the file that it stands in, or want of memory.

An exception, a crash and a hang leave no result that a stage check could judge, but they leave frames. Needs neither
torch nor the code under test.
"""

from __future__ import annotations

import re
import traceback

STAGE_OF_FILE = {
    "dispatch.py": "dispatch",
    "metadata.py": "plan",
    "chunks.py": "plan",
    "mask.py": "mask",
    "mask_kernels.py": "mask",
    "kv_cache.py": "gather",
    "gather_kernel.py": "gather",
    "fp8.py": "gather",
    "projection.py": "project",
    "mha_path.py": "chunk_loop",
    "api.py": "attend",
    "arguments.py": "attend",
    "fa4.py": "attend",
    "mha_kernels.py": "attend",
    "tiles.py": "attend",
    "triton_mha.py": "attend",
    "merge.py": "merge",
    "slots.py": "slots",
    "mqa_path.py": "mqa",
    "sparse_mqa.py": "mqa",
    "sparse_mqa_kernel.py": "mqa",
}
"""Files of `optimized/`; those that serve several stages are left out, so that their caller counts."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


def stage_of_error(error: BaseException) -> str | None:
    """Stage of the innermost frame of the code under test; None if the error did not come from there."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((stage for frame in reversed(frames) if (stage := _stage(frame.filename))), None)


def frame_of_error(error: BaseException) -> str:
    """`mask.py:120 build_topk_mask`: the innermost frame of the code under test; empty if there is none."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = next((frame for frame in frames if _stage(frame.filename)), None)
    return "" if frame is None else f"{_basename(frame.filename)}:{frame.lineno} {frame.name}"


def stage_of_dump(text: str) -> str | None:
    """The same of a stack that Python's fault handler printed, innermost frame first."""
    return next((stage for file, _, _ in _FRAME.findall(text) if (stage := _stage(file))), None)


def frame_of_dump(text: str) -> str:
    """`mask.py:120 build_topk_mask`: the innermost frame of the code under test, or of anything; empty if none."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(text)
    if not frames:
        return ""
    file, line, function = next((frame for frame in frames if _stage(frame[0])), frames[0])
    return f"{_basename(file)}:{line} {function}"


def _basename(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _stage(path: str) -> str | None:
    parts = path.replace("\\", "/").split("/")
    return STAGE_OF_FILE.get(parts[-1]) if "optimized" in parts[:-1] else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device has no memory left; the latter's exceptions share a name and no class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
