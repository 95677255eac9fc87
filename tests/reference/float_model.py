"""The float model and its families, which live beside the measurements that use them."""

from harness.measure.families import FAMILIES, ORDINARY, Case, make_case, split_evenly
from harness.measure.float_model import Model, attend, merge, run

__all__ = ["FAMILIES", "ORDINARY", "Case", "Model", "attend", "make_case", "merge", "run", "split_evenly"]
