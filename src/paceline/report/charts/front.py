"""The main chart of a report: speed against memory, tokens/s over GPUs, throughput per user, predicted peaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.analysis.findings import Measurement, Report, ScalingPoint, ServedLoad
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.analysis.findings.served import TPOT
from paceline.report.charts.chart import (
    CURVE,
    GREY,
    LINES,
    LOG,
    LOG2,
    MARK,
    SERVED,
    Axis,
    Chart,
    Point,
    Series,
    in_full,
    measured_point,
    others,
    strategies,
    used,
)
from paceline.report.charts.served import load_series
from paceline.report.tables.memory import labels, scale
from paceline.report.text.cells import THROUGHPUT, Group, groups, ranked_cells
from paceline.report.text.load_names import beside, family_words, marked, served_words, short_load
from paceline.wording import Scale, format_number, format_parts, places, short_names

PARETO, SCALED, PER_USER, PREDICTED = "pareto", "scaling_rate", "served_per_user", "memory_predicted"
GIB = Scale("GiB", 2.0**-30)
FRONT, IDEAL, EXACT = "Pareto front", "ideal", "exact prediction"
_MEMORY = "peak_memory_bytes"


def lead_group(report: Report) -> Group | None:
    """The group that the first screen is about: that of the headline, else the largest."""
    found = groups(report)
    speed = [r for r in report.recommendations if r.metric == THROUGHPUT]
    lead = max(speed, key=lambda r: len(r.runs), default=None)
    runs = set(lead.runs) if lead else set()
    return max(found, key=lambda group: sum(len(runs & set(row.runs)) for row in group.rows), default=None)


# --- training: speed against memory ---


def pareto(report: Report) -> Iterator[Chart]:
    """Tokens/s against peak memory of the lead group: no cell of the front is slower and larger than another."""
    group = lead_group(report)
    if group is None:
        return
    points, units = [], []
    for row in group.rows:
        speed, memory = row.measurements.get(THROUGHPUT), row.measurements.get(_MEMORY)
        if speed is None or memory is None or not memory.value:
            continue
        units.append(speed.unit)
        point, size = measured_point(speed, Scale(speed.unit)), GIB.apply(memory.value) or 0.0
        detail = f"{point.detail}\n{format_number(size, places(size, None, None))} GiB peak memory"
        points.append(
            replace(point, x=size, series=row.label, label=row.label, text=row.label, drawn=MARK, detail=detail)
        )
    if len(points) < 2:
        return
    listed = " Work differs between these cells on purpose." if group.is_listed else ""
    others = len(groups(report)) - 1
    more = f" {others} more group{'' if others == 1 else 's'} below." if others else ""
    front = front_of(points)
    yield Chart(
        name=PARETO,
        title="Speed against memory",
        subtitle=f"{group.title}. Up is faster, left needs less memory; the dashed line joins cells that no other "
        f"beats in both. Whiskers are 95 % intervals. Axes do not begin at 0.{listed}{more}",
        kind=LINES,
        x=Axis(label="peak memory, GiB", unit="GiB", ticks="round", zero=False),
        y=Axis(label=units[0], unit=units[0], zero=False),
        points=(*points, *front),
        series=(*used(strategies(report), points), *_grey(FRONT, front)),
    )


def front_of(points: Sequence[Point], larger_x: bool = False) -> list[Point]:
    """The points that no other beats in both, as a curve; none if it has fewer than two."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (float(p.x or 0.0), -p.y), reverse=larger_x):
        if all(point.y > other.y for other in kept):
            kept.append(point)
    if len(kept) < 2:
        return []
    return [Point(x=p.x, y=p.y, series=FRONT, drawn=CURVE, cells=p.cells) for p in kept]


def _grey(name: str, points: Iterable[Point]) -> tuple[Series, ...]:
    return (Series(name=name, colour=GREY, dashed=True),) if any(points) else ()


# --- scaling: tokens/s over GPUs ---


def scaled(report: Report) -> Iterator[Chart]:
    """Measured throughput at each world size beside the ideal line through the baseline of each series."""
    cells = ranked_cells(report)
    known = [p for p in report.scaling if p.cell in cells and p.baseline in cells]
    colours = {s.name: s.colour for s in strategies(report)}
    for kind in sorted({p.kind for p in known}, reverse=True):
        ours = sorted((p for p in known if p.kind == kind), key=lambda p: (p.series, p.world_size))
        names = short_names(sorted({p.series for p in ours}))
        points = [point for name in names for point in _grown([p for p in ours if p.series == name], names, cells)]
        on_gpus = all(p.efficiency.axes.get("device") == "cuda" for p in ours)
        what = "GPUs" if on_gpus else "processes"
        unit = cells[ours[0].cell][THROUGHPUT].unit
        strategy = {names[p.series]: describe(p.efficiency.axes, ()) for p in ours}
        yield Chart(
            name=f"{SCALED}_{kind}",
            title=f"Throughput over {what}, {kind} scaling",
            subtitle="Dashed: ideal, the measured rate of the baseline times the number of devices. Whiskers are 95 % "
            "intervals. Both axes are logarithmic.",
            kind=LINES,
            x=Axis(label=what, scale=LOG2),
            y=Axis(label=unit, unit=unit, scale=LOG, zero=False),
            points=tuple(points),
            series=(
                *(Series(name=name, colour=colours.get(strategy[name], 0)) for name in strategy),
                *_grey(IDEAL, points),
            ),
        )


