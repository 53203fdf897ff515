"""What must stand beside the speed of a served model: how good its answers are, what they cost, and which of two
replicas or engines is faster at equal work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.analysis.cost import served
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Report
from paceline.analysis.served import accuracy, equal_work, paired
from paceline.results.records import RunRecord


def added_to(report: Report, records: Sequence[RunRecord], costing: Costing) -> Report:
    """The report with all of it; the same report where nothing was served."""
    asked = [record for record in records if record.requests]
    if not asked:
        return report
    answers = accuracy.analyse(asked)
    costs = served.analyse(asked, costing)
    scores = (m for found in answers for m in (*found.scores, *(s for r in found.replicas for s in r.scores)))
    measured = (*scores, *served.measurements(costs), *served.energies(asked))
    return dataclasses.replace(
        report,
        accuracy=answers,
        paired=paired.analyse(asked, answers),
        served_pairs=equal_work.analyse(asked, answers),
        served_costs=costs,
        measurements=(*report.measurements, *measured),
        notes=(*report.notes, *_notes(asked, costs, costing)),
    )


def _notes(records: Sequence[RunRecord], costs: Sequence[object], costing: Costing) -> list[str]:
    """Why an answer that was asked for is missing."""
    if costs or costing.prices is None:
        return []
    if any(record.shares_gpu for record in records):
        return ["replicas share a GPU, so no cost of served tokens is stated"]
    if all(stage.replica is not None for record in records for stage in record.stages) and records[0].stages:
        return ["replicas took turns to be compared, so no cost of served tokens is stated"]
    return [
        "--price: no load kept its limits on a device that the price holds for, so no cost of served tokens is stated"
    ]
