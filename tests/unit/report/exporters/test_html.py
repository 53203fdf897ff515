from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.findings import Measurement, Recipe, Report, RunFinding
from paceline.report.charts import charts
from paceline.report.charts.training import PHASES
from paceline.report.exporters import html, markdown

EVIL = "<script>alert('x')</script>\"onload=\"y"
MOST_BYTES = 5_000_000


class Reader(HTMLParser):
    """Collects tags, ids, scripts and everything a browser would fetch, and checks that tags close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use", "rect", "image", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset"}]
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(page).scripts[0])
    return found


def own_markup(page: str) -> str:
    """The page without the scripts, which are files of the package and not made from the report."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def poisoned(report: Report) -> Report:
    """Every name a user or a machine may choose is a script."""

    def bad(run: RunFinding) -> RunFinding:
        return dataclasses.replace(run, reason=EVIL, health=(EVIL,), axes=dict(run.axes) | {"model": EVIL})

    return dataclasses.replace(
        report,
        title=EVIL,
        runs=tuple(map(bad, report.runs)),
        measurements=tuple(
            dataclasses.replace(m, axes=dict(m.axes) | {"model": EVIL, "strategy": EVIL}) for m in report.measurements
        ),
        recommendations=tuple(dataclasses.replace(r, text=EVIL, group=EVIL) for r in report.recommendations),
        scaling=tuple(dataclasses.replace(p, series=EVIL) for p in report.scaling),
        machines=({"host": EVIL, EVIL: EVIL, "gpus": [{"name": EVIL}]},),
        recipes=(recipe(report, EVIL),),
        notes=(EVIL,),
        skipped=(EVIL,),
    )


def recipe(report: Report, text: str) -> Recipe:
    cell = next(run.cell for run in report.runs if not run.is_reference)
    return Recipe(cell=cell, file=f"{text}.yaml", experiment=text, command=f"paceline run {text}")


def test_names_stay_text(report: Report) -> None:
    page = html.text(poisoned(report))
    reader = read(page)
    assert reader.tags.count("script") == 1 + len(html.SCRIPTS)
    assert "<script>alert" not in page.lower()
    assert not {name for name in reader.attributes if name.startswith("on")}
    assert "alert('x')" in reader.text
    assert EVIL in reader.scripts[0].replace("\\u003c", "<").replace('\\"', '"'), "the charts tell the name too"
    assert "<" not in reader.scripts[0]
    assert "<script" not in markdown.text(poisoned(report)).lower()


def test_nothing_is_loaded(report: Report) -> None:
    page = html.text(report)
    reader = read(page)
    assert not {"link", "iframe", "object", "embed", "base", "form", "img"} & set(reader.tags)
    assert all(target.startswith("#") for target in reader.fetched)
    assert not re.search(r"https?://|@import|url\(", own_markup(page))


