"""What the certificate looks at: a run read once, and the standard that all runs of one work are held against."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.findings import Check
from paceline.analysis.training.window import StepTable, global_loss, learned_tokens, step_table
from paceline.experiment.spec import RunSpec
from paceline.results.records import Evidence, RunRecord, Status
from paceline.results.step_columns import StepSeries


@dataclass(frozen=True, slots=True)
class Observed:
    """One run, or one variant of a reference, read once for all checks."""

    run: str
    record: RunRecord
    evidence: Mapping[int, Evidence]
    table: StepTable
    losses: Mapping[int, float]
    tokens: Mapping[int, int]
    digests: Mapping[int, int]

    @property
    def steps(self) -> Collection[int]:
        """The steps it recorded, in order."""
        return self.losses.keys()

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def by_step(self, field: str) -> dict[int, list[Any]]:
        """What every rank recorded, by step in order."""
        return dict(zip(self.table.steps, self.table.by_step(field), strict=True))

    @property
    def switches(self) -> dict[str, str]:
        return {key: value for e in self.evidence.values() for key, value in e.switches.items()}


def observe(record: RunRecord, variant: int = 0) -> Observed:
    table = step_table(record, variant)
    tokens = table.by_step("tokens")
    losses = map(global_loss, table.by_step("loss"), learned_tokens(table))
    digests = (sum(ranks) % 2**64 for ranks in table.by_step("data_digest"))
    return Observed(
        record.spec.run_id,
        record,
        {o.rank: o.evidence for o in sorted(record.outcomes, key=lambda o: o.rank) if o.evidence},
        table,
        dict(zip(table.steps, losses, strict=True)),
        dict(zip(table.steps, map(sum, tokens), strict=True)),
        dict(zip(table.steps, digests, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Standard:
    """What every run of one work is held against. reference is None where none is usable; missing then says why."""

    reference: Observed | None
    variants: tuple[Observed, ...]
    missing: str
    digests: Mapping[int, Counter[int]]
    switches: tuple[Mapping[str, str], ...]


def standard_of(reference: RunRecord | None, group: Iterable[Observed]) -> Standard:
    digests: defaultdict[int, Counter[int]] = defaultdict(Counter)
    switches = []
    for run in group:
        switches.append(run.switches)
        for step, digest in run.digests.items():
            digests[step][digest] += 1
    missing = _why_unusable(reference)
    if reference is None or missing:
        return Standard(None, (), missing, digests, tuple(switches))
    numbers = sorted(set(StepSeries.of(reference.steps).column("variant")) - {0})
    variants = tuple(observe(reference, number) for number in numbers)
    return Standard(observe(reference), variants, "", digests, tuple(switches))


def _why_unusable(reference: RunRecord | None) -> str:
    if reference is None:
        return "no reference run of this work was found"
    run = reference.spec.run_id
    if reference.status != Status.OK:
        return f"the reference {run} ended {reference.status}: {reference.error or 'no error was recorded'}"
    if reference.evidence is None or 0 not in StepSeries.of(reference.steps).column("variant"):
        return f"the reference {run} left no evidence or no steps"
    return ""


def checked(name: str, expected: str, problems: Sequence[str], observed: str) -> Check:
    """Passes when there are no problems; `observed` is the text of a pass, the first problems that of a failure."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return Check(name=name, ok=not problems, expected=expected, observed="; ".join(problems[:3]) + more or observed)


def silent_ranks(run: Observed) -> list[str]:
    return [f"rank {r} left no evidence" for r in range(run.spec.topology.world_size) if r not in run.evidence]
