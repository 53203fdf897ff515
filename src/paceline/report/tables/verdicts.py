"""What limits each cell, the runs behind each choice, and rules of thumb for what was not measured."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings import Bottleneck, Recommendation, Report, RuleOfThumb, ShareOfStep
from paceline.analysis.findings.training import BOTTLENECKS, UNDECIDED
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, direction, verdict_text

_GIB = 2.0**30
FLOOR_NOTE = (
    "Share of step time: lower and upper bound. Compute and memory bandwidth are lower bounds from measured ceilings; "
    "the rest of the kernel time may be either."
)
CLASSIFIED_NOTE = (
    "Share of step time: lower and upper bound. Memory bandwidth is the time of kernels without matrix products. "
    "Products and attention count as compute up to the measured ceiling; the rest may be either."
)
THUMB_NOTE = "Rule of thumb from sizes alone: nothing was measured, and it does not predict speed."


def tables(report: Report) -> tuple[Table, ...]:
    """In reading order; empty if nothing was trained."""
    return tuple(table for table in (bottlenecks(report), rules_of_thumb(report.rules_of_thumb)) if table)


def details(report: Report) -> tuple[Table, ...]:
    """Too long for a terminal: the reason for each verdict, and the runs behind each choice."""
    return tuple(table for table in (reasons(report), citations(report)) if table)


# --- bottlenecks ---


def bottlenecks(report: Report) -> Table | None:
    """What each cell waits for, with a column for every kind of bottleneck that occurs."""
    named, found = varying_axes(report), report.bottlenecks
    known = {share.kind for b in found for share in b.evidence}
    kinds = [kind for kind in BOTTLENECKS if kind in known]
    columns = (
        Column("cell", prose=True),
        Column("waits most for", prose=True),
        *(numeric(f"{kind}, %", i) for i, kind in enumerate(kinds, 1)),
    )
    rows = tuple((Cell(cell_name(report, b.cell, b.axes, named)), *_verdict(b, kinds)) for b in found)
    how = dict.fromkeys(CLASSIFIED_NOTE if b.told_apart else FLOOR_NOTE for b in found)
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
    columns: tuple[Filled[Bottleneck], ...] = (
        (Column("cell", prose=True), lambda b: cell_name(report, b.cell, b.axes, named)),
        (Column("because", prose=True), lambda b: b.text),
    )
    return filled("Why each step waits", report.bottlenecks, columns, about=lambda b: (b.cell,))


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

    def pairs(r: Recommendation) -> str:
        return "; ".join(
            f"{c.label} / {c.other_label}: {verdict_text(c.verdict, c.ratio, c.low, c.high, word)[0]}"
            for c in r.because
            for word in (direction(c.metric, c.ratio),)
        )

    def not_measured(r: Recommendation) -> str:
        ended = [f"{cell.name} ({cell.status}: {cell.reason})" for cell in r.left_out]
        return "; ".join((*ended, *r.not_measured)) or MISSING

    columns: tuple[Filled[Recommendation], ...] = (
        (Column("category"), lambda r: r.category),
        (Column("choose"), lambda r: ", ".join(r.choose) if r.over else "no winner"),
        (Column("over"), lambda r: ", ".join(r.over) or MISSING),
        (Column("comparisons", prose=True), pairs),
        (Column("runs", prose=True), lambda r: ", ".join(r.runs)),
        (Column("not measured", prose=True), not_measured),
    )
    return filled("The runs behind each choice", report.recommendations, columns)


# --- rules of thumb ---


def rules_of_thumb(rules: Sequence[RuleOfThumb]) -> Table | None:
    """Per model and GPU, how many GPUs each strategy needs; GPUs on which every strategy fits one are one note."""
    by_gpu: dict[tuple[str, str], list[RuleOfThumb]] = {}
    for rule in rules:
        by_gpu.setdefault((rule.model, rule.gpu), []).append(rule)
    scarce = [ours for ours in by_gpu.values() if any(rule.gpus != 1 for rule in ours)]

    def count(strategy: str) -> Filled[list[RuleOfThumb]]:
        def needed(ours: list[RuleOfThumb]) -> Cell:
            rule = next((rule for rule in reversed(ours) if rule.strategy == strategy), None)
            if rule is None:
                return Cell(MISSING)
            return Cell(f"from {rule.gpus}") if rule.fits else Cell("no", "", "quiet")

        return numeric(f"{strategy}, GPUs"), needed

    columns: tuple[Filled[list[RuleOfThumb]], ...] = (
        (Column("model"), lambda ours: ours[0].model),
        (numeric("memory, GB"), lambda ours: f"{ours[0].memory_bytes / 1e9:.0f}"),
        *map(count, dict.fromkeys(rule.strategy for rule in rules)),
        (Column("GPU", priority=1, prose=True), lambda ours: ours[0].gpu),
    )
    shown = [f"For example {rule.text}." for ours in scarce for rule in ours if rule.fits][-1:]
    roomy: dict[str, float] = {}
    for first in (ours[0] for ours in by_gpu.values() if ours not in scarce):
        roomy[first.model] = min(first.memory_bytes, roomy.get(first.model, first.memory_bytes))
    fits = (f"{model}: every strategy fits one GPU of {least / 1e9:g} GB or more." for model, least in roomy.items())
    return filled("What would fit elsewhere (rule of thumb)", scarce, columns, (THUMB_NOTE, *shown, *fits))


def advice(rules: Sequence[RuleOfThumb]) -> Table:
    """One model on one number of GPUs of one kind, strategy by strategy, in GiB per GPU."""

    def gib(count: float) -> str:
        return f"{count / _GIB:.1f}"

    columns: tuple[Filled[RuleOfThumb], ...] = (
        (Column("strategy"), lambda rule: rule.strategy),
        (numeric("state, GiB"), lambda rule: gib(rule.state_bytes)),
        (numeric("live units, GiB"), lambda rule: gib(rule.live_bytes)),
        (numeric("activations, GiB"), lambda rule: gib(rule.activation_bytes)),
        (numeric("sum, GiB"), lambda rule: gib(rule.needed_bytes)),
        (numeric("usable, GiB"), lambda rule: gib(rule.usable_bytes)),
        (Column("fits"), lambda rule: Cell("yes", "", "good") if rule.fits else Cell("no", "", "bad")),
    )
    first, least = rules[0], min(rules, key=lambda rule: rule.needed_bytes)
    where = f"{first.gpus} x {first.gpu} ({first.memory_bytes / 1e9:g} GB)"
    table = filled(f"What fits: {first.model} on {where}", rules, columns, (THUMB_NOTE, f"{least.text}."))
    assert table is not None
    return table
