"""Subjects by name: bundled ones, mutants, installed entry points, and the user's own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from harness.subjects.api import StageSubject, SubjectError
from harness.subjects.base import PrefillSubject
from harness.subjects.load import as_subject, entry_point_names, load_subject
from harness.subjects.names import MUTANT_PREFIX, is_user_code, split_name
from harness.subjects.ours import OurLayer

LAYERS = {
    "ours[triton]": "our layer, attention by the Triton kernel (any CUDA GPU; interpreted on the CPU)",
    "ours[fa4]": "our layer, attention by FlashAttention-4 with our mask mods (SM90, SM100)",
}


@dataclass(frozen=True)
class Bundle:
    """A bundled subject that offers single stages."""

    what: str
    stages: Mapping[str, str]
    """Stage -> `module:function`, a decorated function; imported when it is asked for."""


BUNDLES: dict[str, Bundle] = {
    "torch-dense": Bundle(
        "PyTorch's scaled_dot_product_attention with a boolean mask, LSE by logsumexp",
        {"attend": "harness.subjects.torch_dense:attend"},
    ),
    "torch-dense[flex]": Bundle(
        "PyTorch's flex_attention over the packed batch, compiled on a GPU",
        {"attend": "harness.subjects.torch_flex:attend"},
    ),
    "fa4": Bundle(
        "FlashAttention-4 (flash_attn.cute, varlen) with our mask mods for one call",
        {"attend": "harness.subjects.fa4:attend", "mask_mod": "harness.subjects.fa4:mask_mod"},
    ),
    "fa4[offset]": Bundle(
        "FlashAttention-4 with our mask mod over whole sequences",
        {"attend": "harness.subjects.fa4:attend_offset"},
    ),
    "fa4[packed]": Bundle("our mask mods for SM100", {"mask_mod": "harness.subjects.fa4:mask_mod_packed"}),
    "fa4[logic]": Bundle(
        "the bit logic of our mask mods on Python integers", {"mask_mod": "harness.subjects.fa4:mask_mod_logic"}
    ),
    "flashmla": Bundle("FlashMLA's sparse prefill kernel", {"mqa": "harness.subjects.flashmla:mqa"}),
    "vllm": Bundle(
        "pieces of an installed vLLM or of an unpacked wheel (--vllm-path)",
        {
            "plan": "harness.subjects.vllm_stages:plan",
            "mask": "harness.subjects.vllm_stages:mask",
            "mask_mod": "harness.subjects.vllm_stages:mask_mod",
            "merge": "harness.subjects.vllm_stages:merge_triton",
            "prefill": "harness.subjects.vllm_stages:prefill",
        },
    ),
    "vllm[torch]": Bundle("vLLM's merge in plain PyTorch", {"merge": "harness.subjects.vllm_stages:merge_torch"}),
    "vllm[layer]": Bundle(
        "vLLM's masked prefill, global mask, with its Blackwell kernels replaced by ours",
        {"prefill": "harness.subjects.vllm_layer:prefill_global"},
    ),
    "vllm[remap]": Bundle(
        "vLLM's masked prefill, remapped top-k, with its Blackwell kernels replaced by ours",
        {"prefill": "harness.subjects.vllm_layer:prefill_remap"},
    ),
    "vllm[mods]": Bundle(
        "vLLM's masked prefill, global mask and its own mask mods, with the kernels replaced by ours",
        {"prefill": "harness.subjects.vllm_layer:prefill_mods"},
    ),
    "vllm[cuda]": Bundle("vLLM's merge in CUDA", {"merge": "harness.subjects.vllm_stages:merge_cuda"}),
}


def resolve(name: str) -> PrefillSubject | StageSubject:
    """The subject of this name. Raises SubjectError (one line).

    `mutant:NAME` is our Triton layer, `mutant:NAME@fa4` our FA4 layer, in a process in which the mutant was
    installed (`harness.mutants.patch.install`) before this was imported. For the rest see `names.py`.
    """
    if name.startswith(MUTANT_PREFIX):
        attention = "fa4" if name.endswith("@fa4") else "triton"
        return OurLayer(attention, name)
    target, stage = split_name(name)
    if target in LAYERS:
        if stage is not None:
            raise SubjectError(f"{target} is judged as a whole: it takes no stage")
        return OurLayer("fa4" if target == "ours[fa4]" else "triton")
    if target in BUNDLES:
        return _bundled(name, BUNDLES[target], stage)
    if not is_user_code(target) and target not in entry_point_names():
        raise SubjectError(
            f"no subject is called {target!r}; `mlacheck list subjects` names them, and yours is FILE.py:FUNCTION "
            "or MODULE:FUNCTION"
        )
    return load_subject(name)


def _bundled(name: str, bundle: Bundle, stage: str | None) -> StageSubject:
    stage = stage or (next(iter(bundle.stages)) if len(bundle.stages) == 1 else None)
    if stage is None or stage not in bundle.stages:
        raise SubjectError(f"{name}: offers the stages {', '.join(bundle.stages)}: say which by --stage")
    module, _, function = bundle.stages[stage].partition(":")
    return as_subject(getattr(import_module(module), function), name, stage)


def list_subjects() -> dict[str, str]:
    """Name -> what it is, of every bundled subject and every installed entry point."""
    bundles = {name: f"{bundle.what} (stage {', '.join(bundle.stages)})" for name, bundle in BUNDLES.items()}
    points = {name: "entry point of the group mlacheck.subjects" for name in entry_point_names()}
    return {**points, **LAYERS, **bundles}
