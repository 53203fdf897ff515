"""The chart of a node test: every node's measures over the median of its peers, with the end of the accepted band."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import Report
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED
from paceline.report.charts.chart import BARS, Axis, Chart, Point, Rule, parts
from paceline.report.tables.nodes import band, furthest, measure_names, shown, verdict_name

VERDICTS = parts(map(verdict_name, (PASS, SUSPECT, FAIL, UNDECIDED)))


def nodes(report: Report) -> Iterator[Chart]:
    """Lanes by measure; temperatures are not ratios and appear only in the table."""
    points = []
    for name, node in ((name, node) for name in measure_names(report.nodes) for node in report.nodes):
        m = furthest(node, name)
        if m is None or m.unit == "C":
            continue
        value = shown(m, m.relative) or 0.0
        points.append(
            Point(
                y=value,
                low=shown(m, m.low),
                high=shown(m, m.high),
                label=node.node,
                group=m.measure,
                series=verdict_name(m.verdict),
                text=f"{value:.1f}" + ("" if m.verdict == PASS else f" ({verdict_name(m.verdict)})"),
                detail=f"{node.node}, rank {m.rank}: {m.measure}\n{value:.1f} % of the median; accepted {band(m)}",
                cells=(node.cell,),
                runs=(node.run,),
            )
        )
    ends = {shown(m, m.accepted[0]) for node in report.nodes for m in node.measures if m.unit not in ("C", "bytes")}
    lowest = min((end for end in ends if end is not None), default=None)
    yield Chart(
        name="nodes",
        title="Nodes beside their peers",
        subtitle="For each measure the rank furthest from its peers; whiskers are 95 % intervals over the repeats.",
        kind=BARS,
        y=Axis(label="% of the median", unit="%"),
        points=tuple(points),
        series=VERDICTS,
        rules=(Rule(y=lowest, label=f"accepted from {lowest:.4g} %"),) if lowest is not None else (),
    )
