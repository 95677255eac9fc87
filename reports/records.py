"""The rows that runs write: verdict names and the record schema.

A leaf: everything that writes or reads a run imports it, and it imports nothing of the project but `text.py`. A
record is one JSON object on one line of a run's journal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from reports.text import one_line

MESSAGE_LIMIT = 4000


class Status(StrEnum):
    """What one check, or one case, came to."""

    PASS = "PASS"
    WATCH = "WATCH"
    """Within the bound, but above 0.8 of it: information, never an exit code."""
    FAIL = "FAIL"
    NONFINITE = "NONFINITE"
    """NaN or infinity where the oracle is finite, or the reverse."""
    SHAPE = "SHAPE"
    """Wrong shape, dtype or device of a result."""
    GUARD = "GUARD"
    """Something was read or written that must not be: canary, poison, changed input."""
    RACY = "RACY"
    """Two identical calls gave different bits."""
    CONTRACT = "CONTRACT"
    """The case lies outside what the subject promises, or the subject refused a legal input."""
    VACUOUS = "VACUOUS"
    """The inputs could not have shown the fault: never counted as a pass."""
    CRASH = "CRASH"
    HANG = "HANG"
    OOM = "OOM"
    NOT_RUN = "NOT_RUN"

    @property
    def is_finding(self) -> bool:
        """True for every status that accuses the subject."""
        return self in _FINDINGS


_FINDINGS = frozenset(
    {
        Status.FAIL,
        Status.NONFINITE,
        Status.SHAPE,
        Status.GUARD,
        Status.RACY,
        Status.CONTRACT,
        Status.CRASH,
        Status.HANG,
        Status.OOM,
    }
)


Message = Annotated[str, BeforeValidator(lambda text: one_line(text, MESSAGE_LIMIT) if isinstance(text, str) else text)]
"""What a subject says may be in it, so that it is made one line that any file and terminal takes."""


class Record(BaseModel):
    """Base of every record: unknown fields are an error."""

    model_config = ConfigDict(extra="forbid")


class Place(Record):
    """Where a check failed; every field that is not known is None."""

    call: str | None = None
    """Attention call: `no_context`, `suffix`, `chunk[0]`, ..."""
    request: int | None = None
    token: int | None = None
    """Row in the packed prefill batch."""
    row: int | None = None
    """Query row within the request."""
    head: int | None = None
    column: int | None = None
    key: int | None = None
    """Key position within the request."""
    word: int | None = None
    bit: int | None = None
    chunk: int | None = None


class CheckRecord(Record):
    """One comparison of one stage."""

    stage: str
    """`plan`, `mask`, `gather`, `project`, `attend`, `merge`, `mqa`, `prefill`, `dispatch`, `guard`, ..."""
    check: str
    """Name of the check, for example `attend.lse`."""
    status: Status
    margin: float | None = None
    """max |err| / tol; None for exact checks."""
    median_margin: float | None = None
    place: Place = Field(default_factory=Place)
    message: Message = ""
    terms: dict[str, float] | None = None
    """For a FAIL of a bounded check: share of each term of the tolerance at the failing element."""


class CaseRecord(Record):
    """One case: one problem, one subject."""

    case_id: str
    subject: str
    source: str = "drawn"
    status: Status
    stage: str | None = None
    """First stage that is wrong, if any."""
    message: Message = ""
    paths: list[str] = Field(default_factory=list)
    """Paths and kernels that ran: `dense`, `no_context`, `global_mask`, `remap`, `mqa`, `mask_single`, ..."""
    chunks: int = 0
    features: list[str] = Field(default_factory=list)
    margin_out: float | None = None
    margin_lse: float | None = None
    power: dict[str, float] = Field(default_factory=dict)
    vacuous: list[str] = Field(default_factory=list)
    """(check, fault class) pairs for which this case had no power."""
    checks: list[CheckRecord] = Field(default_factory=list)
    """Every check that is not a plain PASS, and one summary for each stage that ran."""
    tensor_hash: str = ""
    seconds: float = 0.0
    problem: dict[str, object] | None = None
    """The problem itself, kept with findings so that a journal alone can replay them."""
