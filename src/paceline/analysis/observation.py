"""What the certificate looks at: a run read once, and the standard that all runs of one work are held against."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.window import global_loss, samples_by_step
from paceline.records import Evidence, RunRecord, Status, StepSample
from paceline.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Observed:
    """One run, or one variant of a reference, read once for all checks."""

    run: str
    record: RunRecord
    evidence: Mapping[int, Evidence]
    steps: Mapping[int, Sequence[StepSample]]
    losses: Mapping[int, float]
    digests: Mapping[int, int]

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    @property
    def switches(self) -> dict[str, str]:
        return {key: value for e in self.evidence.values() for key, value in e.switches.items()}


def observe(record: RunRecord, variant: int = 0) -> Observed:
    steps = samples_by_step(record, variant)
    return Observed(
        record.spec.run_id,
        record,
        {o.rank: o.evidence for o in sorted(record.outcomes, key=lambda o: o.rank) if o.evidence},
        steps,
        {step: global_loss(samples) for step, samples in steps.items()},
        {step: sum(s.data_digest for s in samples) % 2**64 for step, samples in steps.items()},
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
    numbers = sorted({s.variant for s in reference.steps} - {0})
    variants = tuple(observe(reference, number) for number in numbers)
    return Standard(observe(reference), variants, "", digests, tuple(switches))


def _why_unusable(reference: RunRecord | None) -> str:
    if reference is None:
        return "no reference run of this work was found"
    run = reference.spec.run_id
    if reference.status != Status.OK:
        return f"the reference {run} ended {reference.status}: {reference.error or 'no error was recorded'}"
    if reference.evidence is None or not any(s.variant == 0 for s in reference.steps):
        return f"the reference {run} left no evidence or no steps"
    return ""
