"""A design as its readers see it: tables, sentences, chart, csv, html and markdown, from one outcome made by hand."""

from __future__ import annotations

import csv
import dataclasses
import io
from xml.etree import ElementTree

import pytest

from paceline.analysis.compare import recommend
from paceline.analysis.findings import DesignOutcome, Effect, LeftOut, Report, Response
from paceline.analysis.findings.compare import ALIASED, COMBINED, FACTOR, FASTER, INTERACTION, LESS, NO_EFFECT, OPEN
from paceline.report.answer import answer, grounds
from paceline.report.charts import charts
from paceline.report.exporters import csv as csv_exporter
from paceline.report.exporters import html, markdown, plots
from paceline.report.tables import effects

SPEED, MEMORY = "tokens_per_s", "peak_memory_bytes"


def response(metric: str, ratio: float, half: float | None, verdict: str) -> Response:
    low, high = (None, None) if half is None else (ratio - half, ratio + half)
    bound = None if low is None or high is None else max(high, 1 / low) - 1
    return Response(
        metric=metric,
        ratio=ratio,
        low=low,
        high=high,
        detectable_ratio=half,
        bound_ratio=bound,
        verdict=verdict,
        text=f"{ratio}: {verdict}",
    )


def effect(kind: str, name: str, *responses: Response, aliases: tuple[str, ...] = ()) -> Effect:
    return Effect(
        kind=kind,
        name=name,
        factors=(name,),
        pairs=1,
        aliases=aliases,
        responses=responses,
        cells=("ddp-2-cell",),
        runs=("r0", "r1"),
    )


EFFECTS = (
    effect(COMBINED, "both", response(SPEED, 1.431, 0.007, FASTER), response(MEMORY, 1.054, 0.0, "needs more memory")),
    effect(FACTOR, "length 2 \u2192 1", response(SPEED, 1.2, 0.3, OPEN), response(MEMORY, 0.62, None, LESS)),
    effect(FACTOR, "rank 16 \u2192 8", response(SPEED, 1.0021, 0.005, NO_EFFECT)),
    effect(INTERACTION, "rank \u00d7 length", response(SPEED, 0.95, 0.002, ALIASED), aliases=("a \u00d7 b",)),
)


@pytest.fixture
def designed(report: Report) -> Report:
    outcome = DesignOutcome(
        kind="fractional",
        title="single, tiny",
        levels={"rank": ("16", "8"), "length": ("2", "1")},
        names={"ddp-2-cell": "baseline"},
        baseline="ddp-2-cell",
        resolution=4,
        relation=("a \u00d7 b \u00d7 rank \u00d7 length",),
        effects=EFFECTS,
        left_out=(LeftOut(name="precision fp16", status="oom", reason="7 GiB asked", runs=("r9",)),),
        notes=("Read this.",),
    )
    return dataclasses.replace(report, effects=(outcome,))


def test_the_ranked_table_says_what_did_not_matter_and_its_bound(designed: Report, golden: object) -> None:
    ranked, crossed = effects.tables(designed)
    assert crossed.title == "Interactions"
    assert ranked.title == golden
    texts = [[cell.text for cell in row] for row in ranked.rows]
    assert texts[0][:3] == ["both", "+43.10", "speeds up"]
    assert ranked.rows[0][1].detail == "[+42.40, +43.80]"
    assert texts[1][2:6] == ["inconclusive", "30", "-38.0", "needs less memory"]
    assert texts[2][:3] == ["rank 16 \u2192 8", "+0.21", "no effect, under 0.8 %"], "rounded up: the bound is 0.71"
    assert texts[2][4:6] == ["\u2013", "\u2013"], "memory that was not measured is a dash"
    assert [cell.text for cell in crossed.rows[0]][2] == "confounded"
    assert crossed.rows[0][-1].text == "a \u00d7 b"
    assert ranked.notes == golden
    assert any("fp16" in note for note in ranked.notes)
    assert "Read this." in ranked.notes


def test_the_answer_is_what_mattered(designed: Report, golden: object) -> None:
    first, second = answer(designed)
    assert first == golden
    assert "43 %" in first
    assert second == golden
    assert "16" in second
    assert "0.8 %" in second
    text = grounds(designed)
    assert text == golden
    assert "16" in text


