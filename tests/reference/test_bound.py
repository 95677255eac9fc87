"""Is a right kernel never accused, is the bound near the errors, and does it notice a key?"""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.measure.families import FAMILIES, ORDINARY, Case, make_case, split_evenly
from harness.measure.float_model import Model, run
from reference import bound, oracle
from reference.numerics import FA4_SM90, FA4_SM100, TRITON, TRITON_MQA, Numerics
from reference.power import attend_power
from tests.reference.tightness import MODELS, margin, margins


def small(family: str, seed: int, *, n: int = 4, topk: int = 90, storage: torch.dtype = torch.bfloat16) -> Case:
    return make_case(family, seed, n=n, heads=2, keys=300, topk=topk, dim=40, v_dim=12, storage=storage)


def reference(case: Case, numerics: Numerics, parts: int = 1, *, keep_terms: bool = True) -> bound.AttendReference:
    return bound.attend_reference(
        q=case.q,
        k=case.k,
        v=case.v,
        allowed=case.allowed,
        scale=case.scale,
        numerics=numerics,
        segments=split_evenly(len(case.k), parts),
        keep_terms=keep_terms,
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_kernel_is_not_accused(family: str, model: str) -> None:
    found = list(margins(family, model, seeds=1, keys=700, topk=200, dim=64))
    assert max(m.out for m in found) <= 1
    assert max(m.lse for m in found) <= 1


@pytest.mark.parametrize("family", ORDINARY)
def test_the_output_bound_is_near_the_errors(family: str) -> None:
    found = list(margins(family, "lanes", seeds=2, keys=700, topk=200, dim=64))
    assert max(m.out for m in found) >= 0.15
    assert statistics.median(m.lse for m in found) >= 0.01


@pytest.mark.parametrize("family", ["unit normal", "sharp", "ties", "offset V", "all positive"])
@pytest.mark.parametrize("parts", [1, 5])
def test_fp16_kernels_are_not_accused(family: str, parts: int) -> None:
    case = small(family, 1, storage=torch.float16)
    found = margin(
        case, Model(storage=torch.float16, tile=64), replace(TRITON, storage="fp16"), split_evenly(300, parts)
    )
    assert found.out <= 1
    assert found.lse <= 1
    assert found.out >= 0.1


@pytest.mark.parametrize("topk", [1, 2, 3, 17])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_short_rows_are_not_accused(topk: int, parts: int) -> None:
    for family in ("unit normal", "sharp", "ties", "tiny"):
        case = small(family, 2, topk=topk, n=16)
        for model, numerics in MODELS.values():
            found = margin(case, model, numerics, split_evenly(300, parts))
            assert found.out <= 1
            assert found.lse <= 1


@pytest.mark.parametrize("numerics", [TRITON, FA4_SM90, FA4_SM100, TRITON_MQA])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_the_answer_is_the_oracle_s(numerics: Numerics, parts: int) -> None:
    case = small("unit normal", 3)
    got = reference(case, numerics, parts)
    out, lse = oracle.attend(case.q, case.k, case.v, case.allowed, case.scale)
    torch.testing.assert_close(got.out, out, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(got.lse, lse, rtol=1e-14, atol=1e-14)
    assert (got.bound.tol_out > 0).all()
    assert (got.bound.tol_lse > 0).all()


def test_terms_add_up_and_explain_themselves() -> None:
    case = small("unit normal", 4)
    found = reference(case, FA4_SM90, 3).bound
    torch.testing.assert_close(sum(found.out_terms.values(), start=torch.zeros(())), found.tol_out)
    torch.testing.assert_close(sum(found.lse_terms.values(), start=torch.zeros(())), found.tol_lse)
    for shares in (found.explain_out(1, 0, 5), found.explain_lse(2, 1)):
        assert sum(share for _, share in shares) == pytest.approx(1)
        assert [share for _, share in shares] == sorted((share for _, share in shares), reverse=True)
    assert found.explain_out(1, 0, 5)[0][0] in ("P rounding", "stores")
    assert not reference(case, FA4_SM90, 3, keep_terms=False).bound.out_terms


def test_empty_rows_are_exact() -> None:
    case = small("unit normal", 5)
    case.allowed[1] = False
    got = reference(case, TRITON, 4)
    assert got.lse[:, 1].tolist() == [-math.inf, -math.inf]
    for exact in (got.out[1], got.bound.tol_out[1], got.bound.tol_lse[:, 1]):
        assert exact.abs().sum() == 0
    assert got.out.isfinite().all()


def test_no_queries_and_no_keys() -> None:
    case = small("unit normal", 5)
    nothing = bound.attend_reference(
        q=case.q[:0], k=case.k, v=case.v, allowed=case.allowed[:0], scale=1.0, numerics=TRITON
    )
    assert nothing.out.shape == (0, 2, 12)
    no_keys = bound.attend_reference(
        q=case.q, k=case.k[:0], v=case.v[:0], allowed=case.allowed[:, :0], scale=1.0, numerics=TRITON
    )
    assert (no_keys.lse == -math.inf).all()
    assert no_keys.out.shape == (4, 2, 12)


def test_what_no_row_selects_may_hold_anything() -> None:
    case = small("unit normal", 6)
    unused = ~case.allowed.any(dim=0)
    assert unused.any()
    clean = reference(case, TRITON, 2)
    case.k[unused], case.v[unused] = math.nan, math.inf
    dirty = reference(case, TRITON, 2)
    for a, b in ((clean.out, dirty.out), (clean.lse, dirty.lse), (clean.bound.tol_out, dirty.bound.tol_out)):
        assert torch.equal(a, b)


def test_an_inf_value_reaches_only_the_rows_that_select_it() -> None:
    case = small("unit normal", 6)
    key = int(case.allowed[0].nonzero()[0])
    case.allowed[1, key] = False
    clean = reference(case, TRITON, 2)
    case.v[key, 1, 3] = math.inf
    got = reference(case, TRITON, 2)
    assert got.out[0, 1, 3] == math.inf
    assert torch.equal(got.out[1], clean.out[1])
    assert (got.out.isfinite() | (got.out == math.inf)).all()
    assert got.bound.tol_out.isfinite().all()
    assert torch.equal(got.lse, clean.lse)


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small("ties", 7, n=11)
    whole = reference(case, FA4_SM90, 3)
    monkeypatch.setitem(bound._BLOCK_ELEMENTS, "cpu", 2000)
    split = reference(case, FA4_SM90, 3)
    for name in ("out", "lse"):
        torch.testing.assert_close(getattr(whole, name), getattr(split, name), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(whole.bound.tol_out, split.bound.tol_out, rtol=1e-10, atol=0)
    torch.testing.assert_close(whole.bound.tol_lse, split.bound.tol_lse, rtol=1e-10, atol=0)


def test_one_head_of_keys_serves_all_heads() -> None:
    case = small("unit normal", 8)
    k, v = case.k[:, :1], case.v[:, :1]
    shared = reference(replace(case, k=k, v=v), TRITON_MQA)
    copied = reference(replace(case, k=k.expand(-1, 2, -1), v=v.expand(-1, 2, -1)), TRITON_MQA)
    torch.testing.assert_close(shared.out, copied.out, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(shared.bound.tol_out, copied.bound.tol_out, rtol=1e-11, atol=0)
    torch.testing.assert_close(shared.bound.tol_lse, copied.bound.tol_lse, rtol=1e-11, atol=0)


@pytest.mark.parametrize("segments", [[(0, 299)], [(0, 200), (100, 200)], [(1, 299)], [(0, 100), (200, 100)]])
def test_segments_must_cover_the_keys(segments: list[tuple[int, int]]) -> None:
    case = small("unit normal", 9)
    with pytest.raises(ValueError, match=r"segments.*0\.\.299"):
        bound.attend_bound(
            q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=1.0, numerics=TRITON, segments=segments
        )


def dropped_share(family: str, numerics: Numerics, *, keys: int, topk: int, parts: int, dim: int) -> float:
    case = make_case(family, 10, n=4, heads=2, keys=keys, topk=topk, dim=dim, v_dim=16)
    found = reference(case, numerics, parts)
    seen = attend_power(q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, reference=found).dropped
    return seen.by_lse / seen.total


@pytest.mark.parametrize("numerics", [TRITON, FA4_SM90])
@pytest.mark.parametrize("parts", [1, 4])
def test_lse_reveals_a_dropped_key(numerics: Numerics, parts: int) -> None:
    for family, least in (("flat", 0.999), ("unit normal", 0.99)):
        assert dropped_share(family, numerics, keys=1024, topk=256, parts=parts, dim=64) >= least


@pytest.mark.parametrize("parts", [1, 4, 8])
def test_lse_reveals_a_dropped_key_of_2048(parts: int) -> None:
    for numerics in (FA4_SM90, TRITON):
        share = dropped_share("unit normal", numerics, keys=4096, topk=2048, parts=parts, dim=192)
        assert share >= 0.97


@pytest.mark.parametrize("family", ["unit normal", "flat"])
def test_a_dropped_key_is_noticed_in_a_run(family: str) -> None:
    """Not only certain in theory: a model that misses one key in one row fails, the others pass."""
    model, numerics = MODELS["lanes, tensor cores"]
    noticed = []
    for seed in range(20):
        case = make_case(family, seed, n=3, heads=1, keys=256, topk=128, dim=32, v_dim=8)
        wrong = case.allowed.clone()
        key = wrong[1].nonzero().flatten()[seed]
        wrong[1, key] = False
        exact = reference(case, numerics)
        _, lse = run(replace(case, allowed=wrong), model, [(0, 256)])
        over: Tensor = (lse.double() - exact.lse).abs() > exact.bound.tol_lse
        assert not over[0, [0, 2]].any()
        noticed.append(bool(over[0, 1]))
    assert sum(noticed) == 20
