"""Published model shapes."""

from __future__ import annotations

from dataclasses import dataclass

from harness.problems.parts import Dims


@dataclass(frozen=True)
class Model:
    """The attention sizes of a published model, over all ranks."""

    heads: int
    kv_lora_rank: int
    nope: int
    rope: int
    v: int
    topk: int

    def dims(self, heads: int, topk: int | None = None) -> Dims:
        """This model with `heads` heads on the rank; tensor-parallel size accordingly, at least 1."""
        return Dims(
            heads=heads,
            kv_lora_rank=self.kv_lora_rank,
            nope=self.nope,
            rope=self.rope,
            v=self.v,
            topk=self.topk if topk is None else topk,
            tensor_parallel_size=max(self.heads // heads, 1),
        )


MODELS: dict[str, Model] = {
    "deepseek-v3.2": Model(heads=128, kv_lora_rank=512, nope=128, rope=64, v=128, topk=2048),
    "glm-5": Model(heads=64, kv_lora_rank=512, nope=192, rope=64, v=256, topk=2048),
    "glm-5.3-flash": Model(heads=64, kv_lora_rank=512, nope=256, rope=0, v=256, topk=2048),
}
