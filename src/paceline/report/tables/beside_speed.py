"""What stands beside the speed of a served model: how good its answers are, who is faster at equal work, at what
cost."""

from __future__ import annotations

from paceline.analysis.findings import Report
from paceline.report.tables import accuracy, paired, served_cost, served_work
from paceline.report.tables.table import Table


def tables(report: Report) -> tuple[Table, ...]:
    return tuple(t for about in (accuracy, paired, served_work, served_cost) for t in about.tables(report))


def sentence(report: Report) -> str:
    return " ".join(filter(None, (accuracy.sentence(report), paired.sentence(report))))
