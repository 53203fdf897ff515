"""Charts of declared approximations: loss against tokens and seconds, and speed against the rate of the network."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import LossTrace, Report, Tradeoff
from paceline.report.charts.chart import LINES, LOG, TRAIL, Axis, Chart, Point, Rule, Series, others, strategies, used
from paceline.report.tables.tradeoffs import NETWORK, SPEED_WORDS, rate_words

COMPRESSION = "compression_speed"


def speed_by_rate(report: Report) -> Iterator[Chart]:
    """Speed over that of the exact strategy, by the rate of the emulated network."""
    rows = [row for row in report.tradeoffs if row.axes.get(NETWORK) and row.speed]
    if len({row.axes[NETWORK] for row in rows}) < 2:
        return
    points = []
    for row in sorted(rows, key=lambda row: float(str(row.axes[NETWORK]))):
        assert row.speed is not None
        rate = float(str(row.axes[NETWORK]))
        points.append(
            Point(
                y=row.speed.value,
                x=rate,
                low=row.speed.low,
                high=row.speed.high,
                label=f"{row.strategy}, {rate_words(rate)}",
                series=row.strategy,
                text=f"{row.speed.value:.2f}",
                detail=f"{row.text}\n{SPEED_WORDS[row.speed.verdict]}: {row.speed.reason}",
                cells=row.cells,
                runs=row.runs,
            )
        )
    yield Chart(
        name=COMPRESSION,
        title="Where compression begins to pay",
        subtitle="Speed over that of the exact strategy on the same emulated network; above 1 is faster. Whiskers are "
        "95 % intervals. Both axes are logarithmic.",
        kind=LINES,
        x=Axis(label="rate of each link, Mbit/s", unit="Mbit/s", scale=LOG),
        y=Axis(label="times as fast", unit="times", scale=LOG),
        points=tuple(points),
        series=used(_series(report), points),
        rules=(Rule(y=1.0, label="exact"),),
    )


def loss(report: Report) -> Iterator[Chart]:
    """The loss of the first seed, against tokens and against seconds; a panel for each setting."""
    warm_up = " Steps of the warm-up count as long as the others, so compiling is left out."
    for name, over, unit, without in (
        ("tokens", "tokens", "tokens", ""),
        ("seconds", "seconds of training", "s", warm_up),
    ):
        # Rows of a panel share their baseline, which is drawn once.
        drawn: dict[tuple[str, str], tuple[Tradeoff, LossTrace]] = {}
        for panel, row in _panels(report):
            for trace in row.traces:
                drawn.setdefault((panel, trace.series), (row, trace))
        points = [p for (panel, _), (row, trace) in drawn.items() for p in _drawn(panel, row, trace, name)]
        yield Chart(
            name=f"loss_by_{name}",
            title=f"Loss against {over}",
            subtitle=f"Training loss of the first seed; all see the same data in the same order.{without}",
            kind=LINES,
            x=Axis(label=over, unit=unit, ticks="round"),
            y=Axis(label="loss, nat", unit="nat", zero=False),
            points=tuple(points),
            series=used(_series(report), points),
        )


def _panels(report: Report) -> Iterator[tuple[str, Tradeoff]]:
    for row in report.tradeoffs:
        rate = row.axes.get(NETWORK)
        yield (rate_words(float(str(rate))) if rate else ""), row


def _drawn(panel: str, row: Tradeoff, trace: LossTrace, over: str) -> Iterator[Point]:
    for x, value in zip(getattr(trace, over), trace.losses, strict=True):
        yield Point(
            y=float(f"{value:.5g}"),
            x=float(f"{x:.5g}"),
            group=panel,
            series=trace.series,
            label=trace.series,
            detail=f"{trace.series}: loss {value:.4g} at {x:.4g} {over}",
            drawn=TRAIL,
            cells=row.cells,
        )


def _series(report: Report) -> tuple[Series, ...]:
    names = [name for row in report.tradeoffs for name in (row.baseline, row.strategy)]
    known = {one.name: one for one in strategies(report)}
    if {*names} <= {*known}:
        return tuple(known[name] for name in dict.fromkeys(names))
    return others(sorted(set(names), key=lambda name: (len(name), name)))
