"""Chart of cost: what a million tokens costs, the lowest spot price as a thin bar under the lowest other."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.findings import Cost, Report, offers_of
from paceline.present.charts.chart import BARS, Axis, Chart, Point, strategies, told, used
from paceline.present.quantity import Scale, format_brief
from paceline.present.standing import groups

LEAST_PER_MILLION = 0.1  # below it digits are mostly zeros, and a billion tokens is said instead


def cost(report: Report) -> Iterator[Chart]:
    by_cell = {offer.lead.cell: offer for offer in offers_of(report.costs)}
    dear = max((o.lead.usd_per_mtok.value or 0.0 for o in by_cell.values()), default=0.0) >= LEAST_PER_MILLION
    scale = Scale("USD per million tokens") if dear else Scale("USD per billion tokens", 1e3)
    points = []
    for group in groups(report):
        for row in group.rows:
            if offer := by_cell.get(row.cell):
                points.append(_bar(offer.lead, row.label, group.title, scale, faint=False))
                points += [_bar(offer.spot, row.label, group.title, scale, faint=True)] if offer.spot else []
    yield Chart(
        name="cost",
        title="Cost",
        subtitle="Lower is better. The lowest price that is not spot; thin bar: the lowest spot price. "
        "Whiskers are 95 % intervals of throughput; the price itself is taken as exact.",
        kind=BARS,
        y=Axis(label=scale.unit, unit=scale.unit),
        points=tuple(points),
        series=used(strategies(report), points),
    )


def _bar(found: Cost, label: str, group: str, scale: Scale, *, faint: bool) -> Point:
    m = found.usd_per_mtok
    price = f"{found.price.name}: {found.price.usd_per_gpu_hour:g} USD per GPU-hour, {found.price.kind}"
    return Point(
        y=scale.apply(m.value) or 0.0,
        low=scale.apply(m.low),
        high=scale.apply(m.high),
        label=label,
        group=group,
        series=label,
        text=f"{format_brief(m, scale)}{' spot' if faint else ''}",
        detail=f"{told(m, scale)}\n{price}",
        cells=(found.cell,),
        runs=m.runs,
        faint=faint,
    )
