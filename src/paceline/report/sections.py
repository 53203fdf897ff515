"""The sections of a report in reading order. Terminal, Markdown and page draw this one list, each in its own way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.analysis.findings import Report
from paceline.report import text_bars
from paceline.report.charts import EVERYWHERE, SERVED, Chart
from paceline.report.tables import (
    accuracy,
    advice,
    ceilings,
    checkpoints,
    claims,
    compilation,
    cost,
    effects,
    fabric,
    finetuning,
    gauges,
    history,
    layouts,
    lengths,
    loadgen,
    memory,
    nodes,
    paired,
    predicted,
    routing,
    scaling,
    served,
    served_cost,
    served_verdicts,
    served_work,
    step_differences,
    table,
    time_spent,
    tradeoffs,
    verdicts,
)
from paceline.report.tables.table import Table
from paceline.report.text.cells import groups

NOTHING_RANKED = "Nothing to rank: no run is both complete and certified."
# The terminal prints recommendations instead of the winners, and `paceline history` prints the history.
NOT_ON_TERMINAL = frozenset({"winners", "history", "certificates", "method"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """text is the sentence before the tables, note the one after them. Charts follow the first table; details are long
    tables that a document folds, bars are drawn with characters for the terminal only."""

    name: str
    title: str
    tables: tuple[Table, ...] = ()
    text: str = ""
    note: str = ""
    charts: tuple[Chart, ...] = ()
    details: tuple[Table, ...] = ()
    bullets: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bars: tuple[Table, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.tables or self.text or self.charts or self.details or self.bullets)


# Heading of what is listed, if nothing is ranked -> title of the section.
_LISTS = {"cell of the design": "Cells of the design", "precision": "Each precision"}


def sections(report: Report, drawn: Iterable[Chart] = ()) -> tuple[Section, ...]:
    """Every section with content; drawn are the charts of the report."""
    drawn = tuple(drawn)
    trains, ranked = table.trains(report), groups(report)
    listed = {group.heading if group.is_listed else "" for group in ranked}
    traded = Section(name="tradeoffs", title="Speed, bytes and loss", tables=tradeoffs.tables(report))
    # Where one exact strategy is compared with others only by speed and loss together, a ranking says nothing.
    is_answer = bool(report.tradeoffs) and not report.comparisons
    lists = (("Health notes", table.health(report)), ("Directories that could not be read", report.skipped))
    found = (
        Section(
            name="served",
            title="Served model",
            text=served.sentence(report),
            tables=served_tables(report),
            charts=tuple(chart for chart in drawn if chart.section == SERVED),
            bars=text_bars.tables(report),
        ),
        Section(name="effects", title="Effects", tables=effects.tables(report)),
        Section(
            name="nodes",
            title=f"{nodes.noun(report).capitalize()}s",
            tables=nodes.tables(report),
            details=nodes.details(report),
        ),
        *((traded,) if is_answer else ()),
        Section(
            name="ranking",
            title=_LISTS.get("".join(listed), "Ranking"),
            tables=table.ranking(report),
            text=NOTHING_RANKED if trains and not ranked else "",
            note=table.common(report) if trains else "",
        ),
        *(() if is_answer else (traded,)),
        Section(name="charts", title="Charts", charts=tuple(chart for chart in drawn if chart.section == EVERYWHERE)),
        Section(name="scaling", title="Scaling", tables=_known(scaling.efficiency(report))),
        Section(name="loss", title="Where the step time goes", tables=_known(scaling.explanation(report))),
        Section(name="differences", title=step_differences.TITLE, tables=step_differences.tables(report)),
        Section(name="compilation", title="Compilation", tables=compilation.tables(report)),
        Section(name="layouts", title="Layouts", tables=(*layouts.tables(report), *routing.tables(report))),
        Section(name="lengths", title="Long sequences", tables=lengths.tables(report)),
        Section(name="checkpoints", title="Checkpoints and restarts", tables=checkpoints.tables(report)),
        Section(name="predictions", title="Predicted beside measured", tables=predicted.of_report(report)),
        Section(name="tuning", title="Fine-tuning", tables=finetuning.tables(report)),
        Section(name="bottlenecks", title="What limits the step", tables=verdicts.tables(report)),
        Section(name="cost", title="Cost", tables=(*cost.tables(report), *claims.tables(report))),
        Section(name="history", title="Over time", tables=history.tables(report.histories)),
        Section(
            name="machine",
            title="The machine",
            tables=(*fabric.tables(report), *memory.tables(report), *ceilings.tables(report)),
            details=(*fabric.details(report), *gauges.tables(report)),
        ),
        Section(name="winners", title="Winners by category", tables=_known(table.winners(report))),
        Section(name="not-ranked", title="Not ranked", tables=_known(table.failures(report))),
        Section(name="advice", title="Out of memory", tables=advice.tables(report)),
        Section(
            name="certificates",
            title="Certificates",
            text=table.certified_sentence(report) if trains else "",
            details=_known(table.certification(report)),
        ),
        Section(
            name="method",
            title="How it was measured",
            text="" if trains else table.common(report),
            details=(
                *time_spent.details(report),
                *verdicts.details(report),
                *_known(table.comparisons(report), table.run_details(report)),
                *table.machine_facts(report),
            ),
            bullets=tuple((title, lines) for title, lines in lists if lines),
        ),
    )
    return tuple(section for section in found if not section.is_empty)


def served_tables(report: Report) -> tuple[Table, ...]:
    """Speed first, then the quality of the answers, replicas beside each other, equal work and cost."""
    subjects = (served, served_verdicts, accuracy, paired, served_work, served_cost, loadgen)
    return tuple(found for subject in subjects for found in subject.tables(report))


def _known(*tables: Table | None) -> tuple[Table, ...]:
    return tuple(found for found in tables if found is not None)
