"""Is the merge of two partials right for every kind of side, in any memory layout?"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from optimized.chunks import build_chunked_context
from optimized.merge import accumulate_context_chunk, init_context_partial, merge_attn_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = math.inf, math.nan
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
LSE_TOLERANCE = 16 * 2.0**-24


def naive_merge(
    prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64, element by element: empty sides are left out, not multiplied by zero."""
    tokens, heads, _ = prefix.shape
    out = torch.zeros(prefix.shape, dtype=torch.float64)
    lse = torch.full((heads, tokens), -INF, dtype=torch.float64)
    sides = [(s.cpu().double(), x.cpu().double()) for s, x in ((prefix, prefix_lse), (suffix, suffix_lse))]
    for t in range(tokens):
        for h in range(heads):
            held = [(s[t, h], x[h, t].item()) for s, x in sides if not math.isinf(x[h, t].item())]
            if held:
                top = max(x for _, x in held)
                lse[h, t] = top + math.log(sum(math.exp(x - top) for _, x in held))
                out[t, h] = sum(s * math.exp(x - lse[h, t].item()) for s, x in held)
    return out, lse


def assert_close_to_naive(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    expected: tuple[torch.Tensor, torch.Tensor],
    sides: tuple[torch.Tensor, torch.Tensor],
) -> None:
    want, want_lse = expected
    magnitude = sum(torch.where(s.isfinite(), s, 0).cpu().double().abs() for s in sides)
    tolerance = UNIT_ROUNDOFF[out.dtype] * want.abs() + 32 * 2.0**-24 * magnitude + 2.0**-24
    error = (out.cpu().double() - want).abs()
    assert (error <= tolerance).all(), f"off by up to {(error - tolerance).max()}"
    assert not out.isnan().any()
    if lse is not None:
        got = lse.cpu().double()
        assert torch.equal(got == -INF, want_lse == -INF)
        finite = want_lse > -INF
        lse_error = (got[finite] - want_lse[finite]).abs()
        assert (lse_error <= LSE_TOLERANCE * (1 + want_lse[finite].abs())).all()


