"""Do the oracles say what the specification says, and the same thing by both roads?"""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from reference import gather_oracle, oracle

NAN = float("nan")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch(seed: int, *, contexts: list[int], queries: list[int], topk: int, dims: dict[str, int]) -> dict[str, Any]:
    """A prefill batch with a permuted paged cache and top-k rows that hold -1, duplicates and strays."""
    gen = torch.Generator().manual_seed(seed)
    lora, heads, nope, rope, v = (dims[x] for x in ("lora", "heads", "nope", "rope", "v"))
    tokens, block_size = sum(queries), 4
    blocks = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(blocks) + 3, generator=gen)
    table = torch.full((len(contexts), max([*blocks, 1]) + 1), 10**6, dtype=torch.int32)
    used = 0
    for b, count in enumerate(blocks):
        table[b, :count] = order[used : used + count].int()
        used += count
    rows = torch.empty(tokens, topk, dtype=torch.int32)
    first = 0
    for context, query in zip(contexts, queries, strict=True):
        rows[first : first + query] = torch.randint(-2, context + query + 3, (query, topk), generator=gen).int()
        first += query
    return {
        "q": normal(tokens, heads, nope + rope, seed=seed + 1),
        "kv_c_normed": normal(tokens, lora, seed=seed + 2),
        "k_pe": normal(tokens, 1, rope, seed=seed + 3),
        "cache": normal(len(order), block_size, lora + rope, seed=seed + 4),
        "block_table": table,
        "w_kv_b": normal(lora, heads * (nope + v), seed=seed + 5) / 4,
        "topk_rows": rows,
        "query_lens": queries,
        "context_lens": contexts,
        "num_heads": heads,
        "nope": nope,
        "rope": rope,
        "v_head_dim": v,
        "scale": 0.3,
    }


DIMS = {"lora": 8, "heads": 3, "nope": 6, "rope": 4, "v": 5}


@pytest.mark.parametrize(
    ("row", "position", "expected"),
    [
        ([3, 1, 2], 3, [1, 2, 3]),
        ([3, 1, 3, 1, 1], 9, [1, 3]),
        ([-1, -7, 0, -2_147_483_648], 4, [0]),
        ([5, 4, 6, 2_147_483_647], 5, [4, 5]),
        ([-1, -1], 5, []),
        ([], 5, []),
    ],
)
def test_allowed_set_is_unique_topk_and_causal(row: list[int], position: int, expected: list[int]) -> None:
    assert oracle.allowed_set(row, position) == expected


def test_allowed_matrix_is_allowed_set_row_by_row() -> None:
    rows = torch.randint(-5, 30, (9, 14), generator=torch.Generator().manual_seed(0)).int()
    matrix = oracle.allowed_matrix(rows, context_len=11)
    assert matrix.shape == (9, 20)
    for i, row in enumerate(rows.tolist()):
        assert matrix[i].nonzero().flatten().tolist() == oracle.allowed_set(row, 11 + i)


def test_two_keys_by_hand() -> None:
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[math.log(3.0), 5.0]], [[0.0, 5.0]], [[7.0, 7.0]]])
    v = torch.tensor([[[4.0]], [[8.0]], [[1e9]]])
    out, lse = oracle.attend(q.double(), k.double(), v, torch.tensor([[True, True, False]]), 1.0)
    assert out.item() == pytest.approx(5.0, rel=1e-7)  # weights 3/4 and 1/4; log(3) is a float32 here
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-7)


def test_equal_scores_count_keys() -> None:
    allowed = torch.tensor([[True] * 5 + [False] * 3, [False] * 8])
    out, lse = oracle.attend(torch.zeros(2, 1, 4), torch.ones(8, 1, 4), torch.eye(8)[:, None], allowed, 0.7)
    assert torch.exp(lse[0, 0]).item() == pytest.approx(5.0, rel=1e-15)
    assert out[0, 0].tolist() == pytest.approx([0.2] * 5 + [0.0] * 3, rel=1e-15)
    assert lse[0, 1].item() == -math.inf
    assert out[1].abs().sum().item() == 0.0


