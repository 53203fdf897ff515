"""Charts of training: throughput, step time, phases, memory, scaling and what it lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import Measurement, Report, ScalingExplanation, ScalingPoint
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.report.charts.chart import (
    BARS,
    DOTS,
    LINES,
    LOG2,
    STACK,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    in_full,
    numbered,
    strategies,
    used,
)
from paceline.report.tables.scaling import baseline_name
from paceline.report.text.cells import THROUGHPUT, WIRE, WIRE_FORMULA, Group, Row, groups
from paceline.report.text.measurements import format_brief
from paceline.wording import Scale, format_number, format_parts, places, scale_of, short_names

MS, GIB, PERCENT = Scale("ms", 1e3), Scale("GiB", 2.0**-30), Scale("%", 100.0)
PHASES = {
    "data_wait_s": "waiting for data",
    "h2d_s": "copy to device",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
}
REST = "rest of the step"
# Samples of all lanes together: what a browser draws without delay. A lane keeps at least the last number.
MOST_SAMPLES, FEWEST_SAMPLES = 20_000, 40
# A device much larger than every bar would leave nothing to see of them.
FAR = 8


def throughput(report: Report) -> Iterator[Chart]:
    points = [
        _bar(group, row, m, Scale(m.unit), format_parts(m.value, m.low, m.high)[0])
        for group, row, m in _measured(report, THROUGHPUT)
    ]
    yield Chart(
        name="throughput",
        title="Throughput",
        subtitle="Higher is better. Whiskers are 95 % intervals.",
        kind=BARS,
        y=Axis(label="tokens/s", unit="tokens/s"),
        points=tuple(points),
        series=used(strategies(report), points),
    )


def peak_memory(report: Report) -> Iterator[Chart]:
    """Peaks against the capacity of the smallest device, or a note if it is far away."""
    found = list(_measured(report, "peak_memory_bytes"))
    points = [_bar(group, row, m, GIB, format_brief(m, GIB)) for group, row, m in found]
    capacity = GIB.apply(_capacity_bytes(report))
    near = capacity is not None and capacity < FAR * max((p.y for p in points), default=0.0)
    words = "Process with the highest peak of each cell; lower is better."
    if capacity is not None and not near:
        words += f" The device holds {format_number(capacity, 1)} GiB, beyond this axis."
    yield Chart(
        name="memory",
        title="Peak memory",
        subtitle=words,
        kind=BARS,
        y=Axis(label="GiB", unit="GiB"),
        points=tuple(points),
        series=used(strategies(report), points),
        rules=(Rule(y=capacity, label=f"device: {format_number(capacity, 1)} GiB"),) if capacity and near else (),
    )


def wire(report: Report) -> Iterator[Chart]:
    """Counted bytes beside the formula's; no chart if nothing was sent."""
    rows = list(_measured(report, WIRE))
    formula = {row.cell: row.measurements[WIRE_FORMULA] for _, row, _ in rows if WIRE_FORMULA in row.measurements}
    scale = scale_of("bytes/step", WIRE, [m.value for m in (*(m for _, _, m in rows), *formula.values())])
    points = [
        replace(
            _bar(group, row, m, scale, format_brief(m, scale)),
            expected=scale.apply(formula[row.cell].value) if row.cell in formula else None,
        )
        for group, row, m in rows
    ]
    if any(point.y for point in points):
        yield Chart(
            name="wire",
            title="Bytes sent per step",
            subtitle="By the busiest process in one optimizer step; lower is better. Bar: counted; line: formula.",
            kind=BARS,
            y=Axis(label=scale.unit, unit=scale.unit),
            points=tuple(points),
            series=used(strategies(report), points),
        )


def host_to_device(report: Report) -> Iterator[Chart]:
    rows = list(_measured(report, "h2d_bytes_per_s"))
    scale = scale_of("bytes/s", "h2d", [m.value for _, _, m in rows])
    points = [_bar(group, row, m, scale, format_brief(m, scale)) for group, row, m in rows]
    yield Chart(
        name="host_to_device",
        title="Host to device",
        subtitle="Rate while token batches are copied, from the device's timeline; higher is better. "
        "Whiskers are 95 % intervals.",
        kind=BARS,
        y=Axis(label=scale.unit, unit=scale.unit),
        points=tuple(points),
        series=used(strategies(report), points),
    )


