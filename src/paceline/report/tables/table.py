"""Tables and sentences of a report as text, shared by the terminal and every exporter.

A `Table` is independent of Markdown, HTML and terminals, which all render the same cells. Columns without measurements
are left out and named below the table, so that a table never suggests a zero.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from paceline.analysis.findings import (
    BETTER,
    CERTIFIED,
    CONSISTENT,
    DIFFERENT,
    INCONCLUSIVE,
    WORSE,
    Certificate,
    Comparison,
    Measurement,
    Recommendation,
    Report,
    RunFinding,
)
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.grouping import grouped
from paceline.report.text.cells import (
    SCRIPT,
    THROUGHPUT,
    WIRE,
    WIRE_FORMULA,
    Group,
    Row,
    Unranked,
    axes_of,
    cell_name,
    groups,
    kind_of,
    runs_alone,
    unranked,
    varying_axes,
)
from paceline.report.text.machine_facts import flatten
from paceline.report.text.measurements import format_brief
from paceline.wording import (
    MISSING,
    Scale,
    direction,
    format_duration,
    format_number,
    format_parts,
    places,
    scale_of,
    short_percent,
    verdict_text,
)

TICK, CROSS = "\u2713", "\u2717"
NO_ANSWER = "No recommendation: no certified comparison of these runs shows a significant difference."
_TONES = {BETTER: "good", WORSE: "bad"}


class Cell(NamedTuple):
    """One table cell. detail is the smaller print (an interval); tone is good, bad, quiet or code; link is the relative
    path of a file beside the page."""

    text: str
    detail: str = ""
    tone: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """priority 0 is always shown; if space is short, the highest number goes first. prose columns contain sentences."""

    heading: str
    numeric: bool = False
    priority: int = 0
    prose: bool = False

    @property
    def name(self) -> str:
        """The heading without its unit."""
        return self.heading.partition(", ")[0]

    @property
    def unit(self) -> str:
        return self.heading.partition(", ")[2]


def numeric(heading: str, priority: int = 0) -> Column:
    """A column of numbers, aligned to the right; priority as in `Column`."""
    return Column(heading, numeric=True, priority=priority)


@dataclass(frozen=True, slots=True)
class Table:
    """cells has, for each row, the cells it is about, so that the page can filter; empty if rows are about none."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ()


Item = TypeVar("Item")
# A column, and the function that gives its cell in the row of an item; a text is a cell without detail and tone.
Filled = tuple[Column, Callable[[Item], Cell | str]]


def filled(
    title: str,
    items: Iterable[Item],
    columns: Iterable[Filled[Item]],
    notes: Iterable[str] = (),
    about: Callable[[Item], tuple[str, ...]] | None = None,
) -> Table | None:
    """A table with a row per item, None without items; about gives the cells that an item is about."""
    items, columns = tuple(items), tuple(columns)
    made = [[fill(item) for _, fill in columns] for item in items]
    rows = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in made)
    cells = tuple(map(about, items)) if about else ()
    return Table(title, tuple(column for column, _ in columns), rows, tuple(notes), cells) if rows else None


def without_empty(table: Table) -> tuple[Table, list[Column]]:
    """The table without the columns in which no row has a value, and those columns."""
    keep = [i for i in range(len(table.columns)) if any(row[i].text != MISSING for row in table.rows)]
    absent = [column for i, column in enumerate(table.columns) if i not in keep]
    columns = tuple(table.columns[i] for i in keep)
    return replace(table, columns=columns, rows=tuple(tuple(row[i] for i in keep) for row in table.rows)), absent


