"""What stands beside the speed of a served model: how good its answers are, who is faster at equal work, at what
cost."""

from __future__ import annotations

from paceline.findings import Report
from paceline.present import accuracy, paired, served_cost, served_work
from paceline.present.tables import Table


def tables(report: Report) -> tuple[Table, ...]:
    return tuple(t for about in (accuracy, paired, served_work, served_cost) for t in about.tables(report))


def sentence(report: Report) -> str:
    return " ".join(filter(None, (accuracy.sentence(report), paired.sentence(report))))
