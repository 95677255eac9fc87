"""Are keys and values the float32 products, rounded once, of the right columns?"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from optimized.projection import concat_k_nope_k_pe, project_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from([(3, 2, 4), (8, 0, 5), (0, 4, 2), (16, 8, 16), (128, 64, 8)]),
    st.integers(1, 20),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_projection_is_the_product_of_each_heads_columns(
    tokens: int, heads: int, dims: tuple[int, int, int], lora: int, dtype: torch.dtype
) -> None:
    nope, rope, v_dim = dims
    latent, k_pe = randn((tokens, lora), 1, dtype), randn((tokens, 1, rope), 2, dtype)
    weight = randn((lora, heads * (nope + v_dim)), 3, dtype)
    k, v = project_kv(latent, k_pe, weight, heads, nope, v_dim)
    assert (k.shape, v.shape) == ((tokens, heads, nope + rope), (tokens, heads, v_dim))
    assert k.dtype == v.dtype == dtype
    assert k.is_contiguous()
    c, w = latent.cpu().double(), weight.cpu().double()
    for h in range(heads):
        first = h * (nope + v_dim)
        for got, columns in (
            (k[:, h, :nope], slice(first, first + nope)),
            (v[:, h], slice(first + nope, first + nope + v_dim)),
        ):
            want = c @ w[:, columns]
            terms = c.abs() @ w[:, columns].abs()
            error = (got.cpu().double() - want).abs()
            assert (
                error <= UNIT_ROUNDOFF[dtype] * want.abs() + (lora + 1) * 2.0**-24 * terms + 2.0**-25
            ).all()
        assert torch.equal(k[:, h, nope:], k_pe[:, 0])


def test_sums_are_not_kept_in_16_bits() -> None:
    # 256 + 1 is no bfloat16 number: a 16-bit sum would lose the 1
    latent = torch.tensor([[256.0, 1.0, -256.0]], device=DEVICE).bfloat16()
    weight = torch.ones((3, 2), device=DEVICE).bfloat16()
    k, v = project_kv(latent, latent.new_zeros((1, 1, 0)), weight, 1, 1, 1)
    assert k.item() == v.item() == 1.0


def test_results_round_to_nearest_even() -> None:
    latent = torch.tensor([[1.0, 2.0**-8], [1 + 2.0**-7, 2.0**-8]], device=DEVICE).bfloat16()
    weight = torch.ones((2, 2), device=DEVICE).bfloat16()
    k, v = project_kv(latent, latent.new_zeros((2, 1, 0)), weight, 1, 1, 1)
    for column in (k.flatten().tolist(), v.flatten().tolist()):
        assert column == [1.0, 1 + 2 * 2.0**-7]


@pytest.mark.parametrize("dims", [(128, 64), (128, 0), (5, 3), (0, 4)])
@pytest.mark.parametrize("heads", [1, 3])
def test_concat_copies_bits_and_gives_the_shared_part_to_every_head(
    dims: tuple[int, int], heads: int
) -> None:
    nope, rope = dims
    generator = torch.Generator().manual_seed(7)

    def any_bits(*shape: int) -> torch.Tensor:
        words = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        return words.view(torch.bfloat16).to(DEVICE)

    product = any_bits(4, heads, nope + 9)  # keys and values side by side, as the projection leaves them
    shared = any_bits(4, 2, rope + 2)
    k_nope, k_pe = product[..., :nope], shared[:, 1:, :rope]
    k = concat_k_nope_k_pe(k_nope, k_pe)
    expected = torch.cat([k_nope, k_pe.expand(4, heads, rope)], dim=-1)
    assert k.is_contiguous()
    assert torch.equal(k.view(torch.int16), expected.contiguous().view(torch.int16))


def test_many_rows_need_more_than_one_program() -> None:
    k_nope, k_pe = randn((1100, 4, 128), 1), randn((1100, 1, 64), 2)
    k = concat_k_nope_k_pe(k_nope, k_pe)
    assert torch.equal(k[..., :128], k_nope)
    assert torch.equal(k[..., 128:], k_pe.expand(1100, 4, 64))


def test_no_tokens_give_no_rows() -> None:
    k, v = project_kv(randn((0, 8), 1), randn((0, 1, 64), 2), randn((8, 2 * 144), 3), 2, 128, 16)
    assert (k.shape, v.shape) == ((0, 2, 192), (0, 2, 16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_c_normed": randn((3, 8), 1).float()}, TypeError, "kv_c_normed has dtype torch.float32"),
        ({"k_pe": randn((2, 1, 4), 1)}, ValueError, r"k_pe has shape \(2, 1, 4\), must be \(3, 1, any\)"),
        ({"k_pe": randn((3, 2, 4), 1)}, ValueError, r"k_pe has shape \(3, 2, 4\), must be \(3, 1, any\)"),
        ({"k_pe": randn((3, 1, 4), 1).half()}, TypeError, "k_pe has dtype torch.float16"),
        ({"w_kv_b": randn((8, 19), 1)}, ValueError, r"w_kv_b has shape \(8, 19\), must be \(8, 20\)"),
        ({"w_kv_b": randn((7, 20), 1)}, ValueError, r"w_kv_b has shape \(7, 20\), must be \(8, 20\)"),
        ({"num_heads": 0}, ValueError, "num_heads is 0, must be >= 1"),
        ({"nope": -1}, ValueError, "nope is -1, must be >= 0"),
        ({"v_head_dim": 4.0}, TypeError, "v_head_dim is a float, must be an int"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {
        "kv_c_normed": randn((3, 8), 1),
        "k_pe": randn((3, 1, 4), 2),
        "w_kv_b": randn((8, 20), 3),
        "num_heads": 2,
        "nope": 6,
        "v_head_dim": 4,
    }
    with pytest.raises(error, match=message):
        project_kv(**arguments | change)  # type: ignore[arg-type]