def without_same(table: Table) -> tuple[Table, tuple[str, ...]]:
    """The table without the less important columns whose rows are all equal, and a note with what they say."""
    same = [
        i
        for i, column in enumerate(table.columns)
        if column.priority and len(table.rows) > 1 and len({row[i] for row in table.rows}) == 1
    ]
    if not same:
        return table, ()
    keep = [i for i in range(len(table.columns)) if i not in same]
    texts = (f"{c.name} {table.rows[0][i].text} {c.unit}".strip() for i in same for c in (table.columns[i],))
    columns, rows = tuple(table.columns[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in table.rows)
    return replace(table, columns=columns, rows=rows), (f"Same in every row: {'; '.join(texts)}.",)


def measured_cell(m: Measurement | None, scale: Scale | None = None) -> Cell:
    """The value of a measurement with its interval as the smaller print."""
    return Cell(MISSING) if m is None else Cell(*format_parts(m.value, m.low, m.high, scale))


def first_sentence(text: str) -> tuple[str, str]:
    sentence, stop, rest = text.partition(". ")
    return sentence + stop.strip(), rest


def created(report: Report) -> str:
    return datetime.datetime.fromtimestamp(report.created_at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def common(report: Report) -> str:
    """The configuration in which all runs agree, in one line."""
    ours = [r.axes for r in report.runs if not r.proves_only]
    same = [n for n in (ours[0] if ours else ()) if n != "strategy" and all(a.get(n) == ours[0].get(n) for a in ours)]
    known = [axis_text(name, ours[0]) for name in same if ours[0].get(name) is not None]
    return f"Common to all runs: {', '.join(known)}." if known else ""


def trains(report: Report) -> bool:
    """Whether the report is about training; a report about the machine alone has no ranking."""
    ours = [r for r in report.runs if not r.proves_only]
    return not ours or any(run.is_certified for run in ours)


NOT_COMPARED = "These cells are not compared with each other, so they are not sorted by speed."


CORRECTED = (
    "An interval that excludes 1 may be inconclusive: the verdict allows for all comparisons of the table together, "
    "with wider intervals. The reason of each comparison has them."
)


def _is_narrower(c: Comparison) -> bool:
    """Whether the interval of one comparison alone says more than its verdict, which allows for all of the table."""
    return c.verdict == INCONCLUSIVE and c.launches != 1 and not c.low <= 1 <= c.high


def ranking(report: Report) -> tuple[Table, ...]:
    """One table per comparison group: certified cells only, equal ones on one rank, each against the first row."""
    found = []
    for group in groups(report):
        table = filled(group.title, group.rows, _ranking_columns(group), about=lambda row: (row.cell,))
        assert table is not None
        table, absent = without_empty(table)
        names = ", ".join(column.name for column in absent if column.priority)
        notes = (f"Not measured here: {names.removesuffix('.')}.",) if names else ()
        if len(group.rows) > 1 and not group.is_listed and not _are_compared(group):
            notes = (NOT_COMPARED, *notes)
        if any(row.versus_best is not None and _is_narrower(row.versus_best) for row in group.rows):
            notes = (CORRECTED, *notes)
        table, same = without_same(table)
        found.append(replace(table, notes=(*group.notes, *notes, *same)))
    return tuple(found)


def _ranking_columns(group: Group) -> list[Filled[Row]]:
    return [
        (numeric("#"), lambda row: row.rank or MISSING),
        (Column(group.heading), lambda row: row.label),
        _metric(group, THROUGHPUT, "", 0, interval=True),
        (Column("vs best"), lambda row: _versus(row, group)),
        (
            # The level of a script's work is beside every verdict.
            Column("equal work", priority=0 if group.heading == SCRIPT else 1),
            lambda row: Cell(
                f"{group.levels.get(row.cell, CERTIFIED)}, {len(row.runs)} run{'' if len(row.runs) == 1 else 's'}",
                "",
                "good" if group.levels.get(row.cell, CERTIFIED) == CERTIFIED else "",
            ),
        ),
        _metric(group, "step_time_s", "step time", 2, interval=True),
        _metric(group, "mfu_ratio", "MFU (causal)", 4),
        *([_metric(group, "achievable_ratio", "of achievable", 4)] if _known(group, "achievable_ratio") else ()),
        _metric(group, "peak_memory_bytes", "peak memory", 3),
        *([_metric(group, "joules_per_token", "energy", 4)] if _known(group, "joules_per_token") else ()),
        _metric(group, "comm_exposed_ratio", "exposed comm.", 5),
        _wire(group),
    ]


def _known(group: Group, metric: str) -> bool:
    return any((m := row.measurements.get(metric)) and m.value is not None for row in group.rows)


def _metric(group: Group, metric: str, heading: str, priority: int, interval: bool = False) -> Filled[Row]:
    found = [row.measurements[metric] for row in group.rows if metric in row.measurements]
    unit = found[0].unit if found else ""
    scale = scale_of(unit, metric, [m.value for m in found])
    # A script with token ids may be beside one without.
    units = " or ".join(dict.fromkeys(m.unit for m in found)) if metric == THROUGHPUT else scale.unit
    heading = ", ".join(filter(None, (heading, units)))

    def fill(row: Row) -> Cell:
        m = row.measurements.get(metric)
        if m is None:
            return Cell(MISSING)
        return Cell(*format_parts(m.value, m.low, m.high, scale)) if interval else Cell(format_brief(m, scale))

    return numeric(heading, priority), fill


def _wire(group: Group) -> Filled[Row]:
    """Counted bytes with the formula's beside them, on one scale."""
    found = [row.measurements[name] for row in group.rows for name in (WIRE, WIRE_FORMULA) if name in row.measurements]
    scale = scale_of("bytes", WIRE, [m.value for m in found])

    def number(row: Row, name: str) -> str:
        m = row.measurements.get(name)
        value = scale.apply(m.value) if m else None
        return MISSING if value is None else format_number(value, places(value, None, None) + 1)  # counted, not timed

    def fill(row: Row) -> Cell:
        counted, formula = number(row, WIRE), number(row, WIRE_FORMULA)
        return Cell(counted, f"(formula {formula})") if {counted, formula} != {MISSING} else Cell(MISSING)

    return numeric(f"wire per step, {scale.unit}", 6), fill


def _are_compared(group: Group) -> bool:
    return any(row.versus_best for row in group.rows)


def _versus(row: Row, group: Group) -> Cell:
    if group.is_listed or not _are_compared(group):
        return Cell(MISSING)
    if row.cell == group.rows[0].cell:
        alone = row.rank == "1" and sum(other.rank == "1" for other in group.rows) == 1
        return Cell("fastest" if alone else "1x", "", "quiet")
    return verdict_cell(row.versus_best) if row.versus_best else Cell("not compared", "", "quiet")


def verdict_cell(c: Comparison) -> Cell:
    word, verdict = direction(c.metric, c.ratio), None if c.launches == 1 else c.verdict
    text, interval = verdict_text(verdict, c.ratio, c.low, c.high, word, c.detectable_ratio)
    return Cell(text, interval, _TONES.get(c.verdict, "quiet"))


def failures(report: Report) -> Table | None:
    """Every run outside the ranking, with its reason."""
    cells = {run.run: run.cell for run in report.runs}
    columns: tuple[Filled[Unranked], ...] = (
        (Column("what"), lambda u: u.label),
        (Column("status"), lambda u: Cell(u.status, "", "bad")),
        (Column("reason", prose=True), lambda u: u.reason),
        (numeric("runs"), lambda u: Cell(str(len(u.runs)), "", "quiet")),
    )
    return filled("Not ranked", unranked(report), columns, about=lambda u: (cells[u.runs[0]],))


def winners(report: Report) -> Table | None:
    """One line per recommendation; without a significant difference there is no winner."""

    def because(r: Recommendation) -> str:
        """The first sentence; if several lead, also the next, which says whom they beat."""
        first, rest = first_sentence(r.text)
        return f"{first} {first_sentence(rest)[0]}" if len(r.choose) > 1 and rest else first

    columns: tuple[Filled[Recommendation], ...] = (
        (Column("category"), lambda r: r.category),
        (Column("choose"), lambda r: ", ".join(r.choose) if r.over else Cell("no winner", "", "quiet")),
        (Column("over"), lambda r: ", ".join(r.over) or MISSING),
        (Column("because", prose=True), because),
        (Column("group"), lambda r: r.group),
    )
    notes = dict.fromkeys(caveat for r in report.recommendations for caveat in r.caveats)
    return filled("Winners by category", report.recommendations, columns, notes)


def comparisons(report: Report) -> Table | None:
    """All pairs, each with the smallest detectable difference."""
    columns: tuple[Filled[Comparison], ...] = (
        (Column("metric"), lambda c: c.metric),
        (Column("pair"), lambda c: f"{c.label} / {c.other_label}"),
        (Column("ratio"), verdict_cell),
        (
            numeric("detectable difference"),
            lambda c: "" if c.detectable_ratio is None else short_percent(c.detectable_ratio),
        ),
        (Column("reason", prose=True), lambda c: c.reason + ("" if c.certified else " (not certified)")),
    )
    title = "Comparisons and the smallest detectable difference of each"
    return filled(title, report.comparisons, columns, about=lambda c: (c.cell, c.other))


def certification(report: Report) -> Table | None:
    """Per cell: how many runs proved equal work, by how many checks, against which reference."""
    named, by_cell = varying_axes(report), dict[str, list[Certificate]]()
    # Those that only prove others come last.
    for c in sorted(report.certificates, key=lambda c: c.proves_only):
        by_cell.setdefault(c.cell, []).append(c)
    kinds = {run.cell: kind_of(run) for run in report.runs}

    def badge(found: list[Certificate]) -> Cell:
        passed = sum(c.valid and not c.differs for c in found)
        mark, tone = (TICK, "good") if passed == len(found) else (CROSS, "bad")
        return Cell(f"{mark} {passed} of {len(found)} runs", "", tone)

    def name(found: list[Certificate]) -> str:
        cell = found[0].cell
        return kinds.get(cell, "") + (cell_name(report, cell, axes_of(report, cell) or {}, named) or cell)

    columns: tuple[Filled[list[Certificate]], ...] = (
        (Column("cell"), name),
        (Column("equal work"), badge),
        (numeric("checks"), lambda found: str(max(len(c.checks) for c in found))),
        (
            Column("outcome", prose=True),
            lambda found: (
                "; ".join(dict.fromkeys(why for c in found for why in (*c.reasons, *filter(None, [c.level_text]))))
                or "all agree"
            ),
        ),
        (
            Column("reference"),
            lambda found: Cell(", ".join(dict.fromkeys(c.reference or MISSING for c in found)), "", "code"),
        ),
    )
    return filled("Certificates by cell", by_cell.values(), columns, about=lambda found: (found[0].cell,))


def certified_sentence(report: Report) -> str:
    """How many runs did equal work, and how many of their steps that rests on."""
    own = _own_certificates(report)
    total, valid = len(own), [c for c in own if c.valid]
    if not total:
        return f"Equal work: {text}." if (text := proof_runs_text(report)) else "No run carries a certificate."
    if any(c.level for c in own):
        first = f"Equal work: {equal_work_text(report)}."
    else:
        first = f"{len(valid)} of {total} runs are certified to have done equal work."
    steps, compared = sum(c.steps for c in valid), sum(c.compared_steps for c in valid)
    if not steps or len(runs_alone(own)) == total:
        return first
    return f"{first} {compared:,} of their {steps:,} steps were compared."


def _own_certificates(report: Report) -> list[Certificate]:
    """Without those of runs that only prove others."""
    return [c for c in report.certificates if not c.proves_only]


NOTHING_TO_COMPARE = "1 run, with nothing to compare its work with"


def equal_work_text(report: Report) -> str:
    """`4 of 4 runs certified`; of foreign scripts, also how many are only consistent, or did other work; and how many
    were proved on less."""
    own = _own_certificates(report)
    total = len(own)
    if not total and (text := proof_runs_text(report)):
        return text
    by_itself = runs_alone(own)
    if own and len(by_itself) == total:
        return f"{total} runs, each with nothing to compare its work with" if total > 1 else NOTHING_TO_COMPARE
    own = [c for c in own if c.run not in by_itself]
    levels = Counter((DIFFERENT if c.differs else c.level or CERTIFIED) for c in own if c.valid)
    if by_itself:
        levels["with no equal run"] = len(by_itself)
    order = dict.fromkeys((CERTIFIED, CONSISTENT, DIFFERENT, *levels))
    parts = [(level, levels[level]) for level in order if levels[level]]
    first, *rest = parts or [(CERTIFIED, 0)]
    return ", ".join((f"{first[1]} of {total} runs {first[0]}", *(f"{count} {level}" for level, count in rest)))


def proof_runs_text(report: Report) -> str:
    """`3 of 3 proof runs certified on 2 of 4 layers, no run at full size`: all that a report of proof runs can say."""
    sizes = {run.run: run.proof for run in report.runs if run.proof and not run.is_reference}
    by_size = grouped((c for c in report.certificates if c.run in sizes), lambda c: sizes[c.run])
    counts = ((size, sum(c.valid for c in own), len(own)) for size, own in by_size.items())
    parts = [f"{good} of {total} proof runs certified on {size}" for size, good, total in counts]
    return "; ".join((*parts, "no run at full size")) if parts else ""


def checks(certificate: Certificate) -> Table:
    rows = tuple(
        (
            Cell(TICK if c.ok else CROSS, "", "good" if c.ok else "bad"),
            Cell(c.name),
            Cell(c.basis),
            Cell(c.expected),
            Cell(c.observed),
        )
        for c in certificate.checks
    )
    columns = (Column(""), Column("check"), Column("basis"), Column("expected"), Column("result"))
    return Table(certificate.run, columns, rows)


def run_details(report: Report) -> Table | None:
    """Each run that stepped: what warm-up took, how it ended, outliers, and that the loss fell."""

    def warmup_end(r: RunFinding) -> Cell:
        w = r.warmup
        return (
            Cell(f"{'rule' if w.by_rule else 'cap'}: {w.text}", "", "" if w.by_rule else "bad") if w else Cell(MISSING)
        )

    def trace(r: RunFinding) -> Cell:
        return Cell(r.trace, link=f"{r.run}/{r.trace}") if r.trace else Cell(MISSING)

    columns: tuple[Filled[RunFinding], ...] = (
        (Column("run"), lambda r: Cell(r.run, "", "code")),
        (numeric("took"), lambda r: format_duration(r.duration_s)),
        (numeric("warm-up steps"), lambda r: str(r.warmup.excluded_steps) if r.warmup else MISSING),
        (numeric("measured steps"), lambda r: str(r.warmup.measured_steps) if r.warmup else MISSING),
        (Column("warm-up ended by", prose=True), warmup_end),
        (numeric("outliers"), lambda r: str(r.outlier_steps) if r.warmup else MISSING),
        (numeric("first loss"), lambda r: format_number(r.loss_first, 4)),
        (numeric("last loss"), lambda r: format_number(r.loss_last, 4)),
    )
    stepped = [r for r in report.runs if r.warmup or r.loss_first is not None]
    if any(r.trace for r in stepped):
        columns += ((Column("trace"), trace),)
    return filled("Runs: warm-up, outliers and loss", stepped, columns, about=lambda r: (r.cell,))


def health(report: Report) -> tuple[str, ...]:
    """Each health note once, with the number of runs it applies to."""
    said: dict[str, list[str]] = {}
    for run in report.runs:
        for note in run.health:
            said.setdefault(note, []).append(run.run)
    return tuple(f"{note} ({len(runs)} of {len(report.runs)} runs)" for note, runs in said.items())


def machine_facts(report: Report) -> tuple[Table, ...]:
    columns = (Column("fact"), Column("value"))
    facts = dict.fromkeys(tuple(flatten("", machine)) for machine in report.machines)
    return tuple(
        Table(f"Machine {dict(f).get('host', i)}", columns, tuple((Cell(k), Cell(v)) for k, v in f))
        for i, f in enumerate(facts)
    )