def _grown(
    found: Sequence[ScalingPoint], names: Mapping[str, str], cells: Mapping[str, Mapping[str, Measurement]]
) -> Iterator[Point]:
    first = found[0]
    sizes = {first.baseline: first.baseline_world_size} | {p.cell: p.world_size for p in found}
    efficiency = {p.cell: p.efficiency for p in found}
    base = cells[first.baseline][THROUGHPUT]
    for cell, size in sorted(sizes.items(), key=lambda item: item[1]):
        m = cells[cell][THROUGHPUT]
        name, point = names[first.series], measured_point(m, Scale(m.unit))
        share = efficiency.get(cell)
        words = f"{format_parts(share.value, None, None, Scale('%', 100.0))[0]} %" if share else ""
        yield replace(
            point,
            x=size,
            series=name,
            label=f"{name}, {axis_text('world_size', m.axes)}",
            text=words,
            detail=f"{in_full(m)}" + (f"\n{words} of ideal" if words else "\nthe baseline"),
        )
        ideal = (base.value or 0.0) * size / first.baseline_world_size
        yield Point(x=size, y=ideal, series=IDEAL, group="", drawn=CURVE, cells=(cell,))


# --- served: what all users get against what one gets ---


def per_user(report: Report) -> Iterator[Chart]:
    """Output tokens/s of all users against tokens/s of one of them, a mark for each load."""
    found = report.served_shapes
    loads = [load for load in found.loads if load.is_believed and load.output_tokens_per_s] if found else []
    known = [(load, tpot) for load in loads if (tpot := _tpot(load))]
    if found is None or len(known) < 2:
        return
    named = beside(found)
    coloured = load_series(found)
    # Each load has its own colour, or, where they are too many, each family of loads one that no load has.
    words = [served_words(load, named) for load, _ in known]
    families = not {*words} <= {*coloured}
    if families:
        long = [family_words(load, named) for load, _ in known]
        short = short_names(list(dict.fromkeys(long)))
        words = [short[name] for name in long]
    points = []
    for (load, tpot), name in zip(known, words, strict=True):
        rate = load.output_tokens_per_s or 0.0
        at = short_load(load.rate_per_s, load.concurrency)
        points.append(
            Point(
                x=1 / tpot,
                y=rate,
                series=name,
                label=marked(served_words(load, named), load.is_believed),
                text=at or load.scenario,
                detail=f"{rate:,.4g} tokens/s in all\n{1 / tpot:,.4g} tokens/s per user (median TPOT "
                f"{1e3 * tpot:.3g} ms)\n{load.requests:,} requests",
                drawn=MARK,
                cells=(load.cell,),
                runs=load.runs,
            )
        )
    front = front_of(points, larger_x=True)
    units = {"requests a second" if load.rate_per_s is not None else "requests in flight" for load, _ in known}
    yield Chart(
        name=PER_USER,
        title="Throughput against speed per user",
        subtitle=f"Each mark is one load ({' or '.join(sorted(units, reverse=True))}). Up: more tokens in all; right: "
        "faster for one user (1 / median time per output token). The dashed line joins loads that no other beats in "
        "both.",
        kind=LINES,
        x=Axis(label="tokens/s per user", unit="tokens/s", ticks="round"),
        y=Axis(label="output, tokens/s", unit="tokens/s"),
        points=(*points, *front),
        series=(
            *(others(p.series for p in points) if families else used(coloured.values(), points)),
            *_grey(FRONT, front),
        ),
        section=SERVED,
    )


def _tpot(load: ServedLoad) -> float | None:
    return next((s.p50[0] for s in load.spreads if s.quantity == TPOT and s.p50[0] and s.p50[0] > 0), None)


# --- memory: predicted peaks beside measured ones ---


def predicted(report: Report) -> Iterator[Chart]:
    """Every cell's peak: predicted before the run against measured, with the line of an exact prediction."""
    rows = [row for row in report.memory if row.measured.get("peak") and row.predicted.get("peak")]
    if len(rows) < 2:
        return
    unit, names = scale(rows), labels(rows)
    points = []
    for row in rows:
        expected, real = ((sizes["peak"] or 0) * unit.factor for sizes in (row.predicted, row.measured))
        error = "" if row.error_ratio is None else f"\noff by {100 * row.error_ratio:+.2f} %"
        points.append(
            Point(
                x=expected,
                y=real,
                series=describe(row.axes, ()),
                label=names[row.cell],
                detail=f"measured {format_parts(real, None, None)[0]}, "
                f"predicted {format_parts(expected, None, None)[0]} {unit.unit}{error}",
                drawn=MARK,
                cells=(row.cell,),
                runs=row.runs,
            )
        )
    ends = [end for p in points for end in (float(p.x or 0.0), p.y)]
    line = [Point(x=end, y=end, series=EXACT, drawn=CURVE, cells=()) for end in (min(ends), max(ends))]
    yield Chart(
        name=PREDICTED,
        title="Peak memory: predicted against measured",
        subtitle="Predicted from the model's shape before the run. On the dashed line the prediction is exact; above "
        "it the run needed more. Both axes are logarithmic.",
        kind=LINES,
        x=Axis(label=f"predicted, {unit.unit}", unit=unit.unit, scale=LOG, ticks="round", zero=False),
        y=Axis(label=f"measured, {unit.unit}", unit=unit.unit, scale=LOG, zero=False),
        points=(*points, *line),
        series=(*used(strategies(report), points), *_grey(EXACT, line)),
    )
