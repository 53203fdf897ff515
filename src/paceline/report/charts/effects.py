"""Chart of a designed experiment: what each change did to speed and to memory, with intervals, around no change."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import Effect, Report
from paceline.analysis.findings.compare import ALIASED, INTERACTION, NO_EFFECT, OPEN
from paceline.report.charts.chart import SPANS, Axis, Chart, Point, Rule, parts, used
from paceline.report.tables.effects import MEMORY, SPEED, change, plan, verdict
from paceline.wording import percent_up

MARKS = "Dots are effects, lines their 95 % intervals."
MATTERS, OPEN_WORD = "matters", "inconclusive or confounded"
SERIES = parts((MATTERS, OPEN_WORD, NO_EFFECT))
PANELS = {SPEED: "Non-pad tokens per second: right is faster", MEMORY: "Peak memory: left is less"}


def effects(report: Report) -> Iterator[Chart]:
    """One chart per design, a panel per metric, the changes by rank."""
    for number, outcome in enumerate(report.effects, 1):
        points = [p for metric in PANELS for effect in outcome.effects if (p := _point(effect, metric)) is not None]
        yield Chart(
            name="effects" if number == 1 else f"effects_{number}",
            title="What mattered, what did not",
            subtitle=f"{plan(outcome)} {MARKS}" if len(report.effects) > 1 else MARKS,
            kind=SPANS,
            y=Axis(label="change, %", unit="%", zero=False),
            points=tuple(points),
            series=used(SERIES, points),
            rules=(Rule(y=0.0, label="no change"),),
        )


def _point(effect: Effect, metric: str) -> Point | None:
    response = effect.response(metric)
    if response is None:
        return None
    number, interval = change(response)
    is_none, is_open = response.verdict == NO_EFFECT, response.verdict in (OPEN, ALIASED)
    return Point(
        y=_percent(response.ratio),
        low=None if response.low is None else _percent(response.low),
        high=None if response.high is None else _percent(response.high),
        label=f"{effect.name} (interaction)" if effect.kind == INTERACTION else effect.name,
        group=PANELS[metric],
        series=NO_EFFECT if is_none else OPEN_WORD if is_open else MATTERS,
        text=f"under {percent_up(response.bound_ratio)} %" if is_none else f"{number} %",
        detail="\n".join(filter(None, (f"{number} {interval} %", verdict(response, effect.kind), response.text))),
        cells=effect.cells,
        runs=effect.runs,
    )


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)
