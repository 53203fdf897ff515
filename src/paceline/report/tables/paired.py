"""Replica against replica over the same samples: who is faster, by how much, and what else differs between them."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import TIE, Report
from paceline.analysis.findings.served import FASTER, SLOWER, PairedRatio, PairedReplicas
from paceline.report.tables.comparison import differences_text
from paceline.report.tables.table import Cell, Column, Table
from paceline.wording import ratio_words, verdict_text

SPEED = "output_tokens_per_s"
_TONES = {FASTER: "good", SLOWER: "bad", TIE: "quiet", None: "quiet"}
METHOD = (
    "The same samples on both, in alternating order, so that a steady drift cancels; intervals are a paired "
    "bootstrap over samples."
)


def sentence(report: Report) -> str:
    """One sentence for each pair, with the reasons to doubt it."""
    return " ".join(_said(pair) for pair in report.paired if pair.ratios)


def _said(pair: PairedReplicas) -> str:
    speed = next((r for r in pair.ratios if r.metric == SPEED), pair.ratios[0])
    ours, theirs = _name(pair.replica, pair.host), _name(pair.other, pair.other_host)
    beside = [f"differs: {differences_text(pair.differences)}"] if pair.differences else []
    beside += [f"flagged: {flag}" for flag in pair.flags]
    text = f"{ours} {_verdict(speed)} {theirs} on {pair.pairs:,} samples"
    if speed.verdict == TIE:
        verdict, interval = verdict_text(TIE, speed.ratio, speed.low, speed.high, "", speed.detectable_ratio)
        text = f"speed of {ours} against {theirs} on {pair.pairs:,} samples: {verdict}, {interval}"
    return "; ".join((text[0].upper() + text[1:], *beside)) + "."


def _verdict(found: PairedRatio) -> str:
    if found.verdict is None or found.low is None or found.high is None:
        return f"is not ranked ({found.reason}) against"
    value, interval = ratio_words(found.ratio, found.low, found.high)
    return f"is {value} times as fast{interval} as"


def _name(replica: int, host: str | None) -> str:
    return f"replica {replica} ({host})" if host else f"replica {replica}"


def tables(report: Report) -> tuple[Table, ...]:
    if not report.paired:
        return ()
    columns = (
        Column("replicas"),
        Column("metric"),
        Column("first over second"),
        Column("smallest detectable, %", numeric=True, priority=1),
        Column("samples", numeric=True, priority=2),
        Column("what else differs", prose=True),
        Column("reason", prose=True, priority=3),
    )
    rows = tuple(row for pair in report.paired for row in _rows(pair))
    cells = tuple((pair.cell,) for pair in report.paired for _ in _rows(pair))
    return (Table("Replica against replica", columns, rows, tuple(_notes(report)), cells),)


def _notes(report: Report) -> Iterator[str]:
    yield METHOD
    for pair in report.paired:
        names = f"replicas {pair.replica} and {pair.other}"
        if not pair.balanced:
            yield f"{names} were not sent at the same time on average: drift is part of their difference."
        if pair.dropped:
            yield f"{pair.dropped:,} samples that one of {names} did not always answer are left out."
        yield from (f"{flag}: its verdict may compare different work." for flag in pair.flags)


def _rows(pair: PairedReplicas) -> Iterator[tuple[Cell, ...]]:
    for number, found in enumerate(pair.ratios):
        detectable = "" if found.detectable_ratio is None else f"{found.detectable_ratio * 100:.2g}"
        yield (
            Cell(f"{_name(pair.replica, pair.host)} : {_name(pair.other, pair.other_host)}"),
            Cell(found.metric),
            _ratio(found, flagged=bool(pair.flags)),
            Cell(detectable),
            Cell(f"{pair.pairs:,}"),
            Cell(differences_text(pair.differences) if number == 0 else ""),
            Cell(found.reason),
        )


def _ratio(found: PairedRatio, flagged: bool) -> Cell:
    word = found.verdict or ""
    text, interval = verdict_text(found.verdict, found.ratio, found.low, found.high, word, found.detectable_ratio)
    tone = "bad" if flagged else _TONES[found.verdict]
    return Cell(f"{text}{', flagged' if flagged else ''}", interval, tone)
