"""The glossary defines every name that users type or read: plugins, run statuses and verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.analysis.findings import machine, served, training
from paceline.analysis.findings.reproduction import ReplayVerdict
from paceline.experiment import plugins
from paceline.results.records import Status

TEXT = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
# "**ddp** (strategy)" is the name ddp of the kind strategy; "**cell**" is a plain term. One row may define two terms.
TERMS = {
    (name, kind)
    for row, kind in re.findall(r"^\| \*\*(.+?)\*\*(?: \((\w+)\))? \|", TEXT, re.MULTILINE)
    for name in row.split(", ")
}
SINGULAR = {
    "workloads": "workload",
    "strategies": "strategy",
    "launchers": "launcher",
    "engines": "engine",
    "exporters": "exporter",
}
# What people read, and what stands in report.json for it.
SHOWN = {"faster", "slower", "equal", "inconclusive", "certified"}
STORED = {
    *(training.BETTER, training.WORSE, training.EQUAL, training.INCONCLUSIVE),
    *machine.WORST_FIRST,
    *(served.VALID, served.INVALID),
    *(served.AGREES, served.DIFFERS, served.UNDECIDED, served.SILENT),
    *(str(verdict) for verdict in ReplayVerdict),
}


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_it_defines_every_plugin(kind: str) -> None:
    own = {name for name, description in plugins.names(kind).items() if not description.startswith("from ")}
    assert own - {name for name, of in TERMS if of == SINGULAR[kind]} == set()


def test_it_defines_every_run_status() -> None:
    assert {str(status) for status in Status} - {name for name, of in TERMS if of == "status"} == set()


def test_it_defines_every_verdict() -> None:
    assert (SHOWN | STORED) - {name for name, _ in TERMS} == set()


def test_it_defines_each_term_once_and_nothing_that_is_gone() -> None:
    rows = re.findall(r"^\| (\*\*.+?\*\*(?: \(\w+\))?) \|", TEXT, re.MULTILINE)
    assert len(rows) == len(set(rows))
    for kind, singular in SINGULAR.items():
        assert {name for name, of in TERMS if of == singular} <= plugins.names(kind).keys()
