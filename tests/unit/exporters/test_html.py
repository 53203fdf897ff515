from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

from paceline.exporters import html, markdown
from paceline.findings import Report, RunFinding

EVIL = "<script>alert('x')</script>\"onload=\"y"


class Reader(HTMLParser):
    """Collects tags, ids and everything a browser would fetch, and checks that tags close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use", "rect", "image"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


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
        machines=({"host": EVIL, EVIL: EVIL},),
        notes=(EVIL,),
        skipped=(EVIL,),
    )


def test_names_stay_text(report: Report) -> None:
    page = html.text(poisoned(report))
    reader = read(page)
    assert "<script" not in page.lower()
    assert not {name for name in reader.attributes if name.startswith("on")}
    assert "alert('x')" in reader.text
    assert "<script" not in markdown.text(poisoned(report)).lower()


def test_nothing_is_loaded(report: Report) -> None:
    page = html.text(report)
    reader = read(page)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    assert all(target.startswith(("#", "data:")) for target in reader.fetched)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_plots_are_inside_with_ids_of_their_own(report: Report) -> None:
    reader = read(html.text(report))
    assert reader.tags.count("figure") == 5
    assert len(set(reader.ids)) == len(reader.ids)
    assert {target[1:] for target in reader.fetched if target.startswith("#")} <= set(reader.ids)


def test_follows_the_theme_and_the_width_of_the_screen(report: Report) -> None:
    page = html.text(report)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "var(--ink)" in page.split("<figure>")[1]


def test_says_the_answer_the_ranking_and_every_failure(report: Report) -> None:
    text = read(html.text(report)).text
    assert text.index("Tie between ddp and fsdp2") < text.index("12,345") < text.index("tp=3 does not divide 4 heads")
    for words in ("micro batches per step: expected 4, observed 1", "out of memory on rank 1 in backward", "0.893"):
        assert words in text
    assert "None" not in text
    assert "nan" not in text.lower().split()


def test_without_runs_it_says_so(empty_report: Report) -> None:
    text = read(html.text(empty_report)).text
    assert "No recommendation" in text
    assert "Nothing to rank" in text
