"""Findings: stored, replayed, shrunk."""
