"""Pieces of the page as HTML: every text is escaped here, and here only."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from html import escape
from urllib.parse import quote

from paceline.report.charts import Chart
from paceline.report.summary import Summary
from paceline.report.tables.table import Cell, Table
from paceline.report.tiles import BARS, Tile, Trend

# Charts with many panels or wide ones, with long lanes or with many lanes take the whole width.
PANELLED = 2
WIDE_PX = 500
MOST_LANES = 14
# Fewer letters than this do not fill the column beside a chart.
FEW_LETTERS = 300
# Tables with so many columns take the whole width.
WIDE_COLUMNS = 5
NO_CHARTS = (
    "Charts, filters and sorting need JavaScript. Every number is in the tables, and the same charts are files in "
    "plots/ next to this page."
)
# A comma between options, where a line may break.
OPTION = re.compile(r",(?=[a-z_])")
# A date is not broken at its hyphens.
DATE, WHOLE = re.compile(r"\d{4}-\d\d-\d\d"), r'<span class="whole">\g<0></span>'
# Words no longer than this stay on one line.
SHORT_WORDS = 24


def document(title: str, head: str, body: str, above: str = "", below: str = "") -> str:
    """A whole page. All but the title are HTML; above and below stand around what a reader came for."""
    return f"""<!doctype html>
