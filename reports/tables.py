"""Tables of a run, by pandas: one frame of cases, one of checks, and what is counted from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from reports.coverage import EXCLUDED, Coverage
from reports.records import Status

MANY_CHUNKS = 2
PUBLISHED = "dims:published"
"""Feature of the cases with the dims of a published model."""
PATH_NAMES = ("dense", "no_context", "global_mask", "remap", "mqa", "mask_single", "mask_many")
"""Paths and mask builders that every summary lists, reached or not."""
_FINDINGS = frozenset(status.value for status in Status if status.is_finding)
_PASSED = frozenset({Status.PASS.value, Status.WATCH.value})

Row = dict[str, Any]


def case_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """One line a case: the plain fields of the record; lists stay lists."""
    columns = [
        "case_id",
        "subject",
        "source",
        "status",
        "stage",
        "message",
        "paths",
        "chunks",
        "features",
        "margin_out",
        "margin_lse",
        "vacuous",
        "seconds",
        "power",
    ]
    frame = pd.DataFrame([{name: row[name] for name in columns} for row in rows], columns=columns)
    for name in ("margin_out", "margin_lse", "seconds"):
        frame[name] = pd.to_numeric(frame[name]).astype("float64")
    return frame


def check_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """One line a recorded check: case, stage, check, status, margin, median margin."""
    columns = ["case_id", "stage", "check", "status", "margin", "median_margin"]
    pairs = [(row["case_id"], check) for row in rows for check in row["checks"]]
    data = {"case_id": [case for case, _ in pairs]}
    frame = pd.DataFrame(data | {name: [check[name] for _, check in pairs] for name in columns[1:]}, columns=columns)
    for name in ("margin", "median_margin"):
        frame[name] = pd.to_numeric(frame[name]).astype("float64")
    return frame


def counts(frame: pd.DataFrame, column: str, always: Iterable[str] = ()) -> pd.DataFrame:
    """How many cases exercised each name of a list column, most first: cases, share and worst margins.

    Names in `always` come first and are listed even with no case.
    """
    long = frame[[column, "case_id", "margin_out", "margin_lse"]].explode(column).dropna(subset=[column])
    grouped = long.groupby(column).agg(
        cases=("case_id", "size"), worst_out=("margin_out", "max"), worst_lse=("margin_lse", "max")
    )
    grouped = grouped.sort_values("cases", ascending=False, kind="stable")
    first = list(always)
    grouped = grouped.reindex([*first, *(name for name in grouped.index if name not in first)])
    grouped["cases"] = grouped["cases"].fillna(0).astype(int)
    grouped.insert(1, "share", grouped["cases"] / max(len(frame), 1))
    return grouped.rename_axis("name").reset_index()


def path_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Cases for each path and kernel; for a subject of one stage, which has no paths, the stage."""
    named = {path for paths in frame["paths"] for path in paths}
    return counts(frame, "paths", PATH_NAMES if not named or named.intersection(PATH_NAMES) else ())


def feature_table(frame: pd.DataFrame, known: Iterable[str]) -> pd.DataFrame:
    """Coverage by feature group: what was reached, by how many cases, and what was not.

    Args:
        frame: the cases.
        known: every feature there is, `group:value`.
    """
    return _by_group(counts(frame, "features", known)[["name", "cases"]])


def coverage_table(coverage: Coverage) -> pd.DataFrame:
    """`feature_table` of counted cases, and which features cannot occur."""
    features = coverage.features.items()
    table = _by_group(pd.DataFrame([(n, c) for n, c in features if c != EXCLUDED], columns=["name", "cases"]))
    never = pd.DataFrame(
        [name.split(":", 1) for name, c in features if c == EXCLUDED], columns=["name", "cannot_occur"]
    )
    return table.merge(never.groupby("name")["cannot_occur"].agg(", ".join).reset_index(), "left").fillna("")


