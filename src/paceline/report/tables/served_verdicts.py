"""Served models over replicas and by rules: tables of each replica, of the whole set, and of LoadGen's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.analysis.findings import Fleet, PartitionGain, ReplicaShare, Report, Rule, ServedVerdict
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import KEPT, NOT_KEPT
from paceline.analysis.findings.training import BETTER, WORSE
from paceline.errors import Scalar
from paceline.report.tables.served import load_text, loads_of, rules_text, span
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.load_names import BESIDE
from paceline.report.text.measurements import format_brief
from paceline.wording import MISSING, Scale, format_duration, format_number, format_parts, listed, places, verdict_text

# A replica that had ended earlier than another is not slower for it.
OWN_TIME = (
    "The time of a replica runs from the start of the load to its last answer; the last row covers the whole load."
)
_TONES = {KEPT: "good", NOT_KEPT: "bad"}
_GAIN_TONES = {BETTER: "good", WORSE: "bad"}


def tables(report: Report) -> tuple[Table, ...]:
    """In reading order; empty if the report has no such runs."""
    shown = _shown(report.fleets)
    found = (
        *(_replicas(fleet, shown) for fleet in shown),
        _gains(report),
        _full_sets(report),
        *map(_rules, report.served),
    )
    return tuple(table for table in found if table is not None)


# --- replicas ---


def _shown(fleets: Sequence[Fleet]) -> list[Fleet]:
    """One of each cell: of a sweep or a search the load that served most, as the loads themselves have rows already."""
    best: dict[str, Fleet] = {}
    for fleet in fleets:
        known = best.get(fleet.cell)
        if known is None or (fleet.combined.value or 0.0) > (known.combined.value or 0.0):
            best[fleet.cell] = fleet
    return list(best.values())


def _load_words(axes: Mapping[str, Scalar]) -> str:
    """`sweep, concurrency 4`: the name of a load on its own."""
    named = [axis_text(name, axes) for name in ("rate_per_s", "concurrency") if axes.get(name) is not None]
    return ", ".join((str(axes.get("scenario")), *named))


def _title(fleet: Fleet, shown: Sequence[Fleet]) -> str:
    """The load and its partition; where another has the same, also in what the two differ."""
    words = {id(each): f"{_load_words(each.axes)}, {each.axes.get('partition')} partition" for each in shown}
    alike = [each.axes for each in shown if words[id(each)] == words[id(fleet)]]
    differing = [name for name in BESIDE if len({str(axes.get(name)) for axes in alike}) > 1]
    return ", ".join((words[id(fleet)], *(axis_text(name, fleet.axes) for name in differing)))


def _replicas(fleet: Fleet, shown: Sequence[Fleet]) -> Table:
    columns = (
        Column("replica"),
        Column("requests", numeric=True),
        Column("output in its own time, tokens/s", numeric=True),
        Column("prompt in its own time, tokens/s", numeric=True, priority=1),
        Column("alone, tokens/s", numeric=True, priority=2),
        Column("busy, %", numeric=True),
        Column("done after", numeric=True, priority=3),
        Column("state", priority=1),
    )
    rows = tuple(_replica(share, share.replica == fleet.best) for share in fleet.replicas)
    return Table(
        f"Replicas ({_title(fleet, shown)})",
        columns,
        (*rows, _together(fleet)),
        tuple(_notes(fleet)),
        ((fleet.cell,),) * (len(rows) + 1),
    )


def _replica(share: ReplicaShare, is_best: bool) -> tuple[Cell, ...]:
    gone = share.died_s is not None
    state = f"gone after {share.died_s:.1f} s" if gone else "best" if is_best else f"{share.failed} failed"
    return (
        Cell(f"{share.replica} {share.host or ''}".strip()),
        Cell(f"{share.requests:,}"),
        *(
            (Cell(MISSING, "", "quiet") if x is None else Cell(format_number(x, places(x, None, None))))
            for x in (share.output_tokens_per_s, share.prompt_tokens_per_s, share.alone_tokens_per_s)
        ),
        Cell(MISSING if share.busy_ratio is None else f"{share.busy_ratio:.0%}".rstrip("%")),
        Cell(format_duration(share.finished_s)),
        Cell(state if gone or is_best or share.failed else "ok", "", "bad" if gone or share.failed else ""),
    )


def _together(fleet: Fleet) -> tuple[Cell, ...]:
    requests = sum(share.requests for share in fleet.replicas)
    value, interval = format_parts(fleet.combined.value, fleet.combined.low, fleet.combined.high)
    last = max(share.finished_s for share in fleet.replicas)
    empty = Cell(MISSING, "", "quiet")
    return (
        Cell("together"),
        Cell(f"{requests:,}"),
        Cell(value, interval),
        empty,
        empty,
        empty,
        Cell(format_duration(last)),
        Cell(""),
    )


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
    columns = (
        Column("load"),
        Column("dynamic / static"),
        Column("because", prose=True),
    )
    rows = tuple(map(_gain, report.partition_gains))
    cells = tuple((gain.cell, gain.other) for gain in report.partition_gains)
    return Table("Gain of the dynamic partition", columns, rows, (), cells) if rows else None


def _gain(gain: PartitionGain) -> tuple[Cell, ...]:
    word = "faster" if gain.ratio > 1 else "slower"
    text, interval = verdict_text(gain.verdict, gain.ratio, gain.low, gain.high, word)
    tone = _GAIN_TONES.get(gain.verdict, "quiet")
    return Cell(_load_words(gain.axes)), Cell(text, interval, tone), Cell(gain.reason)


def _full_sets(report: Report) -> Table | None:
    columns = (
        Column("load"),
        Column("samples", numeric=True),
        Column("sent", numeric=True),
        Column("would take"),
        Column("by", prose=True),
    )
    loads = loads_of(report)
    rows = []
    for each in report.full_sets:
        measured = loads.get((each.cell, each.axes.get("stage")))
        load = load_text(measured, loads) if measured else str(each.axes.get("scenario"))
        time = Cell(span(each.time)) if each.time else Cell("not estimated", "", "quiet")
        why = each.law if each.time else f"{each.reason}"
        rows.append((Cell(load), Cell(f"{each.samples:,}"), Cell(f"{each.asked:,}"), time, Cell(why)))
    notes = ("An estimate, not a measurement: it assumes that the samples sent represent all others.",)
    cells = tuple((each.cell,) for each in report.full_sets)
    return Table("Time for the whole set", columns, tuple(rows), notes, cells) if rows else None


# --- rules ---


def _rules(verdict: ServedVerdict) -> Table | None:
    """Rule by rule, for runs that requested the rules."""
    if verdict.label is None:
        return None
    columns = (
        Column("rule", prose=True),
        Column("required", prose=True),
        Column("observed", prose=True),
        Column("outcome"),
    )
    rows = tuple(map(_rule, verdict.rules))
    runs = f"Runs: {listed(verdict.runs)}."
    return Table(rules_text(verdict), columns, rows, (runs,), ((verdict.cell,),) * len(rows))


def _rule(rule: Rule) -> tuple[Cell, ...]:
    return Cell(rule.name), Cell(rule.asked), Cell(rule.seen), Cell(rule.outcome, "", _TONES.get(rule.outcome, "quiet"))
