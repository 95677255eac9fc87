"""Stage `mask_mod`: which keys an FA4 mask mod lets each query see, bit by bit, without a tolerance.

A mod is asked exactly as FA4's SM90 or SM100 kernels ask it, and its answers are compared with the bits of the
mask it was given: `key_start + key` for a mod that adds a key start, `key` for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from harness.checks.attend import unpack_bits
from harness.checks.mask import expected_words
from harness.checks.mask_mod_python import ModFault
from harness.checks.mask_mod_readout import TILE_KEYS, WORD_BITS, Calling, MaskMod, read_mask_mod, vec_size
from harness.checks.plan import expected_plan
from harness.checks.readout import SetDifference, first_difference
from harness.checks.verdict import failed, passed
from harness.problems.problem import Problem
from harness.problems.workspace import padded_rows, words_per_row
from harness.subjects.api import NotRunnable
from reports.records import CheckRecord, Place, Status

if TYPE_CHECKING:
    from harness.checks.stage_case import StageRun

STAGE = "mask_mod"
CHECK = "mask_mod.bits"
SM90_TILES = (128, 80)
"""Key tiles of FA4's SM90 kernel at head dims 192/128 and 256/256."""
MAX_CHUNKS = 4
"""Chunks of a case whose calls are read out: first ones and last one."""
_GARBAGE = 0x5A7B3C69
"""Words that hold no data: rows behind the last query, words behind the last key."""

F = TypeVar("F", bound=Callable[..., Any])


def mod_factory(function: F) -> F:
    """Mark a function `make(offset, device) -> mod` that makes mods, where a mod itself is expected.

    `offset`: the mod that adds the key start from the last word of query row 0, or the one that does not. The
    function raises NotRunnable for one that it does not offer.
    """
    function.__makes_mods__ = True  # type: ignore[attr-defined]
    return function


def check_mask_mod(
    call: str,
    mod: MaskMod,
    mask: torch.Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    key_starts: Sequence[int] | None = None,
    calling: Calling = "sm90",
    *,
    tile_keys: int = TILE_KEYS,
    first_request: int = 0,
) -> CheckRecord:
    """Read the mod out and compare every bit of every request; the first wrong one is named.

    Arguments as `read_mask_mod`; `call` and `first_request` say where the call stands in its batch. Without CuTe
    the record is NOT_RUN. Raises ValueError and TypeError for wrong arguments.
    """
    try:
        seen = read_mask_mod(mod, mask, q_lens, k_lens, key_starts, calling, tile_keys=tile_keys)
    except NotRunnable as reason:
        return failed(STAGE, CHECK, str(reason), Place(call=call), status=Status.NOT_RUN)
    except ModFault as fault:
        return failed(STAGE, CHECK, str(fault), Place(call=call), status=Status.GUARD)
    for b, allowed in enumerate(expected_bits(mask, q_lens, k_lens, key_starts)):
        difference = first_difference(seen[b], allowed)
        if difference is not None:
            start = 0 if key_starts is None else key_starts[b]
            shares = f"of {int(allowed.sum())} selected keys {int((allowed & ~seen[b]).sum())} are missed"
            how = f"key_start {start}, {shares}, asked as on {calling.upper()}"
            return _wrong_bit(call, first_request + b, difference, start, how)
    return passed(STAGE, CHECK)


def expected_bits(
    mask: torch.Tensor, q_lens: Sequence[int], k_lens: Sequence[int], key_starts: Sequence[int] | None
) -> list[torch.Tensor]:
    """The right answers, bool `[q_len, k_len]` a request. With key starts the last word of a row is no data."""
    words = mask.cpu()
    if key_starts is None:
        return [unpack_bits(words[b, :q], 0, k) for b, (q, k) in enumerate(zip(q_lens, k_lens, strict=True))]
    return [
        unpack_bits(words[b, :q, :-1], start, k)
        for b, (q, k, start) in enumerate(zip(q_lens, k_lens, key_starts, strict=True))
    ]


def _wrong_bit(call: str, request: int, difference: SetDifference, key_start: int, how: str) -> CheckRecord:
    bit = key_start + difference.key
    word, in_word = divmod(bit, WORD_BITS)
    place = Place(call=call, request=request, row=difference.row, key=bit, word=word, bit=in_word)
    return failed(STAGE, CHECK, f"{difference.describe(key_start)}; {how}", place)


@dataclass(frozen=True)
class ModCall:
    """One attention call as a mask mod sees it."""

    call: str
    mask: torch.Tensor
    q_lens: list[int]
    k_lens: list[int]
    key_starts: list[int] | None
    first_request: int
    chunk: int | None = None


def judge(run: StageRun) -> list[CheckRecord]:
    """Judge of the stage: every call that the case makes, by each mod that the subject offers."""
    device = run.facts.inputs.q.device
    records = []
    reasons = []
    for offset in (False, True):
        try:
            mod = _mod_of(run.subject.function, offset, device)
        except NotRunnable as reason:
            reasons.append(str(reason))
            continue
        if mod is not None:
            records += check_problem(mod, run.problem, run.facts.topk_rows.cpu(), offset=offset, device=device)
    not_run = next((record for record in records if record.status is Status.NOT_RUN), None)
    if not_run is not None or (reasons and not records):
        raise NotRunnable(not_run.message if not_run is not None else reasons[0])
    return records


