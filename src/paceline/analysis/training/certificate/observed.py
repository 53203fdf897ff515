"""What the checks look at: one run read once, and the standard that all runs of one work are compared with."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.statistics.intervals import Array
from paceline.analysis.training.window import StepTable, step_table
from paceline.experiment.layout import Layout, layout_of
from paceline.experiment.proof import Reduction
from paceline.experiment.reduced import configuration, reduced
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic
from paceline.models.adapters import trained_parameters
from paceline.results.records import Evidence, RunRecord, Status
from paceline.results.samples import StepSeries

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Observed:
    """One run, or one variant of a reference, read once for all checks. Equal to itself only."""

    run: str
    record: RunRecord
    evidence: Mapping[int, Evidence]
    table: StepTable
    losses: Mapping[int, float]
    tokens: Mapping[int, int]
    digests: Mapping[int, int]
    variant: int = 0

    @property
    def steps(self) -> Set[int]:
        """The recorded steps, in order."""
        return self.losses.keys()

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def by_step(self, field: str) -> dict[int, list[Any]]:
        """Values of every rank, by step in order."""
        return dict(zip(self.table.steps, self.table.by_step(field), strict=True))

    @cached_property
    def norms(self) -> Array:
        """The gradient norm of every rank at every step, as lanes of the table; NaN if it is missing."""
        return self.table.numbers("grad_norm")

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.spec)

    @cached_property
    def switches(self) -> dict[str, str]:
        return {key: value for e in self.evidence.values() for key, value in e.switches.items()}


# What is compared at each step; the norm on every rank.
LOSS, NORM = "loss trajectory", "gradient norm"


def compared_values(run: Observed, name: str) -> Array:
    """The values of a quantity as lanes: one loss for each step, or the norm of each rank."""
    return run.table.losses[None] if name == LOSS else run.norms


def first_values(run: Observed, name: str) -> list[float]:
    """One value of a quantity for each step: the loss, or the norm of the first rank."""
    values = compared_values(run, name)
    return values[0].tolist() if len(values) else []


def observe(record: RunRecord, variant: int = 0) -> Observed:
    table = step_table(record, variant)
    column = table.series.column("data_digest")
    # NumPy adds these modulo 2**64, as digests are.
    own = table.lanes(np.asarray(column, dtype=np.uint64 if isinstance(column, array) else object))
    follows = ~np.isnan(table.numbers("leader"))
    if follows.any():
        # Of ranks that work on the same samples, one counts.
        own = np.where(follows, 0, own)
    digests = [digest % 2**64 for digest in table.totals(own).tolist()]
    return Observed(
        record.spec.run_id,
        record,
        {o.rank: o.evidence for o in sorted(record.outcomes, key=lambda o: o.rank) if o.evidence},
        table,
        dict(zip(table.steps, table.losses.tolist(), strict=True)),
        dict(zip(table.steps, table.totals(table.whole_numbers("tokens")).tolist(), strict=True)),
        dict(zip(table.steps, digests, strict=True)),
        variant,
    )


@dataclass(frozen=True, slots=True)
class ProofGroup:
    """The reference of a reduced form of the model with its re-seeded copies, and the certificates of the runs that
    were compared with it, by their configuration."""

    reduction: Reduction
    reference: Observed
    variants: tuple[Observed, ...]
    runs: Mapping[str, Certificate]

    def certificate_of(self, spec: RunSpec) -> Certificate | None:
        """The certificate of the run of this group that has the configuration of a spec."""
        return self.runs.get(configuration(reduced(spec, self.reduction)))


@dataclass(frozen=True, slots=True)
class Standard:
    """What every run of one work is compared with. reference is None if none is usable; missing then says why.

    variants: re-seeded copies of the reference. group: all runs of the work. cells: by quantity and cell, the value at
    each step after the reference, the median of the cell's launches. proof: replaces a missing reference. kept:
    what the checks of several runs, or several checks of one, have in common, filled as it is computed.
    """

    reference: Observed | None
    variants: tuple[Observed, ...]
    missing: str
    group: tuple[Observed, ...]
    cells: Mapping[str, Mapping[str, Mapping[int, float]]]
    proof: ProofGroup | None = None
    kept: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @property
    def plain(self) -> Observed | None:
        """The plain training loop on one process, of the same work or of its reduced form: for what does not depend on
        sizes, such as settings and kinds of operators."""
        return self.reference or (self.proof.reference if self.proof else None)

    @property
    def last_step(self) -> int:
        """The last step of the reference; -1 without one."""
        return max(self.reference.steps) if self.reference else -1

    def once(self, key: tuple[object, ...], compute: Callable[[], T]) -> T:
        """What compute returned when it was first called with this key."""
        if key not in self.kept:
            self.kept[key] = compute()
        found: T = self.kept[key]
        return found


def standard_of(references: Sequence[RunRecord], group: Sequence[Observed]) -> Standard:
    """references: of this work. The last one that ended ok counts; those with more copies of it only add these."""
    whole = [record for record in references if not record.is_supplement]
    usable = [record for record in whole if record.status == Status.OK] or whole[:1]
    reference = usable[-1] if usable else None
    missing = ""
    if reference is None:
        missing = "no reference run of this work was found"
    elif reference.status != Status.OK:
        error = reference.error or "no error was recorded"
        missing = f"the reference {reference.spec.run_id} ended {reference.status}: {error}"
    elif reference.evidence is None or 0 not in StepSeries.of(reference.steps).column("variant"):
        missing = f"the reference {reference.spec.run_id} left no evidence or no steps"
    if reference is None or missing:
        return Standard(None, (), missing, tuple(group), {})
    own = dict.fromkeys(StepSeries.of(reference.steps).column("variant"), reference)
    # A reference without copies has a fixed limit.
    more = [r for r in references if r.is_supplement and r.status == Status.OK and len(own) > 1]
    # The same number is the same trajectory, wherever it was computed again.
    holders: dict[Any, RunRecord] = {
        number: r for r in more for number in StepSeries.of(r.steps).column("variant")
    } | own
    variants = tuple(observe(holders[number], number) for number in sorted(holders) if number)
    base = observe(reference)
    return Standard(base, variants, "", tuple(group), _cells_after(max(base.steps), group))


def proved_standard(standard: Standard, proof: ProofGroup) -> Standard:
    """A standard without reference, with a proof group in its place: every step is compared with other cells."""
    return replace(standard, proof=proof, cells=_cells_after(-1, standard.group), kept={})


def _cells_after(last: int, group: Sequence[Observed]) -> dict[str, dict[str, dict[int, float]]]:
    exact = [run for run in group if run.spec.approximation is None]
    return {name: _values_after(last, exact, name) for name in (LOSS, NORM)}


def _values_after(last: int, group: Sequence[Observed], name: str) -> dict[str, dict[int, float]]:
    """By cell and step after the last one of the reference, the median of the cell's launches, each by its first
    rank."""
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in group:
        for step, first in zip(run.steps, first_values(run, name), strict=True):
            if step > last and math.isfinite(first):
                found[run.spec.cell][step].append(first)
    return {cell: {s: statistics.median(v) for s, v in steps.items()} for cell, steps in found.items()}


def checked(name: str, expected: str, problems: Sequence[str], observed: str, excess: float | None = None) -> Check:
    """Passes without problems. `observed` is the text of a pass, the first problems that of a failure."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    text = "; ".join(problems[:3]) + more or observed
    return Check(name=name, ok=not problems, expected=expected, observed=text, excess=excess)


def on_ranks(ranks: Sized) -> str:
    """What a check observed that found these ranks equal."""
    return f"equal on {len(ranks)} rank{'' if len(ranks) == 1 else 's'}"


def silent_ranks(run: Observed) -> list[str]:
    return [f"rank {r} left no evidence" for r in range(run.spec.topology.world_size) if r not in run.evidence]


def averages_every(run: Observed) -> int:
    """The number of steps after which all ranks have the same weights."""
    return int(run.spec.says("averages_every") or 1)


def trained_count(run: Observed) -> int:
    """Number of trained weights, by arithmetic on the shape."""
    tuning, shape = run.spec.tuning, run.record.shape
    return arithmetic.parameters(shape) if tuning is None else trained_parameters(shape, tuning)


def steps_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:3]))
    return f"step {shown}" if len(steps) == 1 else f"{len(steps)} steps ({shown}{', ...' if len(steps) > 3 else ''})"


def in_words(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())
