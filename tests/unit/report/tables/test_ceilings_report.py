"""Ceilings as tables and charts: every number with its unit, every gap with its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.findings import Measurement, Report
from paceline.report.charts import charts
from paceline.report.exporters import html, markdown, plots
from paceline.report.tables import ceilings
from paceline.report.tables.table import Table


def measurement(metric: str, value: float | None, **axes: Any) -> Measurement:
    usual = {"workload": "compute", "model": "llama-1b", "device": "cuda", "world_size": 1, "size": None, "rank": None}
    usual |= {"strategy": None, "variant": "", "label": "", "kernel": metric.partition("_")[0]}
    unit = "FLOP/s" if "flops" in metric else "ratio" if "ratio" in metric else "bytes/s"
    note = axes.pop("note", None)
    return Measurement(
        metric=metric,
        unit=unit,
        better="higher",
        cell="ceilings",
        value=value,
        low=value and value * 0.99,
        high=value and value * 1.01,
        n=100,
        launches=1,
        axes=usual | axes,
        runs=("compute-1",),
        note=note,
    )


def bf16(value: float | None, label: str, **more: Any) -> Measurement:
    return measurement("matmul_flops_per_s", value, kernel="matmul", dtype="bf16", label=label, **more)


MEASURED = (
    bf16(400e12, "2048 x 2048 x 2048", size=2048, variant="NT"),
    bf16(775e12, "8192 x 8192 x 8192", size=8192, variant="NT"),
    measurement("achievable_flops_per_s", 775e12, kernel="matmul", dtype="bf16", label="8192 x 8192 x 8192"),
    measurement("datasheet_share_ratio", 0.784, kernel="matmul", dtype="bf16"),
    measurement(
        "matmul_flops_per_s",
        None,
        kernel="matmul",
        dtype="fp8",
        size=256,
        note="unsupported: needs compute capability 8.9",
    ),
    *(bf16(500e12, f"mlp in {way}, 1 x 2 x 3") for way in ("forward", "grad input")),
    bf16(None, "mlp in grad weight, 1 x 2 x 3", note="oom: no room"),
    *(measurement("copy_bytes_per_s", s / 1e-3, dtype="bytes", size=s, label=f"{s}") for s in (2**20, 2**30)),
    *(
        measurement("h2d_bytes_per_s", rate, dtype="bytes", size=2**s, label=f"2^{s}", variant=way)
        for way, rate in (("pinned", 55e9), ("pageable", 11e9))
        for s in (16, 30)
    ),
    *(
        measurement(
            "attention_flops_per_s", 3e14, kernel=k, dtype="bf16", size=s, label=f"sequence {s}", variant="flash"
        )
        for k in ("attention_forward", "attention_backward")
        for s in (512, 1024)
    ),
)


@pytest.fixture
def ceilings_report(report: Report) -> Report:
    return dataclasses.replace(report, measurements=MEASURED, scaling=(), distributions={})


def table(report: Report, title: str) -> Table:
    (found,) = [t for t in ceilings.tables(report) if t.title.startswith(title)]
    return found


def texts(found: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in found.rows]


def test_a_report_without_ceilings_has_no_such_table(report: Report) -> None:
    assert ceilings.tables(report) == ()


def test_the_peak_is_shown_with_its_shape_and_its_share(ceilings_report: Report, golden: object) -> None:
    found = table(ceilings_report, "Ceilings: matrix products")
    assert found.columns[1].heading == golden
    assert texts(found)[0] == ["bf16", "775.0", "8192 x 8192 x 8192", "78.4"]
    assert texts(found)[1][2] == "unsupported: needs compute capability 8.9"


def test_the_peak_of_a_cpu_is_in_gflops(ceilings_report: Report, golden: object) -> None:
    slow = measurement("achievable_flops_per_s", 36.5e9, kernel="matmul", dtype="fp32", label="512 x 512 x 512")
    found = table(dataclasses.replace(ceilings_report, measurements=(slow,)), "Ceilings: matrix products")
    assert found.columns[1].heading == golden


def test_products_stand_by_layer_and_direction_and_a_gap_has_its_reason(
    ceilings_report: Report, golden: object
) -> None:
    found = table(ceilings_report, "Ceilings: products of llama-1b")
    assert texts(found) == [["mlp in", "bf16", "500", "500", "\u2013"]]
    assert found.notes == golden
    assert any("bf16" in note for note in found.notes)


def test_pinned_and_pageable_copies_are_in_one_row(ceilings_report: Report, golden: object) -> None:
    found = table(ceilings_report, "Ceilings: copies")
    heads = [column.heading for column in found.columns]
    assert heads == golden
    assert texts(found)[0] == ["2^16", "\u2013", "55.0", "11.0"]
    assert texts(found)[-1][1:] == ["1,070", "55.0", "11.0"]


def test_a_device_slower_than_its_peers_is_marked(ceilings_report: Report) -> None:
    own = tuple(
        measurement("achievable_flops_per_s", v, kernel="matmul", dtype="bf16", rank=rank)
        for rank, v in enumerate((775e12, 700e12, 776e12))
    )
    found = table(dataclasses.replace(ceilings_report, measurements=(*MEASURED, *own)), "Ceilings by device")
    assert [row[1].tone for row in found.rows] == ["", "bad", ""]
    assert [row[1].detail for row in found.rows] == ["1.000", "0.903", "1.001"]


@pytest.mark.parametrize(
    ("chart", "words"),
    [
        ("ceilings_products", ("TFLOP/s", "bf16", "775", "2,048", "8,192")),
        ("ceilings_copies", ("GB/s", "memory copy", "host to device pageable", "11.0", "1 GiB", "64 KiB")),
        ("ceilings_attention", ("TFLOP/s", "flash backward", "300", "llama-1b, bf16")),
    ],
)
def test_charts_name_lines_units_and_sizes(chart: str, words: tuple[str, ...], ceilings_report: Report) -> None:
    text = plots.image(ceilings_report, chart, "svg").decode()
    for word in words:
        assert word in text


def test_a_single_size_is_no_chart(ceilings_report: Report) -> None:
    few = dataclasses.replace(ceilings_report, measurements=MEASURED[1:2])
    assert not [chart.name for chart in charts(few) if chart.name.startswith("ceilings")]


def test_every_exporter_takes_them(ceilings_report: Report, tmp_path: Path) -> None:
    for exporter in (html, markdown):
        (path,) = exporter.export(ceilings_report, tmp_path)
        assert "8192 x 8192 x 8192" in path.read_text()


def test_a_reason_that_ends_with_full_stops_ends_with_one(golden: object) -> None:
    refused = measurement(
        "attention_flops_per_s",
        None,
        kernel="attention_forward",
        dtype="bf16",
        size=512,
        variant="efficient",
        note="unsupported: No available kernel. Aborting execution.",
    )
    notes = ceilings.attention("Attention", (refused,)).notes
    assert notes == golden
