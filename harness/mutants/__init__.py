"""Planted faults: exact text patches to a copy of `optimized/`, run as subjects `mutant:NAME`."""
