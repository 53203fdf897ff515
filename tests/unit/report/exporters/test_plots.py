from __future__ import annotations

import dataclasses
import io
import struct
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.analysis.findings import Measurement, Report
from paceline.report.exporters import plots
from paceline.report.exporters._matplotlib import bar_charts as bars
from paceline.report.exporters._matplotlib import cost_charts as cost
from paceline.report.exporters._matplotlib import time_charts as times
from paceline.report.exporters._matplotlib.arrangement import MOST_LANES, strategy_colours
from paceline.report.exporters._matplotlib.canvas import End, canvas, entitle, name_ends


def svg_text(report: Report, name: str) -> str:
    return " ".join(ElementTree.fromstring(plots.image(report, name, "svg")).itertext())


def test_png_are_png_and_svg_are_svg(report: Report, tmp_path: Path) -> None:
    written = {p.name: p for p in plots.export(report, tmp_path)}
    assert set(written) == {
        f"{n}.{f}" for n in ("throughput", "step_time", "memory", "scaling", "wire") for f in ("png", "svg")
    }
    for path in written.values():
        if path.suffix == ".png":
            raw = path.read_bytes()
            assert raw.startswith(b"\x89PNG\r\n\x1a\n")
            width, height = struct.unpack(">II", raw[16:24])
            assert width > 1000
            assert height > 400
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_nothing_is_drawn_without_data(report: Report, tmp_path: Path) -> None:
    thin = tuple(m for m in report.measurements if m.metric == "tokens_per_s")
    only = dataclasses.replace(report, measurements=thin, scaling=(), distributions={})
    assert plots.available(only) == ("throughput",)
    assert {p.stem for p in plots.export(only, tmp_path)} == {"throughput"}


def test_an_uncertified_cell_is_not_drawn(report: Report) -> None:
    assert "zero:stage=3" not in svg_text(report, "throughput")


def test_charts_name_units_groups_and_the_measured_baseline(report: Report) -> None:
    throughput, scaling = svg_text(report, "throughput"), svg_text(report, "scaling")
    for words in (
        "tokens/s",
        "12,300",
        "gpt-tiny, 8 sequences per process and step",
        "higher is better",
        "95 % intervals",
    ):
        assert words in throughput
    for words in ("Weak scaling against ddp, 1 process", "ideal", "efficiency, %", "91.1 %"):
        assert words in scaling
    assert "GiB" in svg_text(report, "memory")
    assert "ms per optimizer step" in svg_text(report, "step_time")


def test_memory_stands_against_the_device_where_it_is_known(report: Report, golden: object) -> None:
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
    assert f"mesh:tp={min(cells, MOST_LANES - 1) - 1}" in text
    assert ("and 21 more cells" in text) == (cells == 80)


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


def test_sizes_stand_side_by_side_and_a_cell_that_was_not_measured_is_a_dash(report: Report) -> None:
    (family,) = bars.throughput(report).families
    assert [size for size, _ in family.sizes] == [1, 2]
    assert list(family.strategies) == ["ddp", "fsdp2", "zero:stage=1", "zero:stage=2"]
    assert [mark is None for _, mark in bars.slots(family)] == [False, True, True, True, False, False, False, False]
    assert svg_text(report, "throughput").count("\u2013") == 3


def test_one_size_keeps_a_lane_per_cell_with_the_number_of_the_table(report: Report) -> None:
    one = dataclasses.replace(report, measurements=tuple(m for m in report.measurements if m.axes["world_size"] == 2))
    found = bars.throughput(one)
    assert not found.families
    assert [lane.label for lane in found.lanes if lane.mark] == ["ddp", "fsdp2", "zero:stage=1", "zero:stage=2"]
    assert "12,345" in svg_text(one, "throughput")


def test_a_strategy_has_one_colour_in_every_chart(report: Report) -> None:
    colours = strategy_colours(report)
    assert len(set(colours.values())) == len(colours)
    for found in (bars.throughput(report), bars.wire(report), times.steps(report), bars.peak_memory(report)):
        assert {mark.label: mark.colour for mark in found.marks}.items() <= colours.items()


def test_strong_scaling_is_a_family_of_the_same_global_batch(report: Report, golden: object) -> None:
    def halved(m: Measurement) -> Measurement:
        return dataclasses.replace(m, axes=dict(m.axes) | {"micro_batch": 4, "global_batch": 16})

    found = tuple(halved(m) if m.axes["world_size"] == 1 else m for m in report.measurements)
    (family,) = bars.throughput(dataclasses.replace(report, measurements=found)).families
    assert family.title == golden
    assert "16" in family.title


