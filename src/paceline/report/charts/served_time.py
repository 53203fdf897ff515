"""Charts of inference runs over time: requests in flight, and the rate and latency of each replica."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from paceline.analysis.findings import Report, ServedTrace
from paceline.report.charts.chart import (
    AREA,
    LINES,
    LOG,
    LONE,
    NINES,
    SERVED,
    TRAIL,
    WRONG,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    others,
    used,
)
from paceline.report.charts.served import in_ms, spread_points
from paceline.report.text.load_names import beside, cell_words, load_words, marked, replica_words

# The replicas with most answers have their own colours; the others share one.
MOST_REPLICAS = 5
MOST_COMPARED = 3
OTHERS = "other replicas"
LATE, FAILED = "late or failed", "failed"
RATE, FIRST = "output, tokens/s", "TTFT median, ms"
TIME = Axis(label="s since the start", unit="s", ticks="round", shared=False)


def in_flight(report: Report) -> Iterator[Chart]:
    """A panel per cell: replicas on top of each other, dots where requests ended late or failed."""
    traces = _traces(report)
    several = any(len(trace.replicas) > 1 for trace in traces.values())
    stacked = "replicas on top of each other, " if several else ""
    words = f"Sent and not yet answered, {stacked}one launch of each cell."
    if wrong := [trace for trace in traces.values() if any(trace.late)]:
        ended = "ended late or failed" if any(trace.limited for trace in wrong) else "failed"
        words += f" Dots: times at which requests {ended}."
    rules: list[Rule] = []
    for group, trace in traces.items():
        rules += _deaths(group, trace)
        if len(trace.stages) > 1:
            names = _names(trace)
            for start, rate, concurrency, replica in trace.stages:
                label = load_words(rate, concurrency) if replica is None else names.get(replica, f"replica {replica}")
                rules.append(Rule(y=start, label=label, group=group, upright=True))
    points = [point for group, trace in traces.items() for point in _flight_points(group, trace)]
    yield Chart(
        name="served_in_flight",
        title="Requests in flight",
        subtitle=words,
        kind=LINES,
        x=TIME,
        y=Axis(label="in flight", shared=False),
        points=tuple(points),
        series=used(_series(traces.values()), points),
        rules=tuple(rules),
        section=SERVED,
        # A single launch gets the whole width.
        panel_px=380 if len(traces) > 1 else 560,
    )


def _flight_points(group: str, trace: ServedTrace) -> Iterator[Point]:
    names = _names(trace)
    stacked: dict[str, list[float]] = {}
    for replica in trace.replicas:
        below = stacked.setdefault(names[replica.replica], [0.0] * len(trace.seconds))
        stacked[names[replica.replica]] = [a + b for a, b in zip(below, replica.in_flight, strict=True)]
    base = Point(y=0.0, group=group, cells=(trace.cell,), runs=(trace.run,))
    floor = [0.0] * len(trace.seconds)
    for name, counts in stacked.items():
        heights = [a + b for a, b in zip(floor, counts, strict=True)]
        for at, count, low, high in zip(trace.seconds, counts, floor, heights, strict=True):
            detail = f"{name}: {count:,.1f} in flight at {at:,.4g} s"
            yield replace(base, x=at, y=high, low=low, high=high, series=name, detail=detail, drawn=AREA)
        floor = heights
    word = LATE if trace.limited else FAILED
    for at, late, height in zip(trace.seconds, trace.late, floor, strict=True):
        if late:
            detail = f"{late:,} request{'' if late == 1 else 's'} {word} at {at:,.4g} s"
            yield replace(base, x=at, y=height, series=word, label=word, detail=detail, drawn=LONE)


def _traces(report: Report) -> dict[str, ServedTrace]:
    """Traces by the name of their cell."""
    found = report.served_shapes
    if found is None:
        return {}
    named = beside(found)
    return {marked(cell_words(trace.axes, named), trace.is_believed): trace for trace in found.traces}


def _names(trace: ServedTrace) -> dict[int, str]:
    """Names by replica; all but those with most answers share a name."""
    kept = {r.replica for r in sorted(trace.replicas, key=lambda r: -r.answered)[:MOST_REPLICAS]}
    return {r.replica: replica_words(r, trace) if r.replica in kept else OTHERS for r in trace.replicas}


def _series(traces: Collection[ServedTrace]) -> list[Series]:
    """The same replica has the same colour in every chart."""
    names = dict.fromkeys(name for trace in traces for name in _names(trace).values())
    return [*others(names), Series(name=LATE, colour=WRONG), Series(name=FAILED, colour=WRONG)]


def _deaths(group: str, trace: ServedTrace) -> Iterator[Rule]:
    for replica in trace.replicas:
        if replica.died_s is not None:
            yield Rule(y=replica.died_s, label=f"{replica_words(replica, trace)} gone", group=group, upright=True)


# --- replicas ---


def _compared(report: Report) -> dict[str, ServedTrace]:
    """Cells of several replicas: those that lost one, then those with most in flight."""

    def weight(one: tuple[str, ServedTrace]) -> tuple[int, float]:
        replicas = one[1].replicas
        return sum(r.died_s is not None for r in replicas), sum(sum(r.in_flight) for r in replicas)

    several = [(name, trace) for name, trace in _traces(report).items() if len(trace.replicas) > 1]
    return dict(sorted(several, key=weight, reverse=True)[:MOST_COMPARED])


def replicas(report: Report) -> Iterator[Chart]:
    """Two panels per cell: tokens a second and the median TTFT of each replica over the run."""
    points: list[Point] = []
    rules: list[Rule] = []
    for name, trace in _compared(report).items():
        names, base = _names(trace), Point(y=0.0, drawn=TRAIL, cells=(trace.cell,), runs=(trace.run,))
        for what in (RATE, FIRST):
            rules += _deaths(f"{name}: {what}", trace)
            for replica in trace.replicas:
                series = names[replica.replica]
                values = replica.tokens_per_s if what == RATE else replica.ttft_s
                # The line of a replica that died ends: it has no rate of 0.
                end = trace.wall_s if replica.died_s is None else replica.died_s
                for at, value in zip(trace.pace_seconds, values, strict=True):
                    if series != OTHERS and value is not None and at <= end:
                        text = f"{value:,.4g} tokens/s" if what == RATE else f"{in_ms(value)} ms"
                        y, detail = value if what == RATE else value * 1e3, f"{series}: {text} at {at:,.4g} s"
                        points.append(replace(base, x=at, y=y, group=f"{name}: {what}", series=series, detail=detail))
    yield Chart(
        name="served_replicas",
        title="Replicas over the run",
        subtitle="Output rate and median TTFT at the time of arrival. One launch of each cell.",
        kind=LINES,
        x=TIME,
        y=Axis(label="", shared=False),
        points=tuple(points),
        series=used(_series(_traces(report).values()), points),
        rules=tuple(rules),
        section=SERVED,
        panel_px=380,
    )


def replica_ttft(report: Report) -> Iterator[Chart]:
    """A panel per cell, a curve per replica: whether one replica causes the slowest requests."""
    traces = _compared(report)
    points = [
        point
        for name, trace in traces.items()
        for replica in trace.replicas
        if replica.ttft and _names(trace)[replica.replica] != OTHERS
        for point in spread_points(replica.ttft, name, _names(trace)[replica.replica], trace.cell, (trace.run,))
    ]
    yield Chart(
        name="served_replica_ttft",
        title="Time to first token by replica",
        subtitle="Percentiles of the requests of each replica; logarithmic. One launch of each cell.",
        kind=LINES,
        x=Axis(label="percentile", unit="%", scale=NINES),
        y=Axis(label="ms", unit="ms", scale=LOG, zero=False, shared=False),
        points=tuple(points),
        series=used(_series(_traces(report).values()), points),
        section=SERVED,
        panel_px=300,
    )
