"""`fa4_masked_mha`: masked attention through FlashAttention-4 (`flash_attn.cute`), on SM90 and SM100.

FA4 drops `causal=True` silently beside a mask mod, so the mask alone carries causality (SPEC 2.2). Its
products see masked keys too: every row of v must be finite, since 0 * NaN is NaN.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optimized.attention.arguments import AttentionCall, check_attention_call
from optimized.validation import device_of

FAMILIES = (90, 100)
_MASK_ALIGN_BYTES = 16
_MASK_ALIGN_WORDS = 4
_HEAD_DIM_UNIT = 8
"""Head dims are copied by 16 bytes."""


def fa4_available() -> tuple[bool, str]:
    """Whether FA4 can run here, and if not, why."""
    if not torch.cuda.is_available():
        return False, "no CUDA GPU"
    family = _family(torch.device("cuda"))
    if family not in FAMILIES:
        return False, f"the GPU's capability family is {family}, FA4 takes mask mods on 90 and 100"
    return _importable()


@cache
def _importable() -> tuple[bool, str]:
    try:
        import flash_attn.cute  # noqa: F401
    except Exception as error:  # a broken install fails in many ways, and each means the same here
        return False, f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})"
    return True, ""


def _family(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] * 10


def fa4_masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    *,
    mask: Tensor | None = None,
    offset: bool = False,
    causal: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each request's queries over its own segment of keys; see `triton_masked_mha`.

    Arguments and results are those of `triton_masked_mha`. In addition every row of v must be finite, `scale`
    positive, and the head dims must be ones that FA4 takes: multiples of 8, on SM90 up to 256, on SM100 up to
    128 or (192, 128) or (256, 256).

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype, device or value; nothing is written.
        RuntimeError: FA4 cannot run on this device (see `fa4_available`).
    """
    call = check_attention_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, offset, causal, out
    )
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}, must be finite and positive")
    if mask is not None and mask.shape[2] % _MASK_ALIGN_WORDS != 0:
        raise ValueError(f"mask has rows of {mask.shape[2]} words, must be a multiple of {_MASK_ALIGN_WORDS}")
    if not call.q.is_cuda:
        raise ValueError(f"q is on {call.q.device}, must be on a CUDA device")
    family = _family(call.q.device)
    usable, reason = _importable()
    if family not in FAMILIES or not usable:
        raise RuntimeError(f"FA4 cannot run: {reason or f'capability family {family} is not 90 or 100'}")
    _check_head_dims(call, family)
    if call.q.shape[0] == 0 or call.batch_size == 0:
        return call.out, call.lse
    if max_seqlen_q == 0 or max_seqlen_k == 0:
        call.out.zero_()
        call.lse.fill_(-torch.inf)
        return call.out, call.lse
    attended, lse = _launch(call, family, offset, causal, max_seqlen_q, max_seqlen_k, scale)
    if out is None:
        return attended, lse
    call.out.copy_(attended)
    return call.out, lse


def _check_head_dims(call: AttentionCall, family: int) -> None:
    dims = (call.q.shape[2], call.v.shape[2])
    largest = 256 if family == 90 else 128
    in_range = all(_HEAD_DIM_UNIT <= dim <= largest and dim % _HEAD_DIM_UNIT == 0 for dim in dims)
    if not in_range and dims not in ((192, 128), (256, 256)):
        raise ValueError(
            f"q and v have head dims {dims}, must be multiples of {_HEAD_DIM_UNIT} up to {largest}, or "
            f"(192, 128) or (256, 256), for FA4 on capability family {family}"
        )


def _launch(
    call: AttentionCall,
    family: int,
    offset: bool,
    causal: bool,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_varlen_func

    masking: dict[str, Any] = {"causal": causal}
    if call.mask is not None:
        from optimized.mask_mods import mask_mod_for

        masking = {
            "causal": False,
            "mask_mod": mask_mod_for(family, offset),
            "aux_tensors": [_laid_out(call.mask)],
        }
    with torch.no_grad(), device_of(call.q):
        results = flash_attn_varlen_func(
            call.q,
            call.k,
            call.v,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=call.cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            softmax_scale=scale,
            num_splits=1,
            return_lse=True,
            **masking,
        )
    return results[0], results[1]


def _laid_out(mask: Tensor) -> Tensor:
    """The mask as FA4 takes it: without these attributes its layout is fully dynamic and loads are narrow."""
    aligned = mask.data_ptr() % _MASK_ALIGN_BYTES == 0 and all(
        stride % _MASK_ALIGN_WORDS == 0 for stride in mask.stride()[:2]
    )
    aux: Any = mask.detach() if aligned else mask.clone(memory_format=torch.contiguous_format)
    aux.__leading_dim__ = 2
    aux.__assumed_align__ = _MASK_ALIGN_BYTES
    return aux  # type: ignore[no-any-return]
