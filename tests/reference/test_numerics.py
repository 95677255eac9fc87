"""Are the declared numerics consistent?"""

from dataclasses import replace

import pytest

from reference.numerics import FA4_SM90, FA4_SM100, TRITON, TRITON_MQA, Numerics, RowSum


def test_roundoffs_belong_to_the_storage_type() -> None:
    assert (TRITON.u16, TRITON.cell) == (2.0**-8, 2.0**-12)
    fp16 = replace(TRITON, storage="fp16")
    assert (fp16.u16, fp16.cell, fp16.tiny) == (2.0**-11, 2.0**-15, 2.0**-25)


def test_presets_are_hashable_and_distinct() -> None:
    assert len({TRITON, TRITON_MQA, FA4_SM90, FA4_SM100}) == 4


def test_bad_declarations_are_refused() -> None:
    with pytest.raises(ValueError, match="storage"):
        Numerics(storage="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps_exp"):
        Numerics(eps_exp=0.0)
    with pytest.raises(ValueError, match="tile_keys"):
        RowSum(tile_keys=100, lanes=8)
    with pytest.raises(ValueError, match="smallest_tile"):
        RowSum(tile_keys=16, smallest_tile=32)
    with pytest.raises(ValueError, match="lanes"):
        RowSum(lanes=0)
