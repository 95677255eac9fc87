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

    Keys are counted from the start of a segment, tiles too; key `k` is in lane `(k // lane_run) % lanes`.
    Adding an exact zero, as a masked key does, rounds nothing.

    running:
      "any"         nothing is promised: every selected key may pass through `|A|` additions.
      "tile"        each tile is summed by itself, in any order, and then added to the running sum.
      "lane"        each lane adds its keys to its own running sum, key by key; the lanes meet at the end.
      "first_lane"  as "tile", in lanes, of which the first starts from the running sum.
    """

    running: RunningSum = "any"
    tile_keys: int = 128
    """Keys in a tile; for "lane" and "tile" the largest tile that the kernel may choose."""
    smallest_tile: int = 32
    """The smallest tile that the kernel may choose: there are no more tiles than tiles of this size."""
    lanes: int = 1
    lane_run: int = 1
    combine: int = 1
    """Additions that join the lanes: once per row ("lane"), or once per non-empty tile (the others)."""
    last_tile_first: bool = False
    """Whether the tiles are visited from the end of the segment to its start."""

    def __post_init__(self) -> None:
        for name in ("tile_keys", "smallest_tile", "lanes", "lane_run"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be positive")
        if self.tile_keys % (self.lanes * self.lane_run) or self.tile_keys < self.smallest_tile:
            raise ValueError(
                f"tile_keys is {self.tile_keys}, it must be a multiple of lanes * lane_run = "
                f"{self.lanes * self.lane_run} and at least smallest_tile = {self.smallest_tile}"
            )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Storage type, exponential, row sum and products of an attention kernel with float32 accumulation."""

    storage: Literal["bf16", "fp16"] = "bf16"
    """Type of q, k, v, the probabilities fed to the second product, the partials and the result."""
    eps_exp: float = 4 * U32
    """Largest relative error of one exponential; 2^-22 is the documented one of the hardware's exp2."""
    eps_rescale: float = 4 * U32
    """Largest relative error of the exponential that rescales running sums."""
    row_sum: RowSum = RowSum()
    merge: Literal["any", "natural"] = "any"
    """How two partial results are merged. "natural": exponentials of natural LSEs, and a side without keys is passed
    over, so that the other one is copied. "any": LSE may be turned into base 2 and back, for such a row too."""
    tensor_cores: bool = True
    """Whether products accumulate on tensor cores, which truncate instead of rounding to nearest."""

    def __post_init__(self) -> None:
        if self.storage not in ("bf16", "fp16"):
            raise ValueError(f"storage is {self.storage!r}, it must be 'bf16' or 'fp16'")
        if self.merge not in ("any", "natural"):
            raise ValueError(f"merge is {self.merge!r}, it must be 'any' or 'natural'")
        if not self.eps_exp > 0:
            raise ValueError(f"eps_exp is {self.eps_exp}, it must be positive")

    @property
    def u16(self) -> float:
        """Unit roundoff of the storage type."""
        return 2.0**-8 if self.storage == "bf16" else 2.0**-11

    @property
    def cell(self) -> float:
        """Width of the cells of scores whose exponentials are taken to round alike: a sixteenth of u16."""
        return self.u16 / 16

    @property
    def tiny(self) -> float:
        """Largest absolute error of rounding a number below the normal range of the storage type."""
        return 2.0**-126 if self.storage == "bf16" else 2.0**-25


TRITON = Numerics(merge="natural", row_sum=RowSum(running="tile"))
"""The masked attention kernel of this project: tiles of 32 to 128 keys, in order."""

TRITON_MQA = Numerics(merge="natural")
"""The sparse MQA kernel of this project: keys in the order of the top-k row."""

FA4_SM90 = Numerics(
    merge="natural",
    row_sum=RowSum(running="lane", tile_keys=144, lanes=4, lane_run=2, combine=3, last_tile_first=True),
)
"""flash-attn-4 on Hopper: the four threads of a quad hold pairs of adjacent columns of a row."""

FA4_SM100 = Numerics(
    merge="natural",
    eps_exp=9e-5,
    row_sum=RowSum(running="first_lane", lanes=8, combine=4, last_tile_first=True),
)
"""flash-attn-4 on Blackwell: one thread a row, four packed pairs of accumulators, polynomial exp2."""
