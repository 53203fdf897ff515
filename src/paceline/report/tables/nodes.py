"""Nodes: the verdict of each, its measures beside those of its peers, the evidence, and what to try next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.analysis.findings import NodeEvidence, NodeMeasure, NodeVerdict, Report
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED, WORST_FIRST
from paceline.report.tables.table import Cell, Column, Table
from paceline.wording import MISSING, listed

TONES = {PASS: "good", UNDECIDED: "", SUSPECT: "", FAIL: "bad"}
MOST_NAMED = 6
PER_CENT = 100.0


def tables(report: Report) -> tuple[Table, ...]:
    """One line per node, then the evidence against those that did not pass."""
    return tuple(table for table in (standings(report), reasons(report)) if table)


def details(report: Report) -> tuple[Table, ...]:
    """The condition of every node, and the facts in which nodes differ."""
    return tuple(table for table in (differences(report), conditions(report)) if table)


def sentence(report: Report) -> str:
    """How many passed, how many are inconclusive, and which did not pass; empty without a node test."""
    if not report.nodes:
        return ""
    passed, untold = (sum(node.verdict == verdict for node in report.nodes) for verdict in (PASS, UNDECIDED))
    first = f"{passed} of {len(report.nodes)} nodes pass{f', {untold} inconclusive' if untold else ''}."
    words = {FAIL: "Failed", SUSPECT: "Suspect", UNDECIDED: "Inconclusive, test again with more repeats"}
    return " ".join(filter(None, (first, *(_named(report, verdict, word) for verdict, word in words.items()))))


def _named(report: Report, verdict: str, word: str) -> str:
    found = [f"{node.node} ({kinds_of(node)})" for node in report.nodes if node.verdict == verdict]
    rest = len(found) - MOST_NAMED
    shown = [*found[:MOST_NAMED], f"{rest} more"] if rest > 0 else found
    return f"{word}: {listed(shown)}." if found else ""


def verdict_name(verdict: str) -> str:
    """The verdict for people: the stored `undecided` reads `inconclusive`."""
    return "inconclusive" if verdict == UNDECIDED else verdict


def kinds_of(node: NodeVerdict) -> str:
    return ", ".join(dict.fromkeys(e.kind for e in node.evidence))


# --- one line per node ---


def standings(report: Report) -> Table | None:
    """For each measure the rank furthest from its peers, in percent of the median; temperatures in C above it."""
    if not report.nodes:
        return None
    measures = measure_names(report.nodes)
    columns = (
        Column("node"),
        Column("verdict"),
        *(Column(f"{name}, {_unit(report, name)}", numeric=True, priority=1 + i) for i, name in enumerate(measures)),
        Column("devices", prose=True, priority=len(measures) + 1),
    )
    rows = tuple(
        (
            Cell(node.node),
            Cell(verdict_name(node.verdict), kinds_of(node), TONES[node.verdict]),
            *(_standing(furthest(node, name)) for name in measures),
            Cell(", ".join(dict.fromkeys(node.devices))),
        )
        for node in worst_first(report.nodes)
    )
    cells = tuple((node.cell,) for node in worst_first(report.nodes))
    return Table("Nodes", columns, rows, tuple(_notes(report)), cells)


def worst_first(nodes: Iterable[NodeVerdict]) -> list[NodeVerdict]:
    return sorted(nodes, key=lambda node: WORST_FIRST.index(node.verdict))


def measure_names(nodes: Iterable[NodeVerdict]) -> list[str]:
    return list(dict.fromkeys(m.measure for node in nodes for m in node.measures))


def furthest(node: NodeVerdict, measure: str) -> NodeMeasure | None:
    """The node's rank that lies furthest from the middle, where one lies outside the band that one."""
    ours = [m for m in node.measures if m.measure == measure]
    return max(
        ours,
        key=lambda m: (-WORST_FIRST.index(m.verdict), abs(m.relative - (0.0 if m.unit == "C" else 1.0))),
        default=None,
    )


