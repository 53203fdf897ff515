"""Predicted beside measured, run by run; also how predicted numbers are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.analysis.findings import Report
from paceline.report.tables.table import Cell, Column, Table, numeric


class Predicted(Protocol):
    """A step time with its interval, beside its measurement."""

    @property
    def predicted_s(self) -> float: ...

    @property
    def low_s(self) -> float: ...

    @property
    def high_s(self) -> float: ...

    @property
    def measured_s(self) -> float: ...

    @property
    def error(self) -> float: ...

    @property
    def covered(self) -> bool: ...


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if value >= 1000:
        digits = len(str(int(value)))
        return f"{round(value, 3 - digits):,.0f}"
    return f"{value:.3g}"


def amount(count: float) -> str:
    """`2B`, `1.4T`: a number of tokens as people say it."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{suffix}"
    return number(count)


def between(value: float, low: float, high: float) -> Cell:
    return Cell(number(value), f"{number(low)} to {number(high)}")


def of_report(report: Report) -> tuple[Table, ...]:
    return (beside([(one.run, one) for one in report.predictions]),) if report.predictions else ()


def beside(pairs: Sequence[tuple[str, Predicted]]) -> Table:
    """Predicted beside measured, run by run."""
    rows = tuple(
        (
            Cell(name),
            between(1000 * one.predicted_s, 1000 * one.low_s, 1000 * one.high_s),
            Cell(number(1000 * one.measured_s)),
            Cell(f"{100 * one.error:+.1f}"),
            Cell("yes" if one.covered else "no", "", "" if one.covered else "bad"),
        )
        for name, one in pairs
    )
    columns = (
        Column("run"),
        numeric("predicted step, ms"),
        numeric("measured, ms"),
        numeric("error, %"),
        Column("in interval"),
    )
    return Table("Predicted beside measured", columns, rows)
