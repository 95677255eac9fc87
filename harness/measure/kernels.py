"""What can be measured: attention calls on masks, with the arithmetic that they declare and a merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor

from harness.checks.attend import unpack_bits
from harness.checks.readout import Attend, AttendShape
from harness.measure.families import Case
from harness.measure.float_model import Model, attend, merge
from harness.problems.workspace import padded_rows, words_per_row
from harness.subjects.base import NotRunnable, SubjectError
from harness.subjects.ours import OurLayer
from optimized.merge import merge_attn_states
from reference.numerics import FA4_SM90, TRITON, Numerics

MODELS: dict[str, tuple[Model, Numerics]] = {
    "model[sm90]": (Model(lanes=True, last_tile_first=True), FA4_SM90),
    "model[triton]": (Model(tile=64), TRITON),
    "model[sm90-tc]": (Model(lanes=True, last_tile_first=True, tensor_cores=True), FA4_SM90),
    "model[triton-tc]": (Model(tile=64, tensor_cores=True), TRITON),
}
"""Float models by the kernel whose arithmetic they imitate; `-tc`: products as tensor cores add them (slow)."""

Partial = tuple[Tensor, Tensor]
"""out `[n, H, Dv]`, LSE `[H, n]`"""


@dataclass(frozen=True)
class Kernel:
    """One thing under measurement."""

    name: str
    attend: Attend
    merge: Callable[[Partial, Partial], Partial]
    numerics: Numerics
    device: torch.device

    def run(self, case: Case, segments: Sequence[tuple[int, int]]) -> Partial:
        """One masked call for each segment, as the chunk loop makes them, merged one after the other.

        With several segments all calls read one mask over all keys, from their key starts.
        """
        keys = len(case.k)
        mask = pack_mask(case.allowed, reserve=len(segments) > 1)
        result: Partial | None = None
        for start, length in segments:
            part = slice(start, start + length)
            if len(segments) > 1:
                mask[:, 0, -1] = start
            ends = [torch.tensor([0, x], dtype=torch.int32, device=self.device) for x in (len(case.q), length)]
            found = self.attend(
                case.q, case.k[part], case.v[part], ends[0], ends[1], len(case.q), length, case.scale,
                mask=mask, offset=len(segments) > 1, causal=False,
            )  # fmt: skip
            result = found if result is None else self.merge(result, found)
        if result is None:
            raise ValueError(f"segments is {list(segments)}, it must hold at least one segment of the {keys} keys")
        return result

    def readout_shapes(self, case: Case, segments: Sequence[tuple[int, int]]) -> list[AttendShape]:
        """The calls of `run` without their numbers."""
        shapes = []
        for start, length in segments:
            mask = pack_mask(case.allowed, reserve=True)
            mask[:, 0, -1] = start
            shapes.append(
                AttendShape(
                    cu_seqlens_q=[0, len(case.q)],
                    cu_seqlens_k=[0, length],
                    max_seqlen_q=len(case.q),
                    max_seqlen_k=length,
                    heads=case.q.shape[1],
                    qk_width=case.q.shape[2],
                    v_width=case.v.shape[2],
                    dtype=case.q.dtype,
                    device=case.q.device,
                    scale=case.scale,
                    mask=mask,
                    offset=True,
                    causal=False,
                )
            )
        return shapes


def kernel(name: str) -> Kernel:
    """The kernel of this name: one of `MODELS`, `model` for the first of them, `ours[triton]` or `ours[fa4]`.

    Raises SubjectError for another name and NotRunnable where this machine cannot run it.
    """
    name = "model[sm90]" if name == "model" else name
    if name in MODELS:
        model, numerics = MODELS[name]
        return Kernel(name, _model_attend(model), _merge_model, numerics, torch.device("cpu"))
    if name not in ("ours[triton]", "ours[fa4]"):
        raise SubjectError(
            f"no kernel is called {name!r}; there are {', '.join([*MODELS, 'ours[triton]', 'ours[fa4]'])}"
        )
    layer = OurLayer(name[5:-1])
    layer.require_runnable()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Kernel(name, layer.attend, _merge_kernel, layer.contract.numerics, device)


def pack_mask(allowed: Tensor, *, reserve: bool) -> Tensor:
    """bool `[n, K]` -> `[1, padded_q, words]` int32, key k in bit `k & 31` of word `k >> 5`."""
    n, keys = allowed.shape
    padded, words = padded_rows(n), words_per_row(keys, reserve=reserve)
    bits = F.pad(allowed, (0, words * 32 - keys, 0, padded - n)).view(1, padded, words, 32).long()
    packed = (bits << torch.arange(32, device=allowed.device)).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _model_attend(model: Model) -> Attend:
    """A float model behind the signature of a kernel, for one request."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        *,
        mask: Tensor | None,
        offset: bool,
        causal: bool,
    ) -> Partial:
        if mask is None or causal or len(cu_seqlens_q) != 2:
            raise NotRunnable("the float model takes one request and a mask")
        start = int(mask[0, 0, -1]) if offset else 0
        rows = mask[0, : len(q)]
        allowed = unpack_bits(rows[:, :-1] if offset else rows, start, len(k))
        return attend(Case(q, k, v, allowed, scale), model, seed=start)

    return call


def _merge_model(prefix: Partial, suffix: Partial) -> Partial:
    return merge(*prefix, *suffix)


def _merge_kernel(prefix: Partial, suffix: Partial) -> Partial:
    out, lse = torch.empty_like(prefix[0]), torch.empty_like(prefix[1])
    merge_attn_states(out, *prefix, *suffix, lse)
    return out, lse
