from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from paceline.analysis.findings import Report
from paceline.errors import Scalar
from paceline.report.exporters import markdown


def test_the_answer_comes_first(report: Report, golden: object) -> None:
    title, answer = markdown.text(report).split("\n\n")[:2]
    assert title == "# quick"
    assert answer == golden
    assert "ddp" in answer
    assert "fsdp2" in answer
    assert "12 % faster" in answer


def test_the_answer_is_the_findings_own_whoever_wins(report: Report) -> None:
    verdict = dataclasses.replace(report.comparisons[2], ratio=2.0, low=1.9, high=2.1, verdict="better")
    other = dataclasses.replace(
        report.recommendations[0], choose=("zero:stage=2",), over=("ddp",), because=(verdict,), text="Another winner."
    )
    text = markdown.text(dataclasses.replace(report, recommendations=(other,)))
    assert "**zero:stage=2 is 100 % faster than ddp with gpt-tiny on 2 processes (95 % interval 90 to 110 %).**" in text
    assert "are equal" not in text


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
    assert markdown.escape("a|b <i> [x](http://y)\n`*") == "a\\|b &lt;i> [x]\\(http:<!-- -->//y) \\`\\*"


def named(report: Report, model: str) -> Report:
    """The same report about a model of another name, wherever the name stands."""

    def other(axes: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return dict(axes) | {"model": model}

    return dataclasses.replace(
        report,
        title=model,
        runs=tuple(dataclasses.replace(r, axes=other(r.axes), health=(model,)) for r in report.runs),
        measurements=tuple(dataclasses.replace(m, axes=other(m.axes), note=model) for m in report.measurements),
        machines=({"host": model, "cpu": model},),
        notes=(model,),
        skipped=(model,),
    )


def parsed(text: str) -> list[Token]:
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return [inner for token in tokens for inner in (token, *(token.children or ()))]


OURS = re.compile(r"</?details>|<summary>(?:[^<>]|<!-- -->)*</summary>|</?sub>|<!-- -->|\n")


@pytest.mark.parametrize(
    "model",
    [
        "<script>alert(1)</script>",
        "a|b",
        "`tick`",
        "*bold* _soft_ ~~gone~~",
        "[x](http://y)",
        "# head",
        "- item",
        "1. first",
        "> quoted",
        "</details>",
        "back\\|slash",
        "[quick]: //evil.example 'x'",
    ],
)
def test_a_name_is_never_markup(report: Report, model: str) -> None:
    tokens = parsed(markdown.text(named(report, model)))
    html = "".join(t.content for t in tokens if t.type in ("html_block", "html_inline"))
    assert not OURS.sub("", html), "only our own tags"
    usual = parsed(markdown.text(report))
    for kind in ("em_open", "s_open", "link_open", "blockquote_open", "hr", "ordered_list_open", "fence"):
        assert sum(t.type == kind for t in tokens) == sum(t.type == kind for t in usual) == 0
    assert model in "".join(t.content for t in tokens if t.type == "text")


def test_tables_keep_their_columns_whatever_a_name_holds(report: Report) -> None:
    tokens = parsed(markdown.text(named(report, "a|b `c|d` \\| e")))
    widths = []
    for t in tokens:
        if t.type == "tr_open":
            widths.append(0)
        elif t.type in ("th_open", "td_open"):
            widths[-1] += 1
    usual = [t.type for t in parsed(markdown.text(named(report, "plain")))]
    assert sum(widths) == usual.count("th_open") + usual.count("td_open")


def test_nobody_is_called_by_a_name(report: Report) -> None:
    assert not re.search(r"@\w", markdown.text(named(report, "@everyone")))
    assert markdown.escape("Xeon @ 2 GHz") == "Xeon @ 2 GHz"


@pytest.mark.parametrize("model", ["fixes #12", "closes owner/repo#7", "resolves GH-3"])
def test_no_name_closes_an_issue(report: Report, model: str) -> None:
    """GitHub acts on these words in the description of a pull request."""
    text = markdown.text(named(report, model))
    assert not re.search(r"(?i)#\d|gh-\d", text)
    assert model in "".join(t.content for t in parsed(text) if t.type == "text"), "it reads as it was written"


@pytest.mark.parametrize(
    "model",
    [
        "https://evil.example/x",
        "see HTTP://a.example",
        "www.a.example",
        "_https://a.example",
        "1http://a.example",
        "![x](http://a.example/b.png)",
    ],
)
def test_no_name_becomes_a_link(report: Report, model: str) -> None:
    """GitHub links these without any markup; inside code it does not."""
    text = re.sub(r"`[^`]*`", "", markdown.text(named(report, model)))
    assert not re.search(r"(?i)(https?://|ftp://|www\.)", text)
    shown = "".join(t.content for t in parsed(text) if t.type == "text")
    assert model in shown, "it reads as it was written"


def crowded(report: Report, cells: int, words: int = 10) -> Report:
    speed = next(m for m in report.measurements if m.metric == "tokens_per_s")
    run = next(r for r in report.runs if r.run == speed.runs[0])
    proof = report.certificates[0]
    where = [(f"cell{i}", dict(speed.axes) | {"seed": i // 4, "strategy": f"mesh:tp={i % 4}"}) for i in range(cells)]
    return dataclasses.replace(
        report,
        measurements=tuple(dataclasses.replace(speed, cell=c, axes=a, runs=(c,)) for c, a in where),
        runs=tuple(dataclasses.replace(run, run=c, cell=c, axes=a, health=("word " * words,)) for c, a in where),
        certificates=tuple(dataclasses.replace(proof, run=c, cell=c) for c, _ in where),
        skipped=tuple(f"{c}: {'long ' * words}" for c, _ in where),
        scaling=(),
    )


@pytest.mark.parametrize(("cells", "words"), [(400, 10), (40, 2000), (1000, 100)])
def test_a_big_campaign_fits_a_pull_request_and_says_what_was_cut(report: Report, cells: int, words: int) -> None:
    text = markdown.text(crowded(report, cells, words))
    assert len(text) <= markdown.MOST_CHARACTERS
    assert "Cut to fit a pull request" in text
    assert "\u2026" in text or re.search(r"\d more (rows|notes|ranked groups) are cut here", text)
    assert text.count("<details>") == text.count("</details>")
    assert text.split("\n\n")[1].startswith("**")


def test_a_small_report_is_whole(report: Report) -> None:
    assert "cut" not in markdown.text(report).lower().replace("executed", "")


def test_what_no_limit_shortens_is_cut_at_a_line_with_its_folds_closed() -> None:
    whole = "# a\n\n<details><summary>b</summary>\n\n" + "word\n" * 20_000
    text = markdown._hard_cut(whole)
    assert len(text) <= markdown.MOST_CHARACTERS
    assert text.count("<details>") == text.count("</details>") == 1
    assert text.rstrip().endswith("report.html and metrics.csv are complete.")
