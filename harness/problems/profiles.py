"""Profiles: how large the cases of a run may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ProfileName = Literal["quick", "ci", "gpu_small", "gpu_full"]
PROFILE_NAMES: tuple[ProfileName, ...] = get_args(ProfileName)

Sizes = tuple[int, int, int, int]
"""kv_lora_rank, nope, rope, v"""

_CPU_SIZES: tuple[Sizes, ...] = (
    (16, 8, 4, 8),
    (32, 16, 8, 16),
    (16, 8, 0, 8),
    (32, 16, 8, 8),
    (24, 8, 8, 16),
    (16, 16, 0, 8),
    (20, 12, 4, 12),
    (17, 9, 5, 11),
)
_GPU_SIZES: tuple[Sizes, ...] = ((64, 32, 16, 32), (128, 64, 32, 64), (64, 48, 0, 32), (96, 32, 16, 64))


@dataclass(frozen=True)
class Profile:
    """Limits and shares of drawn cases. Shares are percentages."""

    name: ProfileName
    max_requests: int
    heads: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    topk: tuple[int, ...]
    max_query: int
    """Query tokens of the whole batch"""
    max_context: int
    """Context tokens of the whole batch"""
    max_chunks: int
    """About so many chunks at most"""
    published_share: int
    published_heads: tuple[int, ...]
    published_topk: tuple[int, ...]
    published_query: int
    """Query tokens of a batch with published sizes"""
    published_context: int
    many_share: int = 6
    """Share of batches of more requests than that, nearly all of them tiny"""
    max_dense: int = 2**20
    """Query tokens, and context tokens, of a batch on the dense path: its top-k rows are as wide as it is long"""
    traffic_share: int = 20
    fp8_share: int = 45
    """Share of quantised caches among the paths that take one: dense and MQA"""
    long_query_share: int = 8
    """Share of batches whose first request is around a query tile long, whatever `max_query` says"""
    long_queries: tuple[int, ...] = (127, 128, 129, 255, 256, 257)
    beside_long: int = 40
    """Query tokens left for the other requests of such a batch"""
    second_long: bool = False
    """Whether the second request of such a batch may be as long"""


PROFILES: dict[ProfileName, Profile] = {
    "quick": Profile(
        name="quick",
        max_requests=4,
        heads=(1, 2, 3, 4),
        sizes=_CPU_SIZES,
        topk=(16, 8, 24, 4, 48, 32, 5, 33, 1),
        max_query=72,
        max_context=200,
        max_chunks=6,
        published_share=18,
        published_heads=(1, 2),
        published_topk=(16, 8, 32, 48),
        published_query=24,
        published_context=96,
    ),
    "ci": Profile(
        name="ci",
        max_requests=6,
        heads=(1, 2, 3, 4, 5, 8),
        sizes=_CPU_SIZES,
        topk=(16, 8, 24, 4, 48, 32, 64, 5, 33, 1, 2),
        max_query=160,
        max_context=420,
        max_chunks=10,
        published_share=12,
        published_heads=(1, 2, 3, 4),
        published_topk=(16, 8, 32, 48, 1),
        published_query=40,
        published_context=160,
        long_query_share=15,
        long_queries=(127, 128, 129, 255, 256, 257, 190, 300),
        beside_long=160,
        second_long=True,
    ),
    "gpu_small": Profile(
        name="gpu_small",
        max_requests=8,
        heads=(1, 2, 4, 8, 16, 3),
        sizes=_GPU_SIZES,
        topk=(64, 32, 128, 256, 16, 33, 1),
        max_query=1024,
        max_context=4096,
        max_chunks=12,
        published_share=50,
        published_heads=(2, 8, 16, 1),
        published_topk=(256, 64, 512, 2048, 128),
        published_query=512,
        published_context=4096,
        long_query_share=20,
        second_long=True,
    ),
    "gpu_full": Profile(
        name="gpu_full",
        max_requests=8,
        heads=(16, 8, 32),
        sizes=_GPU_SIZES,
        topk=(256, 512, 2048),
        max_query=8192,
        max_context=32768,
        max_chunks=12,
        published_share=95,
        published_heads=(16, 128, 32, 64),
        published_topk=(2048,),
        published_query=8192,
        max_dense=1024,
        published_context=32768,
        long_query_share=20,
        second_long=True,
    ),
}
