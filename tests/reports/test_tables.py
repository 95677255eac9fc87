"""Do the tables count what the journal says?"""

from __future__ import annotations

from typing import Any

import pytest

from reports import tables
from reports.records import CaseRecord, CheckRecord, Status


def row(name: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"case_id": name, "subject": "s", "status": Status.PASS}
    return CaseRecord(**(base | fields)).model_dump(mode="json")


ROWS = [
    row("a", paths=["dense", "triton_mha"], chunks=0, margin_out=0.5, margin_lse=0.1, features=["dims:small"]),
    row("b", paths=["remap", "mask_many"], chunks=3, status=Status.WATCH, margin_out=0.9, source="azure:7"),
    row("c", paths=["remap"], chunks=2, status=Status.FAIL, stage="merge", margin_out=7.0, margin_lse=0.2),
    row("d", status=Status.NOT_RUN, features=["dims:published"], vacuous=["lse/dropped"]),
    row("v", status=Status.VACUOUS),
    row("e", status=Status.CRASH, power={"dropped": 0.25}, source="azure:9"),
]


def test_does_the_summary_count_every_case_once() -> None:
    numbers = tables.summary(tables.case_frame(ROWS))
    assert numbers["cases"] == 6
    assert (numbers["passed"], numbers["failing"], numbers["not_run"], numbers["vacuous"]) == (2, 2, 1, 1)
    assert numbers["without_power"] == 1
    assert (numbers["worst_margin_out"], numbers["worst_margin_lse"]) == (7.0, 0.2)
    assert numbers["statuses"] == {"PASS": 1, "WATCH": 1, "FAIL": 1, "NOT_RUN": 1, "VACUOUS": 1, "CRASH": 1}
    assert (numbers["many_chunks_share"], numbers["published_dims_share"]) == (0.3333, 0.1667)
    assert numbers["power"] == {"dropped": 0.25}


def test_are_paths_listed_even_if_no_case_reached_them() -> None:
    paths = tables.summary(tables.case_frame(ROWS))["paths"]
    assert list(paths)[: len(tables.PATH_NAMES)] == list(tables.PATH_NAMES)
    assert {name: n for name, n in paths.items() if n} == {
        "dense": 1,
        "remap": 2,
        "mask_many": 1,
        "triton_mha": 1,
    }


def test_does_an_empty_run_have_a_summary() -> None:
    numbers = tables.summary(tables.case_frame([]))
    assert (numbers["cases"], numbers["worst_margin_out"], numbers["many_chunks_share"]) == (0, None, 0.0)
    assert set(numbers["paths"].values()) == {0}


def test_are_no_paths_listed_for_a_subject_of_one_stage() -> None:
    rows = [row("a", paths=["merge"]), row("b", paths=["merge"])]
    assert tables.path_table(tables.case_frame(rows))["name"].tolist() == ["merge"]


def test_does_the_path_table_show_the_worst_margin_of_each_path() -> None:
    table = tables.path_table(tables.case_frame(ROWS)).set_index("name")
    assert table.loc["remap", "worst_out"] == 7.0
    assert table.loc["remap", "share"] == pytest.approx(1 / 3)
    assert table.loc["mqa", "cases"] == 0


def test_does_the_feature_table_name_what_was_not_reached() -> None:
    known = ["dims:small", "dims:published", "dims:huge", "chunks:0"]
    table = tables.feature_table(tables.case_frame(ROWS), known).set_index("name")
    assert (table.loc["dims", "hit"], table.loc["dims", "of"]) == (2, 3)
    assert table.loc["dims", "reached"] == "small 1, published 1"
    assert table.loc["dims", "not_reached"] == "huge"
    assert table.loc["chunks", "hit"] == 0


def test_are_stages_judged_by_their_worst_check() -> None:
    checks = [
        CheckRecord(stage="mask", check="mask.bits", status=Status.PASS),
        CheckRecord(stage="attend", check="attend.out", status=Status.PASS, margin=0.3, median_margin=0.1),
        CheckRecord(stage="attend", check="attend.lse", status=Status.FAIL, margin=3.0, median_margin=0.3),
    ]
    table = tables.stage_table(tables.check_frame([row("a", checks=checks)])).set_index("stage")
    assert list(table.index) == ["mask", "attend"]
    assert (table.loc["attend", "checks"], table.loc["attend", "failed"]) == (2, 1)
    assert (table.loc["attend", "worst"], table.loc["attend", "median"]) == (3.0, pytest.approx(0.2))


def test_are_sources_grouped_by_what_stands_before_the_colon() -> None:
    table = tables.source_table(tables.case_frame(ROWS)).set_index("name")
    assert dict(table["cases"]) == {"drawn": 4, "azure": 2}
