"""The conformance suite as pytest items: one test id for each check of each subject.

All items of a subject look at one run of the engine, made when the first of them runs: cases are judged in worker
processes, so that a crash or a hang is a failed test and not the end of pytest. Under xdist one process makes
the run and the others wait for it (`pytest_run.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from harness.problems.profiles import ProfileName
from harness.pytest_run import Campaign, Outcome, SuiteError
from harness.subjects.api import SubjectError
from harness.subjects.names import MUTANT_PREFIX, full_name, short_name, split_name
from harness.subjects.stages import STAGES
from mlacheck_pytest import folder_of_subjects, option, subjects_of

FOLDER_KEY = "mlacheck_folder"
DEFAULT_EXAMPLES = "50"
DEFAULT_SHRINK_S = "10"


def register(config: pytest.Config) -> None:
    """Read the options and add the suite. Raises pytest.UsageError (one line) for a bad one."""
    config.pluginmanager.register(Suite(config), "mlacheck-suite")


@dataclass(frozen=True)
class Options:
    """The suite's options, checked."""

    profile: ProfileName
    examples: int
    seed: int
    jobs: int | None
    shrink_s: float


def read_options(config: pytest.Config) -> Options:
    """Raises pytest.UsageError for a value that is not legal."""
    profile = option(config, "profile") or "quick"
    if profile not in get_args(ProfileName):
        raise pytest.UsageError(f"mlacheck profile is {profile!r}, must be one of {', '.join(get_args(ProfileName))}")
    return Options(
        profile=profile,  # type: ignore[arg-type]
        examples=_number(config, "examples", DEFAULT_EXAMPLES, least=1),
        seed=_number(config, "seed", "0", least=0),
        jobs=_number(config, "jobs", "0", least=0) or None,
        shrink_s=_number(config, "shrink", DEFAULT_SHRINK_S, least=0),
    )


def _number(config: pytest.Config, name: str, default: str, *, least: int) -> int:
    text = option(config, name) or default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise pytest.UsageError(f"mlacheck {name} is {text!r}, must be a whole number, at least {least}")
    return number


class Suite:
    """The plugin object: adds the items, shares the run folder with xdist workers, reports at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.options = read_options(config)
        inputs: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.folder = Path(inputs[FOLDER_KEY]) if inputs else _new_folder(config)
        stage, here = option(config, "stage") or None, folder_of_subjects(config)
        try:
            names = [full_name(name, stage, here) for name in subjects_of(config)]
        except ValueError as error:
            raise pytest.UsageError(f"mlacheck: {error}") from None
        titles = _titles(names)
        self.campaigns = {
            title: Campaign(name, self.folder / _slug(title), self.options)
            for title, name in zip(titles, names, strict=True)
        }
        if inputs is None and getattr(config.option, "numprocesses", None):
            for name in names:
                checks_of(name)  # only xdist's workers collect, and nobody hears what they complain about

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker where the run is."""
        node.workerinput[FOLDER_KEY] = str(self.folder)

    def pytest_report_header(self) -> str:
        """What is checked, and with which cases."""
        names = ", ".join(self.campaigns)
        options = self.options
        return f"mlacheck: {names}; profile {options.profile}, {options.examples} cases, seed {options.seed}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the checks behind the tests of the files, before -k and -m choose."""
        added: list[pytest.Item] = []
        root = CheckGroup.from_parent(session, name="mlacheck", nodeid="mlacheck")
        for title, campaign in self.campaigns.items():
            group = CheckGroup.from_parent(root, name=title, nodeid=f"mlacheck::{title}")
            for check, question in checks_of(campaign.subject).items():
                item = CheckItem.from_parent(group, name=check, campaign=campaign, question=question)
                item.add_marker(pytest.mark.mlacheck)
                if self.config.pluginmanager.hasplugin("timeout"):
                    item.add_marker(pytest.mark.timeout(0))  # the engine has time-outs of its own
                added.append(item)
        _mark_xfail(self.config, added)
        items.extend(added)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line a subject: how many cases, how near to the bound, and where the run is."""
        for campaign in self.campaigns.values():
            line = campaign.summary()
            if line:
                terminalreporter.write_line(f"mlacheck: {line}")


class CheckGroup(pytest.Collector):
    """Parent of the items of one subject."""

    def collect(self) -> Iterator[pytest.Item]:
        """Never called: the items are made by the suite."""
        return iter(())


class CheckItem(pytest.Item):
    """One check of one subject."""

    def __init__(self, *, campaign: Campaign, question: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.campaign = campaign
        self.question = question

    def runtest(self) -> None:
        """Look the check up in the run, which is made if it has not been yet."""
        outcome = self.campaign.outcome(self.name)
        self.user_properties += outcome.properties
        if outcome.status == "skipped":
            pytest.skip(outcome.text)
        if outcome.status == "failed":
            raise BrokenCheck(outcome)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The judge's words instead of a traceback."""
        if isinstance(excinfo.value, BrokenCheck):
            return f"{excinfo.value.outcome.text}\nthe check: {self.question}"
        if isinstance(excinfo.value, SuiteError):
            return f"mlacheck could not run: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Headline of a failure."""
        return self.path, None, f"{short_name(self.campaign.subject)}: {self.name}"


class BrokenCheck(AssertionError):  # noqa: N818 - what it says, not how it came
    """A check of the subject failed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text.splitlines()[0])
        self.outcome = outcome


def checks_of(subject: str) -> dict[str, str]:
    """Test ids of a subject and the question that each answers: its stage's checks, or the stages of a layer.

    Raises pytest.UsageError if the subject cannot be loaded.
    """
    from harness.checks.stages import STAGES as LAYER_STAGES

    target, stage = split_name(subject)
    if target.startswith((MUTANT_PREFIX, "ours[")):
        return {name: f"{what}: is this right in every case?" for name, what in LAYER_STAGES.items()}
    from harness.subjects.registry import resolve

    try:
        stage = getattr(resolve(subject), "stage", stage)
    except SubjectError as error:
        raise pytest.UsageError(f"mlacheck: {error}") from None
    return dict(STAGES[str(stage)].checks)


def _mark_xfail(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the checks that the xfail file names. Raises pytest.UsageError for a name that no check has."""
    file = option(config, "xfail")
    if not file:
        return
    path = config.invocation_params.dir / file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"mlacheck xfail file {path}: {error.strerror}") from None
    for line in lines:
        name, _, comment = (part.strip() for part in line.partition("#"))
        if not name:
            continue
        named = [item for item in items if name in (item.name, item.nodeid)]
        if not named:
            known = ", ".join(item.name for item in items)
            raise pytest.UsageError(f"mlacheck xfail file {path}: no check is called {name!r}; there are {known}")
        for item in named:
            item.add_marker(pytest.mark.xfail(reason=comment or f"listed in {path.name}"))


def _new_folder(config: pytest.Config) -> Path:
    given = option(config, "out")
    if given:
        return config.invocation_params.dir / given
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return config.rootpath / "runs" / f"pytest-{stamp}-{secrets.token_hex(3)}"


def _titles(names: list[str]) -> list[str]:
    """A name for the test ids of each subject: short, different from the others, and without pytest's brackets."""
    titles: list[str] = []
    for name in names:
        short = short_name(name).replace("[", "(").replace("]", ")")
        same = sum(title.partition("#")[0] == short for title in titles)
        titles.append(f"{short}#{same + 1}" if same else short)
    return titles


def _slug(title: str) -> str:
    """The title as the name of a folder."""
    return "".join(char if char.isalnum() or char in "-_.#" else "-" for char in title)