def strided(values: torch.Tensor, order: tuple[int, ...], pads: tuple[int, ...]) -> torch.Tensor:
    """`values` in memory whose dimensions are ordered `order` and padded by `pads`, filled with NaN."""
    sizes = [values.shape[d] + pads[d] for d in order]
    base = torch.full(sizes, NAN, dtype=values.dtype, device=DEVICE)
    view = base.permute([order.index(d) for d in range(values.dim())])
    view = view[tuple(slice(pads[d] // 2, pads[d] // 2 + values.shape[d]) for d in range(values.dim()))]
    view.copy_(values)
    return view


@st.composite
def merges(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    tokens, heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    width = draw(st.sampled_from([1, 3, 8, 24]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lse_values = st.one_of(st.floats(-40, 40, width=32), st.sampled_from([INF, -INF, 0.0, 1e4, -1e4]))
    sides = []
    for _ in range(2):
        out = torch.randn((tokens, heads, width), generator=generator).to(dtype)
        cells = draw(st.lists(lse_values, min_size=tokens * heads, max_size=tokens * heads))
        lse = torch.tensor(cells, dtype=torch.float32).view(heads, tokens)
        poison = draw(st.sampled_from([NAN, INF, 7.0]))
        out[lse.t().isinf()] = poison  # the output of an empty side is never read into the result
        sides += [out, lse]
    return tuple(sides)


@settings(max_examples=60, deadline=None)
@given(merges(), st.booleans(), st.booleans())
def test_merge_agrees_with_float64_in_any_layout(
    case: tuple[torch.Tensor, ...], wide: bool, with_lse: bool
) -> None:
    prefix, prefix_lse, suffix, suffix_lse = case
    if wide:  # six tensors, six different sets of strides
        p = strided(prefix, (0, 1, 2), (0, 0, 8))
        s = strided(suffix, (1, 0, 2), (2, 0, 4))
        pl = strided(prefix_lse, (1, 0), (0, 2))
        sl = strided(suffix_lse, (0, 1), (0, 6))
        out = strided(torch.full_like(prefix, NAN), (0, 1, 2), (0, 2, 2))
        lse = strided(torch.full_like(prefix_lse, NAN), (1, 0), (4, 0))
    else:
        p, s, pl, sl = (x.to(DEVICE).clone() for x in (prefix, suffix, prefix_lse, suffix_lse))
        out, lse = torch.full_like(p, NAN), torch.full_like(pl, NAN)
    merge_attn_states(out, p, pl, s, sl, lse if with_lse else None)
    expected = naive_merge(prefix, prefix_lse, suffix, suffix_lse)
    assert_close_to_naive(out, lse if with_lse else None, expected, (prefix, suffix))
    if not with_lse:
        assert lse.isnan().all()


@pytest.mark.parametrize("side", ["prefix", "suffix"])
def test_merge_in_place_equals_merge_into_new_memory(side: str) -> None:
    generator = torch.Generator().manual_seed(5)
    p, s = (torch.randn((7, 3, 24), generator=generator).bfloat16().to(DEVICE) for _ in range(2))
    pl, sl = (torch.randn((3, 7), generator=generator).to(DEVICE) for _ in range(2))
    out, lse = torch.empty_like(p), torch.empty_like(pl)
    merge_attn_states(out, p, pl, s, sl, lse)
    target, target_lse = (p, pl) if side == "prefix" else (s, sl)
    merge_attn_states(target, p, pl, s, sl, target_lse)
    assert torch.equal(target, out)
    assert torch.equal(target_lse, lse)


def two_sides(prefix_lse: float, suffix_lse: float) -> tuple[torch.Tensor, ...]:
    p = torch.tensor([1.0, -0.3, 448.0], dtype=torch.bfloat16, device=DEVICE).view(1, 1, 3)
    s = torch.tensor([3.0, 0.7, -(2.0**-100)], dtype=torch.bfloat16, device=DEVICE).view(1, 1, 3)
    pl = torch.full((1, 1), prefix_lse, device=DEVICE)
    sl = torch.full((1, 1), suffix_lse, device=DEVICE)
    return p, pl, s, sl


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 5.0])
def test_empty_side_leaves_the_other_bit_for_bit(empty: float, poison: float) -> None:
    for lse in (0.0, -3.7, 12.3):
        p, pl, s, sl = two_sides(lse, empty)
        s.fill_(poison)
        out, out_lse = torch.empty_like(p), torch.empty_like(pl)
        merge_attn_states(out, p, pl, s, sl, out_lse)
        assert torch.equal(out, p)
        assert torch.equal(out_lse, pl)
        merge_attn_states(out, s, sl, p, pl, out_lse)
        assert torch.equal(out, p)
        assert torch.equal(out_lse, pl)


@pytest.mark.parametrize("prefix_lse", [-INF, INF])
@pytest.mark.parametrize("suffix_lse", [-INF, INF])
def test_two_empty_sides_give_zero_and_minus_infinity(prefix_lse: float, suffix_lse: float) -> None:
    p, pl, s, sl = two_sides(prefix_lse, suffix_lse)
    p.fill_(NAN)
    s.fill_(INF)
    merge_attn_states(p, p, pl, s, sl, pl)
    assert (p == 0).all()
    assert (pl == -INF).all()


def test_nan_lse_stays_visible() -> None:
    for prefix_lse, suffix_lse in ((NAN, 1.0), (1.0, NAN), (NAN, -INF), (-INF, NAN), (INF, NAN)):
        p, pl, s, sl = two_sides(prefix_lse, suffix_lse)
        out, lse = torch.zeros_like(p), torch.zeros_like(pl)
        merge_attn_states(out, p, pl, s, sl, lse)
        assert out.isnan().all(), (prefix_lse, suffix_lse)
        assert lse.isnan().all(), (prefix_lse, suffix_lse)


def test_stores_round_to_nearest_even() -> None:
    ulp = 2.0**-7  # of bfloat16 in [1, 2)
    p = torch.tensor([1.0, 1 + ulp], dtype=torch.bfloat16, device=DEVICE).view(1, 1, 2)
    s = torch.tensor([1 + ulp, 1 + 2 * ulp], dtype=torch.bfloat16, device=DEVICE).view(1, 1, 2)
    lse = torch.zeros((1, 1), device=DEVICE)
    out = torch.empty_like(p)
    merge_attn_states(out, p, lse, s, lse)  # equal weights: both sums are ties
    assert out.flatten().tolist() == [1.0, 1 + 2 * ulp]


def test_base_of_the_logarithm_is_e() -> None:
    p, pl, s, sl = two_sides(math.log(3.0), math.log(1.0))
    out, lse = torch.empty_like(p), torch.empty_like(pl)
    merge_attn_states(out, p, pl, s, sl, lse)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-6)
    assert out[0, 0, 0].item() == 1.5  # (3 * 1 + 1 * 3) / 4


def test_many_heads_and_tokens_keep_their_own_lse() -> None:
    tokens, heads = 37, 5
    t = torch.arange(tokens, dtype=torch.float32, device=DEVICE)
    h = torch.arange(heads, dtype=torch.float32, device=DEVICE)
    p = (t[:, None] + 64 * h).unsqueeze(-1).expand(tokens, heads, 4).contiguous()
    s = torch.full_like(p, NAN)
    pl = (h[:, None] * 100 + t).contiguous()
    out, lse = torch.empty_like(p), torch.empty_like(pl)
    merge_attn_states(out, p, pl, s, torch.full_like(pl, -INF), lse)
    assert torch.equal(out, p)
    assert torch.equal(lse, pl)


@pytest.mark.parametrize("shape", [(0, 3, 8), (4, 3, 0)])
def test_empty_tensors_are_legal(shape: tuple[int, int, int]) -> None:
    out = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty((shape[1], shape[0]), device=DEVICE)
    merge_attn_states(out, out, lse, out, lse)


def merge_arguments() -> dict[str, torch.Tensor]:
    p, pl, s, sl = two_sides(0.0, 0.0)
    return {
        "output": torch.full_like(p, 9.0),
        "prefix_output": p,
        "prefix_lse": pl,
        "suffix_output": s,
        "suffix_lse": sl,
        "output_lse": torch.full_like(pl, 9.0),
    }


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        (
            "suffix_output",
            torch.zeros(2, 1, 3).bfloat16(),
            ValueError,
            r"shape \(2, 1, 3\), must be \(1, 1, 3\)",
        ),
        ("prefix_output", torch.zeros(1, 1, 3), TypeError, "prefix_output has dtype torch.float32"),
        ("prefix_lse", torch.zeros(1, 2), ValueError, r"prefix_lse has shape \(1, 2\), must be \(1, 1\)"),
        ("suffix_lse", torch.zeros(1, 1).double(), TypeError, "suffix_lse has dtype torch.float64"),
        ("output_lse", torch.zeros(1), ValueError, r"output_lse has shape \(1,\)"),
        (
            "prefix_output",
            torch.zeros((1, 1, 6), dtype=torch.bfloat16, device=DEVICE)[..., ::2],
            ValueError,
            "prefix_output has stride 2",
        ),
        ("suffix_lse", [0.0], TypeError, "suffix_lse is a list, must be a torch.Tensor"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(
    name: str, value: object, error: type[Exception], message: str
) -> None:
    arguments: dict[str, object] = {**merge_arguments()}
    arguments[name] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
    with pytest.raises(error, match=message):
        merge_attn_states(**arguments)  # type: ignore[arg-type]
    output = arguments["output"]
    assert isinstance(output, torch.Tensor)
    assert (output == 9.0).all()


def test_output_that_repeats_its_memory_is_refused() -> None:
    side = torch.zeros((2, 1, 3), dtype=torch.bfloat16, device=DEVICE)
    lse = torch.zeros((1, 2), device=DEVICE)
    with pytest.raises(ValueError, match=r"output has strides .* no stride may be 0"):
        merge_attn_states(side[:1].expand(2, 1, 3), side, lse, side, lse)


def test_chunks_accumulate_to_the_merge_of_all_their_parts() -> None:
    """Request 1 has no context, request 2 runs over three chunks, request 3 shares the last of them."""
    heads, width = 2, 16
    queries, contexts = [2, 3, 2, 1], [4, 0, 19, 4]
    context = build_chunked_context(
        contexts,
        queries,
        row_budget=8,
        max_context_chunk=8,
        split_alignment=4,
        row_width=4,
        dtype=torch.float32,
        device=DEVICE,
    )
    assert context is not None
    slices = [c.request_slice for c in context.chunks]
    assert slices == [slice(0, 1), slice(2, 3), slice(2, 3), slice(2, 4)]
    generator = torch.Generator().manual_seed(11)
    out, lse = init_context_partial(sum(queries), heads, width, torch.float32, DEVICE)
    expected, expected_lse = torch.zeros(out.shape).double(), torch.full(lse.shape, -INF).double()
    magnitude = torch.zeros(out.shape)
    for chunk in context.chunks:
        tokens = chunk.token_slice
        shape = (tokens.stop - tokens.start, heads, width)
        part, part_lse = (
            torch.randn(shape, generator=generator),
            torch.randn(shape[1::-1], generator=generator),
        )
        part_lse[0, 0] = -INF
        part[0, 0] = NAN
        accumulate_context_chunk(out, lse, chunk, part.to(DEVICE), part_lse.to(DEVICE))
        expected[tokens], expected_lse[:, tokens] = naive_merge(
            expected[tokens], expected_lse[:, tokens], part, part_lse
        )
        magnitude[tokens] += torch.where(part.isfinite(), part, 0).abs()
    without_context = slice(2, 5)
    assert (out[without_context] == 0).all()
    assert (lse[:, without_context] == -INF).all()
    assert not torch.equal(lse[:, 5:], torch.full_like(lse[:, 5:], -INF))
    # a chunk that starts a request copies an empty side as it is; the final merge never reads it
    seen = (expected_lse > -INF).t()
    error = (out.cpu().double() - expected).abs()[seen]
    assert (error <= 64 * 2.0**-24 * magnitude[seen]).all()
    assert torch.equal(lse.cpu() == -INF, expected_lse == -INF)


def test_chunk_result_of_a_wrong_size_is_refused() -> None:
    context = build_chunked_context(
        [4],
        [2],
        row_budget=8,
        max_context_chunk=8,
        split_alignment=4,
        row_width=4,
        dtype=torch.float32,
        device=DEVICE,
    )
    assert context is not None
    out, lse = init_context_partial(2, 1, 4, torch.float32, DEVICE)
    with pytest.raises(ValueError, match=r"chunk_output has shape \(1, 1, 4\), must be \(2, 1, 4\)"):
        accumulate_context_chunk(out, lse, context.chunks[0], out[:1], lse[:, :1])
    with pytest.raises(ValueError, match="output has 1 tokens, must have at least 2"):
        accumulate_context_chunk(out[:1], lse[:, :1], context.chunks[0], out, lse)
    assert (out == 0).all()
