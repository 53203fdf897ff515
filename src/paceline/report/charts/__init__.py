"""Charts as data: points, units and texts. The renderers (page/charts.js and exporters/_matplotlib.py) place pixels.

chart < front, training, proof, effects, money, time, tradeoffs, memory, nodes, fabric, ceilings, gauges, served <
served_time. A new chart is a function from the report to charts and a line in BUILDERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.analysis.findings import Report
from paceline.report.charts import (
    ceilings,
    effects,
    fabric,
    front,
    gauges,
    memory,
    money,
    nodes,
    proof,
    served,
    served_time,
    time,
    tradeoffs,
    training,
)
from paceline.report.charts.chart import EVERYWHERE, SERVED, Axis, Chart, Point, Rule, Series, Span

__all__ = ["BUILDERS", "EVERYWHERE", "SERVED", "Axis", "Chart", "Point", "Rule", "Series", "Span", "charts"]

# In reading order.
BUILDERS: tuple[Callable[[Report], Iterable[Chart]], ...] = (
    front.per_user,
    served.curve,
    served.distributions,
    served_time.in_flight,
    served_time.replicas,
    served_time.replica_ttft,
    served.client,
    effects.effects,
    front.scaled,
    front.pareto,
    tradeoffs.speed_by_rate,
    tradeoffs.loss,
    training.throughput,
    training.step_time,
    training.phases,
    proof.ranks,
    training.peak_memory,
    training.wire,
    training.host_to_device,
    proof.loss,
    training.scaling,
    training.scaling_loss,
    money.cost,
    money.budget,
    time.history,
    front.predicted,
    memory.components,
    memory.frontier,
    nodes.nodes,
    fabric.busbw,
    fabric.collectives,
    fabric.pairs,
    ceilings.products,
    ceilings.copies,
    ceilings.attention,
    gauges.traces,
)


def charts(report: Report) -> tuple[Chart, ...]:
    """Every chart with at least one point; names are unique."""
    found = [chart for build in BUILDERS for chart in build(report) if chart.points]
    return tuple({chart.name: chart for chart in found}.values())
