"""Nodes: the verdict of each, its measures beside those of its peers, the evidence, and what to try next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.analysis.findings import NodeEvidence, NodeMeasure, NodeVerdict, Report
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED, WORST_FIRST
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric, without_empty
from paceline.wording import MISSING, format_parts, listed

TONES = {PASS: "good", UNDECIDED: "", SUSPECT: "", FAIL: "bad"}
MOST_NAMED = 6


def tables(report: Report) -> tuple[Table, ...]:
    """One line per node, then the evidence against those that did not pass."""
    return tuple(table for table in (standings(report), reasons(report)) if table)


def details(report: Report) -> tuple[Table, ...]:
    """The condition of every node, and the facts in which nodes differ."""
    return tuple(table for table in (differences(report), conditions(report)) if table)


def noun(report: Report) -> str:
    """`rank` if ranks of one host were tested one by one, else `node`."""
    return "rank" if len({node.host for node in report.nodes}) < len(report.nodes) else "node"


def sentence(report: Report) -> str:
    """How many passed, how many are inconclusive, and which did not pass; empty without a node test."""
    if not report.nodes:
        return ""
    passed, undecided = (sum(node.verdict == verdict for node in report.nodes) for verdict in (PASS, UNDECIDED))
    parts = [
        f"{passed} of {len(report.nodes)} {noun(report)}s pass{f', {undecided} inconclusive' if undecided else ''}."
    ]
    words = {FAIL: "Failed", SUSPECT: "Suspect", UNDECIDED: "Inconclusive, test again with more repeats"}
    for verdict, word in words.items():
        found = [f"{node.node} ({kinds_of(node)})" for node in report.nodes if node.verdict == verdict]
        if len(found) > MOST_NAMED:
            found[MOST_NAMED:] = [f"{len(found) - MOST_NAMED} more"]
        parts += [f"{word}: {listed(found)}."] if found else []
    return " ".join(parts)


def verdict_name(verdict: str) -> str:
    """The verdict for people: the stored `undecided` reads `inconclusive`."""
    return "inconclusive" if verdict == UNDECIDED else verdict


def kinds_of(node: NodeVerdict) -> str:
    return ", ".join(dict.fromkeys(map(kind_name, node.evidence)))


def kind_name(evidence: NodeEvidence) -> str:
    """What a piece of evidence is about, beside a verdict that says whether it is inconclusive."""
    return evidence.kind.removesuffix(f" {UNDECIDED}")


# --- one line per node ---


def standings(report: Report) -> Table | None:
    """For each measure the rank furthest from its peers, in percent of the median; temperatures in C above it."""
    measures = measure_names(report.nodes)

    def measured(name: str, priority: int) -> Filled[NodeVerdict]:
        def cell(node: NodeVerdict) -> Cell:
            m = furthest(node, name)
            if m is None:
                return Cell(MISSING)
            low, high = shown(m, m.low), shown(m, m.high)
            interval = f"[{low:.1f}, {high:.1f}]" if low is not None and high is not None and low < high else ""
            return Cell(f"{shown(m, m.relative):.1f}", interval, "bad" if m.verdict in (SUSPECT, FAIL) else "")

        unit = next(m.unit for node in report.nodes for m in node.measures if m.measure == name)
        heading = f"{name}, {'C above' if unit == 'C' else '% of median'}"
        return numeric(heading, priority), cell

    columns: tuple[Filled[NodeVerdict], ...] = (
        (Column(noun(report)), lambda node: node.node),
        (Column("verdict"), lambda node: Cell(verdict_name(node.verdict), kinds_of(node), TONES[node.verdict])),
        (numeric("training, tokens/s"), lambda node: _number(node.tokens_per_s)),
        (numeric("training, samples/s", 2), lambda node: _number(node.samples_per_s)),
        (numeric("cost, USD/Btoken", 2), lambda node: _number(node.usd_per_mtok and node.usd_per_mtok * 1e3)),
        *(measured(name, 1 + i) for i, name in enumerate(measures)),
        (
            Column("devices", prose=True, priority=len(measures) + 1),
            lambda node: ", ".join(dict.fromkeys(node.devices)),
        ),
    )
    title = f"{noun(report).capitalize()}s"
    made = filled(title, worst_first(report.nodes), columns, _notes(report), lambda node: (node.cell,))
    return without_empty(made)[0] if made else None


def _number(value: float | None) -> str:
    return format_parts(value, None, None)[0]


def worst_first(nodes: Iterable[NodeVerdict]) -> list[NodeVerdict]:
    return sorted(nodes, key=lambda node: WORST_FIRST.index(node.verdict))


def measure_names(nodes: Iterable[NodeVerdict]) -> list[str]:
    return list(dict.fromkeys(m.measure for node in nodes for m in node.measures))


def furthest(node: NodeVerdict, measure: str) -> NodeMeasure | None:
    """The rank of the node with the worst verdict, and among those the one furthest from the median."""
    ours = [m for m in node.measures if m.measure == measure]
    return max(
        ours,
        key=lambda m: (-WORST_FIRST.index(m.verdict), abs(m.relative - (0.0 if m.unit == "C" else 1.0))),
        default=None,
    )


def shown(m: NodeMeasure, value: float | None) -> float | None:
    """The value in percent of the median; temperatures in C."""
    return None if value is None else value if m.unit == "C" else 100 * value


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
    columns: tuple[Filled[tuple[NodeVerdict, NodeEvidence]], ...] = (
        (Column(noun(report)), lambda pair: pair[0].node),
        (
            Column("verdict"),
            lambda pair: Cell(verdict_name(pair[1].verdict), kind_name(pair[1]), TONES[pair[1].verdict]),
        ),
        (Column("evidence", prose=True), lambda pair: pair[1].text),
        (Column("try next", prose=True), lambda pair: Cell(pair[1].next_command, "", "code")),
    )
    found = [(node, e) for node in worst_first(report.nodes) for e in node.evidence]
    undecided = any(e.verdict == UNDECIDED for _, e in found)
    title = f"Evidence against {noun(report)}s" + (", or why they are inconclusive" if undecided else "")
    return filled(title, found, columns, about=lambda pair: (pair[0].cell,))


def verdict_cell(evidence: NodeEvidence) -> Cell:
    return Cell(verdict_name(evidence.verdict), kind_name(evidence), TONES[evidence.verdict])


def differences(report: Report) -> Table | None:
    rows = tuple(
        (Cell(node.node), Cell(d.path), Cell(d.first or MISSING), Cell(d.second or MISSING))
        for node in report.nodes
        for d in node.differences
    )
    columns = (Column("node"), Column("fact"), Column("here"), Column("majority"))
    return Table("Where nodes differ from the majority", columns, rows) if rows else None


def conditions(report: Report) -> Table | None:
    """A line per fact, a column per node; facts that no node reports are left out."""
    nodes: Sequence[NodeVerdict] = [node for node in report.nodes if node.condition]
    names = dict.fromkeys(name for node in nodes for name, _ in node.condition)
    rows = tuple((Cell(name), *(Cell(dict(node.condition).get(name, MISSING)) for node in nodes)) for name in names)
    columns = (Column("fact"), *(Column(node.node) for node in nodes))
    return Table("Condition of nodes under load", columns, rows) if rows else None
