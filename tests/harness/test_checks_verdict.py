"""Does a comparison pass what is right, accuse what is wrong, and say where and by which law?"""

import json
import math

import pytest
import torch

from harness.checks.verdict import (
    check_shape,
    compare_bounded,
    compare_exact,
    describe,
    diagnose_lse,
    term_shares,
    unravel,
)
from reports.records import CheckRecord, Place, Status

NAN, INF = math.nan, math.inf


def exact(actual: torch.Tensor, expected: torch.Tensor) -> CheckRecord:
    return compare_exact("gather", "gather.rows", actual, expected, lambda index: Place(row=index[0], column=index[1]))


def bounded(actual: list[float], expected: list[float], tolerance: list[float], *, watch: bool = True) -> CheckRecord:
    a, e, t = (torch.tensor(x, dtype=torch.float64) for x in (actual, expected, tolerance))
    return compare_bounded("attend", "attend.lse", a, e, t, lambda index: Place(token=index[0]), watch=watch)


# exact


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float16])
def test_equal_tensors_pass_exactly(dtype: torch.dtype) -> None:
    x = torch.arange(12).view(3, 4).to(dtype)
    assert exact(x, x.clone()).status is Status.PASS


def test_the_first_difference_is_named_and_all_are_counted() -> None:
    x = torch.zeros(3, 4)
    wrong = x.clone()
    wrong[1, 2] = 5.0
    wrong[2, 0] = 7.0
    record = exact(wrong, x)
    assert record.status is Status.FAIL
    assert record.place == Place(row=1, column=2)
    assert "is 5.0, must be exactly 0.0" in record.message
    assert "first of 2 differences" in record.message
    assert record.message.endswith("at row 1, column 2")


@pytest.mark.parametrize(
    ("a", "b", "same"), [(NAN, NAN, True), (NAN, 1.0, False), (INF, -INF, False), (-0.0, 0.0, False)]
)
def test_exact_means_bits_but_for_nan(a: float, b: float, same: bool) -> None:
    record = exact(torch.tensor([[a]]).bfloat16(), torch.tensor([[b]]).bfloat16())
    assert (record.status is Status.PASS) == same


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(12)])
def test_shape_and_dtype_have_their_own_verdict(wrong: torch.Tensor) -> None:
    record = exact(wrong, torch.zeros(3, 4))
    assert record.status is Status.SHAPE
    assert "(3, 4)" in record.message
    assert check_shape("merge", "merge.out", wrong, (3, 4), torch.float32) is not None


# within a bound


@pytest.mark.parametrize(
    ("error", "status"),
    [(0.0, Status.PASS), (0.79, Status.PASS), (0.81, Status.WATCH), (1.0, Status.WATCH), (1.01, Status.FAIL)],
)
def test_the_margin_decides(error: float, status: Status) -> None:
    record = bounded([1.0, 2.0 + 1e-3 * error], [1.0, 2.0], [1e-3, 1e-3])
    assert record.status is status
    assert record.margin == pytest.approx(error, abs=1e-9)
    assert record.median_margin == 0.0


def test_results_that_round_once_are_not_watched() -> None:
    assert bounded([0.9], [0.0], [1.0], watch=False).status is Status.PASS
    assert bounded([1.1], [0.0], [1.0], watch=False).status is Status.FAIL


def test_zero_error_passes_a_zero_tolerance_and_nothing_else_does() -> None:
    assert bounded([0.0, 3.0], [0.0, 3.0], [0.0, 0.0]).status is Status.PASS
    record = bounded([1e-30, 3.0], [0.0, 3.0], [0.0, 0.0])
    assert record.status is Status.FAIL
    assert record.margin is not None
    assert math.isfinite(record.margin)
    json.loads(record.model_dump_json())


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_infinities_and_nans_must_stand_in_the_same_places(value: float) -> None:
    assert bounded([value, 1.0], [value, 1.0], [0.0, 1.0]).status is Status.PASS
    for actual, expected in (([value, 1.0], [0.5, 1.0]), ([0.5, 1.0], [value, 1.0])):
        record = bounded(actual, expected, [1e300, 1.0])
        assert record.status is Status.NONFINITE
        assert record.place.token == 0
    assert bounded([INF], [-INF], [1e300]).status is Status.NONFINITE


def test_no_tolerance_is_no_excuse() -> None:
    record = bounded([1.0], [2.0], [NAN])
    assert record.status is Status.FAIL
    assert bounded([2.0], [2.0], [NAN]).status is Status.PASS


