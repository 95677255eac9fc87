"""Which features can hold at once: the denominator of a table of feature pairs.

A feature says something about a few facts of the problem (how many requests, how many chunks, which path,
...). Two features exclude each other if they leave no common value of one fact. Pairs that only a combination
of three facts excludes are counted as possible.
"""

from __future__ import annotations

from functools import lru_cache

from harness.problems.features import FEATURES, single_valued
from harness.problems.names import TOPK_KINDS
from harness.problems.profiles import PROFILES, ProfileName

Facts = dict[str, frozenset[str]]


def _values(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SOME_REQUEST: Facts = {"requests": _values("1 2 3..4 5..8 9..")}
_TWO_REQUESTS: Facts = {"requests": _values("2 3..4 5..8 9..")}
_CONTEXT: Facts = {
    "requests": _values("1 2 3..4 5..8 9.."),
    "chunks": _values("1 2 3..5 6.."),
    "path": _values("dense global_mask remap mqa refused"),
}
_TWO_CHUNKS: Facts = _CONTEXT | {"chunks": _values("2 3..5 6..")}
_AFTER: Facts = {"history": _values("1 2")}
_OTHER_BATCH: Facts = _AFTER | {"batch": _values("other")}
_NO_MASK: Facts = {"path": _values("dense mqa refused")}

_FACTS: dict[str, Facts] = {
    # recorded batches are cut to `max_requests`
    "requests:9..": {"lengths": _values("drawn")},
    "chunks:0": {"path": _values("dense no_context mqa refused")},
    **{f"chunks:{n}": {"path": _CONTEXT["path"], **_SOME_REQUEST} for n in ("1", "2", "3..5", "6..")},
    "path:no_context": {"chunks": _values("0")},
    "path:global_mask": _CONTEXT,
    "path:remap": _CONTEXT,
    "force:dense": {"path": _values("dense")},
    "force:mqa": {"path": _values("mqa")},
    "force:masked": {"path": _values("no_context global_mask remap refused")},
    "force:masked_remap": {"path": _values("no_context remap refused")},
    "cache:fp8_e4m3": _NO_MASK,
    "cache:fp8_ds_mla": _NO_MASK
    | {"dtype": _values("bf16"), "dims": _values("published"), "rope": _values("some"), "odd": _values("no")},
    "dims:published": {"odd": _values("no")},
    "batch:long_beside_short": _TWO_REQUESTS,
    "batch:with_and_without_context": _CONTEXT | _TWO_REQUESTS | {"covered": _values("some")},
    "batch:twins": _TWO_REQUESTS,
    "batch:empty_request_beside_others": _TWO_REQUESTS,
    "batch:sequence_of_one": _SOME_REQUEST,
    "batch:tokens==heads": _SOME_REQUEST,
    "chunk:continuation": _TWO_CHUNKS | {"covered": _values("some")},
    "chunk:three_parts_of_one_request": _CONTEXT | {"chunks": _values("3..5 6.."), "covered": _values("some")},
    "chunk:ends_in_different_chunks": _TWO_CHUNKS | _TWO_REQUESTS | {"covered": _values("some")},
    "chunk:covers_all_requests": _CONTEXT | {"chunks": _values("1"), "covered": _values("all")},
    "chunk:request_skipped": _CONTEXT | _TWO_REQUESTS | {"covered": _values("some")},
    "chunk:rows==budget": _CONTEXT,
    "chunk:context==budget+1": _TWO_CHUNKS | {"covered": _values("some")},
    "chunk:start_inside_word": _TWO_CHUNKS | {"covered": _values("some")},
    "chunk:one_row": _CONTEXT,
    "context_len:0": _SOME_REQUEST | {"covered": _values("some")},
    **{
        feature: _CONTEXT
        for feature in FEATURES
        if feature.startswith("context_len:") and feature not in ("context_len:0", "context_len:below_block")
    },
    "context_len:below_block": _CONTEXT | {"block_size": _values("2..15 16 17..63 64..")},
    **{feature: _SOME_REQUEST for feature in FEATURES if feature.startswith("query_len:")},
    "workspace:default": {"words": _values("default")},
    "workspace:call_one_word_short": _NO_MASK | {"words": _values("call-1")} | _SOME_REQUEST,
    "workspace:fits_all_but_the_suffix": _CONTEXT
    | {"path": _values("mqa"), "force": _values("none"), "cache": _values("auto"), "words": _values("call-1 fewer")},
    "workspace:global_one_word_short": {
        "words": _values("call-1 whole-1"),
        "path": _values("dense no_context remap mqa refused"),
        **_SOME_REQUEST,
    },
    "workspace:call_fits_exactly": {"words": _values("call default")},
    "workspace:global_fits_exactly": {"words": _values("call whole default")},
    "workspace:none": {"words": _values("call")},
    "mask:last_word_full": {"last_word": _values("32"), **_SOME_REQUEST},
    "mask:last_word_one_key": {"last_word": _values("1"), **_SOME_REQUEST},
    "mask:last_word_31_keys": {"last_word": _values("31"), **_SOME_REQUEST},
    "mask:rows==padded_rows": _SOME_REQUEST,
    "paging:shared_prefix": _CONTEXT | _TWO_REQUESTS,
    "paging:scale!=1": _NO_MASK | {"cache": _values("fp8_e4m3")},
    "paging:partial_last_block": _CONTEXT | {"block_size": _values("2..15 16 17..63 64..")},
    **{f"topk:{kind}": _SOME_REQUEST | {"rows": _values("drawn")} for kind in TOPK_KINDS},
    "topk_rows:explicit": {"rows": _values("explicit")},
    "topk_rows:any_negative": {"rows": _values("drawn")},
    "topk_rows:lowest_negative": {"rows": _values("drawn")},
    "topk_rows:one_slot": {"width": _values("1")},
    "topk_rows:narrow": {"width": _values("narrow")},
    "topk_rows:wide": {"width": _values("wide")},
    "topk_rows:wider_than_a_sequence": {
        "path": _values("no_context global_mask remap mqa refused"),
        "width": _values("narrow wide"),
        **_SOME_REQUEST,
    },
    **{f"topk_order:{order}": {"rows": _values("drawn")} for order in ("ascending", "descending")},
    **{f"topk_holes:{holes}": {"rows": _values("drawn")} for holes in ("front", "middle", "spread")},
    "before:same_layer": _AFTER | {"layer": _values("same")},
    "before:other_scale": _AFTER | {"layer": _values("other_scale")},
    "before:other_sizes": _AFTER | {"layer": _values("other_sizes"), "batch": _values("other")},
    "before:same_metadata": _AFTER | {"batch": _values("same")},
    "before:other_path": _AFTER,
    "before:grows": _OTHER_BATCH | _SOME_REQUEST | {"tokens": _values("more")},
    "before:shrinks": _OTHER_BATCH | {"tokens": _values("fewer")},
    "before:one_request_then_many": _OTHER_BATCH | _TWO_REQUESTS | {"count": _values("more")},
    "before:many_requests_then_one": _OTHER_BATCH | {"requests": _values("1"), "count": _values("fewer")},
    "before:same_size_class": _OTHER_BATCH | _SOME_REQUEST,
    "model:no_rope": {"rope": _values("none")},
    "model:odd_dims": {"odd": _values("yes"), "dims": _values("small")},
}


@lru_cache(maxsize=1024)
def _facts(feature: str) -> Facts:
    facts = dict(_FACTS.get(feature, {}))
    if single_valued(feature):
        group, _, value = feature.partition(":")
        facts[group] = frozenset({value})
    return facts


def can_coincide(first: str, second: str) -> bool:
    """False if no problem has both features."""
    if first == second:
        return True
    one, other = _facts(first), _facts(second)
    return all(one[fact] & other[fact] for fact in one.keys() & other.keys())


def impossible_features(name: ProfileName) -> frozenset[str]:
    """Features that no case of a profile can have: its batches and sizes do not go so far."""
    profile = PROFILES[name]
    heads = {*profile.heads, *profile.published_heads}
    longest = max(profile.max_query, profile.published_query, *profile.long_queries)
    reached = {
        "requests:9..": profile.many_share > 0,
        "requests:5..8": profile.max_requests >= 5,
        "requests:3..4": profile.max_requests >= 3,
        "chunks:6..": profile.max_chunks >= 6,
        "query_len:258..": longest >= 258,
        "heads:1": 1 in heads,
        "heads:2": 2 in heads,
        "heads:odd": any(h % 2 and h > 2 for h in heads),
        "heads:even": any(h % 2 == 0 and h > 2 for h in heads),
        "model:odd_dims": any(size % 2 for sizes in profile.sizes for size in sizes),
    }
    return frozenset(feature for feature, possible in reached.items() if not possible)


def possible_pairs() -> list[tuple[str, str]]:
    """Every pair of different features (in the order of `FEATURES`) that one problem may have."""
    return [
        (first, second)
        for index, first in enumerate(FEATURES)
        for second in FEATURES[index + 1 :]
        if can_coincide(first, second)
    ]
