"""Charts of training: throughput, step time, phases, memory, scaling and what it lost."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import Measurement, Report, ScalingExplanation
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
    measured_point,
    parts,
    strategies,
    thinned,
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
# Characters of a warning that a chart shows whole.
LONGEST_WARNING = 40


def throughput(report: Report) -> Iterator[Chart]:
    found = list(_measured(report, THROUGHPUT))
    points = [_bar(group, row, m, Scale(m.unit), format_parts(m.value, m.low, m.high)[0]) for group, row, m in found]
    unit = " or ".join(dict.fromkeys(m.unit for _, _, m in found))
    yield _bars(report, "throughput", "Throughput", "Higher is better. Whiskers are 95 % intervals.", unit, points)


def peak_memory(report: Report) -> Iterator[Chart]:
    """Peaks against the capacity of the smallest device, or a note if it is far away."""
    points = [_bar(group, row, m, GIB) for group, row, m in _measured(report, "peak_memory_bytes")]
    sizes = [gpu.get("memory_bytes") for machine in report.machines for gpu in machine.get("gpus") or ()]
    capacity = GIB.apply(min((float(size) for size in sizes if size), default=None))
    words = "Process with the highest peak of each cell; lower is better."
    rules: tuple[Rule, ...] = ()
    if capacity is not None and capacity < FAR * max((p.y for p in points), default=0.0):
        rules = (Rule(y=capacity, label=f"device: {format_number(capacity, 1)} GiB"),)
    elif capacity is not None:
        words += f" The device holds {format_number(capacity, 1)} GiB, beyond this axis."
    yield replace(_bars(report, "memory", "Peak memory", words, "GiB", points), rules=rules)


def wire(report: Report) -> Iterator[Chart]:
    """Counted bytes beside the formula's; no chart if nothing was sent."""
    rows = list(_measured(report, WIRE))
    formula = {row.cell: row.measurements[WIRE_FORMULA] for _, row, _ in rows if WIRE_FORMULA in row.measurements}
    scale = scale_of("bytes/step", WIRE, [m.value for m in (*(m for _, _, m in rows), *formula.values())])
    points = [
        replace(
            _bar(group, row, m, scale), expected=scale.apply(formula[row.cell].value) if row.cell in formula else None
        )
        for group, row, m in rows
    ]
    if any(point.y for point in points):
        words = "By the busiest process in one optimizer step; lower is better. Bar: counted; line: formula."
        yield _bars(report, "wire", "Bytes sent per step", words, scale.unit, points)


def host_to_device(report: Report) -> Iterator[Chart]:
    rows = list(_measured(report, "h2d_bytes_per_s"))
    scale = scale_of("bytes/s", "h2d", [m.value for _, _, m in rows])
    points = [_bar(group, row, m, scale) for group, row, m in rows]
    words = (
        "Rate while token batches are copied, from the device's timeline; higher is better. "
        "Whiskers are 95 % intervals."
    )
    yield _bars(report, "host_to_device", "Host to device", words, scale.unit, points)


def _bars(report: Report, name: str, title: str, subtitle: str, unit: str, points: Sequence[Point]) -> Chart:
    return Chart(
        name=name,
        title=title,
        subtitle=subtitle,
        kind=BARS,
        y=Axis(label=unit, unit=unit),
        points=tuple(points),
        series=used(strategies(report), points),
    )


def _bar(group: Group, row: Row, m: Measurement, scale: Scale, text: str | None = None) -> Point:
    point = measured_point(m, scale)
    # The notes of the ranking have the long warnings whole.
    warnings = [text if len(text) <= LONGEST_WARNING else re.split(r" \(|; ", text)[0] for text in group.warnings]
    heading = ", ".join((group.title, *warnings))
    return replace(point, label=row.label, group=heading, series=row.label, text=point.text if text is None else text)


def _measured(report: Report, metric: str) -> Iterator[tuple[Group, Row, Measurement]]:
    """Ranked cells that have the metric, in the order of the ranking."""
    for group in groups(report):
        for row in group.rows:
            m = row.measurements.get(metric)
            if m is not None and m.value is not None:
                yield group, row, m


