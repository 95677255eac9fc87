"""Does FlashMLA's sparse prefill keep its contract on this GPU?

Needs its library: `MLACHECK_FLASHMLA_LIBRARY` or `MLACHECK_VLLM_PATH`. Many more cases:
`python -m harness.subjects.flashmla --cases 5000 --library PATH`.
"""

from __future__ import annotations

import time

import pytest
import torch

from harness.subjects.api import NotRunnable, SubjectError
from harness.subjects.flashmla import HEADS, SparsePrefill, load_kernel
from harness.subjects.flashmla_cases import FAMILIES, FlashMlaCase, draw
from harness.subjects.flashmla_judge import check
from harness.subjects.flashmla_run import first_finding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def kernel() -> SparsePrefill:
    try:
        return load_kernel()
    except (NotRunnable, SubjectError) as reason:
        pytest.skip(str(reason))


def head_counts() -> tuple[int, ...]:
    return HEADS[torch.cuda.get_device_capability()[0]]


def test_drawn_cases_are_within_the_bound(kernel: SparsePrefill) -> None:
    worst = {"mqa.out": 0.0, "mqa.lse": 0.0, "mqa.max_logits": 0.0}
    start = time.perf_counter()
    for number in range(200):
        case = draw(number, head_counts())
        records = check(case, kernel, CUDA, repeat=number % 4 == 0)
        assert first_finding(records) is None, (case, first_finding(records))
        for record in records:
            if record.check in worst and record.margin is not None:
                worst[record.check] = max(worst[record.check], record.margin)
    print(f"\n200 cases in {time.perf_counter() - start:.1f} s, worst err/tol {worst}")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_at_each_head_count(kernel: SparsePrefill, family: str) -> None:
    for heads in head_counts():
        for width in (576, 512):
            case = FlashMlaCase.model_validate(
                {
                    "heads": heads,
                    "width": width,
                    "queries": 3,
                    "rows": 500,
                    "topk": 512,
                    "family": family,
                    "seed": heads,
                }
            )
            finding = first_finding(check(case, kernel, CUDA))
            assert finding is None, (case, finding)


@pytest.mark.parametrize(
    "changes",
    [
        {"duplicates": "one_key", "family": "counting"},
        {"duplicates": "some"},
        {"lengths": True, "spread": True, "filled": 0.5},
        {"empty_rows": True, "queries": 9},
        {"filled": 0.0},
        {"sinks": "infinite", "empty_rows": True, "queries": 9},
        {"own_out": True},
        {"poison": True, "filled": 0.2, "spread": True},
        {"rows": 1},
    ],
)
def test_each_promise_of_the_contract(kernel: SparsePrefill, changes: dict[str, object]) -> None:
    for heads in head_counts():
        case = FlashMlaCase.model_validate({"heads": heads, "queries": 2, "rows": 300, "topk": 256} | changes)
        finding = first_finding(check(case, kernel, CUDA, repeat=True))
        assert finding is None, (case, finding)
