"""What runs inside a worker process: load the subject once, judge one case at a time.

The worker owns the device. It is the only process that imports `optimized` (for a mutant: a patched copy of
it), so a crash, a hang or a poisoned CUDA context costs one worker and never the run.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from harness.checks.blame import is_out_of_memory
from harness.engine.core_time import pid_file
from harness.engine.device_fault import BLOCKING, device_fault, lost
from harness.problems.problem import Problem
from harness.subjects.copies import copies_end_here
from harness.subjects.domain import Domain
from reports.records import CaseRecord, Status
from reports.text import described, said

MUTANT_PREFIX = "mutant:"
SHORTLY_BEFORE = 0.9
"""A worker that is about to be killed for its silence prints its stack at this part of the time."""
SUBJECT_FOLDERS = ("subjects", "optimized")
"""An out-of-memory error that passed through a file of these was the subject's."""
HARNESS_STAGE = "harness"
"""Stage of a record that says that the harness itself failed, so that no subject is accused of it."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker has to know; sent with each call, so that a new worker needs no memory."""

    subject: str
    scratch: str
    """Folder for temporary files of the worker; removed with the run even if the worker was killed."""
    gpu: int | None = None
    """Index of the GPU this worker uses, in the order of CUDA_VISIBLE_DEVICES; None: the default one."""
    threads: int = 1
    log: str | None = None
    """File that takes what the worker prints, and its stack when it dies; None: the terminal."""
    checker: str = "harness.checks.case:check_case"
    """`module:function` of the judge: (Problem, subject name) -> CaseRecord."""
    resolver: str = "harness.subjects.registry:resolve"
    """`module:function` that raises if the subject name is unknown."""
    blocking: bool = False
    """Whether each launch of a GPU waits for its end."""


class SubjectRefused(Exception):  # noqa: N818 - the word that the user reads
    """The subject cannot be loaded here; the message is one line for the user."""


_loaded: dict[WorkerSpec, Callable[[Problem, str], CaseRecord]] = {}


def mutant_name(subject: str) -> str:
    """Name of the mutant in `mutant:NAME` or `mutant:NAME@ATTENTION`."""
    name, at, attention = subject.removeprefix(MUTANT_PREFIX).partition("@")
    if at and attention not in ("triton", "fa4"):
        raise SubjectRefused(f"{subject}: {attention!r} is no attention kernel, must be 'triton' or 'fa4'")
    return name


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _load(spec: WorkerSpec) -> Callable[[Problem, str], CaseRecord]:
    if spec in _loaded:
        return _loaded[spec]
    tempfile.tempdir = spec.scratch
    if spec.log is not None:
        log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        pid_file(spec.log).write_text(str(os.getpid()))
    faulthandler.enable(file=2)
    if spec.gpu is not None:
        visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[spec.gpu] if visible else str(spec.gpu)
    if spec.blocking:
        os.environ[BLOCKING] = "1"  # read when CUDA is first used, which is later
    if spec.subject.startswith(MUTANT_PREFIX):
        _named("harness.mutants.patch:install")(mutant_name(spec.subject))
    checker: Callable[[Problem, str], CaseRecord] = _named(spec.checker)
    subject = _named(spec.resolver)(spec.subject)
    getattr(subject, "require_runnable", bool)()  # raises NotRunnable, with the reason
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(spec.threads)
    _loaded[spec] = checker
    return checker


def prepare(spec: WorkerSpec) -> dict[str, str]:
    """Load the subject and describe the place where it runs.

    Raises:
        SubjectRefused: the name is unknown or the subject cannot run here (one line).
    """
    try:
        with copies_end_here():
            _load(spec)
    except SubjectRefused:
        raise
    except BaseException as error:
        if type(error).__name__ in ("SubjectError", "MutantError", "NotRunnable"):
            raise SubjectRefused(said(error)) from None
        raise SubjectRefused(f"{spec.subject}: {described(error)}") from None
    return describe()


