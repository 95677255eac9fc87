"""Is a user's function found, its signature understood, and its contract kept by what is drawn?"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import mlacheck
from harness.cli import main
from harness.findings.store import CaseFile, fingerprint, replay_command
from harness.problems.names import TOPK_KINDS, DType
from harness.problems.problem import DataSpec, Dims, Problem, TopkSpec
from harness.problems.topk import topk_rows
from harness.subjects.api import StageSubject, SubjectError, subject
from harness.subjects.contract import Contract
from harness.subjects.domain import MAYBE_EMPTY, Domain
from harness.subjects.load import GROUP, load_subject
from harness.subjects.names import full_name, is_user_code, short_name, split_name
from harness.subjects.registry import list_subjects, resolve
from harness.subjects.stages import STAGES
from reference.numerics import Numerics
from reports.records import CaseRecord, Status
from tests.harness.stage_problems import RAGGED, problem

KERNEL = """
import mlacheck

def plain(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):
    return None

@mlacheck.subject(stage="merge", contract=mlacheck.Contract(lse_base="2"))
def decorated(prefix_output, prefix_lse, suffix_output, suffix_lse):
    return None

NUMBER = 3
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "some_kernel_of_mine.py"
    file.write_text(KERNEL)
    monkeypatch.chdir(tmp_path)
    return file


def test_does_a_decorated_function_stay_what_it_is() -> None:
    def function(prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any) -> int:
        return 3

    assert subject(stage="merge")(function) is function
    assert function(1, 2, 3, 4) == 3


def test_is_a_function_found_by_file_and_by_module(kernel: Path) -> None:
    by_file = resolve(f"{kernel}:plain@attend")
    by_module = resolve("some_kernel_of_mine:decorated")
    assert isinstance(by_file, StageSubject)
    assert isinstance(by_module, StageSubject)
    assert by_file.stage == "attend"
    assert (by_module.stage, by_module.contract.lse_base) == ("merge", "2")
    assert by_module.takes == {"prefix_output", "prefix_lse", "suffix_output", "suffix_lse"}


def test_is_a_function_found_by_its_entry_point(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "some_kernel_of_mine:decorated", GROUP)

    def points(**wanted: str) -> list[importlib.metadata.EntryPoint]:
        return [point] if wanted.get("name", "mine") == "mine" else []

    monkeypatch.setattr("harness.subjects.load.entry_points", points)
    monkeypatch.syspath_prepend(kernel.parent)
    load_subject.cache_clear()
    found = resolve("mine")
    assert isinstance(found, StageSubject)
    assert found.stage == "merge"
    assert "mine" in list_subjects()


