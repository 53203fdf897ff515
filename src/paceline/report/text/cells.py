"""The rank of each cell among those that did the same work, or the reason why it has none.

Ranks follow from comparisons only: a cell ranks below another only by a certified verdict.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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
    Report,
    RunFinding,
    once,
)
from paceline.analysis.findings.cell_axes import DEVICE, EQUAL_WORK, axis_text, describe, distinguishing_axes
from paceline.errors import Scalar

THROUGHPUT = "tokens_per_s"
STRATEGY, SCRIPT, ARGUMENTS = "strategy", "script", "arguments"
ACCUMULATION, BATCH = "accumulation", "global_batch"
# In which cells of a table may differ: a strategy that splits the model has fewer replicas, which accumulate more for
# the same global batch.
LAYOUT = (STRATEGY, ACCUMULATION)
WIRE, WIRE_FORMULA = "wire_bytes_per_step", "wire_bytes_formula_per_step"
SHARES = ("mfu_ratio", "achievable_ratio")
SHOWN = (THROUGHPUT, "step_time_s", *SHARES, "peak_memory_bytes", "comm_exposed_ratio", WIRE, WIRE_FORMULA)
_OPPOSITE = {BETTER: WORSE, WORSE: BETTER}

# A run of a foreign script whose work was compared with that of no other, or found equal to none.
ALONE = "baseline"
DESIGNED = "cells of a design: their work differs on purpose, so they are listed, not ranked"
PRECISIONS = "another precision is other work, so these cells are listed, not ranked"

Verdicts = Mapping[tuple[str, str], Comparison]


@dataclass(frozen=True, slots=True)
class Row:
    """One certified cell: its measurements by metric, its verdict against the first row, and its rank if it has one."""

    rank: str | None
    cell: str
    label: str
    measurements: Mapping[str, Measurement]
    versus_best: Comparison | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that differ in strategy only, on one kind of device, the highest throughput first.

    warnings are true of every run in it; heading says what the labels of its rows are. levels: by cell, how equal the
    work of foreign scripts is.
    """

    title: str
    axes: Mapping[str, Scalar]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    heading: str = "strategy"
    levels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_listed(self) -> bool:
        """Whether its cells did different work, so that they are listed and not ranked."""
        return DESIGNED in self.notes or PRECISIONS in self.notes


@dataclass(frozen=True, slots=True)
class Unranked:
    """Runs of one cell that are not ranked, all for the same reason."""

    label: str
    status: str
    reason: str
    runs: tuple[str, ...]


@once
def groups(report: Report) -> tuple[Group, ...]:
    """All comparison groups with a ranked cell, the largest first, then by world size."""
    by_axes: dict[tuple[Sequence[str], tuple[tuple[str, str], ...]], list[str]] = {}
    cells, context = ranked_cells(report), _Context.of(report)
    of_scripts = _script_axes(context, cells)
    for cell, metrics in cells.items():
        axes = context.placed(metrics[THROUGHPUT])
        free = of_scripts if axes.get(SCRIPT) else LAYOUT
        key = tuple(sorted((name, repr(value)) for name, value in axes.items() if name not in free))
        by_axes.setdefault((free, key), []).append(cell)
    found = _told_apart(
        [_group(context, {cell: cells[cell] for cell in own}, free) for (free, _), own in by_axes.items()]
    )
    for outcome in report.effects:
        alone = [g for g in found if len(g.rows) == 1 and g.rows[0].cell in outcome.names]
        if len(alone) > 1:
            listed = _listed(outcome.names, alone, DESIGNED, "cell of the design")
            found = [*(g for g in found if g not in alone), listed]
    by_precision = {run for tradeoff in report.tradeoffs if tradeoff.axis == "precision" for run in tradeoff.runs}
    alone = [g for g in found if len(g.rows) == 1 and by_precision.issuperset(g.rows[0].runs)]
    if len(alone) > 1:
        listed = _listed(_differences(alone), alone, PRECISIONS, "precision")
        found = [*(g for g in found if g not in alone), listed]

    def order(group: Group) -> tuple[int, int, str]:
        size = group.axes.get("world_size")
        return -len(group.rows), size if isinstance(size, int) else 0, group.title

    return tuple(sorted(found, key=order))


