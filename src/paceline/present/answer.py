"""The sentence that answers first: a recommendation where runs were ranked, else what the machine can do."""

from __future__ import annotations

from collections.abc import Callable

from paceline.findings import Recommendation, Report
from paceline.present import ceilings, claims, fabric, memory
from paceline.present.standing import THROUGHPUT, groups
from paceline.present.tables import NO_ANSWER, first_sentence, trains

# What a report about the machine says first; each is empty where the report holds no such runs.
MACHINE_SENTENCES: tuple[Callable[[Report], str], ...] = (
    fabric.sentence,
    memory.sentence,
    ceilings.sentence,
    claims.sentence,
)


def headline(report: Report) -> Recommendation | None:
    """The recommendation that answers the first ranking, in throughput; else the first there is."""
    first = next(iter(groups(report)), None)
    cells = {row.cell for row in first.rows} if first else set()
    ours = [r for r in report.recommendations if any({c.cell, c.other} <= cells for c in r.because)]
    return next((r for r in ours if r.metric == THROUGHPUT), next(iter((*ours, *report.recommendations)), None))


def answer(report: Report) -> tuple[str, str]:
    """The sentence that answers, and what else was said about it: why, and for which group."""
    found = headline(report)
    if found is None:
        machine = " ".join(filter(None, (say(report) for say in MACHINE_SENTENCES)))
        return (NO_ANSWER, machine) if trains(report) or not machine else first_sentence(machine)
    sentence, why = first_sentence(found.text)
    return sentence, " ".join(filter(None, (why, f"Measured on {found.group}." if found.group else "")))


def recommendation_lines(report: Report) -> list[str]:
    """Every recommendation by group: a line for the group, its sentences, then its caveats, each once."""
    lines: list[str] = []
    for name in dict.fromkeys(r.group for r in report.recommendations):
        ours = [r for r in report.recommendations if r.group == name]
        lines += [name, *(f"  {r.category}: {r.text}" for r in ours)]
        lines += dict.fromkeys(f"  caveat: {caveat}" for r in ours for caveat in r.caveats)
    return lines or [part for part in answer(report) if part]
