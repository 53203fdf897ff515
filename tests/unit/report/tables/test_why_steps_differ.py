"""Sentences about step times where readers see them: terminal, Markdown and page."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from paceline import report as present
from paceline.analysis.findings import Report, StepDifference
from paceline.report import answer
from paceline.report.exporters import html, markdown
from paceline.report.tables import step_differences


def difference(label: str, seconds: float, key: str, **more: Any) -> StepDifference:
    usual: dict[str, Any] = {
        "cell": label,
        "other": "ddp",
        "label": label,
        "other_label": "ddp",
        "group": f"group {key}",
        "group_key": key,
        "step_s": 1 + seconds,
        "other_step_s": 1.0,
        "difference_s": seconds,
        "profiled_s": seconds,
        "noise_s": 0.001,
        "terms": (),
        "unexplained_s": 0.0,
        "is_explained": True,
        "verdict": "worse",
        "launches": (1, 1),
        "peak_bytes": 3 * 2.0**30,
        "other_peak_bytes": 2 * 2.0**30,
        "text": f"{label} is explained.",
        "runs": (f"{label}-r0", "ddp-r0"),
    }
    return StepDifference(**usual | more)


@pytest.fixture
def explained(report: Report) -> Report:
    lead = answer.headline(report)
    assert lead is not None
    names = ("fsdp2", "mesh:tp=2", "mesh:pp=2")
    found = tuple(difference(name, 0.1 * i, lead.group_key) for i, name in enumerate(names, 1))
    return _with(report, found)


def _with(report: Report, found: tuple[StepDifference, ...]) -> Report:
    return dataclasses.replace(report, step_differences=found)


def drawn(report: Report, verbose: bool) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(present.section_group(report) if verbose else present.brief_group(report))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_terminal_has_the_second_and_the_slowest(explained: Report) -> None:
    brief = drawn(explained, verbose=False)
    assert "fsdp2 is explained." in brief
    assert "mesh:pp=2 is explained." in brief
    assert "mesh:tp=2 is explained." not in brief
    assert "mesh:tp=2 is explained." in drawn(explained, verbose=True)


def test_another_group_than_that_of_the_headline_is_not_on_a_terminal(report: Report) -> None:
    other = _with(report, (difference("fsdp2", 0.1, "another"),))
    assert "fsdp2 is explained." not in drawn(other, verbose=False)


def test_documents_have_each_against_the_fastest_and_the_runs(explained: Report) -> None:
    for text in (markdown.text(explained), html.text(explained)):
        for name in ("fsdp2", "mesh:tp=2", "mesh:pp=2"):
            assert f"{name} is explained." in text
            assert f"{name}-r0" in text
        assert "Longer than a step of ddp, the shortest, with a peak memory of 2.00 GiB." in text


def test_a_table_for_each_group(report: Report) -> None:
    tables = step_differences.tables(_with(report, (difference("a", 0.1, "x"), difference("b", 0.2, "y"))))
    assert [table.title for table in tables] == ["Why steps differ: group x", "Why steps differ: group y"]
    assert tables[0].rows[0][1].text == "100"
    assert step_differences.tables(_with(report, ())) == ()