def _told_apart(found: list[Group]) -> list[Group]:
    """With the global batch in equal titles: it follows from the axes of a cell, but not from those of a table."""
    titles = Counter(group.title for group in found)
    return [
        dataclasses.replace(group, title=f"{group.title}, {axis_text(BATCH, group.axes)}")
        if titles[group.title] > 1 and group.axes.get(BATCH)
        else group
        for group in found
    ]


@once
def ranked_cells(report: Report) -> dict[str, dict[str, Measurement]]:
    """Measurements by cell and metric of cells with a throughput, all of whose runs ended ok and are certified."""
    trusted = trusted_runs(report)
    found: dict[str, dict[str, Measurement]] = {}
    for m in report.measurements:
        if m.runs and trusted.issuperset(m.runs):
            found.setdefault(m.cell, {})[m.metric] = m
    return {cell: metrics for cell, metrics in found.items() if _has_value(metrics.get(THROUGHPUT))}


@once
def trusted_runs(report: Report) -> frozenset[str]:
    valid = {c.run for c in report.certificates if c.valid}
    return frozenset(r.run for r in report.runs if r.status == "ok" and not r.proves_only and r.run in valid)


@once
def throughput_comparisons(report: Report) -> dict[tuple[str, str], Comparison]:
    """Certified comparisons of throughput by (cell, other), in both directions."""
    certified = [c for c in report.comparisons if c.metric == THROUGHPUT and c.certified]
    return {(c.cell, c.other): c for c in (*map(turned, certified), *certified)}


def turned(c: Comparison) -> Comparison:
    """The same finding in the other direction: B over A instead of A over B."""
    return dataclasses.replace(
        c,
        cell=c.other,
        other=c.cell,
        label=c.other_label,
        other_label=c.label,
        ratio=1 / c.ratio,
        low=1 / c.high,
        high=1 / c.low,
        verdict=_OPPOSITE.get(c.verdict, c.verdict),
        throttled=c.throttled and c.throttled[::-1],
    )


def unranked(report: Report) -> tuple[Unranked, ...]:
    """Every run that failed, was refused, is not certified or left nothing to rank, merged by cell and reason."""
    certificates = {c.run: c for c in report.certificates}
    named = varying_axes(report)
    measured = {m.cell for m in report.measurements if _has_value(m)}
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for run in report.runs:
        if run.status == "ok" and not run.is_certified:
            continue
        trouble = _trouble(run, certificates.get(run.run))
        if trouble is None and run.is_certified and not run.proves_only and run.cell not in measured:
            trouble = "not measured", run.reason or "the run has no step in the measured window"
        if trouble:
            label = kind_of(run) + describe(_placed(run.axes, run.device_name), named)
            merged.setdefault((run.cell, label, *trouble), []).append(run.run)
    return tuple(Unranked(label, status, why, tuple(runs)) for (_, label, status, why), runs in merged.items())


def kind_of(run: RunFinding) -> str:
    """`reference: ` or `proof on 4 of 80 layers: ` for runs that only prove others."""
    kind = "reference" if run.is_reference else "proof" if run.proof else ""
    return kind and f"{kind}{f' on {run.proof}' if run.proof else ''}: "


def runs_alone(certificates: Sequence[Certificate]) -> set[str]:
    """The runs of foreign scripts whose work no other run was compared with and found equal."""
    known = {c.reference for c in certificates}
    graded = (c for c in certificates if c.valid and c.level in (CERTIFIED, CONSISTENT))
    return {c.run for c in graded if c.reference is None and c.run not in known and not c.differs}


@once
def varying_axes(report: Report) -> tuple[str, ...]:
    """Axes that distinguish the runs of the report, including the kind of device."""
    runs = {(run.cell, run.device_name): run for run in report.runs if not run.proves_only}
    return distinguishing_axes([_placed(run.axes, run.device_name) for run in runs.values()])


