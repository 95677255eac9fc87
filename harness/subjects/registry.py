"""Subjects by name."""

from __future__ import annotations

from harness.subjects.base import PrefillSubject, SubjectError
from harness.subjects.ours import OurLayer

BUNDLED = {
    "ours[triton]": "our layer, attention by the Triton kernel (any CUDA GPU; interpreted on the CPU)",
    "ours[fa4]": "our layer, attention by FlashAttention-4 with our mask mods (SM90, SM100)",
}
MUTANT_PREFIX = "mutant:"


def resolve(name: str) -> PrefillSubject:
    """The subject of this name. Raises SubjectError (one line).

    `mutant:NAME` is our Triton layer, `mutant:NAME@fa4` our FA4 layer, in a process in which the mutant was
    installed (`harness.mutants.patch.install`) before this was imported.
    """
    if name.startswith(MUTANT_PREFIX):
        attention = "fa4" if name.endswith("@fa4") else "triton"
        return OurLayer(attention, name)
    if name == "ours[triton]":
        return OurLayer("triton")
    if name == "ours[fa4]":
        return OurLayer("fa4")
    raise SubjectError(f"no subject is called {name!r}; `mlacheck list subjects` names them")


def list_subjects() -> dict[str, str]:
    """Name -> what it is, of every bundled subject."""
    return dict(BUNDLED)
