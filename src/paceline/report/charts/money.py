"""Charts of cost: what a million tokens costs, and cost against time of a training at each number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.analysis.findings import Cost, Report, offers_of
from paceline.analysis.findings.cell_axes import describe
from paceline.analysis.grouping import grouped
from paceline.report.charts.chart import (
    BARS,
    LINES,
    Axis,
    Chart,
    Point,
    Series,
    in_full,
    measured_point,
    strategies,
    used,
)
from paceline.report.tables import budget as sized
from paceline.report.text.cells import groups
from paceline.wording import Scale, short_count

SPOT = ", spot"


def scale_of(found: Cost) -> Scale:
    amount, factor = found.amount
    return Scale(f"USD per {amount}", factor)


def cost(report: Report) -> Iterator[Chart]:
    """One chart for tokens, and one for samples or micro-batches if scripts count those."""
    for counted, offers in grouped(offers_of(report.costs), lambda offer: offer.lead.counted).items():
        by_cell = {offer.lead.cell: offer for offer in offers}
        scale = scale_of(offers[0].lead)
        points = []
        for group in groups(report):
            for row in group.rows:
                if offer := by_cell.get(row.cell):
                    points.append(_bar(offer.lead, row.label, group.title, scale, faint=False))
                    points += [_bar(offer.spot, row.label, group.title, scale, faint=True)] if offer.spot else []
        yield Chart(
            name="cost" if counted == "token" else f"cost-{counted}",
            title="Cost",
            subtitle="Lower is better. The lowest price that is not spot; thin bar: the lowest spot price. "
            "Whiskers are 95 % intervals of throughput; the price itself is taken as exact.",
            kind=BARS,
            y=Axis(label=scale.unit, unit=scale.unit),
            points=tuple(points),
            series=used(strategies(report), points),
        )


def _bar(found: Cost, label: str, group: str, scale: Scale, *, faint: bool) -> Point:
    point = measured_point(found.usd_per_mtok, scale)
    price = f"{found.price.name}: {found.price.usd_per_gpu_hour:g} USD per GPU-hour, {found.price.kind}"
    text, detail = f"{point.text}{' spot' if faint else ''}", f"{point.detail}\n{price}"
    return replace(point, label=label, group=group, series=label, text=text, detail=detail, faint=faint)


def budget(report: Report) -> Iterator[Chart]:
    """Cost against time of the requested samples: one line per series and price, one panel per kind of
    sample. To the left is sooner, below is cheaper."""
    found = sized.offers(report)
    if not found:
        return
    several = any(offer.lead.axes.get("nodes") != 1 for offer in found)
    points = []
    for offer in found:
        name, where = sized.series_name(report, offer), sized.place(offer, several_nodes=several)
        points.append(_spent(offer.lead, name, where))
        points += [_spent(offer.spot, name + SPOT, where)] if offer.spot else []
    known = {s.name: s.colour for s in strategies(report)}
    colours = {sized.series_name(report, o): known.get(describe(o.lead.axes, ()), 0) for o in found}
    count = short_count(found[0].lead.train_samples or 0)
    yield Chart(
        name="budget",
        title=f"Cost against time of {count} samples",
        subtitle="Left is sooner, below is cheaper. Each point is a number of nodes that was measured; dashed: the "
        "lowest spot price. Whiskers are 95 % intervals of throughput.",
        kind=LINES,
        x=Axis(label="time, h", unit="h"),
        y=Axis(label="USD", unit="USD"),
        points=tuple(points),
        series=tuple(
            Series(name=name, colour=colours[name.removesuffix(SPOT)], dashed=name.endswith(SPOT))
            for name in dict.fromkeys(p.series for p in points)
        ),
    )


def _spent(found: Cost, series: str, where: str) -> Point:
    cost, time = found.samples_cost_usd, found.samples_time_s
    assert cost is not None
    assert time is not None
    axes = found.axes
    return Point(
        x=(time.value or 0.0) / 3600,
        y=cost.value or 0.0,
        low=cost.low,
        high=cost.high,
        group=sized.samples_name(axes),
        series=series,
        label=where,
        text=where,
        detail=f"{where}\n{in_full(time, Scale('h', 1 / 3600))}\n{in_full(cost)}",
        cells=(found.cell,),
        runs=cost.runs,
    )