def step_time(report: Report) -> Iterator[Chart]:
    """Every measured step, or evenly spaced ones if there are too many for a browser to draw without delay.

    y, low and high are the mean and its interval; samples are the single steps.
    """
    found = [(g, row, m) for g, row, m in _measured(report, "step_time_s") if report.distributions.get(row.cell)]
    most = max(MOST_SAMPLES // max(len(found), 1), FEWEST_SAMPLES)
    points = []
    for group, row, m in found:
        seconds = thinned(report.distributions[row.cell], most)
        samples = tuple(float(f"{second * 1e3:.5g}") for second in seconds)
        median = statistics.median(samples)
        text = f"{format_number(median, places(median, None, None))} ms"
        points.append(replace(_bar(group, row, m, MS, text), detail=f"mean {in_full(m, MS)}", samples=samples))
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


def phases(report: Report) -> Iterator[Chart]:
    """The parts of the step. Each is that of its slowest rank, so their sum may exceed the step: then there is no
    rest."""
    points = []
    for group, row, step in _measured(report, "step_time_s"):
        known = {name: row.measurements[name] for name in PHASES if name in row.measurements}
        if not any(m.value for m in known.values()):
            continue
        shares = [(PHASES[name], MS.apply(m.value), in_full(m, MS)) for name, m in known.items()]
        rest = (step.value or 0.0) - sum(m.value or 0.0 for m in known.values())
        shares.append((REST, MS.apply(rest) if rest > 0 else None, ""))
        drawn = [(word, size, detail) for word, size, detail in shares if size]
        whole = (MS.apply(step.value) or 0.0) or 1.0
        base = replace(_bar(group, row, step, MS, ""), low=None, high=None)
        points += [
            replace(
                base,
                y=size,
                series=word,
                text=f"{format_brief(step, MS)} ms" if i == len(drawn) - 1 else "",
                detail="\n".join(filter(None, (f"{word}: {size / whole:.0%} of the step", detail))),
            )
            for i, (word, size, detail) in enumerate(drawn)
        ]
    yield Chart(
        name="phases",
        title="Phases of the step",
        subtitle="Mean time of each phase on its slowest rank. Right: the whole step.",
        kind=STACK,
        y=Axis(label="ms per optimizer step", unit="ms"),
        points=tuple(points),
        series=used(parts((*PHASES.values(), REST)), points),
    )


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
        baselines = {baseline_name(report, p.baseline) for p in ours}
        sizes = {axis_text("world_size", {**p.efficiency.axes, "world_size": p.baseline_world_size}) for p in ours}
        own = f"each series' own run on {sizes.pop()}" if len(sizes) == 1 else "each series' own smallest run"
        points = []
        for p in ours:
            m, name = p.efficiency, names[p.series]
            point, speedup = measured_point(m, PERCENT), format_parts(p.speedup_ratio, None, None)[0]
            points.append(
                replace(
                    point,
                    x=p.world_size,
                    series=name,
                    label=f"{name}, {axis_text('world_size', m.axes)}",
                    text=f"{point.text} %",
                    detail=f"{in_full(m)}\nspeed-up {speedup} over {baseline_name(report, p.baseline)}",
                    cells=(p.cell,),
                )
            )
        yield Chart(
            name=f"scaling_{kind}",
            title=f"{kind.capitalize()} scaling against {baselines.pop() if len(baselines) == 1 else own}",
            subtitle="Efficiency; whiskers are 95 % intervals. The baseline was measured in the same campaign.",
            kind=LINES,
            x=Axis(label="GPUs" if on_gpus else "processes", scale=LOG2),
            y=Axis(label="efficiency, %", unit="%"),
            points=tuple(points),
            series=tuple(Series(name=names[name], colour=series[name]) for name in names),
            rules=(Rule(y=100.0, label="ideal"),),
        )


def scaling_loss(report: Report) -> Iterator[Chart]:
    """The ideal step, what exposed communication adds, and the rest."""
    found = sorted(report.explanations, key=lambda e: (e.kind, e.series, e.world_size))
    points = [point for e in found for point in _loss(e)]
    series = parts(("ideal", "exposed communication", "rest", "not measured"))
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
    """The parts add up to the measured step at most: exposed communication is cut to the loss."""
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
