"""Are the tensors of a case the same on every machine, and is poison only where nothing may be read?"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.problems.data import draw_values
from harness.problems.names import CACHE_DTYPES, FAMILIES, POISONS, BlockOrder, CacheDType, Family, Poison
from harness.problems.paging import plan_pages
from harness.problems.problem import (
    Chunks,
    DataSpec,
    Dims,
    Layout,
    Paging,
    Problem,
    ProblemError,
    Request,
    TopkSpec,
)
from harness.problems.tensors import build_inputs, logical_tensors, tensor_hash

ROOT = Path(__file__).resolve().parents[2]
PACKED = Dims(heads=1, kv_lora_rank=512, nope=8, rope=64, v=8, topk=16)


def make(lengths: tuple[tuple[int, int], ...] = ((100, 20), (0, 7), (40, 33)), **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "dims": Dims(heads=2, kv_lora_rank=16, nope=8, rope=4, v=8, topk=16),
        "scale": 0.3,
        "requests": tuple(Request(context_len=c, query_len=q) for c, q in lengths),
        "topk": TopkSpec(kinds=tuple("random" for _ in lengths)),
        "chunks": Chunks(row_budget=48, max_context_chunk=32),
    }
    return Problem(**(fields | changes))


PINNED = {
    "plain": (make(), "d53eadd70f82c3b769369a1361a36641"),
    "rich": (
        make(
            dtype="fp16",
            paging=Paging(order="permuted", shared_prefix=True, spare_blocks=3, table_pad=2, seed=11),
            topk=TopkSpec(kinds=("duplicates", "past_end", "straddle"), holes="spread", any_negative=True, seed=2**40),
            data=DataSpec(family="heavy_v", seed=17, temperature=0.7),
            layout=Layout(num_decode_tokens=3, q_pad=8),
        ),
        "2973f33b119b668d93fedca54c7e6089",
    ),
    "packed": (
        make(dims=PACKED, paging=Paging(kv_cache_dtype="fp8_ds_mla"), force="mqa"),
        "37ba72b4099f2ee391d74974f8116433",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_the_tensors_of_a_case_never_change(name: str) -> None:
    problem, expected = PINNED[name]
    assert tensor_hash(build_inputs(problem)) == expected


def test_another_process_with_other_threads_and_folder_makes_the_same_tensors(tmp_path: Path) -> None:
    program = (
        "import sys; from harness.problems.problem import Problem; "
        "from harness.problems.tensors import build_inputs, tensor_hash; "
        "[print(tensor_hash(build_inputs(Problem.from_json(line)))) for line in sys.stdin]"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(problem.to_json() for problem, _ in PINNED.values()),
        env=os.environ | {"OMP_NUM_THREADS": "3", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [expected for _, expected in PINNED.values()]


def test_layout_and_poison_do_not_change_the_content() -> None:
    plain = tensor_hash(build_inputs(make()))
    layout = Layout(num_decode_tokens=4, q_pad=8, kv_pad=8, out_pad=16, topk_pad=4, poison="inf")
    assert tensor_hash(build_inputs(make(layout=layout))) == plain
    assert tensor_hash(build_inputs(make(paging=Paging(cache_row_pad=8)))) == plain
    assert tensor_hash(build_inputs(make(data=DataSpec(seed=1)))) != plain
    assert tensor_hash(build_inputs(make(topk=TopkSpec(kinds=("random",) * 3, seed=1)))) != plain


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("order", ["identity", "permuted", "reversed", "high"])
def test_poison_is_everywhere_but_in_used_rows(kv_cache_dtype: CacheDType, poison: Poison, order: BlockOrder) -> None:
    problem = make(
        dims=PACKED,
        paging=Paging(order=order, spare_blocks=2, kv_cache_dtype=kv_cache_dtype, cache_row_pad=8, shared_prefix=True),
        layout=Layout(num_decode_tokens=2, q_pad=8, kv_pad=8, poison=poison),
        force="mqa",
    )
    inputs = build_inputs(problem)
    size = problem.paging.block_size
    raw = inputs.buffers["cache"]
    raw = raw if raw.dtype == torch.uint8 else raw.view(torch.int16)
    pattern = raw[-1, -1, -1]  # row padding of the last row
    used = torch.zeros(raw.shape[:2], dtype=torch.bool)
    used[inputs.slots // size, inputs.slots % size] = True
    assert int(used.sum()) == 108  # 100, and 40 of which the first two blocks are shared
    assert bool((raw[~used] == pattern).all())
    assert not bool((raw[used][:, : problem.cache_row_width] == pattern).all(dim=1).any())
    if kv_cache_dtype == "auto":
        value = inputs.buffers["cache"][-1, -1, -1].float()
        assert {"nan": value.isnan(), "inf": value.isinf(), "large": value > 1e38, "zero": value == 0}[poison]
    for view in (inputs.q, inputs.kv_c_normed, inputs.k_pe, inputs.w_kv_b):
        assert bool(view.isfinite().all())
        assert float(view.float().abs().max()) < 1e6


def test_every_used_cache_row_holds_the_latent_of_its_token() -> None:
    problem = make(paging=Paging(order="permuted", spare_blocks=5, seed=3))
    inputs, values = build_inputs(problem), draw_values(problem)
    first = 0
    for request, (context, seq) in enumerate(zip(problem.context_lens, problem.seq_lens, strict=True)):
        expected = np.concatenate([values.latent, values.k_pe], axis=1)[first : first + seq]
        for position in range(context):
            block = int(inputs.block_table[request, position // 16])
            stored = inputs.cache[block, position % 16]
            assert torch.equal(stored, torch.from_numpy(expected[position]).bfloat16())
        tokens = slice(problem.token_offsets[request], problem.token_offsets[request + 1])
        suffix = torch.cat([inputs.kv_c_normed[tokens], inputs.k_pe[tokens, 0]], dim=1)
        assert torch.equal(suffix, torch.from_numpy(expected[context:]).bfloat16())
        first += seq


def test_shared_blocks_are_shared_and_all_others_are_not() -> None:
    problem = make(((100, 2), (0, 3), (70, 2), (33, 1)), paging=Paging(shared_prefix=True, order="permuted"))
    ids = plan_pages(problem).block_ids
    assert problem.shared_blocks == 2
    assert (ids[0][:2] == ids[2][:2]).all()
    assert (ids[0][:2] == ids[3][:2]).all()
    own = [i for row in (ids[0], ids[2][2:], ids[3][2:]) for i in row]
    assert len(own) == len(set(own)) == problem.num_blocks
    inputs = build_inputs(problem)
    assert torch.equal(inputs.cached_rows[:32], inputs.cached_rows[100:132])


def test_the_block_table_is_strided_and_ends_in_garbage() -> None:
    problem = make(paging=Paging(table_pad=3, order="reversed"))
    table = build_inputs(problem).block_table
    assert table.stride() == (table.shape[1] + 3, 1)
    assert table.dtype == torch.int32
    garbage = torch.cat([table[b, count:] for b, count in enumerate(problem.block_counts)])
    assert bool(((garbage < 0) | (garbage >= problem.num_blocks)).any())


def test_views_have_the_layout_that_was_asked_for() -> None:
    layout = Layout(num_decode_tokens=3, q_pad=8, kv_pad=16, out_pad=8, topk_pad=4)
    inputs = build_inputs(make(layout=layout))
    assert inputs.q.shape == (60, 2, 12)
    assert inputs.q.stride() == (40, 20, 1)
    assert inputs.q.storage_offset() == 3 * 40
    assert inputs.kv_c_normed.stride() == (32, 1)
    assert inputs.k_pe.shape == (60, 1, 4)
    assert inputs.k_pe.stride(0) == 20
    assert inputs.out.shape == (60, 16)
    assert inputs.out.stride() == (24, 1)
    assert inputs.topk_buffer.shape == (65, 16)
    assert inputs.topk_buffer.stride() == (20, 1)
    assert inputs.prefill_topk.shape == (60, 16)
    around = torch.cat([inputs.topk_buffer[:3], inputs.topk_buffer[63:]])
    assert bool(((around >= 0) & (around < 120)).all())


def test_a_stray_write_beside_the_output_breaks_the_canary() -> None:
    for row, column in ((0, 0), (1, 15), (63, 3), (5, 17)):
        inputs = build_inputs(make(layout=Layout(num_decode_tokens=2, out_pad=8)))
        inputs.out.zero_()
        assert inputs.broken_canary() is None
        inputs.buffers["out"][row, column] = 0.0
        assert f"row {row - 2} column {column}" in str(inputs.broken_canary())


def test_given_values_replace_the_drawn_ones() -> None:
    problem = make(paging=Paging(order="permuted"))
    donor = logical_tensors(build_inputs(make(data=DataSpec(seed=9), paging=Paging(order="permuted"))))
    values = {name: donor[name] for name in ("q", "context", "kv_c_normed", "k_pe", "w_kv_b", "topk")}
    assert tensor_hash(build_inputs(problem, values=values)) == tensor_hash(
        build_inputs(problem.replace(data=DataSpec(seed=9)))
    )
    with pytest.raises(ProblemError, match=r"'depth' is unknown"):
        build_inputs(problem, values={"depth": donor["q"]})
    with pytest.raises(ProblemError, match=r"values\['q'\] is torch.bfloat16 \(59, 2, 12\)"):
        build_inputs(problem, values={"q": donor["q"][1:]})


@pytest.mark.parametrize("lengths", [(), ((5, 0),), ((0, 0), (0, 0)), ((0, 1),), ((33, 1), (0, 0))])
@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
def test_batches_without_tokens_or_context_are_legal(
    lengths: tuple[tuple[int, int], ...], kv_cache_dtype: CacheDType
) -> None:
    inputs = build_inputs(make(lengths, dims=PACKED, paging=Paging(kv_cache_dtype=kv_cache_dtype)))
    assert inputs.q.shape[0] == sum(q for _, q in lengths)
    assert len(tensor_hash(inputs)) == 32


def distinct_rows(tensor: torch.Tensor) -> int:
    return len({tuple(row) for row in tensor.flatten(1).tolist()})


def scores_and_values(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[H, T, T]` of the new tokens and V `[T, H, v]`, in float64 from the stored inputs."""
    inputs, dims = build_inputs(problem), problem.dims
    kv = (inputs.kv_c_normed.double() @ inputs.w_kv_b.double()).view(-1, dims.heads, dims.nope + dims.v)
    k = torch.cat([kv[..., : dims.nope], inputs.k_pe.double().expand(-1, dims.heads, -1)], dim=-1)
    return torch.einsum("qhd,khd->hqk", inputs.q.double(), k) * inputs.scale, kv[..., dims.nope :]