WRONG_NAMES = {
    "nosuch": "no subject is called 'nosuch'",
    "nosuch.module:f@attend": "no module 'nosuch'",
    "{file}:nosuch@attend": "it defines plain, decorated",
    "{file}:NUMBER@attend": "is a int, must be a function",
    "{file}:plain": "of which stage?",
    "{file}:decorated@attend": "is declared for stage 'merge', not for 'attend'",
    "{file}:plain@merge": "takes 'q', which stage 'merge' does not offer",
    "missing.py:f@attend": "no such file",
    "ours[triton]@attend": "takes no stage",
}


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_is_a_wrong_name_one_clear_line(kernel: Path, name: str) -> None:
    with pytest.raises(SubjectError) as caught:
        resolve(name.format(file=kernel))
    assert WRONG_NAMES[name] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nosuch_thing", "ModuleNotFoundError: No module named 'nosuch_thing' (broken.py:1)"),
        ("def f(:", "SyntaxError: "),
        ("\nraise RuntimeError('no GPU')", "RuntimeError: no GPU (broken.py:2)"),
        ("raise SystemExit(3)", "SystemExit: 3 (broken.py:1)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (broken.py:1)"),
        ("raise BaseException('a\\nb')", "BaseException: a b (broken.py:1)"),
    ],
)
def test_does_a_file_that_cannot_be_imported_say_where(tmp_path: Path, code: str, reason: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises(SubjectError, match=r"broken\.py") as caught:
        resolve(f"{file}:f@attend")
    assert reason in str(caught.value)


class WrongSignatures:
    """Functions of stage attend with one thing wrong each, and what must be said."""

    @staticmethod
    def misspelt(q, key, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        """takes 'key', which stage 'attend' does not offer, did you mean 'k'?"""

    @staticmethod
    def no_keys(q, k, v, cu_seqlens_q, cu_seqlens_k, scale):  # type: ignore[no-untyped-def]
        """takes no 'allowed' or 'mask'"""

    @staticmethod
    def positional(q, k, v, /, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        """parameter 'q' is positional-only"""

    @staticmethod
    def undeclared(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed, sinks):  # type: ignore[no-untyped-def]
        """takes 'sinks', which its contract does not declare"""


@pytest.mark.parametrize("name", ["misspelt", "no_keys", "positional", "undeclared"])
def test_is_a_wrong_signature_one_clear_line(name: str) -> None:
    function = getattr(WrongSignatures, name)
    with pytest.raises(SubjectError) as caught:
        subject(stage="attend")(function)
    assert (inspect.getdoc(function) or "?") in str(caught.value)
    assert str(caught.value).startswith(name)


def test_must_a_declared_input_be_taken() -> None:
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):  # type: ignore[no-untyped-def]
        return None

    with pytest.raises(SubjectError, match="declares 'sinks', but it does not take it"):
        subject(stage="attend", contract=Contract(attention_sink=True))(attend)


def test_may_a_function_have_parameters_of_its_own_with_defaults_and_take_the_rest() -> None:
    def attend(q, k, v, tile=64, **rest):  # type: ignore[no-untyped-def]
        return None

    takes = StageSubject("it", "attend", attend).takes
    assert "tile" not in takes
    assert {"mask", "allowed", "key_starts"} <= takes
    assert "sinks" not in takes


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"lse_base": "10"}, "lse_base is '10', must be one of"),
        ({"dtypes": "bf16"}, "dtypes is 'bf16', must be a tuple"),
        ({"dtypes": ("fp32",)}, "dtypes"),
        ({"head_dim_multiple": 0}, "head_dim_multiple is 0, must be positive"),
        ({"dims": ((512, 128, 64, 128),), "head_dim_multiple": 48}, "must be multiples of 48"),
        ({"max_requests": 0}, "max_requests"),
        ({"dims": (512, 128, 64, 128)}, "dims has 512, must be a tuple of sizes"),
        ({"numerics": None}, "numerics is None, must be a Numerics"),
        ({"mqa_numerics": Numerics}, "must be a Numerics"),
    ],
)
def test_is_a_wrong_contract_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        Contract(**fields)


NARROW = Contract(
    dtypes=("fp16",),
    cache_dtypes=("auto",),
    head_dim_multiple=8,
    heads_multiple=4,
    topk_multiple=16,
    max_requests=2,
    zero_lengths=False,
    invalid_index="negative_only",
    duplicates="none",
    causality="topk_only",
    empty_rows=False,
    lowest_score=-1e4,
)


