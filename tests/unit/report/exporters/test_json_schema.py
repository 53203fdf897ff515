"""docs/report.schema.json is what Paceline writes: made from the types, accepted by the reports, refusing others."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.exporters import _schema
from paceline.report.exporters import json as exporter

jsonschema = pytest.importorskip("jsonschema")

PUBLISHED = Path(__file__).parents[4] / "docs" / "report.schema.json"


def test_the_published_schema_is_that_of_the_types() -> None:
    """PACELINE_UPDATE_GOLDEN=1 writes it anew; a change that old readers would trip over needs a new SCHEMA."""
    now = json.dumps(_schema.schema(), indent=1) + "\n"
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        write_atomically(PUBLISHED, now)
    assert PUBLISHED.read_text() == now


@pytest.fixture
def check() -> Any:
    schema = json.loads(PUBLISHED.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_reports_are_valid(check: Any, report: Report, empty_report: Report) -> None:
    for found in (report, empty_report):
        check.validate(json.loads(json.dumps(exporter.document(found), allow_nan=False)))


@pytest.mark.parametrize("name", ["h200"])
def test_a_report_that_was_published_is_still_valid(check: Any, name: str) -> None:
    measured = PUBLISHED.parent / "measured" / name / "report.json"
    check.validate(json.loads(measured.read_text()))


def broken(document: dict[str, Any], case: str) -> dict[str, Any]:
    other = copy.deepcopy(document)
    if case == "no schema":
        del other["schema"]
    elif case == "a later schema":
        other["schema"] = 99
    elif case == "no unit":
        del other["measurements"][0]["unit"]
    elif case == "text for a number":
        other["measurements"][0]["value"] = "12,345"
    elif case == "a nested axis":
        other["measurements"][0]["axes"] = {"strategy": "ddp"}
    elif case == "an unknown verdict's type":
        other["comparisons"][0]["verdict"] = None
    return other


@pytest.mark.parametrize(
    "case",
    [
        "no schema",
        "a later schema",
        "no unit",
        "text for a number",
        "a nested axis",
        "an unknown verdict's type",
    ],
)
def test_other_documents_are_not(check: Any, report: Report, case: str) -> None:
    assert not check.is_valid(broken(exporter.document(report), case))
