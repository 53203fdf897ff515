"""Charts of memory: components stacked up to the peak, predicted beside measured, and the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from paceline.analysis.findings import MemoryRow, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.charts.chart import (
    LINES,
    LOG2,
    RING,
    STACK,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    parts,
    strategies,
    used,
)
from paceline.report.tables.memory import labels, scale
from paceline.results.memory_components import COMPONENTS
from paceline.wording import Scale, format_number, format_parts, short_names

# A device much larger than every bar would leave nothing to see of them.
FAR = 2.5
WORDS = {"communication": "persistent buffers", "other": "temporaries, gathered weights, workspaces"}


def components(report: Report) -> Iterator[Chart]:
    """Two lanes per cell, measured and predicted, each cut where its peak is reached."""
    rows = [row for row in report.memory if row.measured.get("peak")]
    if not rows:
        return
    unit, names = scale(rows), labels(rows)
    rows.sort(key=lambda row: names[row.cell])
    points: list[Point] = []
    for row in rows:
        peak = format_parts(row.measured.get("peak"), None, None, unit)[0]
        points += _stack(row, names[row.cell], row.measured, unit, f"{peak} {unit.unit}", "measured")
        if row.predicted.get("peak"):
            # Adding 0.0 makes a positive zero of what rounds to a negative one.
            error = "" if row.error_ratio is None else f"predicted {round(100 * row.error_ratio, 1) + 0.0:+.1f} %"
            points += _stack(row, names[row.cell], row.predicted, unit, error, "predicted")
    # The smallest device, drawn only if it is near enough.
    capacity = min((row.capacity_bytes for row in rows if row.capacity_bytes), default=None)
    top = max(max(row.measured.get("peak") or 0, row.predicted.get("peak") or 0) for row in rows)
    near = capacity is not None and capacity < FAR * top
    text = f"device: {format_number(capacity * unit.factor, 1)} {unit.unit}" if capacity else ""
    words = "Solid: measured on the process with the highest peak; pale: predicted from the model's shape alone."
    yield Chart(
        name="memory_components",
        title="Memory by component",
        subtitle=words if near or not text else f"{words} The {text}, beyond this axis.",
        kind=STACK,
        y=Axis(label=unit.unit, unit=unit.unit),
        points=tuple(points),
        series=used(parts(map(_word, COMPONENTS)), points),
        rules=(Rule(y=capacity * unit.factor, label=text),) if capacity and near else (),
    )


def _word(component: str) -> str:
    return WORDS.get(component, component)


def _stack(
    row: MemoryRow, name: str, sizes: Mapping[str, int | None], unit: Scale, text: str, kind: str
) -> list[Point]:
    """Components are cut where the peak is reached, because not all are there at one moment."""
    peak, reached = sizes.get("peak") or 0, 0
    parts = []
    for component in COMPONENTS:
        part = min(sizes.get(component) or 0, peak - reached)
        reached += part
        if part > 0:
            parts.append((component, part))
    return [
        Point(
            y=part * unit.factor,
            label=name,
            series=_word(component),
            text=text if i == len(parts) - 1 else "",
            detail=f"{kind}, {_word(component)}: {format_parts(sizes.get(component), None, None, unit)[0]} {unit.unit}",
            faint=kind == "predicted",
            cells=(row.cell,),
            runs=row.runs,
        )
        for i, (component, part) in enumerate(parts)
    ]


def frontier(report: Report) -> Iterator[Chart]:
    """Largest micro batch over the sequence length, proved by probes, beside what was predicted."""
    found = [point for point in report.frontier if point.largest_fitting]
    names = short_names(sorted({point.series for point in found}))
    cells = {run.run: run.cell for run in report.runs}
    points = []
    for p in sorted(found, key=lambda p: (p.series, p.sequence_length)):
        runs = tuple(probe.run for probe in p.probes)
        tried = ", ".join(f"{probe.micro_batch} {probe.status}" for probe in p.probes)
        settled = "" if p.settled else "\nnot settled: sizes in between were not tried"
        proved = Point(
            x=p.sequence_length,
            y=float(p.largest_fitting or 0),
            series=names[p.series],
            label=names[p.series],
            text=str(p.largest_fitting),
            detail=f"fits: {p.largest_fitting}, does not: {p.smallest_failing}\nprobes: {tried}{settled}",
            cells=tuple(dict.fromkeys(cells[run] for run in runs if run in cells)),
            runs=runs,
        )
        points.append(proved)
        if p.predicted:
            detail = f"predicted before any probe: {p.predicted}"
            points.append(replace(proved, y=float(p.predicted), text="", detail=detail, drawn=RING, runs=()))
    yield Chart(
        name="frontier",
        title="Largest micro batch that fits",
        subtitle="Filled: the largest that ran, proved by a probe. Ring: predicted before the first probe.",
        kind=LINES,
        x=Axis(label="sequence length, tokens", scale=LOG2),
        y=Axis(label="micro batch, sequences", scale=LOG2),
        points=tuple(points),
        series=tuple(_series_of(report, names)),
    )


def _series_of(report: Report, names: Mapping[str, str]) -> Iterator[Series]:
    """Each series in the colour of its strategy; all but the first of a strategy are dashed."""
    strategy = {point.series: describe(point.axes, ()) for point in report.frontier}
    colours, seen = {s.name: s.colour for s in strategies(report)}, set[str]()
    for series, name in names.items():
        yield Series(name=name, colour=colours[strategy[series]], dashed=strategy[series] in seen)
        seen.add(strategy[series])
