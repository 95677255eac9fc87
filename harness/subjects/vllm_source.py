"""Pieces of an installed or unpacked vLLM, loaded one definition at a time.

vLLM cannot be imported without its whole stack, and an unpacked wheel not at all. What is under test are single
functions and kernels, so those definitions alone are taken from their files and run in a module that holds what
they refer to. Their source lines stay theirs, which Triton and CuTe read.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.subjects.api import NotRunnable, SubjectError

PATH_VARIABLE = "MLACHECK_VLLM_PATH"
"""Environment variable: folder of an unpacked wheel (the one that holds `vllm/`), or that `vllm/` itself."""


class VllmSource:
    """The files of one vLLM."""

    def __init__(self, root: Path) -> None:
        """`root` is the package folder `vllm/`. Raises SubjectError if it is none."""
        if not (root / "v1").is_dir():
            raise SubjectError(f"{root} is no vLLM package: it has no folder v1")
        self.root = root

    @cached_property
    def version(self) -> str:
        """From the wheel's metadata beside the package; "unknown" without it."""
        for folder in sorted(self.root.parent.glob("vllm-*.dist-info")):
            found = re.fullmatch(r"vllm-(.+)\.dist-info", folder.name)
            if found:
                return found[1]
        return "unknown"

    def load(self, file: str, names: Sequence[str], uses: Mapping[str, Any]) -> ModuleType:
        """A module with the definitions `names` of `file` (relative to the package), and what they use.

        `Class.method` takes a method, static or not, as a function. What the definitions import of vLLM inside
        themselves must be among `uses` too. Raises SubjectError if a name is not there: this vLLM has another
        layout than the one that the subject knows.
        """
        path = self.root / file
        if not path.is_file():
            raise SubjectError(f"vLLM {self.version} has no file {file}")
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        body = [_definition(tree, name, file, self.version) for name in names]
        body += [node for node in tree.body if _sets_attribute_of(node, names)]
        body = [_WithoutOwnImports().visit(node) for node in body]
        module = ModuleType(f"mlacheck_vllm.{file.removesuffix('.py').replace('/', '.')}")
        module.__file__ = str(path)
        vars(module).update(uses)
        sys.modules[module.__name__] = module
        future = ast.ImportFrom(module="__future__", names=[ast.alias(name="annotations")], level=0)
        program = ast.fix_missing_locations(ast.Module(body=[future, *body], type_ignores=[]))
        exec(compile(program, str(path), "exec", dont_inherit=True), vars(module))
        return module

    def import_file(self, file: str, name: str) -> ModuleType:
        """Import one whole file that needs nothing else of vLLM. Raises ImportError."""
        path = self.root / file
        spec = importlib.util.spec_from_file_location(f"mlacheck_vllm.{name}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ImportError(f"vLLM {self.version} has no file {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


class _WithoutOwnImports(ast.NodeTransformer):
    """Drops `from vllm...` inside functions: those names come from `uses`."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        own = (node.module or "").partition(".")[0] == "vllm"
        return ast.copy_location(ast.Pass(), node) if own else node


def _definition(tree: ast.Module, name: str, file: str, version: str) -> ast.stmt:
    body: list[ast.stmt] = tree.body
    *outer, last = name.split(".")
    for part in outer:
        owner = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == part), None)
        body = owner.body if owner is not None else []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            if outer and isinstance(node, ast.FunctionDef):
                node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) != "staticmethod"]
            return node
    raise SubjectError(f"vLLM {version} defines no {name} in {file}")


def _sets_attribute_of(node: ast.stmt, names: Sequence[str]) -> bool:
    """Whether a statement is `name.attribute = ...`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
        return False
    owner = node.targets[0].value
    return isinstance(owner, ast.Name) and owner.id in names


def find_vllm() -> VllmSource:
    """The vLLM that `MLACHECK_VLLM_PATH` names, or else the installed one, which is not imported.

    Raises NotRunnable if there is none, SubjectError if the path is wrong.
    """
    given = os.environ.get(PATH_VARIABLE)
    if given:
        path = Path(given).expanduser()
        return VllmSource(path / "vllm" if (path / "vllm").is_dir() else path)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NotRunnable(f"no vLLM is installed and {PATH_VARIABLE} (or --vllm-path) names no unpacked wheel")
    return VllmSource(Path(next(iter(spec.submodule_search_locations))))


def host_utils() -> SimpleNamespace:
    """What mask mods use of FA4's `utils`, for the CPU: there a shift is no PTX instruction."""
    return SimpleNamespace(ssa_to_scalar=lambda values: values[0], shr_u32=lambda value, by: value >> by)
