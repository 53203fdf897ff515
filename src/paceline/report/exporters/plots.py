"""plots/*.png and *.svg for documents: speed, time, scaling, memory, cost, served models and the machine itself."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.charts import served as asked
from paceline.report.charts import served_time as timed
from paceline.report.exporters._matplotlib import bar_charts as bars
from paceline.report.exporters._matplotlib import ceiling_charts as ceilings
from paceline.report.exporters._matplotlib import cost_charts as cost
from paceline.report.exporters._matplotlib import effect_charts as effects
from paceline.report.exporters._matplotlib import fabric_charts as fabric
from paceline.report.exporters._matplotlib import gauge_charts as gauges
from paceline.report.exporters._matplotlib import history_chart as history
from paceline.report.exporters._matplotlib import memory_charts as memory
from paceline.report.exporters._matplotlib import node_chart as nodes
from paceline.report.exporters._matplotlib import scaling_charts as scaling
from paceline.report.exporters._matplotlib import served_charts as served
from paceline.report.exporters._matplotlib import time_charts as times
from paceline.report.exporters._matplotlib.canvas import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160
FORMS = ("png", "svg")
_UNDATED: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}
Draw = Callable[[Report, Any], "Figure"]


def export(report: Report, directory: Path) -> list[Path]:
    """A chart that would hold no data is not written."""
    written = []
    for name, (collect, draw) in CHARTS.items():
        if found := collect(report):
            images = _saved(draw, report, found, FORMS)
            written += [write_atomically(directory / "plots" / f"{name}.{form}", images[form]) for form in FORMS]
    return written


def available(report: Report) -> tuple[str, ...]:
    """Charts for which there is data, known without drawing any."""
    return tuple(name for name, (collect, _) in CHARTS.items() if collect(report))


def image(report: Report, name: str, form: str) -> bytes:
    """One chart as the bytes of a file, the same for the same report."""
    collect, draw = CHARTS[name]
    return _saved(draw, report, collect(report), (form,))[form]


def _saved(draw: Draw, report: Report, found: Any, forms: tuple[str, ...]) -> dict[str, bytes]:
    import matplotlib

    style: Any = STYLE
    images = {}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # A chart without room is drawn as well as it can be; its reader can do nothing about a size that is ours.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure = draw(report, found)
        for form in forms:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=form, dpi=DPI, metadata=_UNDATED[form])
            # One layout serves all forms: it takes as long as drawing.
            figure.set_layout_engine("none")
            images[form] = buffer.getvalue()
    return images


CHARTS: dict[str, tuple[Callable[[Report], Any], Draw]] = {
    "effects": (effects.charted, effects.draw_effects),
    "served_curve": (served.only(asked.curve), served.draw_lines),
    "served_distributions": (served.only(asked.distributions), served.draw_lines),
    "served_in_flight": (served.only(timed.in_flight), served.draw_lines),
    "served_replicas": (served.only(timed.replicas), served.draw_lines),
    "served_replica_ttft": (served.only(timed.replica_ttft), served.draw_lines),
    "served_client": (served.only(asked.client), served.draw_client),
    "throughput": (bars.throughput, bars.draw_throughput),
    "step_time": (times.steps, times.draw_steps),
    "phases": (times.phases, times.draw_phases),
    "scaling": (scaling.points, scaling.draw_efficiency),
    "scaling_loss": (lambda report: report.explanations, fabric.draw_scaling_loss),
    "memory": (bars.peak_memory, bars.draw_memory),
    "memory_components": (memory.rows, memory.draw_components),
    "frontier": (memory.points, memory.draw_frontier),
    "wire": (bars.wire, bars.draw_wire),
    "host_to_device": (bars.host_to_device, bars.draw_host_to_device),
    "cost": (cost.prices, cost.draw_cost),
    "budget": (cost.budget, cost.draw_budget),
    "collective_bandwidth": (fabric.panels, fabric.draw_bandwidth),
    "collective_latency": (fabric.lines, fabric.draw_latency),
    "nodes": (nodes.lanes, nodes.draw),
    "pairs": (lambda report: report.pairs, fabric.draw_pairs),
    "history": (history.panels, history.draw),
    "gauges": (gauges.panels, gauges.draw),
    "ceilings_products": (ceilings.products, ceilings.draw_products),
    "ceilings_copies": (ceilings.copies, ceilings.draw_copies),
    "ceilings_attention": (ceilings.attention, ceilings.draw_attention),
}
