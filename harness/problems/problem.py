"""One test case as data: structure plus integer seeds, in JSON that means the same on every machine.

A `Problem` says everything about a prefill batch except the numbers, and the numbers follow from its seeds
(see `tensors.py`). Rules that it enforces, with one clear line when broken:

* unknown fields, wrong types, NaN and infinity are errors;
* every size has a limit and so has the sum of all tensors: a hostile file cannot ask for 100 GB;
* lists that run along the requests (`topk.kinds`) or along the tokens (`topk.rows`) have the right length;
* a history is short, and the problems in it have none.

Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from itertools import accumulate
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from harness.problems.names import DType, Force, Path
from harness.problems.parts import Chunks, DataSpec, Dims, Layout, Paging, Part, Request, TopkSpec
from harness.problems.splits import Piece, split_context
from harness.problems.workspace import DEFAULT_MASK_WORKSPACE_WORDS, expected_path, mask_words

__all__ = [
    "MAX_ELEMENTS",
    "MAX_HISTORY",
    "SPARE_ROWS",
    "Chunks",
    "DataSpec",
    "Dims",
    "Layout",
    "Paging",
    "Problem",
    "ProblemError",
    "Request",
    "TopkSpec",
]

MAX_JSON_CHARS = 16 * 2**20
MAX_ELEMENTS = 2**32
"""Largest sum of elements over all tensors that a problem stands for."""
MAX_CHUNKS = 20_000
MAX_HISTORY = 2
"""Calls before the judged one."""
SPARE_ROWS = 2
"""Rows behind the last token in q, output and top-k buffers: poison, canary or garbage."""


class ProblemError(ValueError):
    """A problem that is not legal: one line that names the field, what it is and what it must be."""


class Problem(Part):
    """A prefill batch: structure and seeds."""

    version: Literal[1] = 1
    dims: Dims
    dtype: DType = "bf16"
    scale: float = Field(gt=0.0, ge=2**-14, le=2**14)
    requests: tuple[Request, ...] = Field(max_length=4096)
    paging: Paging = Paging()
    chunks: Chunks = Chunks()
    mask_workspace_words: int | None = Field(default=None, ge=0, le=2**30)
    """None: the default size, 33,554,432 words."""
    topk: TopkSpec
    data: DataSpec = DataSpec()
    layout: Layout = Layout()
    force: Force | None = None
    history: tuple[Problem, ...] = Field(default=(), max_length=MAX_HISTORY)
    """Batches that ran just before in the same process, on the same layer and workspaces where their sizes allow."""
    source: str = Field(default="drawn", max_length=200)
    """Where the case comes from; not part of its identity."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Problem:
        """Read and check a case file. Raises ProblemError with one line."""
        if len(text) > MAX_JSON_CHARS:
            raise ProblemError(f"case file: {len(text)} characters, must be at most {MAX_JSON_CHARS}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ProblemError(one_line(error)) from None

    def to_json(self) -> str:
        """Canonical JSON: every field, keys sorted, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed, checked again. Raises ProblemError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields} | changes
        try:
            return Problem.model_validate(fields)
        except ValidationError as error:
            raise ProblemError(one_line(error)) from None

    @model_validator(mode="after")
    def _lists_match(self) -> Self:
        spec = self.topk
        if spec.rows is None and len(spec.kinds) != len(self.requests):
            raise ValueError(
                f"topk.kinds has {len(spec.kinds)} entries, must have one for each of {len(self.requests)} requests"
            )
        if spec.rows is not None:
            if len(spec.rows) != self.num_tokens:
                raise ValueError(f"topk.rows has {len(spec.rows)} rows, must have {self.num_tokens} (tokens)")
            longest = max((len(row) for row in spec.rows), default=0)
            if longest > self.dims.topk:
                raise ValueError(f"topk.rows has a row of {longest}, must be at most {self.dims.topk}")
        paging = self.paging
        if paging.kv_cache_dtype == "fp8_ds_mla" and (self.dims.kv_lora_rank, self.dims.rope) != (512, 64):
            raise ValueError(
                f"paging.kv_cache_dtype fp8_ds_mla needs dims.kv_lora_rank=512 and dims.rope=64, "
                f"got {self.dims.kv_lora_rank} and {self.dims.rope}"
            )
        if paging.kv_cache_dtype == "fp8_ds_mla" and self.dtype != "bf16":
            raise ValueError(f"paging.kv_cache_dtype fp8_ds_mla holds bf16 rope values, dtype is {self.dtype}")
        return self

    @model_validator(mode="after")
    def _history_is_flat(self) -> Self:
        for index, earlier in enumerate(self.history):
            if earlier.history:
                raise ValueError(f"history[{index}] has a history of {len(earlier.history)}, must have none")
        return self

    @model_validator(mode="after")
    def _fits_in_memory(self) -> Self:
        step = min(self.chunks.row_budget, self.chunks.max_context_chunk)
        chunks = -(-sum(self.context_lens) // step)
        if chunks > MAX_CHUNKS:
            raise ValueError(f"chunks: the contexts need about {chunks} chunks, must be at most {MAX_CHUNKS}")
        sizes = self.element_counts
        total = sum(sizes.values())
        if total > MAX_ELEMENTS:
            name = max(sizes, key=lambda key: sizes[key])
            raise ValueError(
                f"all tensors hold {total} elements, must be at most {MAX_ELEMENTS} "
                f"(largest: {name} with {sizes[name]})"
            )
        return self

    @cached_property
    def query_lens(self) -> list[int]:
        """New tokens of each request."""
        return [r.query_len for r in self.requests]

    @cached_property
    def context_lens(self) -> list[int]:
        """Context tokens of each request."""
        return [r.context_len for r in self.requests]

    @cached_property
    def seq_lens(self) -> list[int]:
        """All tokens of each request."""
        return [r.seq_len for r in self.requests]

    @cached_property
    def token_offsets(self) -> list[int]:
        """First packed token of each request, and the number of tokens at the end: `[B + 1]`."""
        return list(accumulate(self.query_lens, initial=0))

    @property
    def num_tokens(self) -> int:
        """Packed new tokens of the batch."""
        return self.token_offsets[-1]

    @property
    def max_query_len(self) -> int:
        """Longest suffix."""
        return max(self.query_lens, default=0)

    @property
    def max_context_len(self) -> int:
        """Longest context."""
        return max(self.context_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        """Longest request."""
        return max(self.seq_lens, default=0)

    @cached_property
    def block_counts(self) -> list[int]:
        """Blocks that hold the context of each request."""
        return [-(-c // self.paging.block_size) for c in self.context_lens]

    @cached_property
    def shared_blocks(self) -> int:
        """Leading blocks which every request with context shares (0 unless `paging.shared_prefix`)."""
        contexts = [c for c in self.context_lens if c]
        if not self.paging.shared_prefix or len(contexts) < 2:
            return 0
        return min(contexts) // self.paging.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole cache, at least one."""
        owners = sum(1 for c in self.context_lens if c)
        used = sum(self.block_counts) - self.shared_blocks * max(owners - 1, 0)
        return max(used + self.paging.spare_blocks, 1)

    @property
    def cache_row_width(self) -> int:
        """Elements of one cache row: latent and rope values, or the 656 bytes of `fp8_ds_mla`."""
        return 656 if self.paging.kv_cache_dtype == "fp8_ds_mla" else self.dims.latent

    @cached_property
    def planned_chunks(self) -> list[list[Piece]]:
        """Context chunks by the naive planner of `splits.py`."""
        return split_context(
            self.context_lens,
            self.chunks.row_budget,
            self.chunks.max_context_chunk,
            self.chunks.split_alignment,
        )

    @property
    def longest_chunk(self) -> int:
        """Most context keys of one request in one chunk; 0 without context."""
        return max((piece.length for chunk in self.planned_chunks for piece in chunk), default=0)

    @property
    def workspace_words(self) -> int:
        """int32 words of the mask workspace."""
        words = self.mask_workspace_words
        return DEFAULT_MASK_WORKSPACE_WORDS if words is None else words

    @property
    def global_mask_words(self) -> int:
        """Words of the mask over whole sequences, key-start word included."""
        return mask_words(len(self.requests), self.max_query_len, self.max_seq_len, reserve=True)

    @property
    def call_mask_words(self) -> int:
        """Words of the largest own mask of one call: the suffix or the longest chunk."""
        keys = max(self.max_query_len, self.longest_chunk)
        return mask_words(len(self.requests), self.max_query_len, keys, reserve=False)

    @property
    def path_by_suffix_mask(self) -> bool:
        """Whether MQA serves the batch because one mask does not fit: the suffix's, while those of all chunks do."""
        batch, rows, chunk = len(self.requests), self.max_query_len, self.longest_chunk
        free = self.force is None and self.paging.kv_cache_dtype == "auto" and self.expected_path() == "mqa"
        return free and chunk > 0 and mask_words(batch, rows, chunk, reserve=False) <= self.workspace_words

    @cached_property
    def element_counts(self) -> dict[str, int]:
        """Elements of each tensor that the problem stands for, buffers of the calls included."""
        d, lay, page = self.dims, self.layout, self.paging
        rows = lay.num_decode_tokens + self.num_tokens + SPARE_ROWS
        gathered = min(self.chunks.row_budget, sum(self.context_lens))
        return {
            "q": rows * d.heads * (d.qk + lay.q_pad),
            "new latents": (self.num_tokens + SPARE_ROWS) * (d.latent + 2 * lay.kv_pad),
            "weights": d.kv_lora_rank * d.heads * (d.nope + d.v),
            "cache": self.num_blocks * page.block_size * (self.cache_row_width + page.cache_row_pad),
            "block table": len(self.requests) * (max(self.block_counts, default=0) + 1 + page.table_pad),
            "top-k": rows * (d.topk + lay.topk_pad),
            "output": rows * (d.heads * d.v + lay.out_pad),
            "keys and values": max(gathered, self.num_tokens) * d.heads * (d.qk + d.v),
            "context rows": sum(self.context_lens) * d.latent,
            "gather workspace": self.chunks.row_budget * d.latent,
        }

    @cached_property
    def case_id(self) -> str:
        """16 hex digits of the canonical JSON without `source`, and without a history where there is none.

        A field that later versions added is left out where it has its default, so that an old case keeps its id.
        """
        content = self.model_dump(mode="json", exclude={"source", "history"})
        if not self.topk.lowest:
            del content["topk"]["lowest"]
        if self.history:
            content["history"] = [earlier.case_id for earlier in self.history]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def expected_path(self) -> Path:
        """The path that the dispatch rules give to this batch (`workspace.expected_path`)."""
        return expected_path(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            topk=self.dims.topk,
            longest_chunk=self.longest_chunk,
            workspace_words=self.workspace_words,
            force=self.force,
            quantised=self.paging.kv_cache_dtype != "auto",
        )

    def features(self) -> list[str]:
        """Sorted names of the coverage features that this problem reaches (`features.py`)."""
        from harness.problems.features import features_of

        return features_of(self)


def one_line(error: ValidationError) -> str:
    """The first complaint of a validation as one line: field, what is wrong, what was given."""
    details = error.errors(include_url=False)
    first = details[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    message = first["msg"].removeprefix("Value error, ")
    given = repr(first.get("input"))
    if first["type"] not in {"value_error", "json_invalid", "missing"}:
        message += f" (got {given if len(given) <= 60 else given[:57] + '...'})"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return " ".join(f"{field or 'problem'}: {message}{more}".split())
