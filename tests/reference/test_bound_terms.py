"""Do the pieces of the attention bound count what a kernel does?"""

import pytest
import torch
from torch import Tensor

from reference import bound_terms as terms
from reference.numerics import FA4_SM90, FA4_SM100, TRITON, U32, RowSum

LANES = FA4_SM90.row_sum
ROW_SUMS = {
    "any": RowSum(),
    "tile": TRITON.row_sum,
    "lane": LANES,
    "lane, first tile first": RowSum(running="lane", tile_keys=128, lanes=4, lane_run=2, combine=3),
    "first_lane": FA4_SM100.row_sum,
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen(n: int, keys: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand(n, keys, generator=torch.Generator().manual_seed(seed)) < density


def test_count_in_cell_is_a_count() -> None:
    scores, allowed = normal(2, 3, 40) / 4, chosen(3, 40, 0.6)
    counts = terms.count_in_cell(scores.masked_fill(~allowed, -torch.inf), allowed, 0.125)
    for head in range(2):
        for row in range(3):
            keys = allowed[row].nonzero().flatten().tolist()
            cells = {j: torch.floor(scores[head, row, j] / 0.125).item() for j in keys}
            for j in keys:
                assert counts[head, row, j] == sum(cells[i] == cells[j] for i in keys)


def visit(keys: int, tile: int, row_sum: RowSum) -> list[list[int]]:
    """Tiles of key numbers in the order of the visit."""
    tiles = [list(range(s, min(s + tile, keys))) for s in range(0, keys, tile)]
    return tiles[::-1] if row_sum.last_tile_first else tiles


class Counting:
    """A sum that remembers how many additions each of its keys has passed, and squares of partial sums."""

    def __init__(self, p: Tensor) -> None:
        self.p, self.passes, self.squares = p, [0] * len(p), 0.0

    def add(self, left: list[int], right: list[int]) -> list[int]:
        if not left or not right:
            return left + right
        for j in left + right:
            self.passes[j] += 1
        self.squares += float(self.p[left + right].sum()) ** 2
        return left + right


def add_up(p: Tensor, allowed: list[bool], tile: int, row_sum: RowSum) -> Counting:
    """Forms the row sum literally as declared, with tiles of this size."""
    counting = Counting(p)
    lanes: list[list[int]] = [[] for _ in range(row_sum.lanes)]
    running: list[int] = []
    for keys in visit(len(p), tile, row_sum):
        members = [j for j in keys if allowed[j]]
        if row_sum.running == "tile":
            own: list[int] = []
            for j in members:
                own = counting.add(own, [j])
            running = counting.add(running, own)
            continue
        if row_sum.running == "first_lane":
            lanes = [running, *([] for _ in range(row_sum.lanes - 1))]
        for j in members:
            lane = (j // row_sum.lane_run) % row_sum.lanes
            lanes[lane] = counting.add(lanes[lane], [j])
        if row_sum.running == "first_lane":
            running = joined(counting, lanes)
    if row_sum.running == "lane":
        joined(counting, lanes)
    return counting


def joined(counting: Counting, lanes: list[list[int]]) -> list[int]:
    while len(lanes) > 1:
        lanes = [counting.add(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


@pytest.mark.parametrize("name", ["tile", "lane", "lane, first tile first", "first_lane"])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.05])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_row_sum_counts_no_addition_too_few(name: str, density: float, tile: int) -> None:
    row_sum = ROW_SUMS[name]
    if row_sum.running == "first_lane":
        tile = row_sum.tile_keys
    allowed = chosen(1, 500, density, seed=3)
    if name.startswith("lane"):
        allowed[:, 128:256] &= torch.arange(128) % 8 < 2  # all in one lane
    p = torch.softmax(normal(1, 1, 500, seed=4).masked_fill(~allowed, -torch.inf), dim=-1)
    g = torch.ones_like(p)
    certain, squares = terms.row_sum_error(p, allowed, g, row_sum, None)
    literal = add_up(p[0, 0], allowed[0].tolist(), tile, row_sum)
    exact = float((p[0, 0] * torch.tensor(literal.passes)).sum())
    assert exact <= certain.item() <= 3 * exact + 2 * row_sum.tile_keys
    if row_sum.running == "lane":
        lanes_met = 3 * 1.0  # the last additions of the lanes, outside the squares
        assert literal.squares - lanes_met <= squares.item() <= 4 * literal.squares + 1


@pytest.mark.parametrize("running", ["tile", "lane", "first_lane"])
def test_row_sum_of_ties_stays_below_the_certain_bound(running: str) -> None:
    """The same float32 added again and again rounds the same way each time."""
    row_sum = next(r for r in ROW_SUMS.values() if r.running == running)
    keys = 2048
    for value in (0.3, 0.7, 1 / 3, 0.9999):
        p = torch.full((keys,), value, dtype=torch.float32)
        if running == "lane":
            total = torch.zeros(4)
            for group in p.view(-1, 4):
                total = total + group
            got = float((total[0] + total[1]) + (total[2] + total[3]))
        else:
            running_sum = torch.zeros(())
            for tile in p.view(-1, 128):
                own = torch.zeros(())
                for x in tile:
                    own = own + x
                running_sum = running_sum + own
            got = float(running_sum)
        exact = float(p.double().sum())
        share = p.double()[None, None] / exact
        allowed = torch.ones(1, keys, dtype=torch.bool)
        certain, squares = terms.row_sum_error(share, allowed, torch.full_like(share, keys), row_sum, None)
        assert abs(got / exact - 1) <= U32 * min(certain.item(), 8.41 * squares.item() ** 0.5)


def test_unknown_order_allows_one_chain_and_slots_shorten_it() -> None:
    allowed = torch.ones(1, 4096, dtype=torch.bool)
    p = torch.full((1, 1, 4096), 1 / 4096, dtype=torch.float64)
    certain, squares = terms.row_sum_error(p, allowed, p, RowSum(), None)
    assert certain.item() == pytest.approx(4096)
    assert squares.item() == torch.inf
    certain, _ = terms.row_sum_error(p, allowed, p, RowSum(), 4096)
    assert certain.item() == pytest.approx(128 + 128)


@pytest.mark.parametrize("last_first", [False, True])
def test_rescaled_mass_counts_every_rise_of_the_maximum(last_first: bool) -> None:
    row_sum = RowSum(running="tile", last_tile_first=last_first)
    scores, allowed = normal(1, 1, 300, seed=5), chosen(1, 300, 0.5)
    scores = scores.masked_fill(~allowed, -torch.inf)
    p = torch.softmax(scores, dim=-1)
    bound = terms.rescaled_mass(scores, p, allowed, row_sum).item()
    for tile in (1, 32, 128):
        top, mass, rescaled = -torch.inf, 0.0, 0.0
        for keys in visit(300, tile, row_sum):
            new_top = max(top, float(scores[0, 0, keys].max()))
            rescaled += mass if new_top > top else 0.0
            top, mass = new_top, mass + float(p[0, 0, keys].sum())
        assert rescaled <= bound + 1e-12
        if tile == 1:
            assert rescaled == pytest.approx(bound)


@pytest.mark.parametrize("dim", [1, 16, 40, 192])
def test_first_product_bounds_every_partial_sum(dim: int) -> None:
    q, k = normal(2, 3, dim, seed=6), normal(1, dim, 7, seed=7)
    total, squares, ends = terms.first_product(q, k, k.abs())
    terms_of = q[..., None] * k[:, None]
    partial = terms_of.cumsum(dim=2)
    torch.testing.assert_close(total, q @ k)
    exact = partial.square().sum(dim=2)
    assert (exact <= squares * (1 + 1e-12)).all()
    assert squares.sum() <= 12 * exact.sum()
    at_ends = partial[:, :, 15::16].abs().sum(dim=2)
    assert (at_ends <= ends + partial[:, :, -1].abs() + 1e-12).all()


def test_product_steps_count_keys_and_blocks() -> None:
    allowed = torch.zeros(2, 50, dtype=torch.bool)
    allowed[0, [0, 15, 16, 49]] = True
    selected, blocks = terms.product_steps(allowed, TRITON.row_sum, None)
    assert (selected.tolist(), blocks.tolist()) == ([4.0, 0.0], [3.0, 0.0])
    _, unknown = terms.product_steps(allowed, RowSum(), None)
    assert unknown.tolist() == [4.0, 0.0]
