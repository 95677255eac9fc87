"""Are single definitions of a vLLM loaded without the rest of it, and judged inside what vLLM promises?

The loader is tried on a small package of our own. With `MLACHECK_VLLM_PATH` the pieces of that vLLM are judged too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from harness.checks.mask import check_remap, check_slice
from harness.checks.mask_mod import check_mask_mod
from harness.checks.stage_case import check_stage
from harness.problems.problem import DataSpec, Dims, Problem, Request, TopkSpec
from harness.problems.strategies import cases
from harness.problems.tensors import build_inputs
from harness.subjects.api import NotRunnable, SubjectError
from harness.subjects.registry import BUNDLES, resolve
from harness.subjects.vllm import Vllm
from harness.subjects.vllm_source import PATH_VARIABLE, VllmSource, find_vllm
from reports.records import Status

needs_vllm = pytest.mark.skipif(PATH_VARIABLE not in os.environ, reason=f"needs {PATH_VARIABLE}: an unpacked wheel")

PIECES = '''
import a_module_that_does_not_exist
from another import Base

limit = 7
def doubled(x):
    """Reads a name that the loader must bring."""
    return helper(x) * 2
doubled.__vec_size__ = 32

class Layer(Base):
    @staticmethod
    def tripled(x):
        return 3 * x

    def method(self, x: NotThere) -> NotThere:
        return self.y + x
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "v1").mkdir(parents=True)
    (tmp_path / "vllm" / "layers").mkdir()
    (tmp_path / "vllm" / "layers" / "pieces.py").write_text(PIECES)
    (tmp_path / "vllm-9.8.7.dist-info").mkdir()
    return tmp_path


def test_definitions_are_loaded_without_the_imports_of_their_file(package: Path) -> None:
    source = VllmSource(package / "vllm")
    assert source.version == "9.8.7"
    names = ["doubled", "Layer.tripled", "Layer.method"]
    module = source.load("layers/pieces.py", names, {"helper": lambda x: x + 1})
    assert (module.doubled(3), module.tripled(2)) == (8, 6)
    assert module.doubled.__vec_size__ == 32, "what a file sets on a function belongs to it"
    assert not hasattr(module, "limit")
    assert module.doubled.__code__.co_filename.endswith("pieces.py"), "Triton and CuTe read the source"
    assert module.doubled.__code__.co_firstlineno == 6


def test_another_layout_is_said_in_one_line(package: Path) -> None:
    source = VllmSource(package / "vllm")
    with pytest.raises(SubjectError, match=r"vLLM 9.8.7 defines no gone in layers/pieces.py"):
        source.load("layers/pieces.py", ["gone"], {})
    with pytest.raises(SubjectError, match=r"defines no Layer.gone"):
        source.load("layers/pieces.py", ["Layer.gone"], {})
    with pytest.raises(SubjectError, match=r"has no file layers/other.py"):
        source.load("layers/other.py", [], {})
    with pytest.raises(SubjectError, match="is no vLLM package"):
        VllmSource(package)


def test_the_path_may_name_the_wheel_or_the_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (package, package / "vllm"):
        monkeypatch.setenv(PATH_VARIABLE, str(path))
        assert find_vllm().root == package / "vllm"
    monkeypatch.delenv(PATH_VARIABLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotRunnable, match="no vLLM is installed"):
        find_vllm()


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    return Vllm.found()


def judged(subject: str, problem: Problem) -> None:
    """One case of a stage: never a finding, and run unless it has nothing to compare."""
    stage_subject = resolve(subject)
    legal = stage_subject.domain.fit(problem)  # type: ignore[union-attr]
    record = check_stage(legal, stage_subject, torch.device("cpu"))  # type: ignore[arg-type]
    assert record.status in (Status.PASS, Status.WATCH, Status.VACUOUS), record.message


FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SLOW = settings(FEW, max_examples=6)


@needs_vllm
@FEW
@given(cases("quick"))
def test_the_planner_follows_the_greedy_rule(problem: Problem) -> None:
    judged("vllm@plan", problem)


@needs_vllm
@FEW
@given(cases("quick"))
def test_slices_and_remapped_rows_are_exact(vllm: Vllm, problem: Problem) -> None:
    rows = build_inputs(problem, torch.device("cpu")).prefill_topk
    sliced = vllm.slice_topk(rows, problem.query_lens)
    assert check_slice(sliced, rows, problem.query_lens).status is Status.PASS
    for starts, lens in (
        (problem.context_lens, problem.query_lens),
        ([length // 3 for length in problem.context_lens], [length // 2 for length in problem.context_lens]),
    ):
        for given_starts in (starts, torch.tensor(starts, dtype=torch.int32)):
            remapped = vllm.remap_topk(sliced, given_starts, lens)
            record = check_remap("x", remapped, sliced, starts, lens, 0)
            assert record.status is Status.PASS, record.message


@needs_vllm
@FEW
@given(cases("quick"))
def test_the_torch_merge_is_within_the_bound(problem: Problem) -> None:
    judged("vllm[torch]@merge", problem)


@needs_vllm
@SLOW
@given(cases("quick"))
def test_the_triton_merge_is_within_the_bound(problem: Problem) -> None:
    judged("vllm@merge", problem)


@needs_vllm
@SLOW
@given(cases("quick"))
def test_masks_are_exact_inside_the_contract(problem: Problem) -> None:
    judged("vllm@mask", problem)


@needs_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_what_cannot_run_here_says_why() -> None:
    subject = resolve("vllm@prefill")
    with pytest.raises(NotRunnable, match="capability family 100"):
        subject.function(*[None] * 7)  # type: ignore[union-attr]
    with pytest.raises(NotRunnable, match="needs a CUDA GPU"):
        Vllm.found().merge("cuda")


@needs_vllm
def test_the_offset_mod_of_0_33_0_loses_the_keys_of_the_second_word(vllm: Vllm) -> None:
    if vllm.source.version != "0.33.0":
        pytest.skip(f"speaks of 0.33.0, this is {vllm.source.version}")
    pytest.importorskip("cutlass")
    mask = torch.full((32, 128, 8), -1, dtype=torch.int32)
    verdicts = []
    mod = vllm.mask_mod(True, torch.device("cpu"))
    for start in range(32):
        record = check_mask_mod("suffix", mod, mask[:1], [1], [32], [start], "sm100")
        verdicts.append(record.status)
        if start:
            assert record.place.key == 32, "the first key of the second word"
    assert verdicts == [Status.PASS] + [Status.FAIL] * 31
    dense = vllm.mask_mod(False, torch.device("cpu"))
    assert check_mask_mod("suffix", dense, mask, [9] * 32, list(range(200, 232)), None, "sm100").status is Status.PASS


@needs_vllm
@SLOW
@given(cases("quick"))
def test_the_host_code_of_the_layer_is_right_with_the_global_mask(problem: Problem) -> None:
    judged("vllm[layer]@prefill", problem)


@needs_vllm
@SLOW
@given(cases("quick"))
def test_the_host_code_of_the_layer_is_right_with_remapped_rows(problem: Problem) -> None:
    judged("vllm[remap]@prefill", problem)


@needs_vllm
def test_the_layer_with_the_mods_of_0_33_0_misses_keys_of_the_new_tokens(vllm: Vllm) -> None:
    if vllm.source.version != "0.33.0":
        pytest.skip(f"speaks of 0.33.0, this is {vllm.source.version}")
    pytest.importorskip("cutlass")
    problem = Problem(
        dims=Dims(heads=1, kv_lora_rank=16, nope=8, rope=0, v=8, topk=64),
        scale=0.3,
        requests=(Request(context_len=1, query_len=40),),
        topk=TopkSpec(kinds=("all",), seed=1),
        data=DataSpec(seed=1),
    )
    subject = resolve("vllm[mods]@prefill")
    record = check_stage(subject.domain.fit(problem), subject, torch.device("cpu"))  # type: ignore[union-attr, arg-type]
    assert (record.status, record.stage) == (Status.FAIL, "prefill")
    # key 32 is the first of the second mask word, and the suffix begins at key 1
    assert "row 31 missed key 32 (word 1, bit 0)" in record.message
    judged("vllm[layer]@prefill", problem)


DOC = Path(__file__).parents[2] / "docs" / "other-kernels.md"


def test_the_subjects_that_the_page_names_exist() -> None:
    text = DOC.read_text(encoding="utf-8")
    table = text.partition("## How to run them")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"--subject '?([\w\[\]-]+)'?", text)) | set(re.findall(r"`([^`]+)`", " ".join(rows)))
    assert {"vllm", "vllm[layer]", "flashmla", "fa4"} <= named
    assert named <= set(BUNDLES)


@needs_vllm
def test_the_reproducer_of_the_page_prints_what_the_page_says() -> None:
    pytest.importorskip("cutlass")
    text = DOC.read_text(encoding="utf-8")
    program, output = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.S)[0]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, cwd=DOC.parents[1], check=False
    )
    assert done.stdout == output, done.stderr[-2000:]
