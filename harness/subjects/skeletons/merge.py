"""Checks the merge of two partial results. Put your kernel's call in the place of the arithmetic, then:

    mlacheck run --subject my_kernel_check.py:my_merge
"""

import torch

import mlacheck


@mlacheck.subject(stage="merge", contract=mlacheck.Contract())
def my_merge(prefix_output, prefix_lse, suffix_output, suffix_lse):
    """Outputs [T, H, D] and natural LSE [H, T] over disjoint keys -> those over all of them."""
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    out = torch.zeros_like(prefix_output, dtype=torch.float32)
    for part, part_lse in ((prefix_output, prefix_lse), (suffix_output, suffix_lse)):
        weight = torch.exp(part_lse - lse).nan_to_num(0.0).t()[..., None]  # both parts empty: -inf minus -inf
        out += torch.where(weight > 0, weight * part.float(), 0.0)
    return out.to(prefix_output.dtype), lse
