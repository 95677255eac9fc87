"""Text of others, made fit for a record: an exception of the code under test may say anything, or fail to say it."""

from __future__ import annotations

_TELLING = 12
"""A text as long as this does not stand in another by chance."""
SAID_LIMIT = 1000
"""Characters of what an exception says; compilers say megabytes."""


def one_line(text: str, limit: int) -> str:
    """The text without line breaks, at most `limit` characters; what is not printable (controls, surrogates) escaped.

    Nothing changes if it is done twice.
    """
    words = " ".join(text[: 4 * limit].split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words[: limit + 1])
    return line if len(line) <= limit else line[: limit - 3] + "..."


def said(error: BaseException) -> str:
    """What the exception says, in one line, and what the one says from which it was raised in the end.

    A compiler that fails in a function called by a kernel raises an error for the call from one for the line itself.
    """
    text, root = _text(error), _root(error)
    cause = _text(root)
    if root is error or (len(cause) >= _TELLING and cause in text):
        return text
    name = type(root).__name__
    return f"{text} (from {name}: {cause})" if cause else f"{text} (from {name})"


def _text(error: BaseException) -> str:
    """Its beginning and its end: what a compiler quotes can be long, and the line that it means comes last."""
    try:
        text = str(error)
        line = one_line(text, SAID_LIMIT)
        if len(text) <= SAID_LIMIT or (len(text) <= 4 * SAID_LIMIT and len(line) < SAID_LIMIT):
            return line
        half = SAID_LIMIT // 2
        return f"{line[: half - 5]} ... {_end_of(text, half)}"
    except BaseException:  # it is raised by code under test
        return "(its text cannot be made)"


def _end_of(text: str, limit: int) -> str:
    """The last characters of the text in one line."""
    tail = one_line(text[-limit:], 10 * limit)
    return tail[-limit:]


def _root(error: BaseException) -> BaseException:
    """The first of the exceptions that were raised `from` one another."""
    seen = {id(error)}
    try:
        while isinstance(error.__cause__, BaseException) and id(error.__cause__) not in seen:
            error = error.__cause__
            seen.add(id(error))
    except BaseException:  # a property of code under test
        return error
    return error


def described(error: BaseException) -> str:
    """`ValueError: what it says`, in one line."""
    name, text = type(error).__name__, said(error)
    return f"{name}: {text}" if text else name
