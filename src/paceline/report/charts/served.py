"""Charts of served models: latency over throughput, how latencies spread, and what the client used of its bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings import LatencySpread, Report, ServedLoad, ServedShapes
from paceline.analysis.findings.served import LATENCY, TPOT, TTFT
from paceline.report.charts.chart import (
    BARS,
    COLOURS,
    CURVE,
    JOINED,
    LINES,
    LOG,
    LONE,
    NINES,
    RING,
    SERVED,
    WRONG,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    numbered,
    others,
    thinned,
    used,
)
from paceline.report.tables.served import MS
from paceline.report.text.load_names import (
    NOT_BELIEVED,
    beside,
    cell_words,
    family_words,
    marked,
    served_words,
    short_load,
)
from paceline.wording import MISSING, format_number, format_parts, places

# As many as there are distinct colours.
MOST_LOADS = 8
# Fewer requests have no distribution.
FEWEST_REQUESTS = 5
WORDS = {TTFT: "Time to first token", TPOT: "Time per further token", LATENCY: "Whole answer"}
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
WITHIN, BEYOND = "within its bounds", "beyond a bound"


def in_ms(seconds: float | None) -> str:
    value = MS.apply(seconds)
    return MISSING if value is None else format_number(value, max(0, places(value, None, None)))


def load_series(found: ServedShapes) -> dict[str, Series]:
    """The loads that have a colour of their own, which is the same in every chart, by name."""
    named = beside(found)
    loads = thinned([load for load in found.loads if load.spreads], MOST_LOADS)
    return {one.name: one for one in numbered(marked(served_words(load, named), load.is_believed) for load in loads)}


# --- latency over throughput ---


def curve(report: Report) -> Iterator[Chart]:
    """A line per scenario through its loads, from the smallest on: where throughput ends and latency begins to grow."""
    found = report.served_shapes
    every = [load for load in found.loads if load.scenario != "offline"] if found else []
    loads = [load for load in every if load.output_tokens_per_s and load.spreads]
    if found is None or len(loads) < 2:
        return
    named = beside(found)
    families = list(dict.fromkeys(family_words(load, named) for load in loads))

    def series_name(family: str, percentile: str) -> str:
        return percentile if len(families) == 1 else f"{family}, {percentile}"

    points = []
    for load in loads:
        counts = [f"{load.requests:,} requests"]
        counts += [f"{load.late:,} late"] if load.late else []
        counts += [f"{load.failed:,} failed"] if load.failed else []
        rate = f"{load.output_tokens_per_s:,.4g} tokens/s, {load.requests_per_s:,.4g} requests/s"
        spreads = [spread for spread in load.spreads if spread.quantity != LATENCY]
        for spread, name in ((spread, name) for spread in spreads for name in ("p99", "p50")):
            names = [name for name, known in (("p99", spread.p99), ("p50", spread.p50)) if known[0]]
            value, low, high = spread.p99 if name == "p99" else spread.p50
            # With too few requests; or an answer arrived in one read and has no time to draw on a logarithmic axis.
            if value is None or value <= 0:
                continue
            shown, interval = format_parts(value, low, high, MS)
            points.append(
                Point(
                    x=load.output_tokens_per_s,
                    y=value * 1e3,
                    low=MS.apply(low) if low else None,
                    high=MS.apply(high),
                    group=WORDS[spread.quantity],
                    series=series_name(family_words(load, named), name),
                    label=marked(served_words(load, named), load.is_believed),
                    text=short_load(load.rate_per_s, load.concurrency) if name == names[0] else "",
                    detail=f"{name} {shown} {interval} ms\n{rate}\n{', '.join(counts)}",
                    drawn=JOINED if load.is_believed else RING,
                    cells=(load.cell,),
                    runs=load.runs,
                )
            )
    series = [
        Series(name=series_name(family, percentile), colour=one.colour, dashed=percentile == "p50")
        for family, one in zip(families, others(families), strict=True)
        for percentile in ("p99", "p50")
    ]
    units = {"requests a second" if load.rate_per_s is not None else "requests in flight" for load in loads}
    doubted = sum(not load.is_believed for load in loads)
    hollow = f" Hollow: {doubted} {NOT_BELIEVED} load{'' if doubted == 1 else 's'}." if doubted else ""
    offline = [load.output_tokens_per_s for load in found.loads if load.scenario == "offline" and load.is_believed]
    most = max((rate for rate in offline if rate is not None), default=None)
    ceiling = f" Offline: {format_number(most, places(most, None, None))} tokens/s." if most else ""
    yield Chart(
        name="served_curve",
        title="Latency over throughput",
        subtitle=f"Each point is one load ({' or '.join(sorted(units, reverse=True))}): median (dashed) and 99th "
        "percentile, from the scheduled send time; whiskers are 95 % intervals. Latency is logarithmic."
        f"{hollow}{ceiling}",
        kind=LINES,
        x=Axis(label="output, tokens/s", unit="tokens/s", ticks="round"),
        y=Axis(label="ms", unit="ms", scale=LOG, zero=False, shared=False),
        points=tuple(points),
        series=used(series, points),
        rules=tuple(_limits(loads, (TTFT, TPOT))),
        section=SERVED,
        panel_px=380,
    )


def _limits(loads: Sequence[ServedLoad], quantities: Sequence[str]) -> Iterator[Rule]:
    """One rule for each panel and value, with the scenario if the limits differ."""
    limits = {
        (spread.quantity, spread.limit_s): load.scenario
        for load in loads
        for spread in load.spreads
        if spread.limit_s is not None and spread.quantity in quantities
    }
    several = len({limit for _, limit in limits}) > len({quantity for quantity, _ in limits})
    for (quantity, limit), scenario in limits.items():
        of = f" of {scenario}" if several else ""
        yield Rule(y=(limit or 0.0) * 1e3, label=f"limit{of} {(limit or 0.0) * 1e3:,.4g} ms", group=WORDS[quantity])


# --- distributions ---


def distributions(report: Report) -> Iterator[Chart]:
    """A panel per quantity, a curve per load: what each share of the requests took at most."""
    found = report.served_shapes
    if found is None or not found.loads:
        return
    named = beside(found)
    series = load_series(found)
    every = {marked(served_words(load, named), load.is_believed): load for load in found.loads if load.spreads}
    names = {name: load for name, load in every.items() if name in series}
    points = [
        point
        for quantity in WORDS
        for name, load in names.items()
        for spread in load.spreads
        if spread.quantity == quantity
        for point in spread_points(
            spread, WORDS[quantity], name, load.cell, load.runs, LONE if load.is_believed else RING
        )
    ]
    left = len(found.loads) - len(names)
    rest = f" {left} of {len(found.loads)} loads are left out." if left else ""
    yield Chart(
        name="served_distributions",
        title="Latency by percentile",
        subtitle="The right end is the slowest request; dots are p50, p90 and p99. Measured from the scheduled send "
        f"time; logarithmic.{rest}",
        kind=LINES,
        x=Axis(label="percentile", unit="%", scale=NINES),
        y=Axis(label="ms", unit="ms", scale=LOG, zero=False, shared=False),
        points=tuple(points),
        series=tuple(series.values()),
        rules=tuple(_limits(list(names.values()), tuple(WORDS))),
        section=SERVED,
        panel_px=300,
    )


def spread_points(
    spread: LatencySpread, group: str, series: str, cell: str, runs: tuple[str, ...], drawn: str = LONE
) -> Iterator[Point]:
    """The curve, and dots at those of p50, p90 and p99 for which there are enough requests."""
    if spread.n < FEWEST_REQUESTS:
        return
    for share, seconds in zip(spread.shares, spread.seconds, strict=True):
        if seconds > 0:
            yield Point(x=100 * share, y=seconds * 1e3, group=group, series=series, drawn=CURVE, cells=(cell,))
    for name, (value, low, high) in (("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99)):
        if value:
            shown, interval = format_parts(value, low, high, MS)
            yield Point(
                x=PERCENTILES[name],
                y=value * 1e3,
                group=group,
                series=series,
                label=series,
                detail=f"{name} {shown} {interval} ms\n{spread.n:,} requests",
                drawn=drawn,
                cells=(cell,),
                runs=runs,
            )


# --- the client ---


def client(report: Report) -> Iterator[Chart]:
    """A lane per cell: how much of its tightest bound the client used, and which one that was."""
    found = report.served_shapes
    if found is None:
        return
    named, points = beside(found), []
    for audit in found.audits:
        measures = (
            ("sending", audit.schedule_lag_s, audit.schedule_bound_s, 1e3, "ms late (p99)"),
            ("reading", audit.read_lag_s, audit.read_bound_s, 1e3, "ms late (p99)"),
            ("processor", audit.cpu_ratio, audit.cpu_bound_ratio, 1e2, "% of a core"),
        )
        used_percent: dict[str, float] = {}
        lines = []
        for what, value, bound, factor, unit in measures:
            if value is not None:
                used_percent[what] = 100 * value / bound
                lines.append(f"{what}: {value * factor:,.3g} {unit}, at most {bound * factor:,.3g}")
        if not used_percent:
            continue
        # Facts without a bound that limit the accuracy of times.
        if audit.clock_drift_s is not None:
            lines.append(f"clocks: drifted {audit.clock_drift_s * 1e3:,.3g} ms against each other")
        if audit.unstamped_ratio is not None:
            lines.append(f"answers without kernel timestamps: {audit.unstamped_ratio:.1%}")
        if audit.coalesced_ratio is not None:
            lines.append(f"events that shared a read: {audit.coalesced_ratio:.1%}")
        lines.append(f"{audit.processes} process{'' if audit.processes == 1 else 'es'}")
        worst = max(used_percent, key=lambda what: used_percent[what])
        points.append(
            Point(
                y=used_percent[worst],
                label=cell_words(audit.axes, named),
                series=WITHIN if used_percent[worst] <= 100 else BEYOND,
                text=f"{used_percent[worst]:,.0f} %, {worst}",
                detail="\n".join(lines),
                cells=(audit.cell,),
                runs=audit.runs,
            )
        )
    yield Chart(
        name="served_client",
        title="How late the load generator was",
        subtitle="Sending, reading or CPU, whichever is nearest to its bound, in the worst process. "
        "Beyond a bound the load is unreliable.",
        kind=BARS,
        y=Axis(label="% of the bound", unit="%"),
        points=tuple(points),
        series=(Series(name=WITHIN, colour=COLOURS), Series(name=BEYOND, colour=WRONG)),
        rules=(Rule(y=100.0, label="bound"),),
        section=SERVED,
    )