def axes_of(report: Report, cell: str) -> Mapping[str, Scalar] | None:
    return next((run.axes for run in report.runs if run.cell == cell), None)


@dataclass(frozen=True, slots=True)
class _Context:
    """Data that all groups need, computed once."""

    named: tuple[str, ...]
    verdicts: Verdicts
    health: Mapping[str, tuple[str, ...]]
    devices: Mapping[str, str | None]
    caveats: tuple[tuple[frozenset[str], tuple[str, ...]], ...]
    levels: Mapping[str, str]
    models: Mapping[Scalar, str]

    @classmethod
    def of(cls, report: Report) -> _Context:
        cited = ((frozenset((c.cell, c.other)), r.caveats) for r in report.recommendations for c in r.because[:1])
        health = {run.run: run.health for run in report.runs}
        devices = {run.run: run.device_name for run in report.runs}
        graded = [c for c in report.certificates if c.level]
        by_itself = runs_alone(report.certificates)
        levels = {c.cell: DIFFERENT if c.differs else ALONE if c.run in by_itself else str(c.level) for c in graded}
        models = short_models(run.axes.get("model") for run in report.runs)
        return cls(varying_axes(report), throughput_comparisons(report), health, devices, tuple(cited), levels, models)

    def placed(self, m: Measurement) -> dict[str, Scalar]:
        """The axes of a measurement with the kinds of device that its runs were made on."""
        kinds = {kind for run in m.runs if (kind := self.devices.get(run))}
        return _placed(m.axes, ", ".join(sorted(kinds)) or None)


def _placed(axes: Mapping[str, Scalar], device_name: str | None) -> dict[str, Scalar]:
    return {**axes, DEVICE: device_name} if device_name else dict(axes)


def _script_axes(context: _Context, cells: Mapping[str, Mapping[str, Measurement]]) -> tuple[str, ...]:
    """The axis in which foreign scripts of a table differ: the strategy, or the parameter of which most values were
    compared; that with the title of the script, which may name the parameter. Without a comparison and a strategy it is
    what follows the script in its command."""
    values: dict[str, set[str]] = {}
    for pair in context.verdicts:
        a, b = (context.placed(cells[cell][THROUGHPUT]) if cell in cells else {} for cell in pair)
        if not (a.get(SCRIPT) and b.get(SCRIPT)):
            continue
        differing = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)} - {SCRIPT}
        if len(differing) == 1:
            name = differing.pop()
            values.setdefault(name, set()).update((repr(a.get(name)), repr(b.get(name))))
    if not values and not any(metrics[THROUGHPUT].axes.get(STRATEGY) for metrics in cells.values()):
        return ARGUMENTS, SCRIPT
    if STRATEGY in values or not values:
        return (STRATEGY,)
    return min(values, key=lambda name: (-len(values[name]), name)), SCRIPT


