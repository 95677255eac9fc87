"""Is each check that some machines alone make a check that exists, and made there?"""

from __future__ import annotations

import pytest

from harness.checks import crowd
from harness.checks.places import ON_A_GPU, is_made_on, where_made
from harness.checks.relations import RELATIONS


def test_do_the_checks_exist() -> None:
    assert set(ON_A_GPU) <= {crowd.CHECK, *(f"relation.{relation.name}" for relation in RELATIONS)}


@pytest.mark.parametrize(
    ("check", "on_gpu", "on_cpu", "where"),
    [
        ("mask.crowd", True, False, "on a GPU alone"),
        ("relation.side_stream", True, False, "on a GPU alone"),
        ("relation.delayed_copies", False, True, "without a GPU alone"),
        ("mask.bits", True, True, None),
    ],
)
def test_where_is_it_made(check: str, on_gpu: bool, on_cpu: bool, where: str | None) -> None:
    assert (is_made_on(check, "cuda"), is_made_on(check, "cpu"), where_made(check)) == (on_gpu, on_cpu, where)