@pytest.mark.parametrize("weights", ["normal", "exact"])
@pytest.mark.parametrize("scale", [0.011, 0.3, 7.0])
def test_each_family_is_what_it_is_named_for(weights: str, scale: float) -> None:
    def drawn(family: Family) -> tuple[torch.Tensor, torch.Tensor]:
        data = DataSpec.model_validate({"family": family, "weights": weights})
        return scores_and_values(make(((0, 96), (0, 64)), data=data, scale=scale))

    s, v = drawn("normal")
    assert 0.7 < float(s.std()) < 1.4
    assert 0.6 < float(v.std()) < 1.4
    assert 0.7 * 2.0**-10 < float(drawn("flat")[0].std()) < 1.4 * 2.0**-10
    assert float(drawn("zero_q")[0].abs().max()) == 0.0
    assert float(drawn("sharp")[0].std()) > 5
    assert float(drawn("offset_v")[1].mean(dim=0).abs().max()) > 2
    tails = drawn("heavy_v")[1].abs()
    assert float(tails.max()) > 20 * float(tails.median())
    s, v = drawn("positive")
    assert float(s.min()) >= 0
    assert float(v.min()) >= 0
    s, _ = drawn("rising")
    assert float((s[:, :, 95] - s[:, :, 0]).min()) > 10
    s, _ = drawn("near_overflow")
    assert float(s.min()) > 200
    assert float(s.max()) < 600
    assert float((s.max(dim=2).values - s.min(dim=2).values).max()) < 20
    for family, high, low in (("low", -200, -600), ("very_low", -2000, -4200)):
        s, _ = drawn(family)
        assert float(s.max()) < high
        assert float(s.min()) > low
        assert float((s.max(dim=2).values - s.min(dim=2).values).max()) < 20
    s, _ = drawn("low_rows")
    of_rows = s.mean(dim=2)
    assert bool((of_rows[:, :32] > -20).any())
    assert bool(((of_rows[:, :32] < -200) & (of_rows[:, :32] > -600)).any())
    assert bool((of_rows[:, :32] < -2000).any())
    assert float((s.max(dim=2).values - s.min(dim=2).values).max()) < 20
    _, v = drawn("ties")
    assert distinct_rows(v[:96]) == 4
    s, v = drawn("repeated")
    assert distinct_rows(v[:96]) == distinct_rows(v[96:]) == 1
    assert float((s[:, :, 0] - s[:, :, 95]).abs().max()) == 0.0
    assert float(drawn("tiny")[1].abs().max()) < 1e-11
    s, v = drawn("one_hot")
    assert float(s.abs().max()) == 0.0
    if weights == "exact":
        assert set(v.flatten().tolist()) <= {0.0, 1.0}
    problem = make(((0, 96),), data=DataSpec(family="powers_of_two"))
    mantissas = torch.frexp(build_inputs(problem).q.float()).mantissa.abs()
    assert bool((mantissas == 0.5).all())
    problem = make(((0, 96),), data=DataSpec(family="rope_heavy"))
    assert float(build_inputs(problem).k_pe.float().std()) > 40


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_lowest_scores_are_below_any_finite_fill_of_ten_thousand(dtype: str) -> None:
    s, _ = scores_and_values(make(((40, 8),), data=DataSpec(family="very_low", seed=3), scale=0.3, dtype=dtype))
    assert float(s.min()) > -33_000
    assert float(s.max()) < -16_000


