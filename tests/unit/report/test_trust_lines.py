"""Disturbed launches are named above every table, wherever a report is read."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from paceline import report as present
from paceline.analysis.findings import LaunchTrust, Report
from paceline.report import summary
from paceline.report.exporters import html, markdown
from paceline.report.exporters import json as json_report
from paceline.report.text import trust

RED = LaunchTrust(level="red", reasons=("other processes used 0.9 of 2 cores",), repeated=2)
AMBER = LaunchTrust(level="amber", reasons=("the CPU frequency governor is <powersave>",))
GREEN = LaunchTrust(level="green")


def lit(report: Report, *lights: LaunchTrust | None) -> Report:
    """The lights of the first measured launches; the others have none."""
    given = iter(lights)
    runs = [run if run.is_reference else dataclasses.replace(run, trust=next(given, None)) for run in report.runs]
    return dataclasses.replace(report, runs=tuple(runs))


def printed(report: Report) -> str:
    screen = Console(file=io.StringIO(), width=160)
    screen.print(present.section_group(report))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_the_worst_launches_are_named_first(report: Report, golden: object) -> None:
    assert "\n".join(trust.lines(lit(report, AMBER, GREEN, RED, dataclasses.replace(RED, repeated=0)))) == golden


@pytest.mark.parametrize("lights", [(), (GREEN, GREEN)])
def test_a_quiet_campaign_says_nothing(report: Report, lights: tuple[LaunchTrust, ...]) -> None:
    assert trust.lines(lit(report, *lights)) == []
    assert "launches disturbed" not in printed(lit(report, *lights))
    assert "were disturbed" not in html.text(lit(report, *lights))


def test_many_launches_are_counted(report: Report) -> None:
    lines = trust.lines(lit(report, *[RED] * 8))
    assert lines[0].startswith("Trust: red. 8 of 21 launches were disturbed: ")
    assert lines[-1] == "  and 3 more, listed in report.json"
    assert len(lines) == 7


def test_it_comes_before_the_first_table_and_the_answer(report: Report) -> None:
    disturbed = lit(report, GREEN, RED, AMBER)
    terminal = printed(disturbed)
    first, second, *_ = terminal.splitlines()
    assert first == "ddp is 12 % faster than zero:stage=1 on 2 processes; equal to fsdp2"
    assert second.startswith("Trust: red. 3 of 20 runs invalid; 1 of 20 launches badly disturbed (other processes ")
    assert terminal.index("<powersave>") < terminal.index("tokens/s"), "the disturbed launches are named first"
    page = html.text(disturbed)
    body = page[page.index("<main>") :]
    assert body.index("Trust: red.") < body.index('class="support"') < body.index("<section")
    assert "&lt;powersave&gt;" in body
    text = markdown.text(disturbed)
    assert text.index("Trust: red.") < text.index("**") < text.index("| ---")


def test_one_of_several_reasons_is_called_an_example(report: Report) -> None:
    other = dataclasses.replace(RED, reasons=("swapping moved 9 MiB/s",))
    assert f"launches badly disturbed ({RED.reasons[0]})" in summary.light(lit(report, RED, RED)).text
    assert f"launches badly disturbed (for example, {RED.reasons[0]})" in summary.light(lit(report, RED, other)).text


def test_programs_find_the_light_of_each_run(report: Report) -> None:
    runs = json.loads(json_report.text(lit(report, RED, GREEN)))["runs"]
    found = [run["trust"] for run in runs if run["trust"] is not None]
    assert found == [
        {"level": "red", "reasons": ["other processes used 0.9 of 2 cores"], "repeated": 2},
        {"level": "green", "reasons": [], "repeated": 0},
    ]
