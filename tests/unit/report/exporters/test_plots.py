from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from paceline.analysis.findings import Report
from paceline.report.charts import charts
from paceline.report.exporters import _matplotlib, plots


def svg_text(report: Report, name: str) -> str:
    return " ".join(ElementTree.fromstring(plots.image(report, name, "svg")).itertext())


def test_png_are_png_and_svg_are_svg(report: Report, tmp_path: Path) -> None:
    written = {p.name: p for p in plots.export(report, tmp_path)}
    assert set(written) == {
        f"{n}.{f}"
        for n in ("scaling_rate_weak", "pareto", "throughput", "step_time", "memory", "scaling_weak", "wire")
        for f in ("png", "svg")
    }
    for path in written.values():
        if path.suffix == ".png":
            raw = path.read_bytes()
            assert raw.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", raw[16:24])
            assert width > 1000
            assert height > 350
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_nothing_is_drawn_without_data(report: Report, tmp_path: Path) -> None:
    thin = tuple(m for m in report.measurements if m.metric == "tokens_per_s")
    only = dataclasses.replace(report, measurements=thin, scaling=(), distributions={})
    assert [chart.name for chart in charts(only)] == ["throughput"]
    assert {p.stem for p in plots.export(only, tmp_path)} == {"throughput"}


def test_an_uncertified_cell_is_not_drawn(report: Report) -> None:
    assert "zero:stage=3" not in svg_text(report, "throughput")


def test_charts_name_units_groups_and_the_measured_baseline(report: Report) -> None:
    throughput, scaling = svg_text(report, "throughput"), svg_text(report, "scaling_weak")
    for words in ("tokens/s", "12,345", "gpt-tiny", "Higher is better", "95 % intervals"):
        assert words in throughput
    for words in ("Weak scaling against ddp, 1 process", "ideal", "efficiency, %", "91.1 %"):
        assert words in scaling
    assert "GiB" in svg_text(report, "memory")
    assert "ms per optimizer step" in svg_text(report, "step_time")


def test_memory_is_drawn_against_that_of_the_device_if_known(report: Report, golden: object) -> None:
    def on(memory_bytes: int | None) -> str:
        machine = {"host": "a", "gpus": [{"memory_bytes": memory_bytes}]}
        return svg_text(dataclasses.replace(report, machines=(machine,)), "memory")

    text = on(2**30)
    assert text == golden
    assert "1.0" in text
    text = on(80 * 2**30)
    assert text == golden
    assert "80.0" in text
    assert "device" not in on(None)


def test_stragglers_are_counted_where_the_axis_stops(report: Report) -> None:
    cell = "ddp-2-cell"
    slow = dict(report.distributions) | {cell: (*report.distributions[cell], 60.0, 90.0)}
    assert "+2 slower" in svg_text(dataclasses.replace(report, distributions=slow), "step_time")


def test_shared_devices_are_named_in_the_chart_itself(report: Report) -> None:
    marked = tuple(dataclasses.replace(r, health=("shared GPU: not a speed",)) for r in report.runs)
    assert "shared GPU: not a speed" in svg_text(dataclasses.replace(report, runs=marked), "throughput")


@pytest.mark.parametrize("cells", [1, 10, 80])
def test_any_number_of_cells_is_drawn_or_counted(report: Report, cells: int) -> None:
    one = next(m for m in report.measurements if m.cell == "ddp-2-cell" and m.metric == "tokens_per_s")
    many = tuple(
        dataclasses.replace(one, cell=f"c{i}", axes=dict(one.axes) | {"strategy": f"mesh:tp={i}"}) for i in range(cells)
    )
    text = svg_text(dataclasses.replace(report, measurements=many), "throughput")
    assert f"mesh:tp={min(cells, _matplotlib.MOST_LANES) - 1}" in text
    assert ("and 20 more cells" in text) == (cells == 80)


def with_metric(report: Report, metric: str, unit: str, value: float, **axes: str) -> Report:
    """The report with one more metric in every certified cell, growing from cell to cell."""
    speeds = [m for m in report.measurements if m.metric == "tokens_per_s"]
    more = tuple(
        dataclasses.replace(
            m, metric=metric, unit=unit, value=value * i, low=value * i, high=value * i, axes=dict(m.axes) | axes
        )
        for i, m in enumerate(speeds, start=1)
    )
    return dataclasses.replace(report, measurements=(*report.measurements, *more))


def test_a_strategy_has_one_colour_in_every_chart(report: Report) -> None:
    colours: dict[str, set[int]] = {}
    for chart in charts(report):
        if chart.name in ("throughput", "wire", "step_time", "memory"):
            for series in chart.series:
                colours.setdefault(series.name, set()).add(series.colour)
    assert {len(found) for found in colours.values()} == {1}
    assert len(set().union(*colours.values())) == len(colours)


def test_wire_shows_counted_beside_the_formula_and_nothing_where_nothing_was_sent(report: Report) -> None:
    (wire,) = [chart for chart in charts(report) if chart.name == "wire"]
    counted = {point.label: point for point in wire.points}
    assert wire.y.unit == "MB/step"
    assert (counted["fsdp2"].y, counted["fsdp2"].expected) == pytest.approx((120.4, 120.3))
    alone = tuple(m for m in report.measurements if not m.metric.startswith("wire"))
    assert "wire" not in [chart.name for chart in charts(dataclasses.replace(report, measurements=alone))]


def test_phases_are_drawn_up_to_the_step_and_what_none_holds_is_named(report: Report, golden: object) -> None:
    assert "phases" not in [chart.name for chart in charts(report)]
    whole = with_metric(report, "forward_s", "s", 0.01)
    text = svg_text(whole, "phases")
    assert "forward" in text
    assert text == golden
    assert "backward" not in text


def test_matplotlib_is_not_imported_until_something_is_drawn() -> None:
    code = "import sys, paceline.report, paceline.report.exporters.html, paceline.report.exporters.plots as p; "
    code += "print([m for m in ('matplotlib', 'rich', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


LONG = ",".join(f"option{i}=some value of it" for i in range(60))


@pytest.mark.parametrize("axis", ["strategy", "launcher"])
def test_axes_keep_their_room_beside_a_page_of_options(report: Report, axis: str) -> None:
    measurements = tuple(
        dataclasses.replace(m, axes={**m.axes, axis: f"{m.axes['strategy']}:{LONG}"}) for m in report.measurements
    )
    changed = dataclasses.replace(report, measurements=measurements)
    with warnings.catch_warnings(), matplotlib.rc_context(_matplotlib.STYLE):
        warnings.filterwarnings("error", message="constrained_layout not applied")
        for chart in charts(changed):
            figure = _matplotlib.draw(chart)
            figure.draw_without_rendering()
            assert all(axes.get_position().width > 0.3 for axes in figure.axes), chart.name
