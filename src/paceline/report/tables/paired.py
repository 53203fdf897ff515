"""Replica against replica over the same samples: who is faster, by how much, and what else differs between them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import EQUAL, INCONCLUSIVE, Report
from paceline.analysis.findings.served import FASTER, SLOWER, PairedRatio, PairedReplicas
from paceline.report.tables.comparison import differences_text
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import equal_sentence, inconclusive_sentence, margin_sentence, short_percent, verdict_text

SPEED = "output_tokens_per_s"
Row = tuple[PairedReplicas, PairedRatio]
_TONES = {FASTER: "good", SLOWER: "bad", EQUAL: "quiet", INCONCLUSIVE: "quiet", None: "quiet"}
METHOD = (
    "The same samples on both, in alternating order, so that a steady drift cancels; intervals are a paired "
    "bootstrap over samples."
)


def sentence(report: Report) -> str:
    """One sentence for each pair, with the reasons to doubt it."""
    sentences = []
    for pair in report.paired:
        if not pair.ratios:
            continue
        speed = next((r for r in pair.ratios if r.metric == SPEED), pair.ratios[0])
        names = _name(pair.replica, pair.host), _name(pair.other, pair.other_host)
        text = _verdict(speed, names, f" on {pair.pairs:,} samples")
        beside = [f"differs: {differences_text(pair.differences)}"] if pair.differences else []
        beside += [f"flagged: {flag}" for flag in pair.flags]
        sentences.append("; ".join((text[0].upper() + text[1:], *beside)) + ".")
    return " ".join(sentences)


def _verdict(found: PairedRatio, names: tuple[str, str], where: str) -> str:
    one, other = names
    if found.verdict is None or found.low is None or found.high is None:
        return f"{one} is not ranked ({found.reason}) against {other}{where}"
    if found.verdict == EQUAL:
        return equal_sentence(f"{one} and {other}{where}", [(found.low, found.high)])
    if found.verdict == INCONCLUSIVE:
        return inconclusive_sentence(f"{one} and {other}{where}", found.detectable_ratio)
    if found.verdict == FASTER:
        return margin_sentence(SPEED, one, f"{other}{where}", found.ratio, found.low, found.high)
    return margin_sentence(SPEED, other, f"{one}{where}", 1 / found.ratio, 1 / found.high, 1 / found.low)


def _name(replica: int, host: str | None) -> str:
    return f"replica {replica} ({host})" if host else f"replica {replica}"


def tables(report: Report) -> tuple[Table, ...]:
    def ratio(row: Row) -> Cell:
        pair, r = row
        text, interval = verdict_text(r.verdict, r.ratio, r.low, r.high, r.verdict or "", r.detectable_ratio)
        return Cell(f"{text}, flagged", interval, "bad") if pair.flags else Cell(text, interval, _TONES[r.verdict])

    def detectable(row: Row) -> str:
        smallest = row[1].detectable_ratio
        return "" if smallest is None else short_percent(smallest).removesuffix(" %")

    columns: tuple[Filled[Row], ...] = (
        (
            Column("replicas"),
            lambda row: f"{_name(row[0].replica, row[0].host)} : {_name(row[0].other, row[0].other_host)}",
        ),
        (Column("metric"), lambda row: row[1].metric),
        (Column("first over second"), ratio),
        (numeric("smallest detectable, %", 1), detectable),
        (numeric("samples", 2), lambda row: f"{row[0].pairs:,}"),
        (
            Column("what else differs", prose=True),
            lambda row: differences_text(row[0].differences) if row[1] is row[0].ratios[0] else "",
        ),
        (Column("reason", prose=True, priority=3), lambda row: row[1].reason),
    )
    rows = [(pair, found) for pair in report.paired for found in pair.ratios]
    table = filled("Replica against replica", rows, columns, _notes(report), lambda row: (row[0].cell,))
    return (table,) if table else ()


def _notes(report: Report) -> Iterator[str]:
    yield METHOD
    for pair in report.paired:
        names = f"replicas {pair.replica} and {pair.other}"
        if not pair.balanced:
            yield f"{names} were not sent at the same time on average: drift is part of their difference."
        if pair.dropped:
            yield f"{pair.dropped:,} samples that one of {names} did not always answer are left out."
        yield from (f"{flag}: its verdict may compare different work." for flag in pair.flags)
