"""Load a user's subject: `package.module:function`, `path/file.py:function`, or an entry point.

Loading runs the module's code. So nothing here is called for a name that a case file brings: the command line
asks for the subject to be named on it.
"""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.subjects.api import ATTRIBUTE, StageSubject, SubjectError
from harness.subjects.contract import Contract
from harness.subjects.names import is_file, is_user_code, split_name
from harness.subjects.stages import STAGES
from reports.text import described

GROUP = "mlacheck.subjects"


def entry_point_names() -> list[str]:
    """Names of the installed entry points of the group `mlacheck.subjects`."""
    return sorted(point.name for point in entry_points(group=GROUP))


@lru_cache(maxsize=64)
def load_subject(name: str) -> StageSubject:
    """The subject of this name, loaded once a process.

    Raises SubjectError (one line): no such file, module or function, an import that fails, no stage, or a wrong
    signature.
    """
    target, stage = split_name(name)
    found = _from_path(target) if is_user_code(target) else _from_entry_point(target)
    return as_subject(found, name, stage)


def as_subject(found: Any, name: str, stage: str | None = None, contract: Contract | None = None) -> StageSubject:
    """A StageSubject from one, from a decorated function, or from a plain function and a stage.

    Raises SubjectError (one line).
    """
    declared = found if isinstance(found, StageSubject) else getattr(found, ATTRIBUTE, None)
    if isinstance(declared, StageSubject):
        if stage is not None and stage != declared.stage:
            raise SubjectError(f"{name}: is declared for stage {declared.stage!r}, not for {stage!r}")
        return StageSubject(name, declared.stage, declared.function, contract or declared.contract)
    if stage is None:
        stages = ", ".join(STAGES)
        raise SubjectError(f"{name}: of which stage? Decorate it with mlacheck.subject or give --stage ({stages})")
    return StageSubject(name, stage, found, contract or Contract())


def _from_entry_point(target: str) -> Any:
    for point in entry_points(group=GROUP, name=target):
        try:
            return point.load()
        except BaseException as error:
            raise SubjectError(f"{target}: entry point {point.value}: {_reason(error)}") from error
    raise SubjectError(
        f"no subject is called {target!r}; `mlacheck list subjects` names them, and yours is FILE.py:FUNCTION or "
        "MODULE:FUNCTION"
    )


def _from_path(target: str) -> Any:
    where, _, attribute = target.rpartition(":")
    if not where or not attribute:
        raise SubjectError(f"{target}: must be FILE.py:FUNCTION or MODULE:FUNCTION")
    module = _module_of_file(Path(where)) if is_file(target) else _module(where)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            own = [
                n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__
            ]
            raise SubjectError(f"{where} has no {attribute!r}; it defines {', '.join(own) or 'nothing'}") from None
    return found


def _module(name: str) -> ModuleType:
    _extend_path(Path.cwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise SubjectError(f"no module {error.name!r} on the import path or in {Path.cwd()}") from None
        raise SubjectError(f"{name}: {_reason(error)}") from error
    except BaseException as error:  # SystemExit, outcomes of pytest, panics of Rust
        raise SubjectError(f"{name}: {_reason(error)}") from error


def _module_of_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise SubjectError(f"{path}: no such file")
    name = f"mlacheck_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SubjectError(f"{path}: cannot be imported")
    _extend_path(path.parent)
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # SystemExit, outcomes of pytest, panics of Rust
        del sys.modules[name]
        raise SubjectError(f"{path}: {_reason(error)}") from error
    return module


_OURS = Path(__file__).parents[1]


def _extend_path(folder: Path) -> None:
    """Last, so that nothing in a user's folder takes the place of an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _reason(error: BaseException) -> str:
    """`NameError: name 'x' is not defined (my_kernel.py:12)`: the innermost line that is neither ours nor the import
    machinery's."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and not Path(file).is_relative_to(_OURS):
            lines.append(f"{Path(file).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{Path(error.filename).name}:{error.lineno}")
    where = f" ({lines[-1]})" if lines else ""
    return described(error) + where
