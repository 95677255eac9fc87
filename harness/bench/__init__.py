"""Performance figures: kernel timings, whole prefills, compile counts. Never part of a test."""
