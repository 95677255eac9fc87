"""Compiles the attention kernels for a GPU that need not be there, and prints what the machine code holds.

Run as a script, in a process of its own: Triton fixes its mode, compiled or interpreted, when it is imported.
Arguments: `<compute capability>:<kernel>` each. Prints a JSON object: for each argument the number of warp-group
products and of 128-bit asynchronous copies, or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

POINTERS = {
    "q_ptr": "*bf16",
    "k_ptr": "*bf16",
    "v_ptr": "*bf16",
    "out_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "scale_log2": "fp32",
    "kv_scale": "fp32",
    "kv_ptr": "*bf16",
}
INT32 = ("num_heads", "num_groups", "num_q_tiles", "num_rows")


def compile_kernel(capability: int, name: str) -> tuple[int, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from optimized.attention import mha_kernels as mha
    from optimized.attention.tiles import _compiled_mqa_tiles, _compiled_tiles, split_head_dim
    from optimized.sparse_mqa_kernel import sparse_mqa_kernel

    shared = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}[capability]
    types, warps, stages = dict(POINTERS), 4, 3
    if name.startswith("list"):
        kernel = mha.list_key_tiles_kernel
        keys = mha.MASKED_FROM_KEY_START if name.endswith("offset") else mha.MASKED
        constants = {"KEYS": keys, "BLOCK_M": 128, "BLOCK_N": 64, "LIST_WORDS": 32}
    elif name.startswith("mqa"):
        kernel = sparse_mqa_kernel
        latent, rope = (512, 0) if name == "mqa_no_rope" else (512, 64)
        tiles = _compiled_mqa_tiles(latent, rope, 64, shared)
        warps, stages = tiles.num_warps, tiles.num_stages
        cache_format = {"mqa_fp8_e4m3": 1, "mqa_fp8_ds_mla": 2}.get(name, 0)
        if cache_format:
            types["kv_ptr"] = "*u8"
        constants = {
            "STRIDE_UNIT": 8,
            "FORMAT": cache_format,
            "FOLDED": False,
            "LATENT": latent,
            "ROPE": rope,
            "BLOCK_LATENT": latent,
            "BLOCK_ROPE": rope,
            "BLOCK_T": 1,
            "BLOCK_H": tiles.block_h,
            "BLOCK_N": tiles.block_n,
        }
    else:
        kernel = mha.masked_mha_kernel
        _, head_dim, v_dim, kind, *narrow = name.split("_")
        block_d, tail = split_head_dim(int(head_dim))
        block_dv = max(triton.next_power_of_2(int(v_dim)), 16)
        mha_tiles = _compiled_tiles(block_d, tail, block_dv, shared)
        warps, stages = mha_tiles.num_warps, mha_tiles.num_stages
        keys = {"full": 0, "causal": 1, "masked": 2, "offset": 3}[kind]
        masked = keys >= mha.MASKED.value
        constants = {
            "STRIDE_UNIT": 1 if narrow else 8,
            "KEYS": keys,
            "USE_LIST": masked,
            "FOLDED": False,
            "D": int(head_dim),
            "DV": int(v_dim),
            "BLOCK_D": block_d,
            "BLOCK_D_TAIL": tail,
            "BLOCK_DV": block_dv,
            "BLOCK_G": 1,
            "BLOCK_M": mha_tiles.block_m,
            "BLOCK_N": mha_tiles.block_n,
        }
        if not masked:
            constants |= {"mask_ptr": None, "list_ptr": None}

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        default = "*i32" if argument.endswith("_ptr") else "i32" if argument in INT32 else "i64"
        return types.get(argument, default)

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if signature[a].startswith("*")}
    values = {(kernel.arg_names.index(a),): value for a, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= shared, f"{compiled.metadata.shared} bytes of shared memory"
    ptx = compiled.asm["ptx"]
    return ptx.count("wgmma.mma_async"), ptx.count("cp.async.cg")


def main(arguments: list[str]) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    results: dict[str, Any] = {}
    for argument in arguments:
        capability, name = argument.split(":")
        try:
            results[argument] = compile_kernel(int(capability), name)
        except Exception as error:  # each kernel is its own test
            results[argument] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
