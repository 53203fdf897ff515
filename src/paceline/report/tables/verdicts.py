"""What limits each cell, the runs behind each choice, and rules of thumb for what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings import Bottleneck, Recommendation, Report, RuleOfThumb, ShareOfStep
from paceline.analysis.findings.training import BOTTLENECKS, UNDECIDED
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, direction, verdict_text

_GIB = 2.0**30
FLOOR_NOTE = (
    "Share of step time: lower and upper bound. Compute and memory bandwidth are lower bounds from measured ceilings; "
    "the rest of the kernel time may be either."
)
TOLD_APART_NOTE = (
    "Share of step time: lower and upper bound. Memory bandwidth is the time of kernels without matrix products. "
    "Products and attention count as compute up to the measured ceiling; the rest may be either."
)
THUMB_NOTE = "Rule of thumb from sizes alone: nothing was measured, and it does not predict speed."


def tables(report: Report) -> tuple[Table, ...]:
    """In reading order; empty if nothing was trained."""
    return tuple(table for table in (bottlenecks(report), rules_of_thumb(report.rules_of_thumb)) if table)


def details(report: Report) -> tuple[Table, ...]:
    """Too long for a terminal and for a first look: why each verdict, and the runs behind each choice."""
    return tuple(table for table in (reasons(report), citations(report)) if table)


# --- bottlenecks ---


def bottlenecks(report: Report) -> Table | None:
    """With a column for every kind that some cell has a share of."""
    named, found = varying_axes(report), report.bottlenecks
    known = {share.kind for b in found for share in b.evidence}
    kinds = [kind for kind in BOTTLENECKS if kind in known]
    columns = (
        Column("cell", prose=True),
        Column("waits most for", prose=True),
        *(Column(f"{kind}, %", numeric=True, priority=i) for i, kind in enumerate(kinds, 1)),
    )
    rows = tuple((Cell(cell_name(report, b.cell, b.axes, named)), *_verdict(b, kinds)) for b in found)
    how = dict.fromkeys(TOLD_APART_NOTE if b.told_apart else FLOOR_NOTE for b in found)
    missing = dict.fromkeys(f"Not known: {why}." for b in found for why in b.missing)
    cells = tuple((b.cell,) for b in found)
    return Table("What the step waits for", columns, rows, (*how, *missing), cells) if rows else None


def _verdict(b: Bottleneck, kinds: Sequence[str]) -> tuple[Cell, ...]:
    tone = "quiet" if b.kind == UNDECIDED or b.share_ratio is None else ""
    shares = {share.kind: share for share in b.evidence}
    return Cell("inconclusive" if b.kind == UNDECIDED else b.kind, "", tone), *(
        Cell(_share(shares.get(kind))) for kind in kinds
    )


def reasons(report: Report) -> Table | None:
    named = varying_axes(report)
    rows = tuple((Cell(cell_name(report, b.cell, b.axes, named)), Cell(b.text)) for b in report.bottlenecks)
    columns = (Column("cell", prose=True), Column("because", prose=True))
    cells = tuple((b.cell,) for b in report.bottlenecks)
    return Table("Why each step waits", columns, rows, cells=cells) if rows else None


def _share(share: ShareOfStep | None) -> str:
    """Whole percents: the rule distinguishes shares by 5 %."""
    if share is None:
        return MISSING
    most = f"{share.high * 100:.0f}"
    if share.share_ratio is None:
        return f"up to {most}"
    certain = f"{share.share_ratio * 100:.0f}"
    return certain if certain == most else f"{certain} to {most}"


# --- recommendations ---


def citations(report: Report) -> Table | None:
    """Each choice with its comparisons and runs, and what it does not cover."""
    columns = (
        Column("category"),
        Column("choose"),
        Column("over"),
        Column("comparisons", prose=True),
        Column("runs", prose=True),
        Column("not measured", prose=True),
    )
    rows = tuple(map(_citation, report.recommendations))
    return Table("The runs behind each choice", columns, rows) if rows else None


def _citation(r: Recommendation) -> tuple[Cell, ...]:
    pairs = "; ".join(
        f"{c.label} / {c.other_label}: {verdict_text(c.verdict, c.ratio, c.low, c.high, word)[0]}"
        for c in r.because
        for word in (direction(c.metric, c.ratio),)
    )
    ended = [f"{cell.name} ({cell.status}: {cell.reason})" for cell in r.left_out]
    return (
        Cell(r.category),
        Cell(", ".join(r.choose) if r.over else "no winner"),
        Cell(", ".join(r.over) or MISSING),
        Cell(pairs),
        Cell(", ".join(r.runs)),
        Cell("; ".join((*ended, *r.not_measured)) or MISSING),
    )


# --- rules of thumb ---


def rules_of_thumb(rules: Sequence[RuleOfThumb]) -> Table | None:
    """Per model and memory size: from how many GPUs on each strategy fits; sizes on which all fit one are one note."""
    by_place: dict[tuple[str, str], list[RuleOfThumb]] = {}
    for rule in rules:
        by_place.setdefault((rule.model, rule.gpu), []).append(rule)
    scarce = [ours for ours in by_place.values() if any(rule.gpus != 1 for rule in ours)]
    strategies = list(dict.fromkeys(rule.strategy for rule in rules))
    columns = (
        Column("model"),
        Column("memory, GB", numeric=True),
        *(Column(f"{name}, GPUs", numeric=True) for name in strategies),
        Column("GPU", priority=1, prose=True),
    )
    rows = tuple(_place(ours, strategies) for ours in scarce)
    shown = [f"For example {rule.text}." for ours in scarce for rule in ours if rule.fits][-1:]
    notes = (THUMB_NOTE, *shown, *_roomy([ours for ours in by_place.values() if ours not in scarce]))
    return Table("What would fit elsewhere (rule of thumb)", columns, rows, notes) if rows else None


def _roomy(places: Sequence[Sequence[RuleOfThumb]]) -> Iterator[str]:
    for model in dict.fromkeys(ours[0].model for ours in places):
        least = min(ours[0].memory_bytes for ours in places if ours[0].model == model)
        yield f"{model}: every strategy fits one GPU of {least / 1e9:g} GB or more."


def _place(ours: Sequence[RuleOfThumb], strategies: Sequence[str]) -> tuple[Cell, ...]:
    first, known = ours[0], {rule.strategy: rule for rule in ours}
    counts = (_count(known[name]) if name in known else Cell(MISSING) for name in strategies)
    return Cell(first.model), Cell(f"{first.memory_bytes / 1e9:.0f}"), *counts, Cell(first.gpu)


def _count(rule: RuleOfThumb) -> Cell:
    return Cell(f"from {rule.gpus}") if rule.fits else Cell("no", "", "quiet")


def advice(rules: Sequence[RuleOfThumb]) -> Table:
    """One model on one number of GPUs of one kind, strategy by strategy, in GiB per GPU."""
    columns = (
        Column("strategy"),
        Column("state, GiB", numeric=True),
        Column("live units, GiB", numeric=True),
        Column("activations, GiB", numeric=True),
        Column("sum, GiB", numeric=True),
        Column("usable, GiB", numeric=True),
        Column("fits"),
    )
    rows = tuple(
        (
            Cell(rule.strategy),
            *(Cell(f"{size / _GIB:.1f}") for size in (rule.state_bytes, rule.live_bytes, rule.activation_bytes)),
            Cell(f"{rule.needed_bytes / _GIB:.1f}"),
            Cell(f"{rule.usable_bytes / _GIB:.1f}"),
            Cell("yes" if rule.fits else "no", "", "good" if rule.fits else "bad"),
        )
        for rule in rules
    )
    first, least = rules[0], min(rules, key=lambda rule: rule.needed_bytes)
    place = f"{first.gpus} x {first.gpu} ({first.memory_bytes / 1e9:g} GB)"
    return Table(f"What fits: {first.model} on {place}", columns, rows, (THUMB_NOTE, f"{least.text}."))