def _group(context: _Context, cells: Mapping[str, Mapping[str, Measurement]], free: Sequence[str]) -> Group:
    """A table of cells that differ in the free axes only, the first of which names them."""
    # Scripts that did other work than most come last: the first row is what the others are compared with.
    order = sorted(
        cells, key=lambda cell: (context.levels.get(cell) == DIFFERENT, -(cells[cell][THROUGHPUT].value or 0.0))
    )
    if not any((cell, order[0]) in context.verdicts for cell in order[1:]):
        # Cells that cannot be compared, for example of ranks that shared a GPU, are not sorted by speed either.
        order.sort(key=lambda cell: describe(cells[cell][THROUGHPUT].axes, ()))
    everything = [context.placed(cells[cell][THROUGHPUT]) for cell in order]
    common = {k: v for k, v in everything[0].items() if all(axes.get(k) == v for axes in everything)}
    axes = {k: v for k, v in common.items() if k not in free or k in (ACCUMULATION, ARGUMENTS)}

    def label(cell: str) -> str:
        own = cells[cell][THROUGHPUT].axes
        by_title = free[0] == STRATEGY or own.get(free[0]) is None or (free[0] == ARGUMENTS and ARGUMENTS in common)
        return describe(own, ()) if by_title else axis_text(free[0], own)

    rows = tuple(
        Row(
            rank,
            cell,
            label(cell),
            cells[cell],
            context.verdicts.get((cell, order[0])),
            cells[cell][THROUGHPUT].runs,
        )
        for rank, cell in zip(_ranks(order, context.verdicts), order, strict=True)
    )
    brief = {**axes, "model": context.models.get(axes.get("model"), axes.get("model"))}
    shown = [name for name in (*context.named, EQUAL_WORK) if brief.get(name) is not None]
    title = ", ".join(axis_text(name, brief) for name in shown)
    health = [context.health.get(run, ()) for row in rows for run in row.runs]
    # The title says on what they were proved. That a script's work is certified is nothing to warn of.
    titled = f"equal work: {axes.get(EQUAL_WORK)}"
    known = titled, f"equal work: {CERTIFIED}"
    warnings = tuple(note for note in health[0] if note not in known and all(note in other for other in health))
    heading = SCRIPT if cells[order[0]][THROUGHPUT].axes.get(SCRIPT) else STRATEGY
    notes = tuple(note for note in _notes(context, rows) if note != titled)
    return Group(title, axes, rows, notes, warnings, heading, context.levels)


def _differences(alone: list[Group]) -> dict[str, str]:
    """What distinguishes these cells, by cell: `bf16, seed 42`."""
    everything = [{"strategy": g.rows[0].label, **g.axes} for g in alone]
    differing = [name for name in distinguishing_axes(everything) if len({repr(a.get(name)) for a in everything}) > 1]
    names = sorted(differing, key=lambda name: name != "precision")

    def words(axes: Mapping[str, Scalar]) -> str:
        plain = ("precision", "strategy")
        return ", ".join(str(axes[name]) if name in plain else axis_text(name, axes) for name in names)

    return {g.rows[0].cell: words(axes) for g, axes in zip(alone, everything, strict=True)}


def _listed(names: Mapping[str, str], alone: list[Group], why: str, heading: str) -> Group:
    """Cells that are alone in their groups, as one group: listed by throughput, never ranked."""
    alone = sorted(alone, key=lambda g: -(g.rows[0].measurements[THROUGHPUT].value or 0.0))
    rows = tuple(dataclasses.replace(g.rows[0], label=names[g.rows[0].cell]) for g in alone)
    axes = {k: v for k, v in alone[0].axes.items() if all(g.axes.get(k) == v for g in alone)}
    words = [g.title.split(", ") for g in alone]
    title = ", ".join(word for word in words[0] if all(word in other for other in words))
    said: dict[str, list[str]] = {}
    for group, row in zip(alone, rows, strict=True):
        for note in group.notes:
            said.setdefault(note, []).append(row.label)
    notes = []
    for note, who in said.items():
        # The cells a note applies to, by the shorter list; none if it applies to all.
        rest = [row.label for row in rows if row.label not in who]
        start = f"all but {'; '.join(rest)}: " if len(rest) < len(who) - 1 else f"{'; '.join(who)}: "
        notes.append(f"{start if rest else ''}{note}")
    warnings = tuple(w for w in alone[0].warnings if all(w in g.warnings for g in alone))
    return Group(title, axes, rows, (why, *notes), warnings, heading=heading)


def without_shared(labels: Iterable[str]) -> tuple[dict[str, str], str]:
    """Each label without the parts that all of them have, and those parts.

    >>> without_shared(["ddp, gpt2, bf16", "fsdp2, gpt2, bf16"])
    ({'ddp, gpt2, bf16': 'ddp', 'fsdp2, gpt2, bf16': 'fsdp2'}, 'gpt2, bf16')
    """
    parts = {label: label.split(", ") for label in labels}
    own, *others = parts.values() if len(parts) > 1 else ([],)
    shared = [part for part in own if all(part in other for other in others)]
    short = {label: ", ".join(part for part in each if part not in shared) for label, each in parts.items()}
    # A cell that has nothing of its own keeps its name.
    return {label: name or label for label, name in short.items()}, ", ".join(shared)