def domain_of(spec: WorkerSpec) -> Domain | None:
    """The problems that are legal for the subject, where it says so. Raises SubjectRefused."""
    prepare(spec)
    domain: Domain | None = getattr(_named(spec.resolver)(spec.subject), "domain", None)
    return domain


def describe() -> dict[str, str]:
    """Versions and device of this process, as far as they are loaded."""
    facts = {"python": platform.python_version(), "machine": platform.machine()}
    if "torch" in sys.modules:
        import torch

        facts["torch"] = str(torch.__version__)
        facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if "triton" in sys.modules:
        import triton

        facts["triton"] = str(triton.__version__)
        facts["triton_mode"] = "interpreted" if triton.knobs.runtime.interpret else "compiled"
    return facts


def run_case(spec: WorkerSpec, problem_json: str, limit_s: float | None = None) -> dict[str, Any]:
    """Judge one case; raises for nothing that the subject or the judge does but one: a device that is lost.

    An exception that reaches this level is a fault of the harness (the judge turns those of the subject into
    verdicts itself) and gives NOT_RUN at stage `harness`; running out of memory gives OOM. What is no Exception is
    meant to end the process, which here would end the worker: CRASH. Shortly before `limit_s`, when the worker will
    be killed, it prints where it is.

    Raises:
        DeviceLost: the GPU no longer answers in this process, which must be replaced.
    """
    start = time.perf_counter()
    problem = Problem.from_json(problem_json)
    raised: BaseException | None = None
    if limit_s is not None:
        faulthandler.dump_traceback_later(SHORTLY_BEFORE * limit_s, file=2)
    try:
        with copies_end_here():
            record = _load(spec)(problem, spec.subject)
    except MemoryError as error:
        record = bare_record(problem, spec.subject, Status.OOM, f"out of host memory: {said(error)}")
    except Exception as error:
        if _is_device_oom(error):
            record = _out_of_device_memory(problem, spec.subject, error)
        else:
            raised = error
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{described(error)} (at {os.path.basename(where.filename)}:{where.lineno})"
            record = bare_record(problem, spec.subject, Status.NOT_RUN, message, stage=HARNESS_STAGE)
    except BaseException as error:
        record = bare_record(problem, spec.subject, Status.CRASH, f"raised {type(error).__name__}({said(error)})")
    finally:
        faulthandler.cancel_dump_traceback_later()
    fault = device_fault()
    if fault is not None:
        raise lost(fault, raised, record.stage if record.status.is_finding else None)
    if not record.seconds:
        record.seconds = time.perf_counter() - start
    return record.model_dump(mode="json")


def bare_record(
    problem: Problem,
    subject: str,
    status: Status,
    message: str,
    stage: str | None = None,
    seconds: float = 0.0,
) -> CaseRecord:
    """A record of a case about which nothing is known but how it ended."""
    return CaseRecord(
        case_id=problem.case_id,
        subject=subject,
        source=problem.source,
        status=status,
        stage=stage,
        message=message,
        features=problem.features(),
        seconds=seconds,
    )


def _out_of_device_memory(problem: Problem, subject: str, error: Exception) -> CaseRecord:
    """OOM where the subject asked for the memory; where the judge did, the case did not run."""
    _free_device_memory()
    message = said(error)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any(f"{os.sep}{folder}{os.sep}" in file for file in files for folder in SUBJECT_FOLDERS):
        return bare_record(problem, subject, Status.OOM, message)
    message = f"the judge ran out of device memory (run fewer --jobs): {message}"
    return bare_record(problem, subject, Status.NOT_RUN, message, stage=HARNESS_STAGE)


def _free_device_memory() -> None:
    """Hand what this process caches back, so that the next case of any worker may have it."""
    import torch

    with suppress(RuntimeError):  # a device that is lost has none: `device_fault` tells
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _is_device_oom(error: Exception) -> bool:
    return is_out_of_memory(error) or "can't allocate memory" in said(error)
