"""A callable of one stage as a subject: `@mlacheck.subject(stage="attend")`.

A function takes the inputs of its stage that it needs, by their names (`stages.py`); which it takes is read from
its signature when it is declared or loaded, and a wrong signature is one clear line then, not a crash later.
Needs no torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from harness.subjects.contract import Contract
from harness.subjects.copies import copies_end_here
from harness.subjects.domain import Domain
from harness.subjects.stages import STAGES, Stage

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "mlacheck_subject"
"""Attribute of a decorated function that holds its StageSubject."""


class SubjectError(ValueError):
    """A subject that does not exist, cannot be loaded or has a wrong signature; the message is one line."""


class NotRunnable(RuntimeError):  # noqa: N818 - an outcome, not a fault
    """The subject cannot run here or not on this case; the message says why. Subjects may raise it."""


@dataclass(frozen=True)
class StageSubject:
    """A callable that is judged by the checks of one stage. Raises SubjectError for a wrong stage or signature."""

    name: str
    stage: str
    function: Callable[..., Any]
    contract: Contract = field(default_factory=Contract)
    takes: frozenset[str] = field(init=False)
    """Names of the inputs that the function is given."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise SubjectError(f"{self.name}: stage {self.stage!r} is unknown, must be one of {', '.join(STAGES)}")
        takes = taken_inputs(self.name, self.function, STAGES[self.stage], self.contract)
        object.__setattr__(self, "takes", takes)

    @property
    def domain(self) -> Domain:
        """The problems that are legal for it."""
        return Domain(self.stage, self.contract)

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Call the function with those of the offered inputs that it takes."""
        with copies_end_here():
            return self.function(**{name: value for name, value in inputs.items() if name in self.takes})


def subject(*, stage: str, contract: Contract | None = None) -> Callable[[F], F]:
    """Declare a function as a subject of one stage; it stays the function that it is.

    stage:     `attend`, `mqa`, `mask`, `mask_mod`, `gather`, `merge`, `plan` or `prefill`
    contract:  what it promises; the default is that of `Contract()`
    Raises SubjectError (one line) if the function's parameters are not inputs of the stage, or the contract is none.
    """

    if contract is not None and not isinstance(contract, Contract):
        what = f"the class {contract.__name__}" if isinstance(contract, type) else f"a {type(contract).__name__}"
        raise SubjectError(f"contract is {what}, must be a Contract: contract=mlacheck.Contract(...)")

    def declare(function: F) -> F:
        name = getattr(function, "__name__", type(function).__name__)
        declared = StageSubject(name, stage, function, contract or Contract())
        try:
            setattr(function, ATTRIBUTE, declared)
        except (AttributeError, TypeError):
            kind = type(function).__name__
            raise SubjectError(f"{name}: a {kind} takes no attributes: wrap it in a function") from None
        return function

    return declare


def taken_inputs(name: str, function: object, stage: Stage, contract: Contract) -> frozenset[str]:
    """The inputs that a function takes, by the names of its parameters.

    Raises SubjectError: not callable, no readable signature, a parameter that is no input of the stage, an input
    that the contract does not declare, or one missing that no right answer can do without.
    """
    if not callable(function):
        raise SubjectError(f"{name}: is a {type(function).__name__}, must be a function")
    if not stage.inputs:
        return frozenset()
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise SubjectError(f"{name}: its signature cannot be read: wrap it in a Python function") from None
    offered = {input_ for input_ in stage.inputs if _declared(input_, contract)}
    taken = set[str]()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            taken |= offered
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise SubjectError(f"{name}: parameter {parameter.name!r} is positional-only, must be given by name")
        elif parameter.name in offered:
            taken.add(parameter.name)
        elif parameter.name in stage.inputs and parameter.default is parameter.empty:
            raise SubjectError(f"{name}: takes {parameter.name!r}, which its contract does not declare")
        elif parameter.default is parameter.empty:
            raise SubjectError(f"{name}: {_unknown(parameter.name, stage, offered)}")
    for group in stage.needs:
        if not taken.intersection(group):
            raise SubjectError(
                f"{name}: takes no {' or '.join(map(repr, group))}: a function of stage {stage.name!r} needs it "
                f"(it takes {', '.join(sorted(taken)) or 'nothing'})"
            )
    for input_ in ("sinks", "topk_length"):
        if input_ in offered and input_ not in taken:
            raise SubjectError(f"{name}: its contract declares {input_!r}, but it does not take it")
    return frozenset(taken)


def _declared(name: str, contract: Contract) -> bool:
    """Some inputs exist only for contracts that ask for them."""
    if name == "sinks":
        return contract.attention_sink
    return contract.topk_length if name == "topk_length" else True


def _unknown(parameter: str, stage: Stage, offered: set[str]) -> str:
    near = difflib.get_close_matches(parameter, offered, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    names = ", ".join(input_ for input_ in stage.inputs if input_ in offered)
    return f"takes {parameter!r}, which stage {stage.name!r} does not offer{hint} It offers {names}"
