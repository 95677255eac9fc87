"""Do merge, projection, MQA and end-to-end bounds hold for right kernels, and only as far as they should?"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.measure.families import Case, make_case, split_evenly
from harness.measure.float_model import Model, attend, merge, run
from reference import bound_stages, latent, oracle
from reference.bound import AttendReference
from reference.numerics import TRITON, TRITON_MQA
from tests.reference.tightness import ratio

BF16 = torch.bfloat16


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def partials(gap: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = normal(50, 3, 16, seed=seed), normal(50, 3, 16, seed=seed + 1)
    lse = normal(3, 50, seed=seed + 2) * 3 + 8
    return a.to(BF16), lse, b.to(BF16), lse + gap * normal(3, 50, seed=seed + 3)


def merge_reference(parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> AttendReference:
    return bound_stages.merge_reference(
        prefix_out=parts[0], prefix_lse=parts[1], suffix_out=parts[2], suffix_lse=parts[3], numerics=TRITON
    )


@pytest.mark.parametrize("gap", [0.0, 0.5, 5.0, 40.0, 300.0])
def test_a_right_merge_is_not_accused(gap: float) -> None:
    parts = partials(gap, seed=1)
    exact = merge_reference(parts)
    out, lse = merge(*parts)
    out_margin = ratio((out.double() - exact.out).abs(), exact.bound.tol_out)
    assert 0.3 <= out_margin <= 1
    assert 0.02 <= ratio((lse.double() - exact.lse).abs(), exact.bound.tol_lse) <= 1
    torch.testing.assert_close(bound_stages.sum_terms(exact.bound.out_terms), exact.bound.tol_out)


def test_a_merge_with_an_empty_side_is_a_copy() -> None:
    parts = partials(1.0, seed=2)
    for empty in (-math.inf, math.inf):
        parts[1][0, :10] = empty
        parts[3][0, 5:15] = empty
        parts[0][:10, 0] = math.nan
        exact = merge_reference(parts)
        assert torch.equal(exact.out[:5, 0], parts[2][:5, 0].double())
        assert torch.equal(exact.lse[0, 10:15], parts[1][0, 10:15].double())
        assert exact.bound.tol_out[:15, 0].abs().sum() == 0
        assert exact.bound.tol_lse[0, :15].abs().sum() == 0
        assert (exact.out[5:10, 0] == 0).all()
        assert (exact.lse[0, 5:10] == -math.inf).all()
        assert (exact.bound.tol_out[15:] > 0).all()


def test_a_right_projection_is_not_accused_and_two_roundings_are() -> None:
    x, w = normal(40, 64, seed=3).to(BF16), normal(64, 30, seed=4).to(BF16)
    tolerance, terms = bound_stages.projection_bound(x, w, numerics=TRITON)
    exact = x.double() @ w.double()
    once = (x.float() @ w.float()).to(BF16)
    assert 0.8 <= ratio((once.double() - exact).abs(), tolerance) <= 1
    torch.testing.assert_close(bound_stages.sum_terms(terms), tolerance)
    halves = (x[:, :32].float() @ w[:32].float()).to(BF16) + (x[:, 32:].float() @ w[32:].float()).to(BF16)
    assert ratio((halves.double() - exact).abs(), tolerance) > 1


def test_an_exact_projection_has_no_tolerance() -> None:
    x = normal(5, 8, seed=5).to(BF16)
    tolerance, _ = bound_stages.projection_bound(x, torch.eye(8), numerics=TRITON, exact_projection=True)
    assert tolerance.abs().sum() == 0


def test_a_right_up_projection_is_not_accused() -> None:
    latents, w = normal(20, 3, 32, seed=6).to(BF16), normal(32, 3, 10, seed=7).to(BF16)
    exact, tolerance, _ = bound_stages.up_projection_bound(latents, w, numerics=TRITON)
    got = torch.einsum("nhl,lhd->nhd", latents.float(), w.float()).to(BF16)
    torch.testing.assert_close(exact, torch.einsum("nhl,lhd->nhd", latents.double(), w.double()))
    assert 0.5 <= ratio((got.double() - exact).abs(), tolerance) <= 1


@pytest.mark.parametrize("family", ["unit normal", "sharp", "ties", "repeated tokens", "all positive"])
def test_right_sparse_mqa_is_not_accused(family: str) -> None:
    case = make_case(family, 8, n=6, heads=4, keys=200, topk=60, dim=48, v_dim=1)
    rows, lora = case.k[:, 0], 32
    exact = bound_stages.mqa_reference(
        q=case.q, latents=rows, lora=lora, allowed=case.allowed, scale=case.scale, numerics=TRITON_MQA, slots=60
    )
    k = rows[:, None].expand(-1, 4, -1)
    out, lse = attend(Case(case.q, k, k[..., :lora], case.allowed, case.scale), Model(tile=32, tensor_cores=True))
    assert 0.1 <= ratio((out.double() - exact.out).abs(), exact.bound.tol_out) <= 1
    assert ratio((lse.double() - exact.lse).abs(), exact.bound.tol_lse) <= 1


HEADS, NOPE, ROPE, V, LORA = 3, 24, 8, 16, 32


def prefill_case(seed: int, *, repeat: str = "", strength: float = 1.0, exact_weights: bool = False) -> dict[str, Any]:
    """Two requests, contexts 70 and 0, queries 10 and 20."""
    queries, contexts, block = [10, 20], [70, 0], 8
    kv, cache = normal(30, LORA, seed=seed), normal(9, block, LORA + ROPE, seed=seed + 1)
    pe = normal(30, 1, ROPE, seed=seed + 2)
    if repeat:
        kv[:], cache[..., :LORA] = kv[0], kv[0]
    if repeat == "tokens":
        pe[:], cache[..., LORA:] = pe[0], pe[0]
    w = normal(LORA, HEADS * (NOPE + V), seed=seed + 3) / LORA**0.5
    if exact_weights:
        picks = torch.randint(0, LORA, (HEADS * (NOPE + V),), generator=torch.Generator().manual_seed(seed))
        w = torch.nn.functional.one_hot(picks, LORA).T.float() * normal(1, len(picks), seed=seed).sign()
    rows = torch.stack(
        [torch.randperm(80, generator=torch.Generator().manual_seed(100 + i))[:40] for i in range(30)]
    ).int()
    return {
        "q": (normal(30, HEADS, NOPE + ROPE, seed=seed + 4) * strength).to(BF16),
        "kv_c_normed": kv.to(BF16),
        "k_pe": pe.to(BF16),
        "cache": cache.to(BF16),
        "block_table": torch.arange(9).repeat(2, 1).int(),
        "w_kv_b": w.to(BF16),
        "topk_rows": rows,
        "query_lens": queries,
        "context_lens": contexts,
        "num_heads": HEADS,
        "nope": NOPE,
        "rope": ROPE,
        "v_head_dim": V,
        "scale": (NOPE + ROPE) ** -0.5,
    }


def requests(case: dict[str, Any]) -> list[tuple[slice, Tensor, Tensor]]:
    """For each request its tokens, latent rows (bf16 values) and allowed sets."""
    found, first = [], 0
    for b, (query_len, context_len) in enumerate(zip(case["query_lens"], case["context_lens"], strict=True)):
        tokens = slice(first, first + query_len)
        first += query_len
        rows = latent.request_latents(
            kv_c_normed=case["kv_c_normed"][tokens],
            k_pe=case["k_pe"][tokens],
            cache=case["cache"],
            block_table_row=case["block_table"][b],
            context_len=context_len,
            rope=ROPE,
        )
        found.append((tokens, rows, oracle.allowed_matrix(case["topk_rows"][tokens], context_len)))
    return found


def masked_kernel(case: dict[str, Any], parts: int) -> tuple[Tensor, Tensor]:
    """float32 projection, K and V rounded to bf16, then the float model by segments."""
    outs, lses = [], []
    for tokens, rows, allowed in requests(case):
        kv = (rows[:, :LORA].float() @ case["w_kv_b"].float()).to(BF16).view(-1, HEADS, NOPE + V)
        pe = rows[:, None, LORA:].to(BF16).expand(-1, HEADS, -1)
        k = torch.cat([kv[..., :NOPE], pe], dim=2)
        attention = Case(case["q"][tokens], k, kv[..., NOPE:], allowed, case["scale"])
        out, lse = run(attention, Model(tile=32), split_evenly(len(k), parts))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def absorbed_kernel(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q' and the latent output rounded to bf16, then W_UV."""
    w_uk, w_uv = latent.split_weight(case["w_kv_b"], HEADS, NOPE, V)
    outs, lses = [], []
    for tokens, rows, allowed in requests(case):
        q = latent.absorb_query(case["q"][tokens], w_uk).float().to(BF16)
        k = rows[:, None].to(BF16).expand(-1, HEADS, -1)
        context = len(k) - len(q)
        calls = [(0, context), (context, len(q))] if context else [(0, len(q))]
        out, lse = run(Case(q, k, k[..., :LORA], allowed, case["scale"]), Model(tile=32), calls)
        outs.append(torch.einsum("nhl,lhd->nhd", out.float(), w_uv.float()).to(BF16))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def prefill_margins(case: dict[str, Any], got: tuple[Tensor, Tensor], **options: Any) -> tuple[float, float]:
    exact = bound_stages.prefill_reference(**case, **options)
    out, lse = oracle.sparse_mla_prefill(**case)
    torch.testing.assert_close((exact.out, exact.lse), (out, lse), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bound_stages.sum_terms(exact.bound.out_terms), exact.bound.tol_out)
    torch.testing.assert_close(bound_stages.sum_terms(exact.bound.lse_terms), exact.bound.tol_lse)
    lse_error = torch.where(lse == -math.inf, 0.0, (got[1].double() - lse).abs())
    return (
        ratio((got[0].double() - out).abs(), exact.bound.tol_out),
        ratio(lse_error, exact.bound.tol_lse),
    )


