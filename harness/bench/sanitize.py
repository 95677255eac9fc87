"""Batches for a memory checker: every kernel on shapes whose tails tempt it to read or write past the end.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python -m harness.bench.sanitize --attention triton --attention fa4

Without the caching allocator every tensor is an allocation of its own, so that one element past its end is seen.
Nothing is judged here: results are the business of `mlacheck run`.
"""

from __future__ import annotations

import click

from harness.problems.names import Force, TopkKind
from harness.problems.problem import Chunks, DataSpec, Dims, Layout, Paging, Problem, Request, TopkSpec

LENGTHS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1),),
    ((0, 129), (0, 31)),
    ((33, 127), (0, 0), (65, 1)),
    ((31, 257),),
    ((95, 2), (64, 33), (1, 1), (0, 5)),
)
"""(context, query) of each request of each batch: around words of 32 keys, tiles of 64, 80, 128 and 256."""
DIMS: tuple[tuple[int, int, int, int, int], ...] = (
    (2, 512, 128, 64, 128),
    (1, 512, 192, 64, 256),
    (3, 512, 256, 0, 256),
    (2, 64, 32, 16, 32),
)
"""heads, kv_lora_rank, nope, rope, v"""


def tempting_problems(sizes: int) -> list[Problem]:
    """Every batch with each of the first `sizes` sizes and every path that can be forced on it."""
    problems = []
    for heads, lora, nope, rope, v in DIMS[:sizes]:
        for lengths in LENGTHS:
            forces: list[Force] = ["dense", "masked", "mqa"]
            if any(context for context, _ in lengths):
                forces.append("masked_remap")
            problems += [
                _problem(Dims(heads=heads, kv_lora_rank=lora, nope=nope, rope=rope, v=v, topk=17), lengths, force)
                for force in forces
            ]
    return problems


def _problem(dims: Dims, lengths: tuple[tuple[int, int], ...], force: Force) -> Problem:
    kinds: tuple[TopkKind, ...] = tuple("random" for _ in lengths)
    return Problem(
        dims=dims,
        scale=(dims.nope + dims.rope) ** -0.5,
        requests=tuple(Request(context_len=context, query_len=query) for context, query in lengths),
        paging=Paging(block_size=16, order="reversed"),
        chunks=Chunks(row_budget=48, max_context_chunk=48, split_alignment=16),
        topk=TopkSpec(kinds=kinds, seed=3),
        data=DataSpec(seed=4),
        layout=Layout(poison="nan"),
        force=force,
    )


@click.command()
@click.option("--attention", "attentions", multiple=True, type=click.Choice(["triton", "fa4"]), default=("triton",))
@click.option("--sizes", type=click.IntRange(1, len(DIMS)), default=len(DIMS), help="How many sizes, published first.")
def main(attentions: tuple[str, ...], sizes: int) -> None:
    """Run every tempting batch through the layer; exit code 2 where an attention kernel cannot run."""
    import torch

    from harness.checks.case import default_device
    from harness.problems.tensors import build_inputs
    from harness.subjects.base import NotRunnable
    from harness.subjects.ours import OurLayer

    problems = tempting_problems(sizes)
    for attention in attentions:
        subject = OurLayer(attention)
        try:
            subject.require_runnable()
        except NotRunnable as reason:
            raise click.ClickException(str(reason)) from None
        for problem in problems:
            subject.prefill(problem, build_inputs(problem, default_device()), traced=False)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        click.echo(f"ours[{attention}]: {len(problems)} batches ran to the end")


if __name__ == "__main__":
    main()