@pytest.mark.parametrize("stage", ["attend", "mqa", "mask", "gather", "prefill"])
def test_does_a_narrow_contract_see_only_legal_problems(stage: str) -> None:
    domain = Domain(stage, NARROW)
    fitted: set[DType] = set()

    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mlacheck.strategies.cases("quick"))
    def look(drawn: Problem) -> None:
        case = domain.fit(drawn)
        fitted.add(drawn.dtype)
        assert domain.fit(case) == case
        assert domain.outside(case) is None
        dims = case.dims
        assert not any(size % 8 for size in (dims.kv_lora_rank, dims.nope, dims.rope, dims.v))
        assert (dims.heads % 4, dims.topk % 16, case.dtype) == (0, 0, "fp16")
        assert 1 <= len(case.requests) <= 2
        assert case.data.family != "very_low"
        assert min(case.query_lens) >= 1
        assert (case.paging.kv_cache_dtype, case.layout.q_pad) == ("auto", 0)
        if case.force == "dense":
            return
        rows, token = topk_rows(case), 0
        for request in case.requests:
            for i in range(request.query_len):
                keys = rows[token][rows[token] >= 0].tolist()
                token += 1
                assert len(keys) == len(set(keys))
                assert max(keys, default=0) < request.seq_len
                assert stage not in ("mask", "prefill") or max(keys, default=0) <= request.context_len + i
                assert stage != "prefill" or keys

    look()
    assert "bf16" in fitted


@pytest.mark.parametrize("kind", sorted(set(TOPK_KINDS) - MAYBE_EMPTY))
def test_does_every_other_kind_give_each_row_a_key(kind: Any) -> None:
    for (context, query, width), seed in itertools.product(((0, 3, 8), (45, 3, 8), (7, 40, 1), (33, 2, 3)), range(4)):
        dims = RAGGED.dims.model_copy(update={"topk": width})
        rows = topk_rows(problem((context, query), dims=dims, topk=TopkSpec(kinds=(kind,), seed=seed)))
        position = context + np.arange(query)[:, None]
        assert bool(((rows >= 0) & (rows <= position)).any(axis=1).all())


def test_are_dims_taken_from_the_list_of_the_contract() -> None:
    sizes = ((64, 32, 0, 32), (128, 64, 32, 64))
    domain = Domain("attend", Contract(dims=sizes))
    dims = domain.fit(RAGGED).dims
    assert (dims.kv_lora_rank, dims.nope, dims.rope, dims.v) in sizes
    assert domain.outside(RAGGED) == "dims"


def test_are_explicit_rows_made_legal_key_by_key() -> None:
    rows = ((0, 0, 9), (50, 2, 2), (1, 1, -3))
    case = problem((2, 3), topk=TopkSpec(rows=rows), dims=Dims(heads=1, kv_lora_rank=8, nope=8, rope=8, v=8, topk=8))
    fitted = Domain("mqa", Contract(duplicates="none", invalid_index="negative_only")).fit(case)
    assert fitted.topk.rows == ((0,), (2,), (1, -3))


@pytest.mark.parametrize(
    ("name", "target", "stage"),
    [
        ("a.py:f@attend", "a.py:f", "attend"),
        ("a.py:f", "a.py:f", None),
        ("mutant:x@fa4", "mutant:x@fa4", None),
        ("torch-dense", "torch-dense", None),
        ("some@where.py:f@mask", "some@where.py:f", "mask"),
    ],
)
def test_is_a_name_taken_apart(name: str, target: str, stage: str | None) -> None:
    assert split_name(name) == (target, stage)


def test_does_a_full_name_mean_the_same_in_every_folder(tmp_path: Path) -> None:
    assert full_name("k.py:f", "attend", tmp_path) == f"{tmp_path.resolve()}/k.py:f@attend"
    assert full_name("pkg.k:f", None, tmp_path) == "pkg.k:f"
    assert short_name(full_name("sub/k.py:f@mask", None, tmp_path)) == "k.py:f@mask"
    with pytest.raises(ValueError, match="names stage 'mask', but stage 'attend'"):
        full_name("k.py:f@mask", "attend")
    with pytest.raises(ValueError, match="unknown"):
        full_name("k.py:f", "attention")


def test_has_a_fault_the_same_fingerprint_in_every_checkout() -> None:
    def record(name: str) -> CaseRecord:
        return CaseRecord(case_id="0", subject=name, status=Status.FAIL, stage="attend", message="x")

    assert fingerprint(record("/a/k.py:f@attend")) == fingerprint(record("/b/c/k.py:f@attend"))
    assert fingerprint(record("/a/k.py:f@attend")) != fingerprint(record("/a/k.py:g@attend"))


