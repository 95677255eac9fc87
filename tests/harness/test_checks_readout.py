"""Does a read-out name what a call really attended, and does a wrong call get its wrong key named?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks.attend import allowed_of_call, check_attend, unpack_bits
from harness.checks.link import first_bad
from harness.checks.localize import explain_attend, shape_of
from harness.checks.readout import (
    AttendShape,
    SetDifference,
    count_attended,
    first_difference,
    name_attended,
    shown_wrongly,
)
from optimized.attention.triton_mha import triton_masked_mha
from optimized.trace import AttendEvent
from reference.numerics import TRITON
from reference.oracle import attend as exact_attend
from tests.harness.traced import traced

Sets = Callable[[int, Tensor], Tensor]
"""(request, allowed `[q, k]`) -> what the kernel attends."""


class Oracle:
    """A right attention kernel in plain torch, or one that attends other sets or computes wrongly."""

    def __init__(self, attended: Sets = lambda request, allowed: allowed, gain: float = 1.0) -> None:
        self.attended, self.gain, self.calls = attended, gain, 0

    def __call__(
        self,
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
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for b in range(len(starts_q) - 1):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            q_len, k_len = rows.stop - rows.start, keys.stop - keys.start
            if mask is None:
                allowed = torch.ones(q_len, k_len, dtype=torch.bool)
                allowed = allowed.tril(k_len - q_len) if causal else allowed
            else:
                start = int(mask[b, 0, -1]) if offset else 0
                allowed = unpack_bits(mask[b, :q_len, :-1] if offset else mask[b, :q_len], start, k_len)
            o, s = exact_attend(q[rows], k[keys], v[keys], self.attended(b, allowed), scale)
            out[rows], lse[:, rows] = (self.gain * o).to(q.dtype), s.float()
        return out, lse


def without(request: int, row: int, key: int) -> Sets:
    def sets(b: int, allowed: Tensor) -> Tensor:
        changed = allowed.clone()
        if b == request and row < len(changed) and key < changed.shape[1]:
            changed[row, key] ^= True
        return changed

    return sets


def shape(keep: Sequence[Tensor], heads: int = 2, v_width: int = 8) -> AttendShape:
    """The structure of a call over these sets, without a mask: every key."""
    q = torch.tensor([0, *[len(x) for x in keep]]).cumsum(0).tolist()
    k = torch.tensor([0, *[x.shape[1] for x in keep]]).cumsum(0).tolist()
    return AttendShape(
        q, k, max(len(x) for x in keep), max(x.shape[1] for x in keep), heads, 12, v_width,
        torch.bfloat16, torch.device("cpu"), 0.3, None, False, False,
    )  # fmt: skip


@pytest.mark.parametrize("call", ["suffix", "chunk[0]", "chunk[1]", "chunk[2]"])
@pytest.mark.parametrize("name", ["global_mask", "remap", "dense"])
def test_our_kernel_attends_exactly_what_its_mask_says(name: str, call: str) -> None:
    event = traced(name).event(AttendEvent, call)

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return triton_masked_mha(*args, **kwargs)

    structure = shape_of(event)
    named = name_attended(attend, structure)
    counts = count_attended(attend, structure)
    for request, found in enumerate(named):
        allowed = allowed_of_call(event, request)
        assert first_difference(found, allowed) is None
        rows = slice(event.cu_seqlens_q[request], event.cu_seqlens_q[request + 1])
        expected = allowed.sum(dim=1).double().expand(event.q.shape[1], -1)
        assert torch.equal(counts[:, rows].round(), expected)
        assert float((counts[:, rows] - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(("heads", "v_width"), [(1, 1), (1, 8), (3, 5), (4, 64)])
def test_windows_put_the_whole_set_together(heads: int, v_width: int) -> None:
    g = torch.Generator().manual_seed(heads)
    keep = [torch.rand(q, k, generator=g) < 0.4 for q, k in ((3, 70), (0, 9), (5, 1), (2, 33))]
    kernel = Oracle(lambda b, allowed: keep[b])
    named = name_attended(kernel, shape(keep, heads, v_width))
    assert all(torch.equal(a, b) for a, b in zip(named, keep, strict=True))
    assert kernel.calls == -(-70 // (heads * v_width))


def test_a_set_difference_names_keys_words_and_bits() -> None:
    allowed = torch.zeros(20, 600, dtype=torch.bool)
    allowed[17, 31] = True
    attended = torch.zeros_like(allowed)
    attended[17, 513] = True
    found = first_difference(attended, allowed)
    assert found == SetDifference(17, [513], [31], 1)
    assert found.key == 31
    text = "row 17 attended key 513 (word 16, bit 1), missed key 31 (word 0, bit 31) (1 wrong rows)"
    assert found.describe() == text
    assert "key 513 (word 16, bit 6)" in found.describe(key_start=5)
    attended[3, :9] = True
    found = first_difference(attended, allowed)
    assert found is not None
    assert (found.row, found.wrong_rows) == (3, 2)
    assert "and 6 more" in found.describe()


def run_again(event: AttendEvent, kernel: Oracle) -> AttendEvent:
    """The call as this kernel answers it."""
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in (event.cu_seqlens_q, event.cu_seqlens_k))
    out, lse = kernel(
        event.q, event.k, event.v, starts_q, starts_k, event.max_seqlen_q, event.max_seqlen_k, event.scale,
        mask=event.mask, offset=event.offset, causal=event.causal,
    )  # fmt: skip
    return replace(event, out=out, lse=lse)


@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("call", ["chunk[0]", "suffix"])
def test_one_wrong_key_of_a_call_is_named(call: str, row: int) -> None:
    event = traced("global_mask").event(AttendEvent, call)
    key = 31 if call == "chunk[0]" else 2
    wrong = Oracle(without(0, row, key))
    faulty = run_again(event, wrong)
    bad = first_bad(check_attend(faulty, TRITON, None))
    assert bad is not None
    explained = explain_attend(bad, faulty, wrong)
    start = event.key_starts[0]
    place = explained.place
    assert explained.stage == "mask_mod"
    assert (place.request, place.row, place.token, place.key) == (0, row, row, key)
    assert (place.word, place.bit) == ((key + start) // 32, (key + start) % 32)
    verb = "missed" if allowed_of_call(event, 0)[row, key] else "attended"
    assert f"{call}, request 0: row {row} {verb} key {key} (word {place.word}, bit {place.bit})" in explained.message
    assert bad.message in explained.message


def test_wrong_arithmetic_on_the_right_keys_is_called_so() -> None:
    event = traced("global_mask").event(AttendEvent, "suffix")
    faulty = replace(event, out=(event.out * 1.1))
    bad = first_bad(check_attend(faulty, TRITON, None))
    assert bad is not None
    explained = explain_attend(bad, faulty, Oracle())
    assert explained.stage == "attend"
    assert "every row attended exactly its keys: the arithmetic is wrong" in explained.message
    assert explained.place == bad.place


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda out: out.flip(2), "with one V for all keys, row 1 of the call shows another in head 0, column 0"),
        (lambda out: out.flip(1), "rows, heads or columns are mixed up"),
        (
            lambda out: out.index_fill(0, torch.tensor([2]), 0.0),
            "and the output shows 0: the output is wrong, not the set",
        ),
    ],
)
def test_an_output_mixed_up_is_not_blamed_on_the_mask(damage: Callable[[Tensor], Tensor], words: str) -> None:
    event = traced("global_mask").event(AttendEvent, "suffix")
    right = Oracle()

    def wrong(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(*args, **kwargs)
        return damage(out), lse

    faulty = replace(event, out=damage(event.out))
    bad = first_bad(check_attend(faulty, TRITON, None))
    assert bad is not None
    explained = explain_attend(bad, faulty, wrong)
    assert (explained.stage, explained.place) == ("attend", bad.place)
    assert words in explained.message


def test_one_value_for_all_keys_is_shown_whatever_is_attended() -> None:
    event = traced("empty_rows").event(AttendEvent, "chunk[0]")
    assert shown_wrongly(Oracle(), shape_of(event)) is None
    assert shown_wrongly(Oracle(without(0, 1, 3)), shape_of(event)) is None
    assert shown_wrongly(Oracle(gain=1.01), shape_of(event)) is not None


def test_a_read_out_that_crashes_leaves_the_record() -> None:
    event = traced("global_mask").event(AttendEvent, "suffix")
    bad = first_bad(check_attend(replace(event, out=event.out * 1.1), TRITON, None))
    assert bad is not None

    def crash(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such kernel")

    explained = explain_attend(bad, event, crash)
    assert explained.stage == bad.stage
    assert "the read-out failed: no such kernel" in explained.message


def test_dense_calls_are_named_too() -> None:
    event = traced("dense").event(AttendEvent, "suffix")
    wrong = Oracle(without(0, 1, 3))
    faulty = run_again(event, wrong)
    bad = first_bad(check_attend(faulty, TRITON, None))
    assert bad is not None
    explained = explain_attend(bad, faulty, wrong)
    assert explained.stage == "attend"
    assert "row 1 attended key 3" in explained.message
