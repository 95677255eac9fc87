"""A run folder, read: `run.json` (what was run and where) and `journal.jsonl` (one record a line)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reports.records import CaseRecord, Record


class RunError(ValueError):
    """A folder that is not a run: one line that names it."""


class RunMeta(Record):
    """`run.json`."""

    subject: str
    profile: str
    seed: int
    jobs: int
    facts: dict[str, str]
    """Versions and device, as the worker saw them."""
    features: list[str]
    """Every coverage feature there is, `group:value`, so that a report can name those not reached."""
    started: str
    """UTC, ISO 8601."""
    search_seconds: float | None = None
    """From the first case to the last; None: the run did not come to its end."""
    seconds: float | None = None
    """The whole run, start-up and shrinking included."""
    interrupted: bool = False

    def write(self, run: Path) -> None:
        """Write `run.json`."""
        text = json.dumps(self.model_dump(mode="json"), indent=1) + "\n"
        (run / "run.json").write_text(text, encoding="utf-8")


def read_meta(run: Path) -> RunMeta:
    """Read `run.json`. Raises RunError if the folder is no run."""
    try:
        return RunMeta.model_validate_json((run / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{run}: not a run folder ({error.strerror}: run.json)") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"{run / 'run.json'}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def read_rows(run: Path) -> Iterator[dict[str, Any]]:
    """The records of a journal with every default filled in. A torn last line is left out.

    Raises:
        RunError: no journal, or a line before the last that is not a record.
    """
    try:
        lines = (run / "journal.jsonl").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RunError(f"{run}: not a run folder ({error.strerror}: journal.jsonl)") from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield CaseRecord.model_validate_json(line).model_dump(mode="json")
        except ValidationError as error:
            if number == len(lines):
                return
            first = error.errors()[0]
            raise RunError(f"{run / 'journal.jsonl'}: line {number}: {first['msg']}") from None
