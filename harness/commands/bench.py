"""`mlacheck bench`: performance figures."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("what", type=click.Choice(["prefill", "compiles"]))
@click.option("--attention", "attentions", multiple=True, type=click.Choice(["triton", "fa4"]), default=("triton",))
@click.option("--batches", type=click.IntRange(1), default=200, show_default=True, help="For `compiles`.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="For `compiles`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of stdout.")
def bench(what: str, attentions: tuple[str, ...], batches: int, seed: int, as_json: bool) -> None:
    """Time whole prefills and their attention calls, or count what unseen batches compile.

    Exit code 0: measured; 2: an attention kernel cannot run here.
    """
    from harness.subjects.base import NotRunnable

    try:
        rows = _prefills(list(attentions)) if what == "prefill" else _compiles(list(attentions), batches, seed)
    except NotRunnable as reason:
        click.echo(f"mlacheck: {reason}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps({"what": what, "rows": rows}))


def _prefills(attentions: list[str]) -> list[dict[str, object]]:
    from harness.bench.kernels import time_prefills

    rows: list[dict[str, object]] = []
    for timing in time_prefills(attentions):
        click.echo(f"{timing.what:34} {timing.shape:36} {timing.milliseconds:10.3f} ms  {timing.note}")
        rows.append(vars(timing))
    return rows


def _compiles(attentions: list[str], batches: int, seed: int) -> list[dict[str, object]]:
    from harness.bench.compiles import count_compiles

    rows: list[dict[str, object]] = []
    for attention in attentions:
        count = count_compiles(attention, batches, seed)
        click.echo(
            f"ours[{attention}]: {count.batches} unseen batches after {count.warm_up} of warm-up compiled "
            f"{count.new_triton} Triton kernels (of {count.triton_after}) and {count.new_fa4} FA4 kernels "
            f"(of {count.fa4_after})"
        )
        rows.append({"attention": attention, **vars(count)})
    return rows