@pytest.mark.parametrize("name", ["ours[triton]", "mutant:x", "torch-dense"])
def test_is_only_a_users_code_named_on_a_replay_line(name: str) -> None:
    assert not is_user_code(name)
    assert replay_command(Path("/c.json"), name) == "mlacheck replay /c.json"
    assert replay_command(Path("/c.json"), "/k.py:f@attend") == "mlacheck replay /c.json --subject /k.py:f@attend"


@pytest.mark.parametrize("command", ["replay", "shrink"])
def test_does_a_case_file_never_make_code_run_by_itself(command: str, tmp_path: Path) -> None:
    """The trap writes a file when it is imported; the case names it as its subject."""
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\ndef f(**inputs): pass\n")
    case = tmp_path / "case.json"
    case.write_text(CaseFile(subject=f"{trap}:f@attend", problem=RAGGED).text())
    done = click.testing.CliRunner().invoke(main, [command, str(case)])
    assert done.exit_code == 2
    assert "name that code, or yours, by --subject" in done.output
    assert not (tmp_path / "sprung").exists()


def test_does_check_raise_with_the_message_and_the_replay_line(kernel: Path) -> None:
    kernel.write_text(
        "import mlacheck\nfrom harness.subjects.skeletons.attend import my_attend\n"
        "@mlacheck.subject(stage='attend')\n"
        "def f(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed):\n"
        "    out, lse = my_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, allowed)\n"
        "    return out, lse + 1\n"
    )
    with pytest.raises(mlacheck.CheckFailed) as caught:
        mlacheck.check(RAGGED, f"{kernel.name}:f")
    line = str(caught.value).splitlines()[-1]
    assert line == f"mlacheck replay {caught.value.case} --subject {kernel}:f"
    assert CaseFile.model_validate_json(caught.value.case.read_text()).problem == RAGGED
    assert "every error fits a constant +1" in str(caught.value)


def test_does_check_pass_a_right_function_and_refuse_a_case_outside_its_contract() -> None:
    @mlacheck.subject(stage="plan", contract=Contract(head_dim_multiple=8))
    def plan(**inputs: Any) -> Any:
        return importlib.import_module("harness.subjects.skeletons.plan").my_plan(**inputs)

    with pytest.raises(mlacheck.NotRunnable, match="outside the contract"):
        mlacheck.check(RAGGED, plan)
    legal = RAGGED.replace(dims=RAGGED.dims.model_copy(update={"rope": 8}), data=DataSpec(seed=1))
    assert mlacheck.check(legal, plan).status is Status.PASS


def test_are_wrong_arguments_of_the_public_functions_named() -> None:
    def plan(**inputs: Any) -> Any:
        return None

    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "problem is a str, must be a Problem", lambda: mlacheck.check("x", "ours[triton]")),  # type: ignore[arg-type]
        (TypeError, "problem is a NoneType, must be a Problem", lambda: mlacheck.check_case(None, "ours[triton]")),  # type: ignore[arg-type]
        (TypeError, "subject_name is a function, must be a name", lambda: mlacheck.check_case(RAGGED, plan)),  # type: ignore[arg-type]
        (ValueError, "profile is 'nope', must be one of quick", lambda: mlacheck.strategies.cases("nope")),  # type: ignore[arg-type]
        (SubjectError, "contract is a dict, must be", lambda: mlacheck.subject(stage="plan", contract={})),  # type: ignore[arg-type]
        (SubjectError, "contract is the class Contract", lambda: mlacheck.subject(stage="plan", contract=Contract)),  # type: ignore[arg-type]
    ]
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()


def test_does_every_public_name_exist() -> None:
    for name in mlacheck.__all__:
        assert getattr(mlacheck, name) is not None
    for stage in STAGES.values():
        assert stage.checks
