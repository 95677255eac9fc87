"""The run folder as it grows: an append-only journal, and the cases that are running now.

`journal.jsonl` has one record a line, flushed, so that a torn last line is the worst that a crash can leave.
`pending/` holds each case from before its launch until its record is in the journal: after a machine crash it
names the culprits, and each file can be given to `mlacheck replay`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from reports.records import CaseRecord


class Journal:
    """Writer of one run folder. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and an empty journal. Raises FileExistsError if it holds a journal already."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._pending = folder / "pending"
        self._pending.mkdir(exist_ok=True)
        self._file = (folder / "journal.jsonl").open("x", encoding="utf-8")

    def launch(self, shard: int, subject: str, problem_json: str) -> None:
        """Put the case on disk, as a case file, before it runs."""
        head = json.dumps({"format": "mlacheck-case", "subject": subject})
        text = f'{head[:-1]}, "problem": {problem_json}}}\n'
        (self._pending / f"{shard}.json").write_text(text, encoding="utf-8")

    def append(self, record: CaseRecord) -> None:
        """One record, one line, flushed."""
        self._file.write(json.dumps(record.model_dump(mode="json", exclude_defaults=True)) + "\n")
        self._file.flush()

    def landed(self, shard: int) -> None:
        """The case of this shard has ended; whatever it did is in the journal."""
        (self._pending / f"{shard}.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the journal; an empty `pending/` goes."""
        self._file.close()
        if not any(self._pending.iterdir()):
            self._pending.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
