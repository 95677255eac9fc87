"""Are the paged latent rows, fp8 entries and the absorbed form what the cache layout says?"""

import pytest
import torch

from reference import latent


def test_rows_follow_the_block_table_from_any_start() -> None:
    cache = torch.arange(5 * 3 * 2, dtype=torch.bfloat16).view(5, 3, 2)
    table = torch.tensor([4, 0, 2, -99], dtype=torch.int32)
    rows = latent.read_cache_rows(cache, table, 2, 5, rope=1)
    expected = [cache[4, 2], cache[0, 0], cache[0, 1], cache[0, 2], cache[2, 0]]
    assert torch.equal(rows, torch.stack(expected))


def test_unused_table_entries_are_not_read_and_used_ones_are_checked() -> None:
    cache, table = torch.zeros(2, 4, 3), torch.tensor([1, 7])
    assert latent.read_cache_rows(cache, table, 0, 4, rope=1).shape == (4, 3)
    assert latent.read_cache_rows(cache, table, 4, 0, rope=1).shape == (0, 3)
    with pytest.raises(ValueError, match="block_table"):
        latent.read_cache_rows(cache, table, 0, 5, rope=1)


def test_every_e4m3_value_times_the_scale_is_rounded_once_to_bf16() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    rows = latent.read_cache_rows(codes, torch.tensor([0]), 0, 8, kv_cache_dtype="fp8_e4m3", scale=0.0137, rope=0)
    assert rows.dtype == torch.bfloat16
    scale = torch.tensor(0.0137, dtype=torch.float32)
    for code, got in zip(range(256), rows.flatten(), strict=True):
        sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            assert got.isnan()
            continue
        value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        assert got == (torch.tensor(-value if sign else value) * scale).bfloat16(), code


def test_a_656_byte_entry_is_512_values_four_scales_and_64_bf16() -> None:
    gen = torch.Generator().manual_seed(1)
    values = torch.randn(2, 512, generator=gen).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 1.7, 3e-3, 11.0], [1.0, 2.0, 0.3, 0.1]])
    pe = torch.randn(2, 64, generator=gen).bfloat16()
    cache = torch.cat([values.view(torch.uint8), scales.view(torch.uint8), pe.view(torch.uint8)], dim=1)
    assert cache.shape == (2, 656)
    rows = latent.read_cache_rows(cache.view(1, 2, 656), torch.tensor([0]), 0, 2, kv_cache_dtype="fp8_ds_mla", rope=64)
    for i in range(2):
        for d in range(512):
            assert rows[i, d] == (values[i, d].float() * scales[i, d // 128]).bfloat16()
    assert torch.equal(rows[:, 512:], pe)


def test_unknown_kinds_and_odd_entries_are_refused() -> None:
    cache, table = torch.zeros(1, 2, 10, dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        latent.read_cache_rows(cache, table, 0, 1, kv_cache_dtype="fp8", rope=2)
    with pytest.raises(ValueError, match="10 bytes"):
        latent.read_cache_rows(cache, table, 0, 1, kv_cache_dtype="fp8_ds_mla", rope=2)


def test_the_absorbed_form_gives_the_same_scores_and_values() -> None:
    gen = torch.Generator().manual_seed(2)
    lora, heads, nope, rope, v = 8, 3, 5, 4, 6
    rows = torch.randn(7, lora + rope, generator=gen, dtype=torch.float64)
    w = torch.randn(lora, heads * (nope + v), generator=gen, dtype=torch.float64)
    q = torch.randn(2, heads, nope + rope, generator=gen, dtype=torch.float64)
    k, values = latent.project(rows, w, heads, nope, v)
    w_uk, w_uv = latent.split_weight(w, heads, nope, v)
    scores = torch.einsum("nhd,khd->nhk", q, k)
    torch.testing.assert_close(latent.absorb_query(q, w_uk) @ rows.T, scores, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.einsum("kl,lhd->khd", rows[:, :lora], w_uv), values, rtol=1e-13, atol=1e-13)
