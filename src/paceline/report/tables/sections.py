"""Tables about the machine itself: what its fabric, memory and devices can do."""

from __future__ import annotations

from paceline.analysis.findings import Report
from paceline.report.tables import (
    beside_speed,
    ceilings,
    fabric,
    gauges,
    loadgen,
    memory,
    nodes,
    served,
    served_verdicts,
)
from paceline.report.tables.table import Table


def machine_tables(report: Report) -> tuple[Table, ...]:
    """In reading order: served models, nodes, network, memory, compute; empty for a report about training alone."""
    found = (*nodes.tables(report), *fabric.tables(report), *memory.tables(report), *ceilings.tables(report))
    return (*served_tables(report), *found)


def served_tables(report: Report) -> tuple[Table, ...]:
    """Of served models, the one to begin with first: a section of their own on the page."""
    found = (*served.tables(report), *served_verdicts.tables(report), *beside_speed.tables(report))
    return (*found, *loadgen.tables(report))


def machine_details(report: Report) -> tuple[Table, ...]:
    """Too long for a terminal and for a first look: a page folds them."""
    return (*nodes.details(report), *fabric.details(report), *gauges.tables(report))