def test_groups_that_differ_in_more_than_size_share_no_panel(report: Report) -> None:
    other = tuple(
        dataclasses.replace(m, axes=dict(m.axes) | {"model": "gpt-13b"}) if m.axes["world_size"] == 1 else m
        for m in report.measurements
    )
    found = bars.throughput(dataclasses.replace(report, measurements=other))
    assert not found.families
    assert len(found.marks) == 5


def test_wire_shows_counted_beside_the_formula_and_nothing_where_nothing_was_sent(report: Report) -> None:
    counted = {mark.label: mark for mark in bars.wire(report).marks}
    assert counted["fsdp2"].beside is not None
    assert (counted["fsdp2"].measurement.value, counted["fsdp2"].beside.value) == (120.4e6, 120.3e6)
    alone = tuple(m for m in report.measurements if not m.metric.startswith("wire"))
    assert not bars.wire(dataclasses.replace(report, measurements=alone))


def test_phases_are_drawn_up_to_the_step_and_what_none_holds_is_named(report: Report, golden: object) -> None:
    assert not times.phases(report)
    whole = with_metric(report, "forward_s", "s", 0.01)
    text = svg_text(whole, "phases")
    assert "forward" in text
    assert text == golden
    assert "backward" not in text


def test_cost_shows_the_lowest_price_on_demand_beside_spot(report: Report, golden: object) -> None:
    assert "cost" not in plots.available(report)
    dear = with_metric(report, "usd_per_mtok", "USD/Mtok", 3.0, price="cloud-a")
    cheap = with_metric(dear, "usd_per_mtok", "USD/Mtok", 2.0, price="cloud-b")
    both = with_metric(cheap, "usd_per_mtok", "USD/Mtok", 1.0, price="cloud-a spot")
    first = next(mark for mark in cost.prices(both).marks if mark.label == "ddp" and mark.measurement.value == 2.0)
    assert first.measurement.axes["price"] == "cloud-b"
    assert first.beside is not None
    assert first.beside.value == 1.0
    text = svg_text(both, "cost")
    assert text == golden


def test_names_at_the_ends_of_lines_never_touch_and_stay_inside() -> None:
    from matplotlib.text import Annotation

    figure, (axes,) = canvas("", "", 4.0)
    axes.set_ylim(0, 100)
    name_ends(axes, [End(y, f"line {y}", "#000000") for y in (1.0, 1.1, 0.9, 50.0)])
    heights = sorted(t.xy[1] for t in axes.texts if isinstance(t, Annotation))
    gaps = [above - below for below, above in pairwise(heights)]
    assert heights[0] >= 0
    assert min(gaps) * figure.get_figheight() * 72 > 9.5
    assert heights[-1] == pytest.approx(0.5)


def test_matplotlib_is_not_imported_until_something_is_drawn() -> None:
    code = "import sys, paceline.report, paceline.report.exporters.html, paceline.report.exporters.plots as p; "
    code += "print([m for m in ('matplotlib', 'rich', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_long_words_over_a_panel_leave_the_axes_their_room(recwarn: pytest.WarningsRecorder) -> None:
    figure, (axes,) = canvas("", "", 2.9)
    entitle(axes, "Title", "what it shows " * 10, "precision bf16, sequence length 1024, " * 5)
    figure.savefig(io.BytesIO(), format="png")
    assert not recwarn.list, "layout gives up where a text leaves the axes no room"
    assert axes.get_position().width > 0.8


LONG = ",".join(f"option{i}=some value of it" for i in range(60))


@pytest.mark.parametrize("axis", ["strategy", "launcher"])
def test_axes_keep_their_room_beside_a_page_of_options(report: Report, axis: str) -> None:
    measurements = tuple(
        dataclasses.replace(m, axes={**m.axes, axis: f"{m.axes['strategy']}:{LONG}"}) for m in report.measurements
    )
    changed = dataclasses.replace(report, measurements=measurements)
    for name in plots.available(changed):
        collect, draw = plots.CHARTS[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="constrained_layout not applied")
            draw(changed, collect(changed)).draw_without_rendering()


def test_the_layout_of_a_chart_is_no_matter_of_the_terminal(
    report: Report, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def crowded(_: Report, __: object) -> object:
        figure, axes = canvas("", "", 1.0)
        axes[0].set_yticks([0], ["x" * 500])
        return figure

    monkeypatch.setitem(plots.CHARTS, "throughput", (lambda _: True, crowded))
    assert plots.image(report, "throughput", "png").startswith(b"\x89PNG")
    assert not recwarn.list


def test_a_heading_leaves_room_for_its_panel() -> None:
    figure, axes = canvas("", "", 2.0)
    entitle(axes[0], "", "", LONG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    assert axes[0].get_position().height > 0.3