def test_a_key_outside_the_allowed_set_adds_nothing_even_if_it_is_nan() -> None:
    k, v = torch.zeros(4, 1, 2), torch.ones(4, 1, 3)
    k[2], v[2], v[3, 0, 1] = NAN, NAN, math.inf
    allowed = torch.tensor([[True, True, False, False], [True, False, False, True], [False, False, True, False]])
    out, lse = oracle.attend(torch.ones(3, 1, 2), k, v, allowed, 1.0)
    assert out[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert out[1, 0].tolist() == [1.0, math.inf, 1.0]
    assert out[2].isnan().all()
    assert lse[0, :2].tolist() == pytest.approx([math.log(2.0)] * 2)
    assert lse[0, 2].isnan()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("contexts", "queries"),
    [([0], [7]), ([9], [5]), ([0, 12, 3], [4, 1, 0]), ([5, 0, 8], [0, 3, 6]), ([], [])],
)
def test_both_roads_agree(contexts: list[int], queries: list[int], dense: bool) -> None:
    case = batch(3, contexts=contexts, queries=queries, topk=6, dims=DIMS)
    out, lse = oracle.sparse_mla_prefill(**case, dense=dense)
    other_out, other_lse = gather_oracle.gather_prefill(**case, dense=dense)
    assert out.shape == (sum(queries), 3, 5)
    torch.testing.assert_close(out, other_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, other_lse, rtol=1e-13, atol=1e-13)


