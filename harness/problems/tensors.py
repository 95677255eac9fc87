"""Problem -> tensors: numbers from the seeds, laid out in poisoned buffers.

Everything is made on the CPU and copied, so that a case means the same on every device. What a kernel must
not read (decode rows, padding, unused cache rows) is poison; what it must not write (around the output) is
canary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from harness.problems.bits import Stream
from harness.problems.data import draw_values
from harness.problems.fp8 import to_ds_mla, to_e4m3
from harness.problems.names import Poison
from harness.problems.paging import plan_pages
from harness.problems.problem import SPARE_ROWS, Problem, ProblemError
from harness.problems.topk import topk_rows

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CANARY_BITS = 0x7FA5
"""A NaN in bf16 and in fp16: fills the output buffer, so that an unwritten output shows too."""
_GARBAGE_TAG = 601
_POISON_BITS: dict[str, dict[Poison, int]] = {
    "bf16": {"nan": 0x7FC0, "inf": 0x7F80, "large": 0x7F7F, "zero": 0},
    "fp16": {"nan": 0x7E00, "inf": 0x7C00, "large": 0x7BFF, "zero": 0},
    "byte": {"nan": 0xFF, "inf": 0xFF, "large": 0x7E, "zero": 0},
}


@dataclass
class Inputs:
    """The tensors of one case; names and shapes as in the problem statement."""

    problem: Problem
    q: torch.Tensor
    """`[T, H, nope + rope]`, head stride `nope + rope + q_pad`, first row behind the decode rows"""
    kv_c_normed: torch.Tensor
    """`[T, kv_lora_rank]`, row stride with `kv_pad`"""
    k_pe: torch.Tensor
    """`[T, 1, rope]`, row stride with `kv_pad`"""
    cache: torch.Tensor
    """`[num_blocks, block_size, width]`; float8_e4m3fn for `fp8_e4m3`, uint8 for `fp8_ds_mla`"""
    block_table: torch.Tensor
    """`[B, max_blocks + 1]` int32, row stride with `table_pad`; garbage behind the used entries"""
    w_kv_b: torch.Tensor
    """`[kv_lora_rank, H * (nope + v)]`"""
    topk_buffer: torch.Tensor
    """`[num_decode_tokens + T + 2, topk]` int32, row stride with `topk_pad`"""
    out: torch.Tensor
    """`[T, H * v]`, canary until written, row stride with `out_pad`"""
    scale: float
    slots: torch.Tensor
    """`[sum of contexts]` int64 on the CPU: cache row of each context token, request after request"""
    buffers: dict[str, torch.Tensor]
    """Whole storage behind each view, padding and poison included: what guards snapshot and compare"""

    @property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return self.problem.query_lens

    @property
    def context_lens(self) -> list[int]:
        """Context tokens of each request."""
        return self.problem.context_lens

    @property
    def prefill_topk(self) -> torch.Tensor:
        """`[T, topk]`: the rows of the prefill tokens."""
        first = self.problem.layout.num_decode_tokens
        return self.topk_buffer[first : first + self.problem.num_tokens]

    @property
    def cached_rows(self) -> torch.Tensor:
        """`[sum of contexts, width]`: cache rows of the context tokens as stored, request after request."""
        size = self.problem.paging.block_size
        slots = self.slots.to(self.cache.device)
        return _as_bytes_if_fp8(self.cache)[slots // size, slots % size]

    def broken_canary(self) -> str | None:
        """Where something beside the output was written, or None."""
        problem = self.problem
        first, width = problem.layout.num_decode_tokens, problem.dims.heads * problem.dims.v
        intact = self.buffers["out"].view(torch.int16) == CANARY_BITS
        intact[first : first + problem.num_tokens, :width] = True
        if bool(intact.all()):
            return None
        row, column = (int(i) for i in (~intact).nonzero()[0])
        return f"output buffer row {row - first} column {column} (of {problem.num_tokens} x {width}) was written"


def build_inputs(
    problem: Problem,
    device: torch.device | str = "cpu",
    values: Mapping[str, torch.Tensor] | None = None,
) -> Inputs:
    """Make the tensors of a problem.

    `values` replaces drawn numbers by given ones, under the names and shapes of `logical_tensors` (a captured
    case). Raises ProblemError if one of them has a wrong name, shape or dtype.
    """
    dims, lay, page = problem.dims, problem.layout, problem.paging
    dtype, tokens, first = TORCH_DTYPES[problem.dtype], problem.num_tokens, problem.layout.num_decode_tokens
    poison = _POISON_BITS[problem.dtype][lay.poison]
    rows = first + tokens + SPARE_ROWS
    pages = plan_pages(problem)

    quantised = page.kv_cache_dtype != "auto"
    buffers = {
        "q": _filled((rows, dims.heads, dims.qk + lay.q_pad), dtype, poison),
        "kv_c_normed": _filled((tokens + SPARE_ROWS, dims.kv_lora_rank + lay.kv_pad), dtype, poison),
        "k_pe": _filled((tokens + SPARE_ROWS, 1, dims.rope + lay.kv_pad), dtype, poison),
        "cache": _filled(
            (problem.num_blocks, page.block_size, problem.cache_row_width + page.cache_row_pad),
            torch.uint8 if quantised else dtype,
            _POISON_BITS["byte"][lay.poison] if quantised else poison,
        ),
        "block_table": torch.full(
            (len(problem.requests), pages.table.shape[1] + page.table_pad), 2**31 - 1, dtype=torch.int32
        ),
        "w_kv_b": torch.empty((dims.kv_lora_rank, dims.heads * (dims.nope + dims.v)), dtype=dtype),
        "topk_buffer": _topk_garbage(problem, rows),
        "out": _filled((rows, dims.heads * dims.v + lay.out_pad), dtype, CANARY_BITS),
    }
    inputs = _view(problem, buffers, torch.from_numpy(pages.slots))
    inputs.block_table.copy_(torch.from_numpy(pages.table))
    inputs.prefill_topk.copy_(torch.from_numpy(topk_rows(problem)))
    _write_values(inputs, pages.owned)
    if values:
        _replace(inputs, values)
    if torch.device(device).type == "cpu":
        return inputs
    return _view(problem, {name: buffer.to(device) for name, buffer in buffers.items()}, inputs.slots)


def logical_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The content of a case without layout and poison: what a hash covers and what a finding stores."""
    return {
        "q": inputs.q,
        "kv_c_normed": inputs.kv_c_normed,
        "k_pe": inputs.k_pe,
        "context": inputs.cached_rows,
        "w_kv_b": inputs.w_kv_b,
        "topk": inputs.prefill_topk,
        "block_table": inputs.block_table,
    }


