"""Charts of served runs over their time: requests in flight, and what each replica gave."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from paceline.analysis.findings import ReplicaTrace, Report, ServedTrace
from paceline.report.charts.chart import (
    AREA,
    LINES,
    LOG,
    LONE,
    NINES,
    SERVED,
    TRAIL,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    used,
)
from paceline.report.charts.served import in_ms, spread_points
from paceline.report.text.load_names import beside, cell_words, load_words, marked, replica_words

# Of a run over more replicas those with most answers have their own colour, the others one.
MOST_REPLICAS = 6
MOST_COMPARED = 3
OTHERS = "other replicas"
LATE, FAILED = "late or failed", "failed"
# Vermilion is for what went wrong; replicas have the other colours.
_WRONG, _REPLICAS = 1, (0, 2, 5, 3, 4, 6, 7)
RATE, FIRST = "output, tokens/s", "TTFT median, ms"
TIME = Axis(label="s since the start", unit="s", ticks="round", shared=False)


def in_flight(report: Report) -> Iterator[Chart]:
    """A panel per cell: replicas on top of each other, dots where requests ended late or failed."""
    traces = _traces(report)
    points = [point for name, trace in traces.items() for point in _flight_points(name, trace)]
    # One launch alone has the whole width: time wants room.
    least = 380 if len(traces) > 1 else 560
    yield Chart(
        name="served_in_flight",
        title="Requests in flight",
        subtitle=_flight_words(traces.values()),
        kind=LINES,
        x=TIME,
        y=Axis(label="in flight", shared=False),
        points=tuple(points),
        series=used(_series(traces.values()), points),
        rules=tuple(rule for name, trace in traces.items() for rule in (*_deaths(name, trace), *_stages(name, trace))),
        section=SERVED,
        panel_px=least,
    )


def _traces(report: Report) -> dict[str, ServedTrace]:
    """By the name of their cell."""
    found = report.served_shapes
    if found is None:
        return {}
    named = beside(found)
    return {marked(cell_words(trace.axes, named), trace.is_believed): trace for trace in found.traces}


def _flight_words(traces: Collection[ServedTrace]) -> str:
    """Only of what there is to see."""
    several = any(len(trace.replicas) > 1 for trace in traces)
    words = [
        "Sent and not yet answered",
        *(["replicas on top of each other"] if several else []),
        "one launch of each cell",
    ]
    wrong = {LATE if trace.limited else FAILED for trace in traces if any(trace.late)}
    ended = "ended late or failed" if LATE in wrong else "failed"
    return f"{', '.join(words)}." + (f" Dots: times at which requests {ended}." if wrong else "")


def _names(trace: ServedTrace) -> dict[int, str]:
    """By replica; beyond those with most answers all share a name."""
    kept = {r.replica for r in sorted(trace.replicas, key=lambda r: -r.answered)[:MOST_REPLICAS]}
    return {r.replica: replica_words(r, trace) if r.replica in kept else OTHERS for r in trace.replicas}


def _series(traces: Collection[ServedTrace]) -> list[Series]:
    """The same replica has the same colour in every chart."""
    names = dict.fromkeys(name for trace in traces for name in _names(trace).values())
    coloured = [Series(name=name, colour=_REPLICAS[min(i, len(_REPLICAS) - 1)]) for i, name in enumerate(names)]
    return [*coloured, Series(name=LATE, colour=_WRONG), Series(name=FAILED, colour=_WRONG)]


def _flight_points(group: str, trace: ServedTrace) -> Iterator[Point]:
    names = _names(trace)
    stacked: dict[str, list[float]] = {}
    for replica in trace.replicas:
        held = stacked.setdefault(names[replica.replica], [0.0] * len(trace.seconds))
        stacked[names[replica.replica]] = [a + b for a, b in zip(held, replica.in_flight, strict=True)]
    floor = [0.0] * len(trace.seconds)
    for name, held in stacked.items():
        for i, (at, count) in enumerate(zip(trace.seconds, held, strict=True)):
            yield Point(
                x=at,
                y=floor[i] + count,
                low=floor[i],
                high=floor[i] + count,
                group=group,
                series=name,
                detail=f"{name}: {count:,.1f} in flight at {at:,.4g} s",
                drawn=AREA,
                cells=(trace.cell,),
                runs=(trace.run,),
            )
        floor = [a + b for a, b in zip(floor, held, strict=True)]
    yield from _late_points(group, trace, floor)


def _late_points(group: str, trace: ServedTrace, heights: Sequence[float]) -> Iterator[Point]:
    word = LATE if trace.limited else FAILED
    for at, count, height in zip(trace.seconds, trace.late, heights, strict=True):
        if count:
            many = f"{count:,} request{'' if count == 1 else 's'} {word}"
            yield Point(
                x=at,
                y=height,
                group=group,
                series=word,
                label=word,
                detail=f"{many} at {at:,.4g} s",
                drawn=LONE,
                cells=(trace.cell,),
                runs=(trace.run,),
            )


def _stages(group: str, trace: ServedTrace) -> Iterator[Rule]:
    """Where a load began, of runs that went through several."""
    if len(trace.stages) > 1:
        names = _names(trace)
        for start, rate, concurrency, replica in trace.stages:
            label = load_words(rate, concurrency) if replica is None else names.get(replica, f"replica {replica}")
            yield Rule(y=start, label=label, group=group, upright=True)


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
    traces = _compared(report)
    points = [point for name, trace in traces.items() for point in _pace_points(name, trace)]
    groups = [(f"{name}: {what}", trace) for name, trace in traces.items() for what in (RATE, FIRST)]
    yield Chart(
        name="served_replicas",
        title="Replicas over the run",
        subtitle="Output rate and median TTFT at the time of arrival. One launch of each cell.",
        kind=LINES,
        x=TIME,
        y=Axis(label="", shared=False),
        points=tuple(points),
        series=used(_series(_traces(report).values()), points),
        rules=tuple(rule for name, trace in groups for rule in _deaths(name, trace)),
        section=SERVED,
        panel_px=380,
    )


def _pace_points(name: str, trace: ServedTrace) -> Iterator[Point]:
    names = _names(trace)
    own = [replica for replica in trace.replicas if names[replica.replica] != OTHERS]
    for what in (RATE, FIRST):
        for replica in own:
            for at, value, text in _pace(replica, trace, what):
                yield Point(
                    x=at,
                    y=value,
                    group=f"{name}: {what}",
                    series=names[replica.replica],
                    detail=f"{names[replica.replica]}: {text} at {at:,.4g} s",
                    drawn=TRAIL,
                    cells=(trace.cell,),
                    runs=(trace.run,),
                )


def _pace(replica: ReplicaTrace, trace: ServedTrace, what: str) -> Iterator[tuple[float, float, str]]:
    """A replica that is gone has no rate of 0: its line ends."""
    end = trace.wall_s if replica.died_s is None else replica.died_s
    values = replica.tokens_per_s if what == RATE else replica.ttft_s
    for at, value in zip(trace.pace_seconds, values, strict=True):
        if value is not None and at <= end:
            yield (at, value, f"{value:,.4g} tokens/s") if what == RATE else (at, value * 1e3, f"{in_ms(value)} ms")


def replica_ttft(report: Report) -> Iterator[Chart]:
    """A panel per cell, a curve per replica: whether one of them makes the slow end of the whole."""
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
