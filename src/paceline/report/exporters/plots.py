"""plots/*.png and *.svg for documents: one file per chart of the report, named after the chart."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.charts import Chart, charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160
FORMS = ("png", "svg")
_UNDATED: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}


def export(report: Report, directory: Path) -> list[Path]:
    written = []
    for chart in charts(report):
        images = _saved(chart, FORMS)
        written += [write_atomically(directory / "plots" / f"{chart.name}.{form}", images[form]) for form in FORMS]
    return written


def image(report: Report, name: str, form: str) -> bytes:
    """One chart as the bytes of a file, the same for the same report."""
    (chart,) = (chart for chart in charts(report) if chart.name == name)
    return _saved(chart, (form,))[form]


def _saved(chart: Chart, forms: tuple[str, ...]) -> dict[str, bytes]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    from paceline.report.exporters import _matplotlib

    style: Any = _matplotlib.STYLE
    images = {}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # The figure is drawn without the layout then; the user cannot change its size anyway.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure = _matplotlib.draw(chart)
        _lay_out(figure)
        # Figure.savefig draws everything once more beforehand, for layouts that are not yet known.
        save: dict[str, Callable[..., None]] = {
            "png": FigureCanvasAgg(figure).print_png,
            "svg": FigureCanvasSVG(figure).print_svg,
        }
        for form in forms:
            buffer = io.BytesIO()
            save[form](buffer, metadata=_UNDATED[form])
            images[form] = buffer.getvalue()
    return images


def _lay_out(figure: Figure) -> None:
    """Place the axes once for all forms, which takes as long as drawing.

    The solver of the layout orders its constraints by memory address, so its positions differ in their last digits
    from one drawing to the next, and with them the bytes of the file. Rounded, they are the same.
    """
    figure.set_dpi(DPI)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        x, y, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(x, 6), round(y, 6), round(width, 6), round(height, 6)))
