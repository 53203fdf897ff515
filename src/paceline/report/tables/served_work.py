"""Engines that did the same work, compared; and the reason why other pairs are not compared."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import BETTER, WORSE, Comparison, Report
from paceline.analysis.findings.served import ServedPair
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Table
from paceline.wording import direction, verdict_text

_TONES = {BETTER: "good", WORSE: "bad"}
NOTE = (
    "Engines are compared only if model, data, limits and precision are the same, their token counts agree within 1 % "
    "and their stored answers, if both kept them, begin alike."
)


def tables(report: Report) -> tuple[Table, ...]:
    if not report.served_pairs:
        return ()
    columns = (
        Column("engines", prose=True),
        Column("load", priority=1),
        Column("equal work"),
        Column("metric"),
        Column("first over second"),
        Column("reason", prose=True, priority=2),
    )
    rows = [(pair, row) for pair in report.served_pairs for row in _rows(pair)]
    cells = tuple((pair.cell, pair.other) for pair, _ in rows)
    flags = dict.fromkeys(flag for pair in report.served_pairs for flag in pair.flags)
    return (Table("Engines at equal work", columns, tuple(row for _, row in rows), (NOTE, *flags), cells),)


def _rows(pair: ServedPair) -> Iterator[tuple[Cell, ...]]:
    names = f"{pair.label} : {pair.other_label}"
    head = (Cell(names), Cell(pair.load or ""))
    if not pair.equal:
        yield (*head, Cell(CROSS, "", "bad"), Cell(""), Cell("not ranked", "", "quiet"), Cell("; ".join(pair.reasons)))
        return
    proof = Cell(f"{TICK} {len(pair.checks)} checks", "", "good")
    for c in pair.comparisons:
        yield (*head, proof, Cell(c.metric), _ratio(c, bool(pair.flags)), Cell(c.reason))
    for u in pair.undecided:
        text, ratio = verdict_text(None, u.ratio, None, None, "")
        yield (*head, proof, Cell(u.metric), Cell(text, ratio, "quiet"), Cell(u.reason))
    if not pair.comparisons and not pair.undecided:
        yield (*head, proof, Cell(""), Cell("no interval", "", "quiet"), Cell("too few answers for an interval"))


def _ratio(c: Comparison, flagged: bool) -> Cell:
    word = direction(c.metric, c.ratio)
    text, interval = verdict_text(c.verdict, c.ratio, c.low, c.high, word, c.detectable_ratio)
    return Cell(
        f"{text}{', flagged' if flagged else ''}", interval, "bad" if flagged else _TONES.get(c.verdict, "quiet")
    )
