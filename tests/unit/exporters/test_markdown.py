from __future__ import annotations

import dataclasses

from paceline.exporters import markdown
from paceline.findings import Report


def test_the_answer_comes_first(report: Report) -> None:
    title, answer = markdown.text(report).split("\n\n")[:2]
    assert title == "# quick"
    assert answer.startswith("**Tie between DDP and FSDP2 with gpt-tiny on 2 processes: DDP is 1.12 times as fast")


def test_the_answer_is_the_findings_own_whoever_wins(report: Report) -> None:
    verdict = dataclasses.replace(report.comparisons[2], ratio=2.0, low=1.9, high=2.1, verdict="better")
    other = dataclasses.replace(
        report.recommendations[0], choose=("zero:stage=2",), over=("ddp",), because=(verdict,), text="Another winner."
    )
    text = markdown.text(dataclasses.replace(report, recommendations=(other,)))
    assert "**ZeRO-2 is 2.0 times as fast as DDP with gpt-tiny on 2 processes (95 % interval 1.9 to 2.1).**" in text
    assert "Tie between" not in text


def test_an_invalid_cell_is_listed_and_not_ranked_though_it_was_fastest(report: Report) -> None:
    ranking, rest = markdown.text(report).split("## Not ranked")
    assert "| zero:stage=3 |" not in ranking
    assert "14,020" not in ranking + rest
    assert "| zero:stage=3, gpt-tiny, 2 processes | invalid | micro batches per step: expected 4, observed 1 |" in rest


def test_no_winner_without_a_recommendation(report: Report) -> None:
    text = markdown.text(dataclasses.replace(report, recommendations=()))
    assert "Winners" not in text
    assert "No recommendation" in text


def test_a_plot_is_linked_only_where_there_is_data(report: Report) -> None:
    text = markdown.text(dataclasses.replace(report, scaling=(), distributions={}))
    assert "plots/throughput.png" in text
    assert "plots/scaling.png" not in text
    assert "plots/step_time.png" not in text


def test_missing_is_a_dash_never_zero(report: Report) -> None:
    unknown = tuple(
        dataclasses.replace(m, value=None, low=None, high=None) if m.metric == "peak_memory_bytes" else m
        for m in report.measurements
    )
    line = next(
        line
        for line in markdown.text(dataclasses.replace(report, measurements=unknown)).splitlines()
        if "| zero:stage=2 |" in line
    )
    assert "| \u2013 |" in line
    assert "| 0" not in line.replace("| 0.849", "")


def test_escape_keeps_cells_and_tags_shut() -> None:
    assert markdown.escape("a|b <i> [x](http://y)\n`*") == "a\\|b &lt;i> [x]\\(http://y) \\`\\*"
