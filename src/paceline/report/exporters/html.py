"""report.html: one page with everything inside, for people; opens from disk and loads nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.answer import answer, grounds
from paceline.report.charts import EVERYWHERE, SERVED, Chart, charts
from paceline.report.exporters import _page_cells, _page_data
from paceline.report.exporters._page_tables import block, bullets, folded, paragraph, render
from paceline.report.tables import (
    advice,
    claims,
    cost,
    effects,
    finetuning,
    history,
    nodes,
    scaling,
    served,
    verdicts,
)
from paceline.report.tables import (
    table as tables,
)
from paceline.report.tables.sections import machine_details, machine_tables, served_tables
from paceline.report.tables.table import Table
from paceline.report.text.cells import groups

SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "charts.js", "page.js")
# More pairs than this make the page heavy before they make anyone wiser; report.json holds all.
MOST_COMPARISONS = 1000
# Charts with many panels or wide ones, or with long lanes, take the whole width.
PANELLED = 2
WIDE_PX = 500

PAGE = Template("""<!doctype html>
<html lang="en" class="no-js">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
<script type="application/json" id="data">$data</script>
$scripts
</body>
</html>
""")

NO_CHARTS = (
    "The charts, filters and sorting need JavaScript. Every number is in the tables, and the same charts are files in "
    "the folder plots/ beside this page."
)


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.html", text(report))]


def text(report: Report) -> str:
    """The whole page. Only the scripts that stand in it may run, by their hashes; nothing may be loaded."""
    found = charts(report)
    sources = [asset(name) for name in SCRIPTS]
    return PAGE.substitute(
        policy=_policy(sources),
        title=escape(f"{report.title}: Paceline report"),
        style=asset("page.css"),
        body="\n".join(part for part in _parts(report, found) if part),
        data=_page_data.text(report, found),
        scripts="\n".join(f"<script>{source}</script>" for source in sources),
    )


@cache
def asset(name: str) -> str:
    """A file of the page's folder."""
    return resources.files(__package__).joinpath("page", *name.split("/")).read_text()