def test_chunk_gap_puts_scores_of_different_chunks_far_apart() -> None:
    problem = make(((130, 8),), data=DataSpec(family="chunk_gap"))
    latent = draw_values(problem).latent[:, 0]
    levels = [latent[p.start : p.start + p.length] for chunk in problem.planned_chunks for p in chunk]
    levels.append(latent[130:])
    assert all((level == level[0]).all() for level in levels)
    assert all(abs(a[0] - b[0]) >= 8 for a, b in pairwise(levels))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_exact_weights_make_the_projection_exact(family: Family, dtype: str) -> None:
    problem = make(data=DataSpec(family=family, weights="exact"), dtype=dtype)
    inputs = build_inputs(problem)
    exact = inputs.kv_c_normed.double() @ inputs.w_kv_b.double()
    assert torch.equal(exact.to(inputs.q.dtype).double(), exact)
    assert set(inputs.w_kv_b.flatten().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [2.0**-14, 0.05, 2.0**14])
def test_inputs_are_finite_in_both_types_whatever_the_scale(family: Family, scale: float) -> None:
    for dtype in ("bf16", "fp16"):
        inputs = build_inputs(make(data=DataSpec(family=family, temperature=1024.0), scale=scale, dtype=dtype))
        for tensor in (inputs.q, inputs.kv_c_normed, inputs.k_pe, inputs.w_kv_b, inputs.cached_rows):
            assert bool(tensor.isfinite().all())
