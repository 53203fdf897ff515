"""Collectives as nccl-tests prints them, fits, overlap, suspects."""

from __future__ import annotations

from paceline.findings import Report
from paceline.present.tables import Table


def tables(report: Report) -> tuple[Table, ...]:
    """Empty where the report holds no such runs."""
    return ()
