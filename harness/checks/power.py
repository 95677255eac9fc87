"""What a case could have shown: shares of single-key mask faults that its bounded checks would certainly reveal."""

from __future__ import annotations

from reference.power import Power

VACUOUS_LEVEL = 0.5
"""Below this share of certainly revealed faults, a bounded check counts as vacuous for that fault class."""
ROWS = 4
"""Query rows of each request that are looked at."""


def power_shares(power: Power) -> dict[str, float]:
    """`dropped`, `dropped_lse`, `dropped_out`, `added`, ...: share of faults revealed by either, by LSE, by output."""
    shares: dict[str, float] = {}
    for name, revealed in (("dropped", power.dropped), ("added", power.added)):
        for suffix, count in (
            ("", revealed.by_either),
            ("_lse", revealed.by_lse),
            ("_out", revealed.by_out),
        ):
            share = revealed.share(count)
            if share is not None:
                shares[name + suffix] = share
    return shares


def vacuous_classes(shares: dict[str, float], check: str) -> list[str]:
    """(check, fault class) pairs without power, as `prefill.fed:dropped`."""
    return [f"{check}:{name}" for name in ("dropped", "added") if shares.get(name, 1.0) < VACUOUS_LEVEL]
