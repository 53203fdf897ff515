"""report.md: the answer and its evidence, fit for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.answer import answer, grounds
from paceline.report.charts import charts
from paceline.report.sections import Section, sections
from paceline.report.tables.table import Cell, Table, created
from paceline.report.text import trust

# GitHub refuses a longer comment or description.
MOST_CHARACTERS = 65_536
# How many rows of a table, tables of a section or items of a list are kept, and how many characters of a text.
CUTS = ((None, None), (200, 1000), (60, 400), (25, 250), (10, 160), (5, 100), (2, 60))
WHERE = "report.html and metrics.csv are complete"


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.md", text(report))]


def text(report: Report) -> str:
    """The whole document if it fits a pull request; otherwise part of every table and a note."""
    found = sections(report, charts(report))
    whole = ""
    for rows, characters in CUTS:
        page = Page(rows, characters)
        whole = "\n\n".join(part for part in page.parts(report, found) if part) + "\n"
        if len(whole) <= MOST_CHARACTERS:
            return whole
    return _hard_cut(whole)


def _hard_cut(whole: str) -> str:
    """For a report that no limit on tables makes short enough: whole lines from the top, folds closed again."""
    last = f"\n\nThe rest is cut to fit a pull request: {WHERE}.\n"
    kept = whole[: MOST_CHARACTERS - len(last) - len("\n\n</details>")].rpartition("\n")[0]
    open_folds = kept.count("<details>") - kept.count("</details>")
    return kept + "\n\n</details>" * open_folds + last


@dataclass(frozen=True, slots=True)
class Page:
    """Renders the parts of a report, at most so many rows and characters of each; None keeps all."""

    rows: int | None = None
    characters: int | None = None

    def parts(self, report: Report, found: Sequence[Section]) -> Iterator[str]:
        yield f"# {escape(report.title)}"
        yield self.bullets([line.strip() for line in trust.lines(report)])
        yield " ".join(f"**{escape(sentence)}**" for sentence in answer(report) if sentence)
        yield escape(grounds(report))
        if self.rows is not None:
            most = f"at most {self.rows} rows of a table and {self.characters} characters of a text are shown"
            yield f"Cut to fit a pull request: {most}; {WHERE}."
        yield f"Notes on the whole report:\n\n{self.bullets(report.notes)}" if report.notes else ""
        for section in found:
            yield f"## {escape(section.title)}"
            yield from self._section(section)
        made = f"Paceline {escape(report.paceline_version)}, {created(report)}"
        yield f"<sub>{made}; brackets are 95 % intervals.</sub>"

    def _section(self, section: Section) -> Iterator[str]:
        """Tables below their titles, unless the section has the same title; then plots, notes and folded details."""
        yield escape(section.text)
        kept = section.tables[: self.rows]
        for table in kept:
            yield "" if table.title == section.title else f"### {escape(table.title)}"
            yield self.render(table)
        yield _more(len(section.tables) - len(kept), "tables")
        yield escape(section.note)
        # The first plot is open, the others are folded.
        links = [f"![{escape(chart.title)}](plots/{chart.name}.png)" for chart in section.charts]
        yield from links[:1]
        if links[1:]:
            others = _html(", ".join(chart.title for chart in section.charts[1:]))
            yield "\n\n".join((f"<details><summary>More: {others}</summary>", *links[1:], "</details>"))
        yield from (self.folded(table.title, table) for table in section.details[: self.rows])
        yield _more(len(section.details[self.rows :]) if self.rows else 0, "tables")
        yield from (f"{title}:\n\n{self.bullets(lines)}" for title, lines in section.bullets)

    def titled(self, table: Table, level: int = 2) -> str:
        """The table below its title as a heading of that level."""
        return f"{'#' * level} {escape(table.title)}\n\n{self.render(table)}"

    def folded(self, summary: str, table: Table) -> str:
        """Evidence on demand: GitHub and most renderers fold it. The blank lines let Markdown begin inside."""
        return f"<details><summary>{_html(summary)}</summary>\n\n{self.render(table)}\n\n</details>"

    def render(self, table: Table) -> str:
        kept = table.rows[: self.rows]
        lines = [
            _line(escape(column.heading) for column in table.columns),
            _line("---:" if column.numeric else "---" for column in table.columns),
            *(_line(map(self._cell, row)) for row in kept),
        ]
        below = (_more(len(table.rows) - len(kept), "rows"), self.bullets(table.notes))
        return "\n\n".join(filter(None, ("\n".join(lines), *below)))

    def bullets(self, lines: Sequence[str]) -> str:
        kept = [f"- {_block(self._short(line))}" for line in lines[: self.rows]]
        cut = _more(len(lines) - len(kept), "notes")
        return "\n".join((*kept, f"- {cut}") if cut else kept)

    def _cell(self, cell: Cell) -> str:
        short = self._short(cell.text)
        # In a table a bar ends the cell even in code, unless a backslash precedes it, which GFM removes.
        code = _one_line(short).replace("`", "").replace("|", "\\|")
        shown = f"`{code}`" if cell.tone == "code" else escape(short)
        shown = f"[{shown}]({quote(cell.link)})" if cell.link else shown
        glue = " " if cell.detail.startswith(("[", "(")) else ", "
        return f"{shown}{glue}{escape(cell.detail)}" if cell.detail else shown

    def _short(self, value: str) -> str:
        limit = self.characters
        return value if limit is None or len(value) <= limit else f"{value[: limit - 1]}\u2026"


def _more(count: int, what: str) -> str:
    return f"{count:,} more {what} are cut here." if count > 0 else ""


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- text stays text -----------------------------------------------------------------------------------------------


def _one_line(value: str) -> str:
    return " ".join(value.split())


def _html(value: str) -> str:
    """For inside a tag, where Markdown is not read."""
    return _uncalled(_one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def escape(value: str) -> str:
    """No tag, link, emphasis, table cell or mention of a person comes from a name."""
    one_line = _one_line(value)
    if not _ACTIVE.search(one_line):
        return one_line
    marked = _MARKS.sub(r"\\\1", one_line.replace("&", "&amp;").replace("<", "&lt;"))
    # Underscores inside a word are plain in GitHub's dialect, and names of metrics stay readable so.
    marked = _UNDERSCORE.sub(r"\\_", marked)
    # `](` would end a link, `]:` at the beginning of a line would define one and vanish.
    return _uncalled(_LINK.sub(r"]\\", marked))


# Most cells are numbers and names, which have none of what the other patterns look for.
_ACTIVE = re.compile(r"(?i)[\\|*`~&<_\]@#:]|www|gh-")
_MARKS = re.compile(r"([\\|*`~])")
_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")
_LINK = re.compile(r"\](?=[(:])")
_ADDRESS = re.compile(r"(?i)(https?:|ftp:|www)(?=//|\.)")
_MENTION = re.compile(r"(?i)(@(?=\w)|#(?=\d)|\bgh-(?=\d))")


def _uncalled(value: str) -> str:
    """Keep GitHub from notifying @names, linking addresses and closing issues (`fixes #1`): a comment inside prevents
    all of it."""
    return _MENTION.sub(r"\1<!-- -->", _ADDRESS.sub(r"\1<!-- -->", value))


def _block(value: str) -> str:
    """As `escape`, and no heading, quotation, list or rule at the beginning of a line."""
    return re.sub(r"^([#>+=-]|\d+(?=[.)]))", lambda m: f"{m[0]}\\" if m[0].isdigit() else f"\\{m[0]}", escape(value))