def test_the_dense_road_does_not_read_topk_rows() -> None:
    case = batch(4, contexts=[6], queries=[4], topk=3, dims=DIMS)
    expected = oracle.sparse_mla_prefill(**case, dense=True)
    case["topk_rows"] = torch.full((0, 0), 7)
    for road in (oracle.sparse_mla_prefill, gather_oracle.gather_prefill):
        torch.testing.assert_close(road(**case, dense=True), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("block", [1, 7, 10_000])
def test_row_blocks_do_not_change_the_answer(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = batch(5, contexts=[9, 2], queries=[5, 6], topk=6, dims=DIMS)
    expected = oracle.sparse_mla_prefill(**case)
    monkeypatch.setitem(oracle._BLOCK_ELEMENTS, "cpu", block)
    monkeypatch.setitem(gather_oracle._BLOCK_ELEMENTS, "cpu", block)
    torch.testing.assert_close(oracle.sparse_mla_prefill(**case), expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gather_oracle.gather_prefill(**case), expected, rtol=1e-13, atol=1e-13)


def _by_mpmath(
    q: list[float], k: list[list[float]], v: list[list[float]], scale: float
) -> tuple[list[Any], Any, list[Any]]:
    """One row over its allowed keys, 60 digits: output, LSE and `sum p |v|`."""
    scores = [mpmath.mpf(scale) * mpmath.fdot(q, key) for key in k]
    lse = mpmath.log(mpmath.fsum(mpmath.exp(s) for s in scores))
    p = [mpmath.exp(s - lse) for s in scores]
    columns = list(zip(*v, strict=True))
    return [mpmath.fdot(p, c) for c in columns], lse, [mpmath.fdot(p, map(abs, c)) for c in columns]


@pytest.mark.parametrize("road", ["dense", "gather"])
def test_fifty_spots_against_mpmath(road: str) -> None:
    """Output within 1e-14 * sum p|v|, LSE within 1e-14 * (1 + |LSE|), scores of order 0.05 to 10."""
    worst_out = worst_lse = 0.0
    with mpmath.workdps(60):
        for seed in range(50):
            keys, dim, context = 3 + seed % 11, 4 + seed % 5, 2 + seed % 11
            spread = 2.0 ** (seed % 7 - 4)  # larger scores lose 1e-14 to their own float64 rounding
            q = normal(1, 1, dim, seed=seed).double() * spread
            k, v = normal(context + 1, 1, dim, seed=seed + 100), normal(context + 1, 1, 3, seed=seed + 200)
            row = torch.randint(-1, context + 1, (1, keys), generator=torch.Generator().manual_seed(seed)).int()
            scale = 0.37
            if road == "dense":
                out, lse = oracle.attend(q, k, v, oracle.allowed_matrix(row, context), scale)
            else:
                out, lse = gather_oracle.gather_attend(q, k, v, row, context, scale)
            listed = oracle.allowed_set(row[0].tolist(), context)
            if not listed:
                assert lse.item() == -math.inf
                continue
            k_list, v_list = k[listed, 0].double().tolist(), v[listed, 0].double().tolist()
            exact, exact_lse, size = _by_mpmath(q[0, 0].tolist(), k_list, v_list, scale)
            for got, want, denominator in zip(out[0, 0].tolist(), exact, size, strict=True):
                worst_out = max(worst_out, float(abs(got - want) / denominator))
            worst_lse = max(worst_lse, float(abs(lse.item() - exact_lse) / (1 + abs(exact_lse))))
    assert worst_lse <= 1e-14
    assert worst_out <= 1e-14


def test_merge_puts_the_parts_of_a_set_together() -> None:
    q, k, v = (normal(*s, seed=i).double() for i, s in enumerate([(5, 2, 4), (9, 2, 4), (9, 2, 3)]))
    everything = torch.ones(5, 9, dtype=torch.bool)
    head = everything.clone()
    head[:, 4:] = False
    head[3] = False  # row 3: an empty prefix
    tail = everything & ~head
    tail[4] = head[4] = False  # row 4: nothing on either side
    everything[4] = False
    merged = oracle.merge(*oracle.attend(q, k, v, head, 0.5), *oracle.attend(q, k, v, tail, 0.5))
    torch.testing.assert_close(merged, oracle.attend(q, k, v, everything, 0.5), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_merge_never_reads_the_output_of_an_empty_side(empty: float) -> None:
    full_out, full_lse = torch.tensor([[[3.0]]]), torch.tensor([[1.5]])
    bad_out, bad_lse = torch.full((1, 1, 1), NAN), torch.tensor([[empty]])
    for pair in ((full_out, full_lse, bad_out, bad_lse), (bad_out, bad_lse, full_out, full_lse)):
        out, lse = oracle.merge(*pair)
        assert (out.item(), lse.item()) == (3.0, 1.5)
    out, lse = oracle.merge(bad_out, bad_lse, bad_out, bad_lse)
    assert (out.item(), lse.item()) == (0.0, -math.inf)


def test_oracle_is_short_enough_to_be_the_specification() -> None:
    source = oracle.__file__
    with open(source, encoding="utf-8") as handle:
        assert len(handle.readlines()) < 150


_ROADS: list[Callable[..., tuple[Tensor, Tensor]]] = [oracle.sparse_mla_prefill, gather_oracle.gather_prefill]


@pytest.mark.parametrize("road", _ROADS)
def test_no_rope(road: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = batch(6, contexts=[5], queries=[3], topk=4, dims={**DIMS, "rope": 0})
    out, _ = road(**case)
    assert out.shape == (3, 3, 5)
    assert out.isfinite().all()


def test_is_a_wrong_argument_named() -> None:
    q, k, v = torch.zeros(4, 2, 8), torch.zeros(6, 2, 8), torch.zeros(6, 2, 5)
    allowed, out, lse = torch.ones(4, 6, dtype=torch.bool), torch.zeros(4, 2, 5), torch.zeros(2, 4)
    wrong: list[tuple[str, Callable[[], object]]] = [
        (r"k has shape \(6, 2, 8\), must be \(6, 1, 8\)", lambda: oracle.attend(q[:, :1], k, v, allowed, 1.0)),
        (r"v has shape \(1, 2, 5\), must be \(6, 2, 5\)", lambda: oracle.attend(q, k, v[:1], allowed, 1.0)),
        (r"allowed has shape \(1, 6\), must be \(4, 6\)", lambda: oracle.attend(q, k, v, allowed[:1], 1.0)),
        ("allowed has dtype torch.int32", lambda: oracle.attend(q, k, v, allowed.int(), 1.0)),
        (r"lse_a has shape \(2, 1\), must be \(2, 4\)", lambda: oracle.merge(out, lse[:, :1], out, lse)),
        (r"lse_b has shape \(4, 2\), must be \(2, 4\)", lambda: oracle.merge(out, lse, out, lse.t())),
        (r"out_b has shape \(4, 1, 5\), must be \(4, 2, 5\)", lambda: oracle.merge(out, lse, out[:, :1], lse)),
        ("context_len is -2, must be at least 0", lambda: oracle.allowed_matrix(torch.zeros(3, 4).int(), -2)),
        ("dtype torch.float32, must be integers", lambda: oracle.allowed_matrix(torch.zeros(3, 4), 2)),
    ]
    for message, call in wrong:
        with pytest.raises(ValueError, match=message):
            call()