def test_only_the_scripts_inside_may_run(report: Report) -> None:
    page = html.text(report)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    allowed = re.findall(r"'sha256-([^']+)'", policy[1])
    scripts = read(page).scripts[1:]
    assert allowed == [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "unsafe-inline" not in policy[1].partition("script-src")[2].partition(";")[0]


def test_vendored_libraries_are_what_the_note_says() -> None:
    folder = Path(html.__file__).parent / "page"
    note = (folder / "VENDORED.md").read_text()
    for path in (folder / "vendor").glob("*.js"):
        assert f"| `{path.name}` |" in note
        assert hashlib.sha256(path.read_bytes()).hexdigest() in note
        assert (folder / "vendor" / f"{path.name.partition('.')[0]}.LICENSE").is_file()


def test_every_chart_has_a_place_and_its_data(report: Report) -> None:
    page = html.text(report)
    names = [chart["name"] for chart in data_of(page)["charts"]]
    assert names == [chart.name for chart in charts(report)]
    assert sorted(re.findall(r'data-chart="([^"]+)"', page)) == sorted(names)
    ids = read(page).ids
    assert len(set(ids)) == len(ids)


def test_zero_is_shown_and_defaults_are_not(report: Report) -> None:
    chart = next(c for c in data_of(html.text(report))["charts"] if c["name"] == "throughput")
    assert chart["series"][0]["colour"] == 0
    assert "samples" not in chart["points"][0]
    assert "scale" not in chart["y"]


def test_links_lead_to_something(report: Report) -> None:
    reader = read(html.text(report))
    targets = {target[1:] for target in reader.fetched}
    assert any(target.startswith("cell-") for target in targets)
    assert targets <= set(reader.ids)


def test_filters_are_the_axes_that_vary(report: Report) -> None:
    data = data_of(html.text(report))
    axes = {axis["name"]: axis["values"] for axis in data["axes"]}
    assert set(axes) == {"strategy", "model", "world size"}, "global batch follows from the world size"
    assert axes["world size"] == ["1 process", "2 processes"]
    cell = next(run.cell for run in report.runs if run.axes.get("strategy") == "zero:stage=2")
    place = data["cells"][cell][list(axes).index("strategy")]
    assert axes["strategy"][place] == "zero:stage=2"
    drawn = {data["words"][cell] for chart in data["charts"] for point in chart["points"] for cell in point["cells"]}
    assert drawn <= set(data["cells"])


def test_a_cell_can_be_repeated_from_the_page(report: Report) -> None:
    text = read(html.text(dataclasses.replace(report, recipes=(recipe(report, "again"),)))).text
    assert "paceline run again" in text
    assert "again.yaml" in text


def test_follows_the_theme_and_the_width_of_the_screen(report: Report) -> None:
    page = html.text(report)
    assert "color-scheme: light dark" in page
    assert 'name="viewport"' in page
    assert "@media print" in page


def test_says_the_answer_the_ranking_and_every_failure(report: Report) -> None:
    text = read(html.text(report)).text
    assert (
        text.index("ddp is 12 % faster than zero:stage=1 on 2 processes; equal to fsdp2")
        < text.index("12,345")
        < text.index("equal to fsdp2 (within 2 %)")
        < text.index("tp=3 does not divide 4 heads")
    )
    for words in ("micro batches per step: expected 4, observed 1", "out of memory on rank 1 in backward", "0.893"):
        assert words in text
    assert "None" not in text
    assert "nan" not in text.lower().split()
    assert "plots/" in text, "who has no JavaScript is told where the charts are"


def test_without_runs_it_says_so(empty_report: Report) -> None:
    text = read(html.text(empty_report)).text
    assert "No recommendation" in text
    assert "Nothing to rank" in text


def many(report: Report, models: int) -> Report:
    """The same campaign once per model, as rich as a real one: 25 metrics, 15 checks, 500 steps of each cell."""

    def named(value: Any, i: int) -> Any:
        axes = dict(value.axes) | {"model": f"gpt-{i}"}
        runs = (
            {"runs": tuple(f"{run}-{i}" for run in value.runs)}
            if hasattr(value, "runs")
            else {"run": f"{value.run}-{i}"}
        )
        return dataclasses.replace(value, cell=f"{value.cell}-{i}", axes=axes, **runs)

    each = range(models)
    return dataclasses.replace(
        report,
        runs=tuple(named(run, i) for i in each for run in report.runs),
        measurements=tuple(named(m, i) for i in each for m in (*report.measurements, *further(report))),
        certificates=tuple(
            dataclasses.replace(c, run=f"{c.run}-{i}", cell=f"{c.cell}-{i}", checks=c.checks * 3)
            for i in each
            for c in report.certificates
        ),
        comparisons=tuple(
            dataclasses.replace(c, cell=f"{c.cell}-{i}", other=f"{c.other}-{i}")
            for i in each
            for c in report.comparisons
        ),
        distributions={
            f"{cell}-{i}": tuple(0.123456789 + k * 1e-5 for k in range(500))
            for i in each
            for cell in report.distributions
        },
        recipes=tuple(
            Recipe(cell=f"{cell}-{i}", file="again.yaml", experiment="x" * 700, command="paceline run again.yaml")
            for i in each
            for cell in {run.cell for run in report.runs}
        ),
    )


def further(report: Report) -> list[Measurement]:
    speeds = [m for m in report.measurements if m.metric == "tokens_per_s"]
    phases = [dataclasses.replace(m, metric=name, unit="s", value=0.1) for m in speeds for name in PHASES]
    return phases + [dataclasses.replace(m, metric=f"another_metric_{i}_per_s") for m in speeds for i in range(13)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_five_hundred_runs_stay_light(report: Report, repeats: int) -> None:
    """Worst is a cell of its own for every run: one repeat of each is kept then."""
    kept = [run for run in report.runs if run.repeat < repeats]
    names = {run.run for run in kept}
    certificates = tuple(c for c in report.certificates if c.run in names)
    some = dataclasses.replace(report, runs=tuple(kept), certificates=certificates)
    large = many(some, -(-500 // len(kept)))
    assert len(large.runs) >= 500
    assert len(html.text(large).encode()) < MOST_BYTES
