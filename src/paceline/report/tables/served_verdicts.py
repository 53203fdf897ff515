"""Served models over replicas and by rules: tables of each replica, of the whole set, and of LoadGen's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.analysis.findings import Fleet, FullSet, PartitionGain, ReplicaShare, Report, Rule, ServedVerdict
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import KEPT, NOT_KEPT
from paceline.analysis.findings.training import BETTER, WORSE
from paceline.errors import Scalar
from paceline.report.tables.served import load_text, loads_of, rules_text, span
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.load_names import BESIDE
from paceline.report.text.measurements import format_brief
from paceline.wording import MISSING, Scale, format_duration, format_number, format_parts, listed, places, verdict_text

# A replica that finished earlier than another is not slower because of that.
OWN_TIME = (
    "The time of a replica runs from the start of the load to its last answer; the last row covers the whole load."
)
_TONES = {KEPT: "good", NOT_KEPT: "bad"}
_GAIN_TONES = {BETTER: "good", WORSE: "bad"}


def tables(report: Report) -> tuple[Table, ...]:
    """In reading order; empty if the report has no such runs."""
    by_cell: dict[str, list[Fleet]] = {}
    for fleet in report.fleets:
        by_cell.setdefault(fleet.cell, []).append(fleet)
    # Only the load with the highest throughput of each cell: the loads have rows of their own already.
    shown = [max(fleets, key=lambda fleet: fleet.combined.value or 0.0) for fleets in by_cell.values()]
    found = (
        *(_replicas(fleet, shown) for fleet in shown),
        _gains(report),
        _full_sets(report),
        *map(_rules, report.served),
    )
    return tuple(table for table in found if table is not None)


# --- replicas ---


def _load_words(axes: Mapping[str, Scalar]) -> str:
    """`sweep, concurrency 4`: the name of a load on its own."""
    named = [axis_text(name, axes) for name in ("rate_per_s", "concurrency") if axes.get(name) is not None]
    return ", ".join((str(axes.get("scenario")), *named))


def _replicas(fleet: Fleet, shown: Sequence[Fleet]) -> Table:
    # The title is the load and its partition; if another has the same, also the axes in which the two differ.
    words = {id(each): f"{_load_words(each.axes)}, {each.axes.get('partition')} partition" for each in shown}
    alike = [each.axes for each in shown if words[id(each)] == words[id(fleet)]]
    differing = [name for name in BESIDE if len({str(axes.get(name)) for axes in alike}) > 1]
    title = ", ".join((words[id(fleet)], *(axis_text(name, fleet.axes) for name in differing)))

    def rate(value: float | None) -> Cell:
        return Cell(MISSING, "", "quiet") if value is None else Cell(format_number(value, places(value, None, None)))

    def busy(share: ReplicaShare) -> str:
        return MISSING if share.busy_ratio is None else f"{share.busy_ratio:.0%}".rstrip("%")

    def state(share: ReplicaShare) -> Cell:
        if share.died_s is not None:
            return Cell(f"gone after {share.died_s:.1f} s", "", "bad")
        text = "best" if share.replica == fleet.best else f"{share.failed} failed" if share.failed else "ok"
        return Cell(text, "", "bad" if share.failed else "")

    columns: tuple[Filled[ReplicaShare], ...] = (
        (Column("replica"), lambda share: f"{share.replica} {share.host or ''}".strip()),
        (numeric("requests"), lambda share: f"{share.requests:,}"),
        (numeric("output in its own time, tokens/s"), lambda share: rate(share.output_tokens_per_s)),
        (numeric("prompt in its own time, tokens/s", 1), lambda share: rate(share.prompt_tokens_per_s)),
        (numeric("alone, tokens/s", 2), lambda share: rate(share.alone_tokens_per_s)),
        (numeric("busy, %"), busy),
        (numeric("done after", 3), lambda share: format_duration(share.finished_s)),
        (Column("state", priority=1), state),
    )
    table = filled(f"Replicas ({title})", fleet.replicas, columns, _notes(fleet), lambda _: (fleet.cell,))
    assert table is not None
    together = (
        Cell("together"),
        Cell(f"{sum(share.requests for share in fleet.replicas):,}"),
        Cell(*format_parts(fleet.combined.value, fleet.combined.low, fleet.combined.high)),
        *(Cell(MISSING, "", "quiet"),) * 3,
        Cell(format_duration(max(share.finished_s for share in fleet.replicas))),
        Cell(""),
    )
    return replace(table, rows=(*table.rows, together), cells=(*table.cells, (fleet.cell,)))


def _notes(fleet: Fleet) -> Iterator[str]:
    """The sentences of the fleet, then how well it is used."""
    yield fleet.text
    yield OWN_TIME
    if fleet.efficiency is not None and fleet.efficiency.value is not None:
        share = format_brief(fleet.efficiency, Scale("%", 100.0))
        yield f"That is {share} % of {len(fleet.replicas)} times the best one ({fleet.efficiency.note})."
    if fleet.uneven_ratio is not None:
        yield f"At least one replica was idle for {fleet.uneven_ratio:.0%} of the time."


# --- dynamic over static, and the whole set ---


def _gains(report: Report) -> Table | None:
    def ratio(gain: PartitionGain) -> Cell:
        word = "faster" if gain.ratio > 1 else "slower"
        text = verdict_text(gain.verdict, gain.ratio, gain.low, gain.high, word)
        return Cell(*text, _GAIN_TONES.get(gain.verdict, "quiet"))

    columns: tuple[Filled[PartitionGain], ...] = (
        (Column("load"), lambda gain: _load_words(gain.axes)),
        (Column("dynamic / static"), ratio),
        (Column("because", prose=True), lambda gain: gain.reason),
    )
    title = "Gain of the dynamic partition"
    return filled(title, report.partition_gains, columns, about=lambda gain: (gain.cell, gain.other))


def _full_sets(report: Report) -> Table | None:
    loads = loads_of(report)

    def load(each: FullSet) -> str:
        measured = loads.get((each.cell, each.axes.get("stage")))
        return load_text(measured, loads) if measured else str(each.axes.get("scenario"))

    columns: tuple[Filled[FullSet], ...] = (
        (Column("load"), load),
        (numeric("samples"), lambda each: f"{each.samples:,}"),
        (numeric("sent"), lambda each: f"{each.asked:,}"),
        (Column("would take"), lambda each: span(each.time) if each.time else Cell("not estimated", "", "quiet")),
        (Column("by", prose=True), lambda each: each.law if each.time else f"{each.reason}"),
    )
    note = "An estimate, not a measurement: it assumes that the samples sent represent all others."
    return filled("Time for the whole set", report.full_sets, columns, (note,), lambda each: (each.cell,))


# --- rules ---


def _rules(verdict: ServedVerdict) -> Table | None:
    """Rule by rule, for runs that requested the rules."""
    if verdict.label is None:
        return None
    columns: tuple[Filled[Rule], ...] = (
        (Column("rule", prose=True), lambda rule: rule.name),
        (Column("required", prose=True), lambda rule: rule.asked),
        (Column("observed", prose=True), lambda rule: rule.seen),
        (Column("outcome"), lambda rule: Cell(rule.outcome, "", _TONES.get(rule.outcome, "quiet"))),
    )
    runs = f"Runs: {listed(verdict.runs)}."
    return filled(rules_text(verdict), verdict.rules, columns, (runs,), lambda _: (verdict.cell,))