def test_where_nothing_matters_the_answer_says_so(designed: Report, golden: object) -> None:
    outcome = dataclasses.replace(designed.effects[0], effects=EFFECTS[1:3])
    first, _ = answer(dataclasses.replace(designed, effects=(outcome,)))
    assert first == golden


def test_without_effects_the_answer_is_the_recommendation(report: Report, designed: Report) -> None:
    empty = dataclasses.replace(designed.effects[0], effects=())
    assert answer(dataclasses.replace(designed, effects=(empty,))) == answer(report)


def test_the_chart_has_a_panel_per_metric_around_no_change(designed: Report, golden: object) -> None:
    chart = charts(designed)[0]
    assert (chart.name, chart.kind, [rule.y for rule in chart.rules]) == ("effects", "spans", [0.0])
    first = chart.points[0]
    assert (first.y, first.low, first.high) == tuple(map(pytest.approx, (43.1, 42.4, 43.8)))
    unknown = "inconclusive or confounded"
    assert [point.series for point in chart.points[:4]] == ["matters", unknown, "no effect", unknown]
    assert chart.points[2].text == golden
    assert "0.8 %" in chart.points[2].text
    assert len({point.group for point in chart.points}) == 2


def test_the_plot_names_every_effect(designed: Report) -> None:
    text = " ".join(ElementTree.fromstring(plots.image(designed, "effects", "svg")).itertext())
    for found in EFFECTS:
        assert found.name in text
    assert "95 % interval" in text


def test_no_design_no_chart_no_table_no_file(report: Report) -> None:
    assert effects.tables(report) == ()
    assert "effects" not in {chart.name for chart in charts(report)}


def test_csv_has_a_row_per_effect_and_metric(designed: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_exporter.effects_text(designed))))
    assert [(row["effect"], row["metric"]) for row in rows] == [
        (found.name, one.metric) for found in EFFECTS for one in found.responses
    ]
    assert rows[0]["ratio"] == "1.431"
    assert (rows[3]["low"], rows[3]["verdict"]) == ("", LESS)


def test_the_effects_stand_before_the_ranking(designed: Report) -> None:
    page, document = html.text(designed), markdown.text(designed)
    assert page.index('<section id="effects">') < page.index('id="ranking"')
    assert document.index("## What mattered, what did not") < document.index("## Ranking")
    assert "no effect, under 0.8 %" in document


def test_cells_of_a_design_that_stand_alone_are_one_list(designed: Report) -> None:
    """ddp at 1 and at 2 processes stand in groups of their own once the others are gone."""
    from paceline.report.text.cells import DESIGNED, groups

    ours = {m.cell for m in designed.measurements if m.axes["strategy"] == "ddp"}
    kept = tuple(m for m in designed.measurements if m.cell in ours)
    names = {cell: f"change {i}" for i, cell in enumerate(sorted(ours))}
    outcome = dataclasses.replace(designed.effects[0], names=names)
    (group,) = groups(dataclasses.replace(designed, measurements=kept, effects=(outcome,)))
    assert {row.label for row in group.rows} == set(names.values())
    assert group.is_listed
    assert DESIGNED in group.notes
    assert all(row.rank is None for row in group.rows)


def test_show_lists_where_the_profiled_steps_went(golden: object) -> None:
    from paceline.report.tables.one_run import _profile
    from paceline.results.records import TraceSample

    old = TraceSample(rank=1, steps=2, wall_s=2.0, compute_s=1.5, communication_s=0.4, exposed_s=0.2)
    text = _profile(old)
    assert text == golden
    assert "1,000" in text
    assert "75" in text
    assert "10" in text
    told = dataclasses.replace(
        old, products_s=0.8, attention_s=0.2, dequantisation_s=0.3, elementwise_s=0.2, copies_s=0.0
    )
    text = _profile(told)
    assert text == golden
    assert "40" in text
    assert "10" in text
    assert "15" in text


def test_cells_of_one_design_are_named_by_their_changes_and_not_chosen_between(designed: Report) -> None:
    page = html.text(designed)
    assert "<b>baseline</b>" in page
    (first, *_) = designed.recommendations
    cells = {cell: "point" for c in first.because for cell in (c.cell, c.other)}
    planned = dataclasses.replace(designed.effects[0], names=cells)
    assert first not in recommend.beside_designs(designed.recommendations, (planned,))
    assert first in recommend.beside_designs(designed.recommendations, designed.effects), "one cell alone is no pair"
