"""Stand-ins for the judge, the subjects and the strategies: quick, torch-free, and misbehaving on demand.

What a fake judge does depends on the number of query tokens of the case alone, so that each test can aim.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from hypothesis import strategies as st

from harness.problems.problem import Dims, Problem, Request, TopkSpec
from reports.records import CaseRecord, CheckRecord, Place, Status

DIMS = Dims(heads=2, kv_lora_rank=32, nope=16, rope=8, v=16, topk=8)


def problem(*lengths: tuple[int, int], **fields: object) -> Problem:
    """A problem with these (context, query) lengths."""
    requests = tuple(Request(context_len=c, query_len=q) for c, q in lengths)
    topk = TopkSpec(kinds=("random",) * len(requests))
    return Problem(dims=DIMS, scale=0.25, requests=requests, topk=topk, **fields)  # type: ignore[arg-type]


def cases(profile: str) -> st.SearchStrategy[Problem]:
    """One to four short requests."""
    lengths = st.tuples(st.integers(0, 60), st.integers(1, 40))
    return st.lists(lengths, min_size=1, max_size=4).map(lambda pairs: problem(*pairs))


def cases_of_two_scales(profile: str) -> st.SearchStrategy[Problem]:
    """Cases of two layers."""
    return st.tuples(cases(profile), st.sampled_from([0.25, 0.5])).map(lambda pair: pair[0].replace(scale=pair[1]))


def deadly_cases(profile: str) -> st.SearchStrategy[Problem]:
    """A strategy that takes its process down."""
    os._exit(0)


def broken_cases(profile: str) -> st.SearchStrategy[Problem]:
    """A strategy with a bug."""
    raise RuntimeError("the strategy is broken")


class Skipped(BaseException):
    """As the outcomes of pytest are."""


def resolve(name: str) -> None:
    """Knows every subject but one; others take their process down, or try to."""
    if name == "unknown":
        raise type("SubjectError", (ValueError,), {})("no subject is called 'unknown'")
    if name == "dies":
        os._exit(3)
    if name == "leaves":
        os._exit(0)
    if name == "interrupts":
        raise KeyboardInterrupt
    if name == "panics":
        raise BaseException("a panic\nin Rust")


def good(case: Problem, subject: str) -> CaseRecord:
    """Everything passes."""
    paths = ["global_mask", "mask_single" if len(case.requests) == 1 else "mask_many"]
    return CaseRecord(
        case_id=case.case_id,
        subject=subject,
        status=Status.PASS,
        paths=paths,
        chunks=len(case.planned_chunks),
        features=["dims:published"] if case.num_tokens % 2 else ["dims:small"],
        margin_out=case.num_tokens / 1000,
        margin_lse=0.1,
        power={"lse_dropped": 0.5},
        tensor_hash=case.case_id[::-1],
        checks=[CheckRecord(stage="attend", check="attend.out", status=Status.PASS, margin=0.3)],
    )


def bad_when_long(case: Problem, subject: str) -> CaseRecord:
    """The mask loses a bit as soon as one request has 20 new tokens or more."""
    record = good(case, subject)
    if case.max_query_len < 20:
        return record
    check = CheckRecord(
        stage="mask",
        check="mask.bits",
        status=Status.FAIL,
        place=Place(request=0, row=19, key=31, word=0, bit=31),
        message="row 19 missed key 31",
    )
    return record.model_copy(
        update={"status": Status.FAIL, "stage": "mask", "message": check.message, "checks": [check]}
    )


_first_scale: list[float] = []


def scale_kept(case: Problem, subject: str) -> CaseRecord:
    """The process keeps the scale of its first call; requests of 20 new tokens or more show it."""
    record = good(case, subject)
    for call in (*case.history, case):
        _first_scale.append(call.scale)
        if call.scale != _first_scale[0] and call.max_query_len >= 20:
            check = CheckRecord(stage="attend", check="attend.lse", status=Status.FAIL, message="LSE is off")
            return record.model_copy(
                update={"status": Status.FAIL, "stage": "attend", "message": check.message, "checks": [check]}
            )
    return record


def once(case: Problem, subject: str) -> CaseRecord:
    """Fails at the 5th call of its process and never again."""
    _first_scale.append(case.scale)
    record = good(case, subject)
    wrong = len(_first_scale) == 5
    return record.model_copy(update={"status": Status.FAIL, "message": "once"}) if wrong else record


def misbehaving(case: Problem, subject: str) -> CaseRecord:
    """By its number of tokens: 1 segfault, 2 hang, 3 memory, 4 a harness bug, 5 exit, 7 exit later, 8 slow,
    9 to 11 exceptions that are no Exception, 12 a quiet exit, 13 a fork that returns twice, 14 a child that stays,
    15 a GPU that stops and is noticed by the judge, 16 one that stops at the end of the case, 17 one that has no memory
    left and stops, 18 one whose errors go round in a circle, 19 functions of torch that are replaced."""
    match case.num_tokens:
        case 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 2:
            time.sleep(600)
        case 3:
            raise MemoryError("no room for 7 GiB")
        case 4:
            raise ZeroDivisionError("a bug of the judge")
        case 5:
            sys.exit("enough")
        case 7:
            threading.Timer(0.2, os._exit, [9]).start()
        case 8:
            time.sleep(1.5)
        case 9:
            raise KeyboardInterrupt
        case 10:
            raise GeneratorExit("stop")
        case 11:
            raise Skipped("not today")
        case 12:
            os._exit(0)
        case 13:
            os.fork()
        case 14:
            child = subprocess.Popen(["sleep", "600"])
            Path(tempfile.gettempdir(), "child").write_text(str(child.pid))
        case 15 | 16 | 17 | 18:
            stop_the_gpu(case.num_tokens)
        case 19:
            sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=None))  # type: ignore[assignment]
    return good(case, subject)


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def stop_the_gpu(how: int) -> None:
    """What a process sees of a GPU whose kernel touched foreign memory: each request fails, the first one late.

    Where launches wait for their end, the launch itself fails, in a file that stands for a stage.
    """

    def request() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")

    cuda = SimpleNamespace(
        is_initialized=lambda: True, is_available=lambda: True, synchronize=request, empty_cache=request
    )
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # type: ignore[assignment]
    space: dict[str, object] = {"request": request}
    exec(compile("def launch():\n    request()", "/x/optimized/merge.py", "exec"), space)
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        try:
            space["launch"]()  # type: ignore[operator]
        except RuntimeError as error:
            if how == 18:
                later = RuntimeError("later")
                later.__context__, error.__context__ = error, later
                raise later  # noqa: B904
            request()  # as a judge that goes on
    if how == 17:
        raise OutOfMemoryError("no memory")
    if how != 16:
        request()


def crash_when_long(case: Problem, subject: str) -> CaseRecord:
    """Kills its process on requests of 20 new tokens or more."""
    if case.max_query_len >= 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return good(case, subject)


def slow(case: Problem, subject: str) -> CaseRecord:
    """Takes its time."""
    time.sleep(0.05)
    return good(case, subject)


def buggy(case: Problem, subject: str) -> CaseRecord:
    """A judge with a bug."""
    raise KeyError("a bug of the judge")


def not_here(case: Problem, subject: str) -> CaseRecord:
    """A subject that needs another machine."""
    return CaseRecord(case_id=case.case_id, subject=subject, status=Status.NOT_RUN, message="no CUDA GPU")
