"""Can a text of the code under test break a record, a file or a terminal?"""

from __future__ import annotations

import json

import pytest

from reports.records import MESSAGE_LIMIT, CaseRecord, CheckRecord, Status
from reports.text import SAID_LIMIT, described, one_line, said

TEXTS = {
    "plain text, (1|2) \\ é": "plain text, (1|2) \\ é",
    "two\n lines\r\n\tof\u2028it ": "two lines of it",
    "bad \udc80 surrogate": "bad \\udc80 surrogate",
    "\x00 \x1b[31mred \x7f": "\\x00 \\x1b[31mred \\x7f",
    "left\u202eright": "left\\u202eright",
}


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("text", TEXTS)
def test_is_a_text_made_one_printable_line_and_then_left_alone(text: str) -> None:
    line = one_line(text, 100)
    assert line == TEXTS[text]
    assert one_line(line, 100) == line
    assert line.isprintable()


@pytest.mark.parametrize("text", ["y" * 5_000_000, "\x00" * 5_000_000, " y" * 5_000_000])
def test_is_a_long_text_cut(text: str) -> None:
    line = one_line(text, 50)
    assert len(line) == 50
    assert line.endswith("...")
    assert one_line(line, 50) == line


def test_is_an_exception_described_whatever_it_says() -> None:
    assert described(ValueError("two\nlines")) == "ValueError: two lines"
    assert described(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert described(MuteError()) == "MuteError: (its text cannot be made)"
    assert len(said(ValueError("y" * 5_000_000))) == SAID_LIMIT
    assert said(ValueError("dots...")) == "dots..."


@pytest.mark.parametrize("filler", ["y", "\x00", "\n"])
def test_is_the_end_of_a_long_exception_told_too(filler: str) -> None:
    words = said(ValueError("begins " + " ".join([40 * filler + "z"] * 2000) + " ends"))
    assert words.startswith("begins ")
    assert words.endswith("z ends")
    assert " ... " in words
    assert len(words) <= SAID_LIMIT
    assert words.isprintable()


@pytest.mark.parametrize("text", ["bad \udc80\x1b\nsurrogate", "y" * 5_000_000])
def test_is_the_message_of_every_record_fit_for_a_file(text: str) -> None:
    check = CheckRecord(stage="attend", check="attend.run", status=Status.CONTRACT, message=text)
    case = CaseRecord(case_id="0" * 16, subject="s", status=Status.CONTRACT, message=text, checks=[check])
    for message in (case.message, case.checks[0].message):
        assert message.isprintable()
        assert len(message) <= MESSAGE_LIMIT
        message.encode()
    assert CaseRecord.model_validate(json.loads(case.model_dump_json())) == case


def test_is_the_first_cause_told_once() -> None:
    inner, outer, again = TypeError("no such node"), RuntimeError("at the call"), ValueError("wraps: no such node")
    outer.__cause__ = inner
    again.__cause__ = outer
    assert said(inner) == "no such node"
    assert said(outer) == "at the call (from TypeError: no such node)"
    assert described(outer) == "RuntimeError: at the call (from TypeError: no such node)"
    assert said(again) == "wraps: no such node"
    short = RuntimeError("call 10 failed")
    short.__cause__ = KeyError(1)
    assert said(short) == "call 10 failed (from KeyError: 1)"
    short.__cause__ = KeyError()
    assert said(short) == "call 10 failed (from KeyError)"
    inner.__cause__ = outer  # a circle
    assert said(outer) == "at the call (from TypeError: no such node)"


class CauselessError(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise KeyboardInterrupt


class OddCauseError(Exception):
    __cause__ = "text"  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [CauselessError, OddCauseError])
def test_may_a_cause_be_anything(kind: type[Exception]) -> None:
    assert said(kind("it failed")) == "it failed"
