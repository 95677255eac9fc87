"""What the oracle's functions may be given: errors that name the argument, not a broadcast that nobody meant."""

from torch import Tensor, bool


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")


def require_attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> None:
    """Raise ValueError unless q `[n, H, D]`, k `[K, H, D]`, v `[K, H, Dv]`, allowed bool `[n, K]`.

    One head of k or of v may serve all heads of q.
    """
    keys, heads, width = k.shape[0], q.shape[1], q.shape[2]
    for name, tensor, columns in (("k", k, width), ("v", v, v.shape[-1])):
        shared = tensor.dim() == 3 and tensor.shape[1] == 1
        require_shape(name, tensor, (keys, 1 if shared else heads, columns))
    require_shape("allowed", allowed, (q.shape[0], k.shape[0]))
    if allowed.dtype is not bool:
        raise ValueError(f"allowed has dtype {allowed.dtype}, must be torch.bool")


def require_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise ValueError unless both outputs are `[n, H, Dv]` and both LSEs `[H, n]`."""
    require_shape("out_b", out_b, tuple(out_a.shape))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        require_shape(name, lse, (out_a.shape[1], out_a.shape[0]))


def require_topk(topk_rows: Tensor, context_len: int) -> None:
    """Raise ValueError unless the rows are integers `[q, topk]` and the length is none below 0."""
    if topk_rows.dim() != 2 or topk_rows.dtype.is_floating_point or topk_rows.dtype is bool:
        found = f"shape {tuple(topk_rows.shape)} and dtype {topk_rows.dtype}"
        raise ValueError(f"topk_rows has {found}, must be integers of shape (queries, topk)")
    if context_len < 0:
        raise ValueError(f"context_len is {context_len}, must be at least 0")
