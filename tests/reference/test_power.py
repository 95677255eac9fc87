"""Does the power of a case say what a fault would really do?"""

import math

from torch import Tensor

from harness.measure.families import Case, make_case
from reference import oracle
from reference.bound import AttendReference, attend_reference
from reference.numerics import TRITON
from reference.power import Power, Revealed, attend_power, combine


def reference(case: Case) -> AttendReference:
    return attend_reference(q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, numerics=TRITON)


def power(case: Case, max_rows: int = 8, max_keys: int = 512) -> Power:
    return attend_power(
        q=case.q,
        k=case.k,
        v=case.v,
        allowed=case.allowed,
        scale=case.scale,
        reference=reference(case),
        max_rows=max_rows,
        max_keys=max_keys,
    )


def literally(case: Case, exact: AttendReference, row: int, key: int) -> tuple[Tensor, Tensor]:
    """Which heads reveal this flipped key, by computing the faulty answer."""
    flipped = case.allowed.clone()
    flipped[row, key] ^= True
    out, lse = oracle.attend(case.q, case.k, case.v, flipped, case.scale)
    move_lse = (lse[:, row] - exact.lse[:, row]).abs() > 2 * exact.bound.tol_lse[:, row]
    move_out = ((out[row] - exact.out[row]).abs() > 2 * exact.bound.tol_out[row]).any(dim=-1)
    return move_lse, move_out


def test_the_counts_are_those_of_literal_faults() -> None:
    for family in ("unit normal", "sharp", "chunk gaps"):
        case = make_case(family, 1, n=3, heads=2, keys=40, topk=18, dim=16, v_dim=6)
        case.allowed[2] = False
        case.allowed[2, 7] = True  # one key only
        exact = reference(case)
        counts = {True: [0, 0, 0, 0], False: [0, 0, 0, 0]}
        for row in range(3):
            for key in range(40):
                by_lse, by_out = literally(case, exact, row, key)
                shown = [by_lse, by_out, by_lse | by_out]
                here = [len(by_lse), *(int(x.sum()) for x in shown)]
                kind = bool(case.allowed[row, key])
                counts[kind] = [a + b for a, b in zip(counts[kind], here, strict=True)]
        found = power(case)
        assert found.dropped == Revealed(*counts[True])
        assert found.added == Revealed(*counts[False])
        assert found.dropped.by_lse > 0


def test_an_empty_row_reveals_an_added_key() -> None:
    case = make_case("unit normal", 2, n=1, heads=2, keys=10, topk=4, dim=16, v_dim=6)
    case.allowed[:] = False
    assert power(case) == Power(Revealed(), Revealed(20, 20, 20, 20))


def test_sampling_is_bounded_and_spread() -> None:
    case = make_case("flat", 3, n=30, heads=2, keys=50, topk=20, dim=16, v_dim=6)
    found = power(case, max_rows=4, max_keys=5)
    assert (found.dropped.total, found.added.total) == (4 * 5 * 2, 4 * 5 * 2)
    assert found.dropped.share(found.dropped.by_lse) == 1.0


def test_powers_add_up() -> None:
    a, b = Power(Revealed(4, 1, 2, 3)), Power(Revealed(6, 1, 0, 1), Revealed(2, 2, 2, 2))
    total = combine([a, b])
    assert total == Power(Revealed(10, 2, 2, 4), Revealed(2, 2, 2, 2))
    assert total.dropped.share(total.dropped.by_either) == 0.4
    assert combine([]).added.share(0) is None


def test_one_hot_softmax_hides_dropped_keys() -> None:
    """With a key that takes nearly everything, most faults of the others cannot show: the count must say so."""
    case = make_case("near overflow", 4, n=4, heads=2, keys=200, topk=60, dim=64, v_dim=6)
    found = power(case).dropped
    assert found.by_lse / found.total < 0.1
    assert math.isclose(found.total, 4 * 2 * 60)