def _policy(sources: Iterable[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _parts(report: Report, found: tuple[Chart, ...]) -> Iterator[str]:
    linked = {run.cell for run in report.runs if not run.is_reference}
    sections = [(name, title, inner) for name, title, inner in _sections(report, found, linked) if inner]
    yield _header(report, [(name, title) for name, title, _ in sections])
    yield '<div id="filters" class="filters" role="group" aria-label="Filters" hidden></div>'
    for name, title, inner in sections:
        yield f'<section id="{name}"><h2>{escape(title)}</h2>{inner}</section>'
    made = f"Paceline {report.paceline_version}, {tables.created(report)}. Brackets are 95 % intervals."
    yield f'<footer>{escape(made)}<p class="printed">What was folded on the screen is not printed.</p></footer>'


def _header(report: Report, sections: Iterable[tuple[str, str]]) -> str:
    said = " ".join(filter(None, answer(report)))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in sections)
    notes = f'<div class="mind">{"".join(map(paragraph, report.notes))}</div>' if report.notes else ""
    button = '<button type="button" id="theme" class="scripted">Dark</button>'
    return (
        f'<header><div class="top"><h1>{escape(report.title)}</h1>{button}</div>'
        f"{paragraph(said, 'answer')}{paragraph(grounds(report))}"
        f'<div class="badges">{_badge(report)}{"".join(_chips(report))}</div>'
        f'{notes}<nav aria-label="Sections">{links}</nav></header>'
    )


def _badge(report: Report) -> str:
    """How many runs proved equal work; on demand which, by how many checks."""
    found = tables.certification(report)
    if not tables.trains(report) or found is None:
        return ""
    valid = all(c.valid for c in report.certificates)
    mark, tone = (tables.TICK, "good") if valid else (tables.CROSS, "bad")
    words = f"{mark} {tables.certified_sentence(report)}"
    return f'<details class="badge"><summary class="{tone}">{escape(words)}</summary>{render(found)}</details>'


def _chips(report: Report) -> Iterator[str]:
    ours = [run for run in report.runs if not run.is_reference]
    statuses = Counter(run.status for run in ours)
    ended = ", ".join(f"{n} {status}" for status, n in statuses.items())
    runs = f"{len(ours)} run{'' if len(ours) == 1 else 's'}"
    yield _chip(f"{runs}: {ended}" if set(statuses) - {"ok"} else runs)
    devices = Counter(str(gpu.get("name")) for m in report.machines[:1] for gpu in m.get("gpus") or ())
    yield from (_chip(f"{n} \u00d7 {name}") for name, n in devices.items())
    hosts = dict.fromkeys(str(machine.get("host")) for machine in report.machines)
    yield _chip(f"{len(hosts)} hosts") if len(hosts) > 1 else ""


def _chip(words: str) -> str:
    return f'<span class="chip">{escape(words)}</span>'


def _sections(report: Report, found: tuple[Chart, ...], linked: set[str]) -> Iterator[tuple[str, str, str]]:
    """Name, title and inside of each; what is empty is left out."""
    yield "served", "Served model", _served(report, found, linked)
    yield "effects", "Effects", _all(effects.tables(report), linked)
    yield "nodes", "Nodes", _all(nodes.tables(report), linked)
    yield "ranking", _ranking_title(report), _ranking(report, linked)
    yield "charts", "Charts", _charts(found, EVERYWHERE)
    yield "scaling", "Scaling", _rendered(scaling.efficiency(report), linked)
    yield "loss", "Where the step time goes", _rendered(scaling.explanation(report), linked)
    yield "tuning", "Fine-tuning", _all(finetuning.tables(report), linked)
    yield "bottlenecks", "What holds it back", _all(verdicts.tables(report), linked)
    yield "cost", "Cost", _all((*cost.tables(report), *claims.tables(report)), linked)
    yield "history", "Over time", _all(history.tables(report.histories), linked)
    yield "machine", "The machine", _machine(report, linked)
    yield "winners", "Winners by category", _rendered(tables.winners(report), linked)
    yield "not-ranked", "Not ranked", _rendered(tables.failures(report), linked)
    yield "advice", "Out of memory", _all(advice.tables(report), linked)
    yield "cells", "Every cell", _cells(report)
    yield "method", "How it was measured", _method(report, linked)


def _ranking_title(report: Report) -> str:
    """Cells of a design stand beside each other, not against each other."""
    found = groups(report)
    return "Cells of the design" if found and all(group.is_listed for group in found) else "Ranking"


def _ranking(report: Report, linked: set[str]) -> str:
    if not tables.trains(report):
        return ""
    ranking = "".join(block(table.title, table, linked) for table in tables.ranking(report))
    nothing = paragraph("Nothing to rank: no run is both complete and certified.")
    return (ranking or nothing) + paragraph(tables.common(report), "quiet")


def _rendered(table: Table | None, linked: set[str]) -> str:
    return render(table, linked) if table else ""


def _all(found: Iterable[Table], linked: set[str]) -> str:
    return "".join(block(table.title, table, linked) for table in found)


def _served(report: Report, found: tuple[Chart, ...], linked: set[str]) -> str:
    """What was found, its first table, the charts, and the evidence behind them."""
    first, *rest = served_tables(report) or (None,)
    words = paragraph(served.sentence(report))
    return words + _rendered(first, linked) + _charts(found, SERVED) + _all(filter(None, rest), linked)


def _charts(found: tuple[Chart, ...], section: str) -> str:
    drawn = "".join(_figure(chart) for chart in found if chart.section == section)
    without = f"<noscript>{paragraph(NO_CHARTS)}</noscript>"
    return f'{without}<div class="charts scripted">{drawn}</div>' if drawn else ""


def _figure(chart: Chart) -> str:
    panels = len({point.group for point in chart.points}) if chart.kind == "lines" else 1
    wide = panels > PANELLED or chart.kind == "spans" or chart.panel_px * panels > WIDE_PX
    return (
        f'<figure data-chart="{escape(chart.name)}"{" class=wide" if wide else ""}><figcaption>'
        f"<h3>{escape(chart.title)}</h3>{paragraph(chart.subtitle, 'quiet')}</figcaption>"
        '<div class="plot"></div></figure>'
    )


def _machine(report: Report, linked: set[str]) -> str:
    shown = (*nodes.tables(report), *served_tables(report))
    return _all((table for table in machine_tables(report) if table not in shown), linked) + "".join(
        folded(table.title, table, linked) for table in machine_details(report)
    )


def _cells(report: Report) -> str:
    panels = "".join(_page_cells.panels(report))
    words = "How each ended, the command and experiment that repeat it, what was measured, and its certificate."
    return paragraph(words, "quiet") + panels if panels else ""


def _method(report: Report, linked: set[str]) -> str:
    pairs = tables.comparisons(report)
    if pairs and len(pairs.rows) > MOST_COMPARISONS:
        note = f"The first {MOST_COMPARISONS:,} of {len(pairs.rows):,}; report.json holds all."
        rows, cells = pairs.rows[:MOST_COMPARISONS], pairs.cells[:MOST_COMPARISONS]
        pairs = dataclasses.replace(pairs, rows=rows, cells=cells, notes=(note, *pairs.notes))
    machines = (folded(f"Machine {table.title}", table) for table in tables.machine_facts(report))
    parts = (
        "" if tables.trains(report) else paragraph(tables.common(report), "quiet"),
        bullets(tables.health(report)),
        *(folded(table.title, table, linked) for table in verdicts.details(report)),
        folded("Comparisons, with the smallest effect the data could have shown", pairs),
        folded("Runs: warm-up, outliers and loss", tables.run_details(report), linked),
        *machines,
        folded("Folders that could not be read", bullets(report.skipped)),
    )
    return "".join(parts)
