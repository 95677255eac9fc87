"""Passes of the shrinker for cases with a history: fewer calls before the judged one, and smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.problems.problem import Problem, ProblemError

Changes = dict[str, Any]
Pass = Callable[[Problem], Iterator[Changes]]


def changed(problem: Problem, changes: Changes) -> Problem | None:
    """The problem with these fields changed; None if that is not legal."""
    try:
        return problem.replace(**changes)
    except ProblemError:
        return None


def drop_history(p: Problem) -> Iterator[Changes]:
    """No earlier call, or one fewer."""
    if p.history:
        yield {"history": ()}
    if len(p.history) > 1:
        for index in range(len(p.history)):
            yield {"history": (*p.history[:index], *p.history[index + 1 :])}


def all_calls(passes: Sequence[Pass]) -> Pass:
    """Every call made smaller in the same way, so that what they share stays shared."""

    def propose(p: Problem) -> Iterator[Changes]:
        if not p.history:
            return
        for one_pass in passes:
            for mine, *theirs in zip(one_pass(p), *map(one_pass, p.history), strict=False):
                history = [changed(call, changes) for call, changes in zip(p.history, theirs, strict=True)]
                if None not in history:
                    yield {**mine, "history": tuple(history)}

    return propose


def earlier_calls(passes: Sequence[Pass]) -> Pass:
    """One earlier call made smaller: the judged batch in its place, or a pass of its own."""

    def propose(p: Problem) -> Iterator[Changes]:
        for index, call in enumerate(p.history):
            for smaller in (*_like_the_judged(p, call), *_by(passes, call)):
                yield {"history": (*p.history[:index], smaller, *p.history[index + 1 :])}

    return propose


def _like_the_judged(p: Problem, call: Problem) -> Iterator[Problem]:
    """The judged batch with what tells the earlier call from it: all of that, the scale only, the numbers only."""
    if _size(p) >= _size(call):
        return
    for changes in ({"scale": call.scale, "data": call.data, "force": call.force}, {"scale": call.scale}, {}):
        if (candidate := changed(p, {"history": (), **changes})) is not None:
            yield candidate


def _by(passes: Sequence[Pass], call: Problem) -> Iterator[Problem]:
    for one_pass in passes:
        for changes in one_pass(call):
            if (candidate := changed(call, changes)) is not None:
                yield candidate


def _size(p: Problem) -> int:
    return len(p.requests) + p.num_tokens + sum(p.seq_lens)
