"""Checks: one module a stage, each from actual inputs and outputs to check records."""
