"""Served models: latency and throughput by scenario."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.findings import Measurement, Report
from paceline.present.quantity import MISSING, Scale, format_brief, format_parts
from paceline.present.standing import axis_text
from paceline.present.tables import Cell, Column, Table
from paceline.spec import SERVED, Scalar

MS, PERCENT, PLAIN = Scale("ms", 1e3), Scale("%", 100.0), Scale("tokens/s")
# metric, heading, scale, priority
_COLUMNS: tuple[tuple[str, str, Scale, int], ...] = (
    ("output_tokens_per_s", "output, tokens/s", PLAIN, 0),
    ("requests_per_s", "requests/s", Scale("requests/s"), 2),
    ("ttft_p50_s", "TTFT p50, ms", MS, 0),
    ("ttft_p99_s", "TTFT p99, ms", MS, 1),
    ("tpot_p50_s", "TPOT p50, ms", MS, 0),
    ("tpot_p99_s", "TPOT p99, ms", MS, 1),
    ("latency_p99_s", "latency p99, ms", MS, 3),
    ("goodput_ratio", "in time, %", PERCENT, 2),
    ("failed_ratio", "failed, %", PERCENT, 2),
)
_LOAD = ("concurrency", "rate_per_s", "engine", "data", "partition")


def tables(report: Report) -> tuple[Table, ...]:
    """Empty where the report holds no such runs."""
    cells = _cells(report)
    if not cells:
        return ()
    columns = (Column("scenario"), *(Column(text, numeric=True, priority=n) for _, text, _, n in _COLUMNS))
    rows = tuple(_row(_load_text(measured, cells), measured) for measured in cells.values())
    note = "Latency counts from when a request was due. TTFT: first token; TPOT: each further one."
    return (Table("Served model", columns, rows, (note,), tuple((cell,) for cell in cells)),)


def sentence(report: Report) -> str:
    """The most tokens a second, and what the first token took there."""
    found = [cell for cell in _cells(report).values() if cell["output_tokens_per_s"].value is not None]
    if not found:
        return ""
    best = max(found, key=lambda cell: cell["output_tokens_per_s"].value or 0.0)
    rate, first = best["output_tokens_per_s"], best["ttft_p50_s"]
    where = _load_text(best, _cells(report))
    return (
        f"Served {format_brief(rate, PLAIN)} tokens/s at most ({where}), "
        f"the first token after {format_brief(first, MS)} ms in the median."
    )


def _cells(report: Report) -> dict[str, dict[str, Measurement]]:
    found: dict[str, dict[str, Measurement]] = {}
    for m in report.measurements:
        if str(m.axes.get("workload")).partition(":")[0] in SERVED:
            found.setdefault(m.cell, {})[m.metric] = m
    order = ("offline", "single_stream")
    return dict(sorted(found.items(), key=lambda each: _place(next(iter(each[1].values())).axes, order)))


def _place(axes: Mapping[str, Scalar], order: tuple[str, ...]) -> tuple[int, str, float]:
    scenario = str(axes.get("scenario"))
    known = order.index(scenario) if scenario in order else len(order)
    return known, scenario, float(axes.get("concurrency") or axes.get("rate_per_s") or 0)


def _load_text(measured: Mapping[str, Measurement], cells: Mapping[str, Mapping[str, Measurement]]) -> str:
    """The scenario, and of its load what tells it from others."""
    axes = next(iter(measured.values())).axes
    everywhere = [next(iter(each.values())).axes for each in cells.values()]
    differing = [name for name in _LOAD if len({str(each.get(name)) for each in everywhere}) > 1]
    words = [axis_text(name, axes) for name in differing if axes.get(name) is not None]
    return ", ".join([str(axes.get("scenario")), *words])


def _row(what: str, measured: Mapping[str, Measurement]) -> tuple[Cell, ...]:
    return (Cell(what), *(_cell(measured.get(metric), scale) for metric, _, scale, _ in _COLUMNS))


def _cell(m: Measurement | None, scale: Scale) -> Cell:
    if m is None or m.value is None:
        return Cell(MISSING, tone="quiet")
    value, interval = format_parts(m.value, m.low, m.high, scale)
    return Cell(value, interval)