@pytest.mark.parametrize("repeat", ["", "latents", "tokens"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_right_prefill_is_not_accused(parts: int, repeat: str) -> None:
    for seed in range(5):
        case = prefill_case(seed, repeat=repeat, strength=4.0 ** (seed - 2))
        segments = [split_evenly(80, parts), split_evenly(20, parts)]
        out, lse = prefill_margins(case, masked_kernel(case, parts), numerics=TRITON, segments=segments)
        assert max(out, lse) <= 1
        assert seed != 2 or (out >= 0.1 and lse >= 0.01)  # scores of order 1


@pytest.mark.parametrize("repeat", ["", "latents", "tokens"])
def test_a_right_absorbed_prefill_is_not_accused(repeat: str) -> None:
    for seed in range(5):
        case = prefill_case(seed, repeat=repeat, strength=4.0 ** (seed - 2))
        out, lse = prefill_margins(case, absorbed_kernel(case), numerics=TRITON_MQA, path="mqa")
        assert max(out, lse) <= 1
        assert repeat or seed != 2 or (out >= 0.1 and lse >= 0.01)  # scores of order 1


def test_exact_projection_leaves_no_propagated_rounding() -> None:
    case = prefill_case(7, exact_weights=True)
    got = masked_kernel(case, 1)
    loose = bound_stages.prefill_reference(**case, numerics=TRITON)
    tight = bound_stages.prefill_reference(**case, numerics=TRITON, exact_projection=True)
    assert "rounded inputs" not in tight.bound.lse_terms
    assert (tight.bound.tol_lse * 20 < loose.bound.tol_lse)[loose.bound.tol_lse > 0].all()
    out, lse = prefill_margins(case, got, numerics=TRITON, exact_projection=True)
    assert 0.1 <= out <= 1
    assert 0.01 <= lse <= 1


def test_the_dense_path_and_no_requests() -> None:
    case = prefill_case(8)
    dense = bound_stages.prefill_reference(**{**case, "topk_rows": torch.zeros(0, 0)}, numerics=TRITON, dense=True)
    out, _ = oracle.sparse_mla_prefill(**case, dense=True)
    torch.testing.assert_close(dense.out, out, rtol=1e-12, atol=1e-12)
    nothing = {"query_lens": [], "context_lens": [], "q": case["q"][:0]}
    empty = bound_stages.prefill_reference(**{**case, **nothing}, numerics=TRITON)
    assert (empty.out.shape, empty.lse.shape) == ((0, HEADS, V), (HEADS, 0))


def test_unknown_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="path"):
        bound_stages.prefill_reference(**prefill_case(9), numerics=TRITON, path="flash")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [0.0, 512.0, -512.0, -4096.0, -30_000.0])