def short_models(models: Iterable[Scalar]) -> dict[Scalar, str]:
    """Models without their options, where that leaves them distinct; the common settings have them whole.

    >>> short_models(["tiny-llama:layers=4,hidden=256", "gpt2", None])
    {'tiny-llama:layers=4,hidden=256': 'tiny-llama', 'gpt2': 'gpt2'}
    >>> short_models(["gpt2:layers=4", "gpt2:layers=8"])
    {'gpt2:layers=4': 'gpt2:layers=4', 'gpt2:layers=8': 'gpt2:layers=8'}
    """
    known = dict.fromkeys(str(model) for model in models if model is not None)
    bare = [name.partition(":")[0] for name in known]
    return {name: short if bare.count(short) == 1 else name for name, short in zip(known, bare, strict=True)}


def cell_name(report: Report, cell: str, axes: Mapping[str, Scalar], named: Sequence[str]) -> str:
    """A cell of a design by its changes from the baseline, any other by its axes."""
    own = next((outcome.names[cell] for outcome in report.effects if cell in outcome.names), None)
    return own or describe(axes, named)


def _ranks(order: Sequence[str], verdicts: Verdicts) -> list[str | None]:
    """The places a cell may hold, such as "1" or "2-4": behind all that are certainly faster, and, where the comparison
    is inconclusive, before or behind the other. Cells that are equal share a place.

    A cell without a verdict has no rank. Cells with one launch have no verdict.
    """
    decided = {pair: c.verdict for pair, c in verdicts.items() if c.launches != 1}
    placed = [cell for cell in order if any((cell, other) in decided for other in order)]

    def rank(cell: str) -> str:
        found = [decided.get((cell, other), INCONCLUSIVE) for other in placed if other != cell]
        first = 1 + found.count(WORSE)
        last = first + found.count(INCONCLUSIVE)
        return str(first) if first == last else f"{first}-{last}"

    return [rank(cell) if cell in placed else None for cell in order]


def _notes(context: _Context, rows: Sequence[Row]) -> tuple[str, ...]:
    """Notes on the table, each once, with names if it does not apply to every row."""
    said: dict[str, list[str]] = {}
    for row in rows:
        health = (note for run in row.runs for note in context.health.get(run, ()))
        measured = (m.note for name in SHOWN if (m := row.measurements.get(name)) and m.note)
        for note in dict.fromkeys((*health, *measured)):
            said.setdefault(note, []).append(row.label)
    for note in list(said):
        # `A; B` repeats A if A is a separate note: keep only B.
        start = next((other for other in said if note.startswith(f"{other}; ")), None)
        if start is not None:
            labels = said.pop(note)
            said.setdefault(note.removeprefix(f"{start}; "), []).extend(labels)
            said[start] = [row.label for row in rows if row.label in {*said[start], *labels}]
    notes = [n if len(labels) == len(rows) else f"{', '.join(labels)}: {n}" for n, labels in said.items()]
    cells = {row.cell for row in rows}
    cited = (caveat for pair, caveats in context.caveats if pair <= cells for caveat in caveats)
    return tuple(dict.fromkeys((*notes, *(c for c in cited if not any(note.startswith(c) for note in notes)))))


def _trouble(run: RunFinding, certificate: Certificate | None) -> tuple[str, str] | None:
    reasons = "; ".join(certificate.reasons) if certificate else ""
    if run.is_failure or run.status in ("unsupported", "claimed"):
        return run.status, run.reason or reasons or "no reason was recorded"
    if run.is_reference or not run.is_certified:
        return None
    if certificate is None:
        return "not certified", run.reason or "the run carries no certificate of equal work"
    return None if certificate.valid else ("invalid", reasons or "the certificate has no check")


def _has_value(m: Measurement | None) -> bool:
    return m is not None and m.value is not None and math.isfinite(m.value)