def _mod_of(function: Any, offset: bool, device: torch.device) -> MaskMod | None:
    if getattr(function, "__makes_mods__", False):
        mod: MaskMod = function(offset, device)
        return mod
    # a mod itself says by `__key_starts__` whether it adds the key start
    return function if bool(getattr(function, "__key_starts__", False)) == offset else None


def check_problem(
    mod: MaskMod, problem: Problem, topk_rows: torch.Tensor, *, offset: bool, device: torch.device
) -> list[CheckRecord]:
    """The calls of a prefill batch: global mask with key starts (`offset`), or own masks of single calls.

    `topk_rows` is `[T, topk]` on the CPU. A scalar mod is asked by both calling rules.
    """
    callings: tuple[Calling, ...] = ("sm100",) if vec_size(mod) > 1 else ("sm90", "sm100")
    records = []
    for index, call in enumerate(calls_of(problem, topk_rows, offset=offset)):
        mask = call.mask.to(device)
        for calling in callings:
            tile = SM90_TILES[(int(problem.case_id, 16) + index) % 2] if calling == "sm90" else TILE_KEYS
            record = check_mask_mod(
                call.call, mod, mask, call.q_lens, call.k_lens, call.key_starts, calling,
                tile_keys=tile, first_request=call.first_request,
            )  # fmt: skip
            record.place.chunk = call.chunk
            records.append(_with_smallest(record, mod, call, calling, device, tile))
    return records


def _with_smallest(
    record: CheckRecord, mod: MaskMod, call: ModCall, calling: Calling, device: torch.device, tile_keys: int
) -> CheckRecord:
    """The record of a wrong bit, with the smallest call that shows the same fault in its message."""
    request = record.place.request
    if record.status is not Status.FAIL or request is None:
        return record
    from harness.checks.mask_mod_shrink import shrink_fault

    start = None if call.key_starts is None else call.key_starts[request - call.first_request]
    small = shrink_fault(mod, record, start, calling, device=device, tile_keys=tile_keys)
    return record if small is None else record.model_copy(update={"message": f"{record.message}; {small.describe()}"})


def calls_of(problem: Problem, topk_rows: torch.Tensor, *, offset: bool) -> Iterator[ModCall]:
    """The suffix call and the chunk calls of a batch, with masks made from its top-k rows by the oracle."""
    q_lens, contexts = problem.query_lens, problem.context_lens
    rows = [topk_rows[a:b] for a, b in zip(problem.token_offsets, problem.token_offsets[1:], strict=False)]
    limits = problem.chunks
    plan = expected_plan(contexts, limits.row_budget, limits.max_context_chunk, limits.split_alignment)
    chosen = dict(enumerate(plan))
    if len(plan) > MAX_CHUNKS:
        chosen = {index: plan[index] for index in (*range(MAX_CHUNKS - 1), len(plan) - 1)}
    if offset:
        whole = _mask_of(rows, problem.max_query_len, problem.max_seq_len, contexts, reserve=True)
        yield ModCall("suffix", whole, q_lens, q_lens, contexts, 0)
        for index, chunk in chosen.items():
            part = slice(chunk.first, chunk.first + len(chunk.lengths))
            yield ModCall(
                f"chunk[{index}]",
                whole[part],
                q_lens[part],
                list(chunk.lengths),
                list(chunk.starts),
                chunk.first,
                index,
            )
        return
    suffix = [_remapped(r, c, q) for r, c, q in zip(rows, contexts, q_lens, strict=True)]
    mask = _mask_of(suffix, problem.max_query_len, problem.max_query_len, [0] * len(rows), reserve=False)
    yield ModCall("suffix", mask, q_lens, q_lens, None, 0)
    for index, chunk in chosen.items():
        part = slice(chunk.first, chunk.first + len(chunk.lengths))
        ranges = zip(rows[part], chunk.starts, chunk.lengths, strict=True)
        mask = _mask_of(
            [_remapped(r, start, length) for r, start, length in ranges],
            max(q_lens[part]), max(chunk.lengths), None, reserve=False,
        )  # fmt: skip
        yield ModCall(f"chunk[{index}]", mask, q_lens[part], list(chunk.lengths), None, chunk.first, index)


def _remapped(rows: torch.Tensor, start: int, length: int) -> torch.Tensor:
    wide = rows.to(torch.int64)
    return torch.where((wide >= start) & (wide < start + length), wide - start, -1)


def _mask_of(
    rows: Sequence[torch.Tensor], longest_query: int, longest_key: int, first_pos: list[int] | None, *, reserve: bool
) -> torch.Tensor:
    """int32 `[B, padded_q, words]`; garbage in every row and word that holds no data."""
    words = words_per_row(longest_key, reserve=reserve)
    mask = torch.full((len(rows), padded_rows(longest_query), words), _GARBAGE, dtype=torch.int32)
    data = -(-longest_key // WORD_BITS)
    for b, topk in enumerate(rows):
        bits = expected_words(topk, data, longest_key, None if first_pos is None else first_pos[b])
        mask[b, : topk.shape[0], :data] = torch.from_numpy(bits.view("int32"))
    return mask