def test_a_merge_may_take_its_weights_from_the_lse_that_it_returns(dtype: torch.dtype, level: float) -> None:
    g = torch.Generator().manual_seed(3)
    sides = [level + 2 * torch.randn(4, 300, generator=g) for _ in range(2)]
    outs = [(1 + torch.randn(300, 4, 16, generator=g)).to(dtype) for _ in range(2)]
    lse = torch.logaddexp(*sides)
    weights = [torch.exp(side - lse).t()[..., None] for side in sides]
    merged = sum((w * out.float() for w, out in zip(weights, outs, strict=True)), torch.zeros(()))
    exact = bound_stages.merge_reference(
        prefix_out=outs[0], prefix_lse=sides[0], suffix_out=outs[1], suffix_lse=sides[1],
        numerics=replace(TRITON, merge="natural", storage="bf16" if dtype == torch.bfloat16 else "fp16"),
    )  # fmt: skip
    assert bool(((merged.to(dtype).double() - exact.out).abs() <= exact.bound.tol_out).all())
    assert bool(((lse.double() - exact.lse).abs() <= exact.bound.tol_lse).all())
    # where scores are ordinary the rounding of the result stays nearly all of the tolerance
    assert level or float(exact.bound.out_terms["weights"].max()) < 2e-5


def merge_in_base_two(parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Natural LSE in and out, base 2 between, in float32; sides without keys get no special care."""
    log2_e, ln_2 = torch.tensor(math.log2(math.e)), torch.tensor(math.log(2.0))
    a, b = parts[1] * log2_e, parts[3] * log2_e
    largest = torch.maximum(a, b)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    wa, wb = torch.exp2(a - largest), torch.exp2(b - largest)
    total = wa + wb
    lse = (largest + torch.log2(total)) * ln_2
    weighed = [
        torch.where((w > 0).T[..., None], (w / total).T[..., None] * side.float(), 0.0)
        for w, side in ((wa, parts[0]), (wb, parts[2]))
    ]
    return (weighed[0] + weighed[1]).to(parts[0].dtype), lse


@pytest.mark.parametrize("storage", ["bf16", "fp16"])
@pytest.mark.parametrize("shift", [0.0, 8.0, -420.0, 512.0, 3000.0])
@pytest.mark.parametrize("gap", [0.0, 0.5, 5.0, 40.0])
def test_a_merge_in_base_two_is_not_accused(gap: float, shift: float, storage: Any) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[storage]
    worst = {"any": 0.0, "natural": 0.0}
    for seed in range(6):
        first, lse_a, second, lse_b = partials(gap, seed=seed)
        parts = (first.to(dtype), lse_a + shift, second.to(dtype), lse_b + shift)
        parts[1][0, :10] = -math.inf
        parts[3][1, 5:15] = -math.inf
        out, lse = merge_in_base_two(parts)
        for kind in ("any", "natural"):
            exact = bound_stages.merge_reference(
                prefix_out=parts[0],
                prefix_lse=parts[1],
                suffix_out=parts[2],
                suffix_lse=parts[3],
                numerics=replace(TRITON, merge=kind, storage=storage),  # type: ignore[arg-type]
            )
            errors = (
                ((out.double() - exact.out).abs(), exact.bound.tol_out),
                (torch.where(lse.double() == exact.lse, 0.0, (lse.double() - exact.lse).abs()), exact.bound.tol_lse),
            )
            for error, tolerance in errors:
                worst[kind] = max(worst[kind], float(torch.where(error > 0, error / tolerance, 0.0).max()))
    assert worst["any"] <= 1
    assert worst["natural"] >= worst["any"]
    assert shift != -420.0 or worst["natural"] > 1, "else the declaration is worth nothing"