def _by_group(table: pd.DataFrame) -> pd.DataFrame:
    """One line a feature group from one line a feature."""
    table[["group", "value"]] = table["name"].str.split(":", n=1, expand=True)
    lines = []
    for group, part in table.groupby("group", sort=False):
        hit, missed = part[part["cases"] > 0], part[part["cases"] == 0]
        reached = ", ".join(f"{value} {n}" for value, n in zip(hit["value"], hit["cases"], strict=True))
        lines.append((group, len(hit), len(part), reached, ", ".join(missed["value"])))
    return pd.DataFrame(lines, columns=["name", "hit", "of", "reached", "not_reached"])


def pair_table(coverage: Coverage) -> pd.DataFrame:
    """The rarest pairs of features: how many cases had both, and how many would if they were independent."""
    return pd.DataFrame(coverage.rarest(), columns=["pair", "cases", "expected"])


def source_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Cases and mean seconds for each source (drawn, a trace, ...), by the part before the first colon."""
    source = frame["source"].str.split(":").str[0].rename("name")
    table = frame.groupby(source).agg(cases=("case_id", "size"), seconds=("seconds", "mean"))
    return table.sort_values("cases", ascending=False).reset_index()


def stage_table(checks: pd.DataFrame) -> pd.DataFrame:
    """For each stage: checks recorded, how many failed, worst and median err/tol."""
    failed = checks["status"].isin(_FINDINGS)
    table = checks.assign(failed=failed).groupby("stage", sort=False)
    return table.agg(
        checks=("check", "size"),
        failed=("failed", "sum"),
        worst=("margin", "max"),
        median=("median_margin", "median"),
    ).reset_index()


def power_table(frame: pd.DataFrame) -> pd.DataFrame:
    """For each fault class: cases that measured it, mean and least share of faults they would reveal."""
    lines = [(name, share) for power in frame["power"] for name, share in power.items()]
    table = pd.DataFrame(lines, columns=["name", "share"]).groupby("name")["share"]
    return table.agg(cases="size", mean="mean", least="min").reset_index()


def vacuous_table(frame: pd.DataFrame) -> pd.DataFrame:
    """For each (check, fault class): cases that could not have shown it."""
    return counts(frame, "vacuous")[["name", "cases", "share"]]


def summary(frame: pd.DataFrame) -> dict[str, Any]:
    """The numbers of a run that do not depend on the clock.

    Every case is `passed` (PASS, WATCH), `failing`, `vacuous` (it could not have shown any fault) or `not_run`.
    `without_power` are cases that had too little power for at least one (check, fault class).
    """
    paths = path_table(frame).set_index("name")["cases"]
    status = frame["status"]
    total = max(len(frame), 1)
    return {
        "cases": len(frame),
        "passed": int(status.isin(_PASSED).sum()),
        "failing": int(status.isin(_FINDINGS).sum()),
        "vacuous": int((status == Status.VACUOUS.value).sum()),
        "not_run": int((status == Status.NOT_RUN.value).sum()),
        "without_power": int((frame["vacuous"].str.len() > 0).sum()),
        "worst_margin_out": _worst(frame["margin_out"]),
        "worst_margin_lse": _worst(frame["margin_lse"]),
        "paths": {str(name): int(cases) for name, cases in paths.items()},
        "statuses": {str(name): int(n) for name, n in status.value_counts().items()},
        "power": {str(name): round(float(mean), 4) for name, mean in _means(frame).items()},
        "many_chunks_share": round(int((frame["chunks"] >= MANY_CHUNKS).sum()) / total, 4),
        "published_dims_share": round(int(frame["features"].map(_is_published).sum()) / total, 4),
    }


def _means(frame: pd.DataFrame) -> dict[str, float]:
    table = power_table(frame)
    return dict(zip(table["name"], table["mean"], strict=True))


def _worst(margins: pd.Series) -> float | None:
    worst = margins.max()
    return None if pd.isna(worst) else float(worst)


def _is_published(features: list[str]) -> bool:
    return any(feature == PUBLISHED for feature in features)
