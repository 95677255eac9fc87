"""`mlacheck measure tightness|sensitivity|agreement|masks`: what the judge is worth, measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from harness.commands.common import Refusal

if TYPE_CHECKING:
    from harness.measure.kernels import Kernel
    from harness.measure.tightness import Cell, Tightness


JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line of stdout.")
SUBJECT_OPTION = click.option(
    "--subject", default="model", show_default=True, help="ours[triton], ours[fa4], model[sm90], model[triton], ..."
)
SEED_OPTION = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)


@click.group()
def measure() -> None:
    """Measure the judge: margins of right results, faults noticed, agreement of oracles and of masks.

    Exit code 1 if a right result was accused or a target was missed.
    """


@measure.command()
@SUBJECT_OPTION
@click.option("--rows", type=click.IntRange(min=1), default=20_000, show_default=True, help="(token, head) rows.")
@SEED_OPTION
@JSON_OPTION
def tightness(subject: str, rows: int, seed: int, as_json: bool) -> None:
    """Largest err / tol by input family over 1 to 8 chunks, and its histogram."""
    _use_one_thread()
    from harness.measure.tightness import CHUNKS
    from harness.measure.tightness import measure as run

    found = run(_kernel(subject), rows, seed=seed)
    title = (
        f"largest err / tol of {found.subject}, output and LSE, over 1 to 8 chunks: {found.cases} cases, "
        f"{found.rows} (token, head) rows, {found.seconds:.0f} s"
    )
    families = {name: list(row.values()) for name, row in found.cells.items()}
    _table(
        title,
        ["family", *(str(n) for n in CHUNKS), "all"],
        [[name, *(_pair([cell]) for cell in cells), _pair(cells)] for name, cells in families.items()],
    )
    _table(
        "rows by err / tol of the output (0 to 0.1, 0.1 to 0.2, ..., above 1)",
        ["family", *(f"{i / 10:.1f}" for i in range(11))],
        [[name, *(str(sum(c.out_bins[i] for c in cells)) for i in range(11))] for name, cells in families.items()],
    )
    exact = f"{found.exact_cases - len(found.inexact)} of {found.exact_cases} exact cases are right bit for bit"
    click.echo(f"{exact} (single key, one-hot softmax, empty rows)")
    for line in found.inexact[:5]:
        click.echo(f"not exact: {line}")
    _finish(_tightness_json(found), found.sound, as_json)


def _pair(cells: Sequence[Cell]) -> str:
    rows = [cell for cell in cells if cell.rows]
    if not rows:
        return "-"
    return f"{max(c.out_max for c in rows):.2f} {max(c.lse_max for c in rows):.2f}"


def _tightness_json(found: Tightness) -> dict[str, Any]:
    return {
        "subject": found.subject,
        "cases": found.cases,
        "rows": found.rows,
        "seconds": round(found.seconds, 1),
        "sound": found.sound,
        "exact_cases": found.exact_cases,
        "inexact": found.inexact,
        "families": {
            name: {
                "out_max": [round(cell.out_max, 4) for cell in row.values()],
                "lse_max": [round(cell.lse_max, 4) for cell in row.values()],
                "out_bins": [sum(cell.out_bins[i] for cell in row.values()) for i in range(11)],
                "lse_bins": [sum(cell.lse_bins[i] for cell in row.values()) for i in range(11)],
                "worst": max(row.values(), key=lambda cell: cell.out_max).worst,
            }
            for name, row in found.cells.items()
        },
    }


@measure.command()
@SUBJECT_OPTION
@click.option("--trials", type=click.IntRange(min=1), help="Wrong keys for each family, size and chunk count.")
@SEED_OPTION
@JSON_OPTION
def sensitivity(subject: str, trials: int | None, seed: int, as_json: bool) -> None:
    """Share of single dropped and added keys that are noticed, by the bound and by a read-out."""
    _use_one_thread()
    from dataclasses import asdict

    from harness.measure.sensitivity import measure as run

    kernel = _kernel(subject)
    on_gpu = kernel.device.type == "cuda"
    found = run(
        kernel, trials or (4096 if on_gpu else 256), seed=seed, n=128 if on_gpu else 32, heads=8 if on_gpu else 2
    )
    _table(
        f"share of single wrong keys that are noticed, {found.subject}, {found.seconds:.0f} s",
        [
            "family",
            "top-k",
            "chunks",
            "fault",
            "trials",
            "LSE",
            "output",
            "either",
            "row (any head)",
            "read-out",
            "target",
        ],
        [
            [
                c.family,
                str(c.topk),
                str(c.chunks),
                c.fault,
                str(c.trials),
                f"{c.by_lse / c.trials:.2%}",
                f"{c.by_out / c.trials:.2%}",
                f"{c.share:.2%}",
                f"{c.rows_noticed / c.rows:.2%}",
                f"{c.named}/{c.rows_read}",
                "met" if c.met else "MISSED",
            ]
            for c in found.cells
        ],
    )
    cells = [{**asdict(c), "share": round(c.share, 5), "met": c.met} for c in found.cells]
    numbers = {"subject": found.subject, "seconds": round(found.seconds, 1), "met": found.met, "cells": cells}
    _finish(numbers, found.met, as_json)


@measure.command()
@click.option("--cases", type=click.IntRange(min=1), default=500, show_default=True, help="Cases of each oracle.")
@click.option("--spots", type=click.IntRange(min=0), default=50, show_default=True, help="Rows compared with mpmath.")
@SEED_OPTION
@JSON_OPTION
def agreement(cases: int, spots: int, seed: int, as_json: bool) -> None:
    """Both oracles and mpmath: largest differences in units of 1e-14 sum p|v| and 1e-14 (1 + |LSE|)."""
    _use_one_thread()
    from dataclasses import asdict

    from harness.measure.agreement import measure as run

    found = run(cases, spots, seed=seed)
    _table(
        f"largest difference in units of 1e-14 sum p|v| (output) and 1e-14 (1 + |LSE|), {found.seconds:.0f} s",
        ["what", "cases", "output", "LSE"],
        [
            [
                "attention: dense and gathered",
                str(found.attend_cases),
                f"{found.attend_out:.3f}",
                f"{found.attend_lse:.3f}",
            ],
            [
                "prefill: dense and gathered",
                str(found.prefill_cases),
                f"{found.prefill_out:.3f}",
                f"{found.prefill_lse:.3f}",
            ],
            ["both against mpmath, 60 digits", str(found.spots), f"{found.spot_out:.3f}", f"{found.spot_lse:.3f}"],
        ],
    )
    if spots and not found.spots:
        click.echo("mpmath is not installed: no spot was compared")
    _finish({**asdict(found), "met": found.met}, found.met, as_json)


@measure.command()
@click.option("--batches", type=click.IntRange(min=1), default=10_000, show_default=True)
@SEED_OPTION
@JSON_OPTION
def masks(batches: int, seed: int, as_json: bool) -> None:
    """Global mask, remapped masks and allowed sets of drawn batches, bit for bit."""
    _use_one_thread()
    from dataclasses import asdict

    from harness.measure.masks import measure as run

    found = run(batches, seed=seed)
    click.echo(
        f"{found.batches} batches, {found.requests} requests, {found.pieces} masks of single calls: "
        f"{found.bits} bits compared, {len(found.wrong)} requests differ, {found.seconds:.0f} s"
    )
    for line in found.wrong[:10]:
        click.echo(line)
    _finish({**asdict(found), "wrong": found.wrong[:100], "met": not found.wrong}, not found.wrong, as_json)


def _use_one_thread() -> None:
    """The cases are small: on the CPU a second thread only waits."""
    import torch

    torch.set_num_threads(1)


def _kernel(name: str) -> Kernel:
    from harness.measure.kernels import kernel
    from harness.subjects.base import NotRunnable, SubjectError

    try:
        return kernel(name)
    except (SubjectError, NotRunnable) as error:
        raise Refusal(str(error)) from None


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=180, markup=False, highlight=False).print(table)


def _finish(numbers: dict[str, Any], good: bool, as_json: bool) -> None:
    """The JSON line, and exit code 1 if a target was missed."""
    if as_json:
        click.echo(json.dumps(numbers))
    sys.exit(0 if good else 1)