<html lang="en" class="no-js">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{head}
<title>{escape(title)}</title>
</head>
<body>
{above}<main>
{body}
</main>
{below}</body>
</html>
"""


def scripted(data: str, scripts: str) -> str:
    """The end of a page with a script: the data of its charts, then the scripts."""
    return f'<script type="application/json" id="data">{data}</script>\n{scripts}\n'


def policy(rules: str) -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def paragraph(value: str, css: str = "") -> str:
    opening = f'<p class="{css}">' if css else "<p>"
    return f"{opening}{escape(value)}</p>" if value else ""


def bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def folded(summary: str, content: Table | str | None, linked: Container[str] = ()) -> str:
    """Evidence on demand; nothing if there is none. A text is HTML already."""
    inner = render(content, linked) if isinstance(content, Table) else content
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>" if inner else ""


def block(title: str, table: Table, linked: Container[str]) -> str:
    """A titled table that a filter may empty, and then hides."""
    return f'<div class="block"><h3>{escape(title)}</h3>{render(table, linked)}</div>'


def render(table: Table, linked: Container[str] = ()) -> str:
    """The first text of a row about one cell links to that cell."""
    kinds = []
    for i, column in enumerate(table.columns):
        # Columns of short words are not broken, however narrow the screen.
        short = all(len(row[i].text) <= SHORT_WORDS for row in table.rows)
        kind = "n" if column.numeric else "prose" if column.prose else "w" if short else ""
        kinds.append(f' class="{kind}"' if kind else "")
    units = [f"<small>{escape(column.unit)}</small>" if column.unit else "" for column in table.columns]
    names = [escape(column.name) for column in table.columns]
    head = "".join(f"<th{kind}>{name}{unit}</th>" for kind, name, unit in zip(kinds, names, units, strict=True))
    words = next((i for i, column in enumerate(table.columns) if not column.numeric), None)
    rows = []
    for row, cells in zip(table.rows, table.cells or [()] * len(table.rows), strict=True):
        target = cells[0] if len(cells) == 1 and cells[0] in linked else None
        shown = (_cell(cell, target if i == words else None) for i, cell in enumerate(row))
        filled = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, shown, strict=True))
        rows.append(f"<tr{about(cells)}>{filled}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    wide = " wide" if len(table.columns) >= WIDE_COLUMNS else ""
    return f'<div class="scroll{wide}">{body}</div>{_notes(table.notes)}'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    count = f"{len(notes)} note{'' if len(notes) == 1 else 's'}"
    return f'<details class="more"><summary>{count}</summary>{bullets(notes)}</details>'


# --- the first screen ---


def first_screen(summary: Summary, chart: Chart | None, proof: str, links: str) -> str:
    """The headline, the tiles, the main chart, and beside it the trust light with what supports the answer.

    proof (the certificates by cell) and links (to the sections) are HTML.
    """
    light = summary.light
    support = "".join(map(paragraph, summary.support))
    reasons = bullets(light.reasons) + proof
    line = f"<b>{light.name}: {light.level}.</b> {escape(light.text)}"
    shown = (
        f'<details class="light {light.level}"><summary>{line}</summary><div class="reasons">{reasons}</div></details>'
        if reasons
        else f'<p class="light {light.level}">{line}</p>'
    )
    drawn = f"<noscript>{paragraph(NO_CHARTS)}</noscript>"
    drawn += f'<div class="scripted">{figure(chart)}</div>' if chart else ""
    # Few words beside a chart, or any beside one of many panels, leave their column empty: there they are above it.
    few = sum(map(len, summary.support)) < FEW_LETTERS
    lead = "lead above" if chart and (few or is_wide(chart)) else "lead"
    return (
        f'<p class="headline" role="heading" aria-level="2">{DATE.sub(WHOLE, escape(summary.headline))}</p>'
        f'<div class="tiles">{"".join(map(_tile, summary.tiles))}</div>'
        f'<div class="{lead}">{drawn}<aside aria-label="Trust and evidence">'
        f'{shown}<div class="support">{support}</div>{links}</aside></div>'
    )


def _tile(tile: Tile) -> str:
    link = f' href="#cell-{escape(tile.cell)}"' if tile.cell else ""
    return (
        f'<a class="tile"{link}><span class="name">{escape(tile.name)}</span>'
        f'<span class="value">{escape(tile.value)} <small>{escape(tile.unit)}</small></span>'
        f'<span class="interval">{escape(tile.interval) or "&nbsp;"}</span>'
        f"{spark(tile.trend) if tile.trend else ''}"
        f'<span class="note" title="{escape(tile.note)}">{escape(tile.note)}</span></a>'
    )


def spark(trend: Trend) -> str:
    """A trend as a small drawing without axes; what it shows is its title."""
    wide, high, values = 120.0, 28.0, trend.values
    name = escape(trend.name)
    box = f'viewBox="0 0 {wide:.0f} {high:.0f}" preserveAspectRatio="none"'
    opening = f'<svg class="spark" {box} role="img" aria-label="{name}"><title>{name}</title>'
    if trend.kind == BARS:
        step, top = wide / len(values), max(map(abs, values)) or 1.0
        bars = "".join(
            f'<rect x="{i * step:.1f}" y="{high - high * abs(v) / top:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{high * abs(v) / top:.1f}" style="fill:var(--s{trend.colours[i]})" '
            f'opacity="{1 if trend.at in (None, i) else 0.4}"/>'
            for i, v in enumerate(values)
        )
        return f"{opening}{bars}</svg>"
    low, top = min(values), max(values)
    room = (top - low) or 1.0
    at = [(i * wide / max(len(values) - 1, 1), 3 + (high - 6) * (1 - (v - low) / room)) for i, v in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    style = f'style="stroke:var(--s{trend.colours[0]})" stroke-width="1.6" vector-effect="non-scaling-stroke"'
    return f'{opening}<polyline points="{line}" fill="none" {style}/></svg>'


def is_wide(chart: Chart) -> bool:
    """Whether a chart needs the whole width of the page."""
    groups = len({point.group for point in chart.points})
    panels = groups if chart.kind == "lines" else 1
    lanes = len({(point.group, point.label) for point in chart.points}) if chart.kind in ("bars", "stack") else 0
    # Strips have a panel per group too, each on its own axis.
    if chart.kind == "spans" or (chart.kind == "dots" and groups > 1):
        return True
    return panels > PANELLED or chart.panel_px * panels > WIDE_PX or lanes > MOST_LANES


def figures(charts: Sequence[Chart]) -> str:
    """Charts in columns, then those that take the whole width. A column alone would leave the others empty."""
    narrow = [chart for chart in charts if not is_wide(chart)]
    wide = [chart for chart in charts if is_wide(chart)]
    if len(narrow) == 1:
        narrow, wide = [], list(charts)
    drawn = [*map(figure, narrow), *(figure(chart, wide=True) for chart in wide)]
    return f'<div class="charts scripted">{"".join(drawn)}</div>' if drawn else ""


def figure(chart: Chart, wide: bool = False) -> str:
    """Where the script draws a chart."""
    return (
        f'<figure data-chart="{escape(chart.name)}"{" class=wide" if wide else ""}><figcaption>'
        f"<h3>{escape(chart.title)}</h3>{paragraph(chart.subtitle, 'quiet')}</figcaption>"
        '<div class="plot"></div></figure>'
    )


def about(cells: Iterable[str]) -> str:
    """The attribute that the filter of the page uses to find rows about these cells."""
    names = " ".join(dict.fromkeys(cells))
    return f' data-cells="{escape(names)}"' if names else ""


def _cell(cell: Cell, target: str | None) -> str:
    shown = OPTION.sub(",<wbr>", escape(cell.text))
    if target is not None:
        shown = f'<a href="#cell-{escape(target)}">{shown}</a>'
    elif cell.link:
        # Quoted, a colon is no longer one: no link leads anywhere but to a file.
        shown = f'<a href="{quote(cell.link)}">{shown}</a>'
    elif cell.tone == "code":
        shown = f"<code>{shown}</code>"
    elif cell.tone:
        shown = f'<span class="{cell.tone}">{shown}</span>'
    return shown + (f"<small>{escape(cell.detail)}</small>" if cell.detail else "")
