from __future__ import annotations

import csv
import io

from paceline.exporters import csv as exporter
from paceline.findings import Report


def rows(report: Report) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exporter.text(report))))


def test_one_row_per_cell_and_metric(report: Report) -> None:
    found = rows(report)
    assert len(found) == len(report.measurements)
    assert len({(row["cell"], row["metric"]) for row in found}) == len(found)
    assert all(row["unit"] for row in found)


def test_missing_is_empty_never_zero(report: Report) -> None:
    mfu = [row for row in rows(report) if row["metric"] == "mfu_ratio"]
    assert mfu
    assert {row["value"] for row in mfu} == {""}


def test_a_cell_without_certificate_is_marked(report: Report) -> None:
    certified = {row["strategy"]: row["certified"] for row in rows(report)}
    assert certified == {
        "ddp": "true",
        "fsdp2": "true",
        "zero:stage=1": "true",
        "zero:stage=2": "true",
        "zero:stage=3": "false",
    }
