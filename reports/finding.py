"""The report of one finding, in Markdown, ready to paste in an issue."""

from __future__ import annotations

from collections.abc import Mapping

from reports.records import CaseRecord, CheckRecord, Place

MAX_INLINE_CASE = 20_000
"""Longer cases are named, not pasted."""


def finding_markdown(record: CaseRecord, *, case_json: str, facts: Mapping[str, str], replay: str) -> str:
    """Verdict, place, terms of the bound, where it ran, how to reproduce it, and the case itself."""
    lines = [
        f"# {record.status.value} at {record.stage or 'case'}: {record.subject}",
        "",
        headline(record),
        "",
    ]
    bad = [check for check in record.checks if check.status.is_finding]
    if bad:
        lines += ["| check | verdict | err/tol | place | message |", "|---|---|---|---|---|"]
        lines += [_check_row(check) for check in bad]
        lines.append("")
    for check in bad:
        if check.terms:
            lines += [f"The tolerance of `{check.check}` there: {terms_text(check.terms)}.", ""]
    lines += ["## Where", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        f"- case: `{record.case_id}` ({record.source})",
        f"- paths: {', '.join(record.paths) or 'none reached'}; context chunks: {record.chunks}",
        f"- tensor hash: `{record.tensor_hash or 'not built'}`",
        "",
        "## Reproduce",
        "",
        "```",
        replay,
        "```",
        "",
    ]
    if len(case_json) <= MAX_INLINE_CASE:
        save = (
            f"Or save this as `case.json` and run `mlacheck replay case.json --subject '{record.subject}'`:"
        )
        lines += [save, "", "```json", case_json, "```", ""]
    return "\n".join(lines)


def headline(record: CaseRecord) -> str:
    """The message of the case, or of its first failing check, with the place."""
    if record.message:
        return record.message
    for check in record.checks:
        if check.status.is_finding:
            return f"{check.check}: {check.message or check.status.value}"
    return record.status.value


def place_text(place: Place) -> str:
    """`request 0, row 17, key 513, word 16, bit 1`: the fields that are known."""
    return ", ".join(f"{name} {value}" for name, value in place.model_dump(exclude_none=True).items())


def terms_text(terms: Mapping[str, float]) -> str:
    """`P rounding 62 %, stores 30 %`: the shares of a tolerance, largest first."""
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in ordered)


def _check_row(check: CheckRecord) -> str:
    margin = "exact" if check.margin is None else f"{check.margin:.3g}"
    message = check.message.replace("|", "\\|").replace("\n", " ")
    return f"| {check.check} | {check.status.value} | {margin} | {place_text(check.place)} | {message} |"
