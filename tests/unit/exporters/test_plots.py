from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.exporters import plots
from paceline.findings import Report


def svg_text(report: Report, name: str) -> str:
    return " ".join(ElementTree.fromstring(plots.image(report, name, "svg")).itertext())


def test_png_are_png_and_svg_are_svg(report: Report, tmp_path: Path) -> None:
    written = {p.name: p for p in plots.export(report, tmp_path)}
    assert set(written) == {
        f"{n}.{f}" for n in ("throughput", "step_time", "memory", "scaling") for f in ("png", "svg")
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
    for words in ("tokens/s", "12,345", "gpt-tiny, 2 processes", "95 % intervals"):
        assert words in throughput
    for words in ("Weak scaling against ddp, 1 process", "ideal", "efficiency, %", "91.1 %"):
        assert words in scaling
    assert "GiB" in svg_text(report, "memory")
    assert "ms per optimizer step" in svg_text(report, "step_time")


def test_memory_stands_against_the_device_where_it_is_known(report: Report) -> None:
    def on(memory_bytes: int | None) -> str:
        machine = {"host": "a", "gpus": [{"memory_bytes": memory_bytes}]}
        return svg_text(dataclasses.replace(report, machines=(machine,)), "memory")

    assert "device: 1.0 GiB" in on(2**30)
    assert "holds 80.0 GiB, beyond this axis" in on(80 * 2**30)
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
    assert f"mesh:tp={min(cells, plots.MOST_LANES - 1) - 1}" in text
    assert ("and 21 more cells" in text) == (cells == 80)


def test_matplotlib_is_not_imported_until_something_is_drawn() -> None:
    code = "import sys, paceline.present, paceline.exporters.html, paceline.exporters.plots as p; "
    code += "print([m for m in ('matplotlib', 'rich', 'numpy', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