def _unit(report: Report, measure: str) -> str:
    found = next(m for node in report.nodes for m in node.measures if m.measure == measure)
    return "C above" if found.unit == "C" else "% of median"


def _standing(m: NodeMeasure | None) -> Cell:
    if m is None:
        return Cell(MISSING)
    low, high = shown(m, m.low), shown(m, m.high)
    interval = f"[{low:.1f}, {high:.1f}]" if low is not None and high is not None and low < high else ""
    return Cell(f"{shown(m, m.relative):.1f}", interval, "bad" if m.verdict in (SUSPECT, FAIL) else "")


def shown(m: NodeMeasure, value: float | None) -> float | None:
    """In per cent of the median; degrees stay degrees."""
    return None if value is None else value if m.unit == "C" else value * PER_CENT


def _notes(report: Report) -> Iterable[str]:
    against = dict.fromkeys(node.against for node in report.nodes)
    whom = " or ".join("of the ranks of the same kind" if name == "peers" else f"of {name}" for name in against)
    yield f"Median {whom}; for several ranks, the furthest one. Brackets: 95 % intervals over the repeats."
    bands = {m.measure: band(m) for node in report.nodes for m in node.measures}
    yield f"Accepted: {'; '.join(f'{name} {text}' for name, text in bands.items())}." if bands else "Nothing was timed."
    yield (
        "Fail: an outlier among its peers (z > 3.5) whose whole interval is outside the accepted range. Suspect: the "
        "interval reaches into the range."
    )
    if any(node.verdict == UNDECIDED for node in report.nodes):
        yield "Inconclusive: too few repeats to detect a node outside the accepted range. Test again with more repeats."


def band(m: NodeMeasure) -> str:
    unit = " C" if m.unit == "C" else " %"
    low, high = (shown(m, end) for end in m.accepted)
    parts = (f"from {low:.4g}" if low is not None else "", f"to {high:.4g}" if high is not None else "")
    return " ".join(filter(None, parts)) + unit


# --- why not, and what next ---


def reasons(report: Report) -> Table | None:
    """Evidence against nodes first, then what is inconclusive."""
    columns = (Column("node"), Column("verdict"), Column("evidence", prose=True), Column("try next", prose=True))
    found = [(node, e) for node in worst_first(report.nodes) for e in node.evidence]
    rows = tuple(_reason(node, e) for node, e in found)
    untold = any(e.verdict == UNDECIDED for _, e in found)
    title = "Evidence against nodes" + (", or why they are inconclusive" if untold else "")
    return Table(title, columns, rows, cells=tuple((n.cell,) for n, _ in found)) if rows else None


def _reason(node: NodeVerdict, e: NodeEvidence) -> tuple[Cell, ...]:
    return Cell(node.node), Cell(e.verdict, e.kind, TONES[e.verdict]), Cell(e.text), Cell(e.next_command, "", "code")


def differences(report: Report) -> Table | None:
    rows = tuple(
        (Cell(node.node), Cell(d.path), Cell(d.first or MISSING), Cell(d.second or MISSING))
        for node in report.nodes
        for d in node.differences
    )
    columns = (Column("node"), Column("fact"), Column("here"), Column("majority"))
    return Table("Where nodes differ from the majority", columns, rows) if rows else None


def conditions(report: Report) -> Table | None:
    """A line per fact, a column per node; what no node tells is left out."""
    nodes: Sequence[NodeVerdict] = [node for node in report.nodes if node.condition]
    names = dict.fromkeys(name for node in nodes for name, _ in node.condition)
    rows = tuple((Cell(name), *(Cell(dict(node.condition).get(name, MISSING)) for node in nodes)) for name in names)
    columns = (Column("fact"), *(Column(node.node) for node in nodes))
    return Table("Condition of nodes under load", columns, rows) if rows else None
