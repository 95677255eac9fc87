"""The declared arithmetic of a subject: what an error bound may assume, fixed before a run.

A contract holds one `Numerics`. Nothing here is fitted to a test: each field is a property of the kernel's
source or of the hardware, and a subject that rounds more often than it declares is judged wrong.
"""

from dataclasses import dataclass
from typing import Literal

U32 = 2.0**-24
"""Unit roundoff of float32."""

RunningSum = Literal["any", "tile", "lane", "first_lane"]


@dataclass(frozen=True, kw_only=True)
class RowSum:
    """How the float32 sum of a row's exponentials is formed.

    Keys are counted from the start of a segment: tile `t` holds `t*tile_keys .. (t+1)*tile_keys - 1`, and
    key `k` of a tile belongs to lane `(k // lane_run) % lanes`. Adding an exact zero, as a masked key does,
    rounds nothing.

    running:
      "any"         nothing is promised: every selected key may pass through `|A|` additions.
      "tile"        each tile is summed by itself, in any order, and then added to the running sum.
      "lane"        each lane adds its keys to its own running sum, key by key; the lanes meet at the end.
      "first_lane"  as "tile", but lane 0 of each tile starts from the running sum.
    """

    running: RunningSum = "any"
    tile_keys: int = 128
    lanes: int = 1
    lane_run: int = 1
    combine: int = 1
    """Additions that join the lanes, once per row ("lane") or once per non-empty tile (the others)."""
    last_tile_first: bool = False
    """Whether the tiles are visited from the end of the segment to its start."""

    def __post_init__(self) -> None:
        if self.tile_keys < 1 or self.tile_keys % (self.lanes * self.lane_run):
            raise ValueError(
                f"tile_keys is {self.tile_keys}, it must be a positive multiple of lanes * lane_run "
                f"= {self.lanes * self.lane_run}"
            )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Storage type, exponential and row sum of an attention kernel with float32 accumulation."""

    storage: Literal["bf16", "fp16"] = "bf16"
    """Type of q, k, v, the probabilities fed to the second product, the partials and the result."""
    eps_exp: float = 4 * U32
    """Largest relative error of one exponential."""
    row_sum: RowSum = RowSum()

    @property
    def u16(self) -> float:
        """Unit roundoff of the storage type."""
        return 2.0**-8 if self.storage == "bf16" else 2.0**-11

    @property
    def cell(self) -> float:
        """Width of the score cells inside which two probabilities are taken to round alike: u16 / 16."""
        return self.u16 / 16

    def __post_init__(self) -> None:
        if self.storage not in ("bf16", "fp16"):
            raise ValueError(f"storage is {self.storage!r}, it must be 'bf16' or 'fp16'")
        if not self.eps_exp > 0:
            raise ValueError(f"eps_exp is {self.eps_exp}, it must be positive")


TRITON = Numerics()
"""The Triton kernels of this project."""

FA4_SM90 = Numerics(
    row_sum=RowSum(running="lane", tile_keys=128, lanes=4, lane_run=2, combine=8, last_tile_first=True)
)
"""flash-attn-4 on Hopper: the four threads of a quad hold pairs of adjacent columns of a row."""

FA4_SM100 = Numerics(
    eps_exp=9e-5,
    row_sum=RowSum(running="first_lane", tile_keys=128, lanes=8, combine=4, last_tile_first=True),
)
"""flash-attn-4 on Blackwell: one thread a row, four packed pairs of accumulators, polynomial exp2."""