def _bar(group: Group, row: Row, m: Measurement, scale: Scale, text: str) -> Point:
    return Point(
        y=scale.apply(m.value) or 0.0,
        low=scale.apply(m.low),
        high=scale.apply(m.high),
        label=row.label,
        group=_heading(group),
        series=row.label,
        text=text,
        detail=in_full(m, scale),
        cells=(row.cell,),
        runs=m.runs,
    )


def _heading(group: Group) -> str:
    return ": ".join((group.title, *group.warnings))


def _measured(report: Report, metric: str) -> Iterator[tuple[Group, Row, Measurement]]:
    """Ranked cells that hold the metric, in the order of the ranking."""
    for group in groups(report):
        for row in group.rows:
            m = row.measurements.get(metric)
            if m is not None and m.value is not None:
                yield group, row, m


def _capacity_bytes(report: Report) -> float | None:
    """Memory of the smallest device of all machines; None if none is known."""
    known = [gpu.get("memory_bytes") for machine in report.machines for gpu in machine.get("gpus") or ()]
    return min((float(size) for size in known if size), default=None)


def step_time(report: Report) -> Iterator[Chart]:
    """Every measured step; of more than a browser draws without delay, evenly spaced ones."""
    found = [(g, row, m) for g, row, m in _measured(report, "step_time_s") if report.distributions.get(row.cell)]
    most = max(MOST_SAMPLES // max(len(found), 1), FEWEST_SAMPLES)
    points = [_spread(group, row, m, _thinned(report.distributions[row.cell], most)) for group, row, m in found]
    yield Chart(
        name="step_time",
        title="Step time",
        subtitle="Each dot is one step. Box: middle half; whiskers: 5 to 95 %; number: median. "
        "The axis does not begin at 0.",
        kind=DOTS,
        y=Axis(label="ms per optimizer step", unit="ms", zero=False),
        points=tuple(points),
        series=used(strategies(report), points),
    )


def _spread(group: Group, row: Row, m: Measurement, seconds: Sequence[float]) -> Point:
    """y, low and high are the mean and its interval; samples are the single steps."""
    samples = tuple(float(f"{second * 1e3:.5g}") for second in seconds)
    ordered = sorted(samples)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return Point(
        y=MS.apply(m.value) or 0.0,
        low=MS.apply(m.low),
        high=MS.apply(m.high),
        label=row.label,
        group=_heading(group),
        series=row.label,
        text=f"{format_number(median, places(median, None, None))} ms",
        detail=f"mean {in_full(m, MS)}",
        samples=samples,
        cells=(row.cell,),
        runs=m.runs,
    )


def _thinned(values: Sequence[float], most: int) -> list[float]:
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def phases(report: Report) -> Iterator[Chart]:
    """The step in its parts. Each is its slowest rank's, so they may add up to more than the step: no rest then."""
    points = [
        point
        for group, row, step in _measured(report, "step_time_s")
        if any(name in row.measurements and row.measurements[name].value for name in PHASES)
        for point in _parts(group, row, step)
    ]
    yield Chart(
        name="phases",
        title="Phases of the step",
        subtitle="Mean time of each phase on its slowest rank. Right: the whole step.",
        kind=STACK,
        y=Axis(label="ms per optimizer step", unit="ms"),
        points=tuple(points),
        series=used(numbered((*PHASES.values(), REST)), points),
    )


def _parts(group: Group, row: Row, step: Measurement) -> list[Point]:
    known = {name: row.measurements[name] for name in PHASES if name in row.measurements}
    parts = [(PHASES[name], MS.apply(m.value), in_full(m, MS)) for name, m in known.items()]
    rest = (step.value or 0.0) - sum(m.value or 0.0 for m in known.values())
    parts.append((REST, MS.apply(rest) if rest > 0 else None, ""))
    drawn = [(word, size, detail) for word, size, detail in parts if size]
    whole = (MS.apply(step.value) or 0.0) or 1.0
    return [
        Point(
            y=size,
            label=row.label,
            group=_heading(group),
            series=word,
            text=f"{format_brief(step, MS)} ms" if i == len(drawn) - 1 else "",
            detail="\n".join(filter(None, (f"{word}: {size / whole:.0%} of the step", detail))),
            cells=(row.cell,),
            runs=step.runs,
        )
        for i, (word, size, detail) in enumerate(drawn)
    ]


# --- scaling ---


def scaling(report: Report) -> Iterator[Chart]:
    """Efficiency against the ideal, one chart per kind of scaling, the measured baseline in its title."""
    known = [p for p in report.scaling if p.efficiency.value is not None]
    for kind in sorted({p.kind for p in known}, reverse=True):
        ours = sorted((p for p in known if p.kind == kind), key=lambda p: p.world_size)
        names = short_names(sorted({p.series for p in ours}))
        colours = {s.name: s.colour for s in strategies(report)}
        series = {p.series: colours[describe(p.efficiency.axes, ())] for p in ours}
        on_gpus = all(p.efficiency.axes.get("device") == "cuda" for p in ours)
        yield Chart(
            name=f"scaling_{kind}",
            title=f"{kind.capitalize()} scaling against {_baseline(report, ours)}",
            subtitle="Efficiency; whiskers are 95 % intervals. The baseline was measured in the same campaign.",
            kind=LINES,
            x=Axis(label="GPUs" if on_gpus else "processes", scale=LOG2),
            y=Axis(label="efficiency, %", unit="%"),
            points=tuple(_efficiency(report, p, names[p.series]) for p in ours),
            series=tuple(Series(name=names[name], colour=series[name]) for name in names),
            rules=(Rule(y=100.0, label="ideal"),),
        )


def _efficiency(report: Report, p: ScalingPoint, name: str) -> Point:
    m = p.efficiency
    against = f"speed-up {format_parts(p.speedup_ratio, None, None)[0]} over {baseline_name(report, p.baseline)}"
    return Point(
        x=p.world_size,
        y=PERCENT.apply(m.value) or 0.0,
        low=PERCENT.apply(m.low),
        high=PERCENT.apply(m.high),
        series=name,
        label=f"{name}, {axis_text('world_size', m.axes)}",
        text=f"{format_brief(m, PERCENT)} %",
        detail=f"{in_full(m)}\n{against}",
        cells=(p.cell,),
        runs=m.runs,
    )


def _baseline(report: Report, points: Sequence[ScalingPoint]) -> str:
    names = {baseline_name(report, p.baseline) for p in points}
    if len(names) == 1:
        return names.pop()
    sizes = {axis_text("world_size", {**p.efficiency.axes, "world_size": p.baseline_world_size}) for p in points}
    return f"each series' own run on {sizes.pop()}" if len(sizes) == 1 else "each series' own smallest run"


LOSS = ("ideal", "exposed communication", "rest", "not measured")


def scaling_loss(report: Report) -> Iterator[Chart]:
    """The ideal step, what exposed communication adds, and the rest."""
    found = sorted(report.explanations, key=lambda e: (e.kind, e.series, e.world_size))
    points = [point for e in found for point in _loss(e)]
    palette = {"ideal": 7, "exposed communication": 1, "rest": 0, "not measured": 6}
    series = tuple(Series(name=word, colour=palette[word]) for word in LOSS)
    yield Chart(
        name="scaling_loss",
        title="Where the step time goes",
        subtitle="Ideal is the step time at the baseline's rate.",
        kind=STACK,
        y=Axis(label="ms per optimizer step", unit="ms"),
        points=tuple(points),
        series=used(series, points),
    )


def _loss(e: ScalingExplanation) -> list[Point]:
    """Parts never reach beyond the measured step: communication that a faster step made up for is not drawn."""
    loss = max(e.loss_s, 0.0)
    parts = {"ideal": min(e.ideal_s, e.step_s)}
    if e.exposed_loss_s is None:
        parts["not measured"] = loss
    else:
        exposed = min(max(e.exposed_loss_s, 0.0), loss)
        parts |= {"exposed communication": exposed, "rest": loss - exposed}
    drawn = [(word, seconds * 1e3) for word, seconds in parts.items() if seconds > 0]
    first = e.series.partition(",")[0]
    return [
        Point(
            y=size,
            label=f"{first}, {e.baseline_world_size} \u2192 {e.world_size}",
            group=f"{e.kind} scaling",
            series=word,
            text=f"{e.ideal_s / e.step_s:.0%} efficient" if i == len(drawn) - 1 else "",
            detail=f"{word}: {format_number(size, places(size, None, None))} ms\n{e.text}",
            cells=(e.cell,),
            runs=e.runs,
        )
        for i, (word, size) in enumerate(drawn)
    ]
