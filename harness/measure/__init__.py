"""Measurements of the judge itself: how near its bounds are to real errors, and what it notices."""
