from __future__ import annotations

import csv
import dataclasses
import io
import math
from typing import Any

from paceline.analysis.findings import Report
from paceline.report.exporters import csv as exporter


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def with_axes(report: Report, **axes: Any) -> Report:
    return dataclasses.replace(
        report, measurements=tuple(dataclasses.replace(m, axes=dict(m.axes) | axes) for m in report.measurements)
    )


def test_one_row_per_cell_and_metric(report: Report) -> None:
    found = rows(exporter.text(report))
    assert len(found) == len(report.measurements)
    assert len({(row["cell"], row["metric"]) for row in found}) == len(found)
    assert all(row["unit"] for row in found)


def test_missing_is_empty_never_zero(report: Report) -> None:
    mfu = [row for row in rows(exporter.text(report)) if row["metric"] == "mfu_ratio"]
    assert mfu
    assert {row["value"] for row in mfu} == {""}
    broken = dataclasses.replace(report.measurements[0], value=math.nan, low=-math.inf, high=math.inf)
    (row,) = rows(exporter.text(dataclasses.replace(report, measurements=(broken,))))
    assert (row["value"], row["low"], row["high"]) == ("", "", "")


def test_a_cell_without_certificate_is_marked(report: Report) -> None:
    certified = {row["strategy"]: row["certified"] for row in rows(exporter.text(report))}
    assert certified == {
        "ddp": "true",
        "fsdp2": "true",
        "zero:stage=1": "true",
        "zero:stage=2": "true",
        "zero:stage=3": "false",
    }
    wide = {(row["strategy"], row["world_size"]): row["certified"] for row in rows(exporter.cells_text(report))}
    assert wide["zero:stage=3", "2"] == "false"
    assert wide["ddp", "2"] == "true"


def test_cells_have_one_row_each_and_units_in_the_header(report: Report) -> None:
    found = rows(exporter.cells_text(report))
    assert [row["cell"] for row in found] == list(dict.fromkeys(m.cell for m in report.measurements))
    first = found[0]
    assert float(first["tokens_per_s [tokens/s]"]) == 12345.0
    assert float(first["tokens_per_s_low [tokens/s]"]) < 12345.0 < float(first["tokens_per_s_high [tokens/s]"])
    assert first["mfu_ratio [ratio]"] == ""
    assert (first["strategy"], first["world_size"]) == ("ddp", "2")


def test_cells_tell_variants_of_a_metric_apart(report: Report) -> None:
    speed = report.measurements[0]
    prices = tuple(
        dataclasses.replace(
            speed, metric="usd_per_mtok", unit="USD/Mtok", value=v, axes=dict(speed.axes) | {"price": p}
        )
        for p, v in (("here", 2.0), ("there", 1.0))
    )
    (first, *_) = rows(exporter.cells_text(dataclasses.replace(report, measurements=(*report.measurements, *prices))))
    assert first["usd_per_mtok (here) [USD/Mtok]"] == "2.0"
    assert first["usd_per_mtok (there) [USD/Mtok]"] == "1.0"


def test_columns_keep_their_order_whatever_came_first(report: Report) -> None:
    strange = dataclasses.replace(
        report.measurements[0], cell="x", metric="m", axes={"kernel": "k", "steps": 3, "strategy": "ddp"}
    )
    one = dataclasses.replace(report, measurements=(strange, *report.measurements))
    other = dataclasses.replace(report, measurements=(*report.measurements, strange))
    assert exporter.text(one).splitlines()[0] == exporter.text(other).splitlines()[0]
    assert list(rows(exporter.text(one))[0])[:3] == ["workload", "strategy", "model"]


def test_a_name_is_never_a_formula_and_a_negative_number_stays_one(report: Report) -> None:
    named = with_axes(report, model="=cmd()", data="@sum(A1)")
    cold = dataclasses.replace(named.measurements[0], value=-1.5)
    for text in (exporter.text, exporter.cells_text):
        (row,) = rows(text(dataclasses.replace(named, measurements=(cold,))))
        assert (row["model"], row["data"]) == ("'=cmd()", "'@sum(A1)")
        assert "-1.5" in row.values()


def test_rfc_4180(report: Report) -> None:
    name = 'a "quoted", two\nlines'
    text = exporter.text(with_axes(report, model=name))
    assert text.endswith("\r\n")
    assert text.count("\r\n") == len(report.measurements) + 1
    assert {row["model"] for row in rows(text)} == {name}
