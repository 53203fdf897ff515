"""report.html: one page with everything inside, for people; opens from disk and loads nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.answer import answer, grounds
from paceline.report.charts import Chart, charts
from paceline.report.exporters import _page_cells, _page_data
from paceline.report.exporters._page_tables import block, bullets, folded, paragraph, render
from paceline.report.sections import Section, sections
from paceline.report.tables import table as tables

SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "charts.js", "page.js")
# Rows of a folded table; report.json has all.
MOST_ROWS = 1000
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
    "Charts, filters and sorting need JavaScript. Every number is in the tables, and the same charts are files in "
    "plots/ next to this page."
)


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.html", text(report))]


def text(report: Report) -> str:
    """The whole page. Only its own scripts may run, identified by their hashes; nothing may be loaded."""
    found = charts(report)
    sources = [asset(name) for name in SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return PAGE.substitute(
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'",
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


def _parts(report: Report, found: tuple[Chart, ...]) -> Iterator[str]:
    linked = {run.cell for run in report.runs if not run.is_reference}
    shown = [
        (section.name, section.title, _section(section, linked))
        for section in sections(report, found)
        if section.name != "certificates"  # the badge and the panels of the cells show them
    ]
    if panels := "".join(_page_cells.panels(report)):
        text = "How each cell ended, the command and experiment that repeat it, its measurements and its certificate."
        method = next((i for i, (name, _, _) in enumerate(shown) if name == "method"), len(shown))
        shown.insert(method, ("cells", "Every cell", paragraph(text, "quiet") + panels))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in shown)
    notes = f'<div class="mind">{"".join(map(paragraph, report.notes))}</div>' if report.notes else ""
    yield (
        f'<header><div class="top"><h1>{escape(report.title)}</h1>'
        '<button type="button" id="theme" class="scripted">Dark</button></div>'
        f"{paragraph(' '.join(filter(None, answer(report))), 'answer')}{paragraph(grounds(report))}"
        f'<div class="badges">{"".join(_badges(report))}</div>{notes}<nav aria-label="Sections">{links}</nav></header>'
    )
    yield '<div id="filters" class="filters" role="group" aria-label="Filters" hidden></div>'
    for name, title, inner in shown:
        yield f'<section id="{name}"><h2>{escape(title)}</h2>{inner}</section>'
    made = f"Paceline {report.paceline_version}, {tables.created(report)}. Brackets are 95 % intervals."
    yield f'<footer>{escape(made)}<p class="printed">Collapsed sections are not printed.</p></footer>'


def _badges(report: Report) -> Iterator[str]:
    """How many runs are certified, with the checks on demand; then the runs, devices and hosts."""
    found = tables.certification(report)
    if tables.trains(report) and found is not None:
        valid = all(c.valid for c in report.certificates)
        mark, tone = (tables.TICK, "good") if valid else (tables.CROSS, "bad")
        words = escape(f"{mark} {tables.certified_sentence(report)}")
        yield f'<details class="badge"><summary class="{tone}">{words}</summary>{render(found)}</details>'
    ours = [run for run in report.runs if not run.is_reference]
    statuses = Counter(run.status for run in ours)
    ended = ", ".join(f"{n} {status}" for status, n in statuses.items())
    runs = f"{len(ours)} run{'' if len(ours) == 1 else 's'}"
    devices = Counter(str(gpu.get("name")) for m in report.machines[:1] for gpu in m.get("gpus") or ())
    hosts = {str(machine.get("host")) for machine in report.machines}
    chips = [f"{runs}: {ended}" if set(statuses) - {"ok"} else runs]
    chips += [f"{n} \u00d7 {name}" for name, n in devices.items()]
    chips += [f"{len(hosts)} hosts"] if len(hosts) > 1 else []
    yield from (f'<span class="chip">{escape(words)}</span>' for words in chips)


def _section(section: Section, linked: set[str]) -> str:
    """The sentence, the first table, the charts, the other tables, then what is folded."""
    blocks = [
        render(table, linked) if table.title == section.title else block(table.title, table, linked)
        for table in section.tables
    ]
    figures = ""
    for chart in section.charts:
        panels = len({point.group for point in chart.points}) if chart.kind == "lines" else 1
        wide = panels > PANELLED or chart.kind == "spans" or chart.panel_px * panels > WIDE_PX
        figures += (
            f'<figure data-chart="{escape(chart.name)}"{" class=wide" if wide else ""}><figcaption>'
            f"<h3>{escape(chart.title)}</h3>{paragraph(chart.subtitle, 'quiet')}</figcaption>"
            '<div class="plot"></div></figure>'
        )
    details = []
    for table in section.details:
        if len(table.rows) > MOST_ROWS:
            note = f"The first {MOST_ROWS:,} of {len(table.rows):,}; report.json has all."
            rows, cells = table.rows[:MOST_ROWS], table.cells[:MOST_ROWS]
            table = dataclasses.replace(table, rows=rows, cells=cells, notes=(note, *table.notes))
        details.append(folded(table.title, table, linked))
    without = f"<noscript>{paragraph(NO_CHARTS)}</noscript>"
    parts = (
        paragraph(section.text),
        *blocks[:1],
        f'{without}<div class="charts scripted">{figures}</div>' if figures else "",
        *blocks[1:],
        paragraph(section.note, "quiet"),
        *details,
        *(folded(title, bullets(lines)) for title, lines in section.bullets),
    )
    return "".join(parts)
