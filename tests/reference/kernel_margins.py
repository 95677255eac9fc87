"""How far are real kernels from the exact answer? `python -m tests.reference.kernel_margins NAME [keys] [seeds]`

NAME is "fa4" or "triton": prints err / tol of output and LSE for each input family over 1, 4 and 8 segments, with
top-k half of the keys, 8 heads, 192/128; or "reference": the time that oracles and bounds take. It uses the GPU if
there is one; "triton" also runs interpreted, with few keys.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone knows)
from torch import Tensor

from harness.measure.families import FAMILIES, Case, make_case, split_evenly
from optimized.attention.fa4 import fa4_masked_mha
from optimized.attention.triton_mha import triton_masked_mha
from optimized.mask import topk_mask_shape
from optimized.merge import merge_attn_states
from reference.bound import attend_reference
from reference.bound_stages import prefill_reference
from reference.gather_oracle import gather_prefill
from reference.numerics import FA4_SM90, FA4_SM100, TRITON, TRITON_MQA, Numerics
from reference.oracle import sparse_mla_prefill
from reference.power import attend_power
from tests.reference.tightness import ratio

Kernel = Callable[..., tuple[Tensor, Tensor]]


def pack_mask(allowed: Tensor) -> Tensor:
    """bool `[n, K]` -> bit mask `[1, padded_q, words]` int32, key k in bit k & 31 of word k >> 5."""
    n, keys = allowed.shape
    _, padded, words = topk_mask_shape(1, n, keys)
    bits = F.pad(allowed, (0, words * 32 - keys, 0, padded - n)).view(1, padded, words, 32).long()
    packed = (bits << torch.arange(32, device=allowed.device)).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def run_kernel(case: Case, kernel: Kernel, segments: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """One masked call for each segment, merged one after the other."""
    n, device = len(case.q), case.q.device
    result: tuple[Tensor, Tensor] | None = None
    for start, length in segments:
        keys = slice(start, start + length)
        ends = [torch.tensor([0, x], dtype=torch.int32, device=device) for x in (n, length)]
        mask = pack_mask(case.allowed[:, keys].contiguous())
        part = kernel(case.q, case.k[keys], case.v[keys], ends[0], ends[1], n, length, case.scale, mask=mask)
        if result is None:
            result = part
            continue
        merged, lse = torch.empty_like(part[0]), torch.empty_like(part[1])
        merge_attn_states(merged, *result, *part, lse)
        result = merged, lse
    assert result is not None
    return result


def measure(kernel: Kernel, numerics: Numerics, keys: int, seeds: int, *, n: int = 64, heads: int = 8) -> None:
    """Print one line for each family."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.monotonic()
    for family in FAMILIES:
        columns = []
        for parts in (1, 4, 8):
            worst = [0.0, 0.0]
            for seed in range(seeds):
                case = make_case(family, seed, n=n, heads=heads, keys=keys, topk=keys // 2, dim=192, v_dim=128)
                case = Case(
                    case.q.to(device), case.k.to(device), case.v.to(device), case.allowed.to(device), case.scale
                )
                segments = split_evenly(keys, parts)
                exact = attend_reference(
                    q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, numerics=numerics,
                    segments=segments,
                )  # fmt: skip
                out, lse = run_kernel(case, kernel, segments)
                found = ratio((out.double() - exact.out).abs(), exact.bound.tol_out)
                worst[0] = max(worst[0], found)
                worst[1] = max(worst[1], ratio((lse.double() - exact.lse).abs(), exact.bound.tol_lse))
            seen = attend_power(
                q=case.q, k=case.k, v=case.v, allowed=case.allowed, scale=case.scale, reference=exact
            ).dropped
            columns.append(f"{worst[0]:.3f} {worst[1]:.3f} ({seen.by_lse / seen.total:.3f})")
        print(f"{family:18s}", "   ".join(columns), flush=True)
    print(f"columns: 1, 4, 8 segments: output, LSE (dropped keys LSE reveals); {time.monotonic() - start:.0f} s")


def time_reference(keys: int, *, n: int = 256, heads: int = 128) -> None:
    """Seconds and memory that the oracles and the bound take for `n` rows of a published shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(n, x, generator=g).bfloat16().to(device) for x in (heads * 192, 512))
    cache = torch.randn(keys // 64, 64, 576, generator=g).bfloat16().to(device)
    w = (torch.randn(512, heads * 256, generator=g) / 23).bfloat16().to(device)
    rows = torch.randint(0, keys, (n, 2048), generator=g, dtype=torch.int32).to(device)
    arguments = {
        "q": q.view(n, heads, 192), "kv_c_normed": kv, "k_pe": kv[:, None, :64], "cache": cache,
        "block_table": torch.arange(keys // 64, device=device)[None], "w_kv_b": w, "topk_rows": rows,
        "query_lens": [n], "context_lens": [keys - n], "num_heads": heads, "nope": 128, "rope": 64,
        "v_head_dim": 128, "scale": 192**-0.5,
    }  # fmt: skip
    roads: list[tuple[str, Callable[..., object], dict[str, object]]] = [
        ("oracle", sparse_mla_prefill, {}),
        ("gather oracle", gather_prefill, {}),
        ("gather oracle, dense", gather_prefill, {"dense": True}),
        ("bound, mha", prefill_reference, {"numerics": FA4_SM90, "keep_terms": False}),
        ("bound, mqa", prefill_reference, {"numerics": TRITON_MQA, "keep_terms": False, "path": "mqa"}),
    ]
    for name, road, options in roads:
        start = time.monotonic()
        road(**arguments, **options)
        peak = 0.0
        if device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        print(f"{name:22s} {time.monotonic() - start:7.2f} s for {n} rows, {peak:.1f} GiB", flush=True)


def main(name: str, keys: int, seeds: int) -> None:
    """Measure one kernel."""
    if name == "triton":
        small = not torch.cuda.is_available()
        measure(triton_masked_mha, TRITON, keys, seeds, n=8 if small else 64, heads=2 if small else 8)
    elif name == "fa4":
        hopper = torch.cuda.get_device_capability()[0] == 9
        measure(fa4_masked_mha, FA4_SM90 if hopper else FA4_SM100, keys, seeds)
    elif name == "reference":
        time_reference(keys)
    else:
        raise ValueError(f"kernel is {name!r}, it must be 'fa4', 'triton' or 'reference'")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        arguments[0],
        int(arguments[1]) if len(arguments) > 1 else 4096,
        int(arguments[2]) if len(arguments) > 2 else 1,
    )
