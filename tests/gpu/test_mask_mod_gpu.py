"""Do our four mask mods answer every bit right on this GPU, called as SM90 and as SM100 kernels call them?

Every residue of the key start, last partial words, suffixes longer than a query tile. vLLM's mods are read out too
where a wheel is named (`MLACHECK_VLLM_PATH`): that shows that the read-out finds a real fault.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe (nvidia-cutlass-dsl)")

from harness.checks.mask_mod import check_mask_mod, expected_bits
from harness.checks.mask_mod_readout import Calling, read_mask_mod
from harness.checks.mask_mod_shrink import shrink_fault
from harness.subjects.vllm import Vllm
from harness.subjects.vllm_source import PATH_VARIABLE
from optimized.mask_mods import mask_mod_for
from reports.records import Status

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
RESIDUES = [*range(32), 32, 63, 95, 1000, 4097]
WAYS: list[tuple[int, Calling, int]] = [(90, "sm90", 128), (90, "sm90", 80), (90, "sm100", 128), (100, "sm100", 128)]
needs_vllm = pytest.mark.skipif(PATH_VARIABLE not in os.environ, reason=f"needs {PATH_VARIABLE}: an unpacked wheel")


def random_mask(batch: int, rows: int, words: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (batch, rows, words), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).to(CUDA)


@pytest.mark.parametrize(("family", "calling", "tile"), WAYS)
@pytest.mark.parametrize("offset", [False, True])
def test_every_bit_from_every_key_start_and_in_last_partial_words(
    family: int, calling: Calling, tile: int, offset: bool
) -> None:
    start = time.perf_counter()
    mod = mask_mod_for(family, offset)
    bits = 0
    for ending in range(32):
        # lengths end in each of the 32 places of a word, in turn for every key start
        k_lens = [32 * (1 + b % 7) + (ending + b) % 32 for b in range(len(RESIDUES))]
        mask = random_mask(len(RESIDUES), 128, 144, ending)
        record = check_mask_mod(
            "x", mod, mask, [5] * len(RESIDUES), k_lens, RESIDUES if offset else None, calling, tile_keys=tile
        )
        assert record.status is Status.PASS, record.message
        bits += 5 * sum(k_lens)
    name = f"{'offset' if offset else 'dense'} mod for SM{family}, asked as {calling}, tiles of {tile}"
    print(f"\n{name}: {32 * len(RESIDUES)} calls, {bits} bits, exact, {time.perf_counter() - start:.1f} s")


@pytest.mark.parametrize(("family", "calling"), [(90, "sm90"), (100, "sm100")])
@pytest.mark.parametrize("offset", [False, True])
def test_long_suffixes_and_long_segments(family: int, calling: Calling, offset: bool) -> None:
    q_lens, k_lens, starts = [300, 257, 1, 0], [4000, 4001, 1, 77], [31, 1, 7999, 5]
    mask = random_mask(4, 512, 256, 3)
    record = check_mask_mod(
        "x", mask_mod_for(family, offset), mask, q_lens, k_lens, starts if offset else None, calling
    )
    assert record.status is Status.PASS, record.message


def test_a_strided_view_of_a_larger_mask_is_read_as_it_lies() -> None:
    whole = random_mask(3, 256, 64, 4)
    for view in (whole[1:, :128, 8:40], whole[:, 128:, 1:33]):
        record = check_mask_mod("x", mask_mod_for(90, False), view, [9] * len(view), [999] * len(view), None, "sm90")
        assert record.status is Status.PASS, record.message


def test_the_read_out_of_a_side_stream_is_the_same() -> None:
    mask = random_mask(2, 128, 16, 5)
    arguments = (mask_mod_for(100, True), mask, [7, 3], [200, 99], [5, 64], "sm100")
    first = read_mask_mod(*arguments)  # type: ignore[arg-type]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = read_mask_mod(*arguments)  # type: ignore[arg-type]
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_vllm
def test_vllm_mods_are_read_out_and_the_lost_keys_are_named() -> None:
    start = time.perf_counter()
    vllm = Vllm.found()
    mask = random_mask(32, 128, 16, 6)
    q_lens, k_lens = [9] * 32, [390] * 32
    dense = check_mask_mod("dense", vllm.mask_mod(False, CUDA), mask, q_lens, k_lens, None, "sm100")
    print(f"\nvLLM {vllm.source.version}: dense_mask_mod {dense.status}")
    assert dense.status is Status.PASS, dense.message
    mod = vllm.mask_mod(True, CUDA)
    starts = list(range(32))
    seen = read_mask_mod(mod, mask, q_lens, k_lens, starts, "sm100")
    allowed = expected_bits(mask, q_lens, k_lens, starts)
    for r in (0, 1, 5, 16, 31):
        lost = float((allowed[r] & ~seen[r]).sum() / allowed[r].sum())
        print(f"offset_dense_mask_mod, key_start {r:2}: {lost:6.1%} of the selected keys are lost")
    record = check_mask_mod("offset", mod, mask, q_lens, k_lens, starts, "sm100")
    small = shrink_fault(mod, record, record.place.request, "sm100", device=CUDA) if record.status.is_finding else None
    print(f"offset_dense_mask_mod {record.status}: {record.message}")
    print(f"{small.describe() if small else 'no small call shows it'}; {time.perf_counter() - start:.1f} s in all")
    assert all(not bool((s & ~a).any()) for s, a in zip(seen, allowed, strict=True)), "no key is attended by mistake"