def test_nothing_to_compare_passes() -> None:
    assert bounded([], [], []).status is Status.PASS


def test_a_wrong_shape_is_said_before_anything_is_compared() -> None:
    record = compare_bounded("attend", "attend.out", torch.zeros(2), torch.zeros(3), torch.ones(3))
    assert record.status is Status.SHAPE


def test_a_failure_names_place_size_and_terms() -> None:
    terms = {"stores": torch.tensor([1.0, 1.0]), "P rounding": torch.tensor([9.0, 3.0]), "floor": torch.zeros(2)}
    record = compare_bounded(
        "attend",
        "attend.out",
        torch.tensor([1.0, 9.0]),
        torch.tensor([1.0, 1.0]).double(),
        torch.tensor([10.0, 4.0]).double(),
        lambda index: Place(request=2, token=index[0]),
        terms=terms,
    )
    assert record.status is Status.FAIL
    assert record.place == Place(request=2, token=1)
    assert record.terms == {"P rounding": 0.75, "stores": 0.25}
    assert list(record.terms) == ["P rounding", "stores"]
    assert "error 8 is 2 x the tolerance" in record.message
    assert "(1 of 2 elements beyond it)" in record.message
    assert "P rounding 75%, stores 25%" in record.message
    assert record.message.endswith("at request 2, token 1")


def test_shares_of_no_tolerance_are_empty() -> None:
    assert term_shares({"floor": torch.zeros(1)}, (0,)) == {}


def test_places_are_described_by_what_is_known() -> None:
    assert describe(Place()) == ""
    assert describe(Place(request=1, key=513, word=16, bit=1)) == "request 1, key 513, word 16, bit 1"


def test_a_flat_index_finds_its_element() -> None:
    x = torch.arange(24).view(2, 3, 4)
    assert [int(x[unravel(i, x.shape)]) for i in range(24)] == list(range(24))


# laws of a wrong LSE

LSE = torch.tensor([[3.5, -2.25, 7.0, 0.5, -INF], [1.25, 4.5, -0.75, 2.0, -INF]], dtype=torch.float64)

TIGHT = torch.full_like(LSE, 1e-6)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (LSE / math.log(2), "factor 1.4427: base-2 LSE"),
        (LSE * math.log(2), "factor 0.6931: natural LSE taken for base 2"),
        (LSE + math.log(2), "constant +0.6931: a factor 2 on the row sum"),
        (LSE - 0.1, "constant -0.1: a factor 0.9048 on the row sum"),
        (LSE.roll(1, dims=1), "rows are shifted by 1"),
        (LSE.roll(-1, dims=1), "rows are shifted by -1"),
        (LSE.roll(2, dims=1), "rows are shifted by 2"),
        (LSE.T.reshape(2, 5), "the layout is transposed ([T, H] written as [H, T])"),
    ],
)
def test_simple_laws_are_named(wrong: torch.Tensor, words: str) -> None:
    assert words in diagnose_lse(wrong, LSE, TIGHT)
    blurred = wrong + 0.8e-2 * (torch.rand(2, 5, generator=torch.Generator().manual_seed(1)) - 0.5)
    assert words.split()[0] in diagnose_lse(blurred, LSE, torch.full_like(LSE, 1e-2))
    assert diagnose_lse(blurred, LSE, TIGHT) == ""


@pytest.mark.parametrize("wrong", [LSE, LSE.flip(0), LSE + torch.tensor([0.1, 0.3, -0.2, 0.05, 0.0]), LSE * 1.01])
def test_no_law_is_invented(wrong: torch.Tensor) -> None:
    assert diagnose_lse(wrong, LSE, TIGHT) == ""


def test_rows_of_one_value_are_not_called_shifted() -> None:
    flat = torch.full((2, 4), math.log(256), dtype=torch.float64)
    assert diagnose_lse(flat + torch.tensor([1e-6, -2e-6, 3e-6, 0.0]), flat, torch.full_like(flat, 1e-6)) == ""


def test_the_law_reaches_the_message() -> None:
    record = compare_bounded(
        "merge", "merge.lse", LSE / math.log(2), LSE, torch.full_like(LSE, 1e-6), diagnose=diagnose_lse
    )
    assert "base-2 LSE" in record.message
    other_places = compare_bounded(
        "merge", "merge.lse", LSE.T.reshape(2, 5), LSE, torch.full_like(LSE, 1e-6), diagnose=diagnose_lse
    )
    assert other_places.status is Status.NONFINITE
    assert "transposed" in other_places.message