def tensor_hash(inputs: Inputs) -> str:
    """32 hex digits over names, dtypes, shapes and bytes of `logical_tensors`, and over the scale."""
    digest = hashlib.sha256(inputs.scale.hex().encode())
    for name, tensor in logical_tensors(inputs).items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _view(problem: Problem, buffers: dict[str, torch.Tensor], slots: torch.Tensor) -> Inputs:
    dims, tokens, first = problem.dims, problem.num_tokens, problem.layout.num_decode_tokens
    cache = buffers["cache"][:, :, : problem.cache_row_width]
    if problem.paging.kv_cache_dtype == "fp8_e4m3":
        cache = cache.view(torch.float8_e4m3fn)
    return Inputs(
        problem=problem,
        q=buffers["q"][first : first + tokens, :, : dims.qk],
        kv_c_normed=buffers["kv_c_normed"][:tokens, : dims.kv_lora_rank],
        k_pe=buffers["k_pe"][:tokens, :, : dims.rope],
        cache=cache,
        block_table=buffers["block_table"][:, : max(problem.block_counts, default=0) + 1],
        w_kv_b=buffers["w_kv_b"],
        topk_buffer=buffers["topk_buffer"][:, : dims.topk],
        out=buffers["out"][first : first + tokens, : dims.heads * dims.v],
        scale=problem.scale,
        slots=slots,
        buffers=buffers,
    )


def _write_values(inputs: Inputs, owned: np.ndarray) -> None:
    """Draw the numbers and store them: suffix rows into the new tensors, context rows into the cache."""
    problem = inputs.problem
    values = draw_values(problem)
    in_context = np.concatenate(
        [np.zeros(0, dtype=bool), *(np.arange(r.seq_len) < r.context_len for r in problem.requests)]
    )
    inputs.q.copy_(torch.from_numpy(values.q))
    inputs.kv_c_normed.copy_(torch.from_numpy(values.latent[~in_context]))
    inputs.k_pe.copy_(torch.from_numpy(values.k_pe[~in_context]).unsqueeze(1))
    inputs.w_kv_b.copy_(torch.from_numpy(values.w_kv_b))
    # the engine stores what it computed in its storage type: round first, quantise then
    dtype = TORCH_DTYPES[problem.dtype]
    latent = torch.from_numpy(values.latent[in_context][owned]).to(dtype)
    rope = torch.from_numpy(values.k_pe[in_context][owned]).to(dtype)
    if problem.paging.kv_cache_dtype == "auto":
        rows = torch.cat([latent, rope], dim=1)
    elif problem.paging.kv_cache_dtype == "fp8_e4m3":
        rows = to_e4m3(torch.cat([latent, rope], dim=1), problem.paging.kv_cache_scale)
    else:
        rows = to_ds_mla(latent, rope)
    _store_rows(inputs, inputs.slots[torch.from_numpy(owned)], rows)


def _store_rows(inputs: Inputs, slots: torch.Tensor, rows: torch.Tensor) -> None:
    size = inputs.problem.paging.block_size
    _as_bytes_if_fp8(inputs.cache)[slots // size, slots % size] = rows


def _replace(inputs: Inputs, values: Mapping[str, torch.Tensor]) -> None:
    targets = logical_tensors(inputs)
    for name, value in values.items():
        if name not in targets or name == "block_table":
            raise ProblemError(f"values: {name!r} is unknown, must be one of {sorted(set(targets) - {'block_table'})}")
        target = targets[name]
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ProblemError(
                f"values[{name!r}] is {value.dtype} {tuple(value.shape)}, must be {target.dtype} {tuple(target.shape)}"
            )
        if name == "context":
            _store_rows(inputs, inputs.slots, value)
        else:
            target.copy_(value)


def _as_bytes_if_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _filled(shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8 if dtype == torch.uint8 else torch.int16).fill_(bits)
    return tensor


def _topk_garbage(problem: Problem, rows: int) -> torch.Tensor:
    """Legal key positions: a stray read of one is silent unless results are checked."""
    shape = (rows, problem.dims.topk + problem.layout.topk_pad)
    stream = Stream(problem.topk.seed, _GARBAGE_TAG)
    garbage = stream.integers(max(problem.max_seq_len, 1), math.prod(shape)).astype(np.int32)
    return torch.from_numpy(garbage.reshape(shape))
