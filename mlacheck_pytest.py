"""pytest plugin of mlacheck: options, one fixture, and nothing else until an option is used.

pytest imports this module in every test run of an environment that has mlacheck installed. So it has a name of its
own, imports nothing heavy, and cannot fail: the suite itself is `harness/pytest_plugin.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

OPTIONS = {
    "stage": "Stage of a subject that is not decorated: attend, mqa, mask, gather, merge, plan, prefill.",
    "profile": "How large cases are: quick (default), ci, gpu_small, gpu_full.",
    "examples": "Cases in total (default 50).",
    "seed": "Seed of the search (default 0: the same cases every time).",
    "jobs": "Worker processes (default: one a core, four a GPU).",
    "shrink": "Seconds to make each finding smaller (default 10; 0: not at all).",
    "xfail": "File with the names of checks that are known to fail, one a line; # begins a comment.",
    "out": "Folder for runs (default: runs/pytest-TIME-ID in the root folder).",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Each option exists on the command line and, as `mlacheck_NAME`, in the configuration file."""
    group = parser.getgroup("mlacheck", "mlacheck: conformance suite of a sparse MLA kernel")
    text = "What to check: FILE.py:FUNCTION, MODULE:FUNCTION or a name of `mlacheck list subjects`. May be repeated."
    group.addoption("--mlacheck-subject", action="append", default=None, metavar="SUBJECT", help=text)
    parser.addini("mlacheck_subject", text, type="args", default=[])
    for name, what in OPTIONS.items():
        group.addoption(f"--mlacheck-{name}", default=None, metavar=name.upper(), help=what)
        parser.addini(f"mlacheck_{name}", what, default="")


def subjects_of(config: pytest.Config) -> list[str]:
    """The subjects that the command line names, or else the configuration file."""
    given: list[str] | None = config.getoption("mlacheck_subject")
    listed: list[str] = config.getini("mlacheck_subject")
    return listed if given is None else given


def folder_of_subjects(config: pytest.Config) -> Path:
    """Where relative files of subjects begin: here for the command line, else the folder of the configuration file."""
    if config.getoption("mlacheck_subject") is None and config.inipath is not None:
        return config.inipath.parent
    return config.invocation_params.dir


def option(config: pytest.Config, name: str) -> str:
    """An option from the command line, or else from the configuration file; empty if neither has it."""
    given: str | None = config.getoption(f"mlacheck_{name}")
    listed: str = config.getini(f"mlacheck_{name}")
    return listed if given is None else given


def pytest_configure(config: pytest.Config) -> None:
    """Start the suite if a subject is named."""
    config.addinivalue_line("markers", "mlacheck: a check of the mlacheck conformance suite")
    if not subjects_of(config):
        return
    try:
        import mlacheck  # noqa: F401 - refuses foreign packages of our names, with a clear message
        from harness.pytest_plugin import register
    except ImportError as error:
        raise pytest.UsageError(f"mlacheck: {error}") from None
    register(config)


@pytest.fixture(scope="session")
def mlacheck_subject(pytestconfig: pytest.Config) -> str:
    """Name of the subject under test, for `mlacheck.check` and `mlacheck.strategies.cases`; skips without one."""
    names = subjects_of(pytestconfig)
    if not names:
        pytest.skip("no --mlacheck-subject is given")
    from harness.subjects.names import full_name

    return full_name(names[0], option(pytestconfig, "stage") or None, folder_of_subjects(pytestconfig))
