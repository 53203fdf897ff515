"""More re-seeded copies of a reference, computed only where a run was refused narrowly.

The tolerance of a certificate is a multiple of the largest deviation of the copies. More copies can only raise it, so a
run that passes with few of them would pass with all. Computing the rest only after a narrow refusal therefore gives the
verdicts of always having them all, except for runs that are further off, and costs nothing where nobody is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.analysis.findings import Certificate
from paceline.analysis.training.certificate import certify
from paceline.errors import StoreError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord, Status
from paceline.results.samples import StepSeries

# Of honest simulated runs, 15 % are refused with three copies and 2 % so (`benchmarks/error_rates.py`).
MORE = 5


def read(spec: RunSpec, out: Path) -> RunRecord | None:
    """The record of a run; None if it is not finished, or was damaged since."""
    try:
        return store.read_run(out / spec.experiment / spec.run_id)
    except StoreError:
        return None


def supplement_of(reference: RunSpec, known: Sequence[RunRecord]) -> RunSpec | None:
    """The run that computes more copies, over as many steps as the reference has; None if that did not end ok. known:
    the finished references of this work."""
    whole = next((record for record in known if not record.is_supplement), None)
    if whole is None or whole.status is not Status.OK or not whole.steps:
        return None
    options, covered = reference.workload.options, max(StepSeries.of(whole.steps).column("step")) + 1
    first = int(str(options["variants"]))
    workload = Choice("reference", {**options, "first": first, "variants": first + MORE, "least": covered})
    return replace(reference, workload=workload, timeout_s=reference.timeout_s * MORE / first)


def references(reference: RunSpec | None, out: Path) -> list[RunRecord]:
    """The finished runs that judge others: the reference and, if it was computed, its supplement."""
    if reference is None or (whole := read(reference, out)) is None:
        return []
    supplement = supplement_of(reference, [whole])
    more = None if supplement is None else read(supplement, out)
    return [whole] if more is None else [whole, more]


def count(known: Sequence[RunRecord]) -> int:
    """How many copies these references have together."""
    return len({number for one in known for number in StepSeries.of(one.steps).column("variant")} - {0})


def narrow_refusal(record: RunRecord | None, known: Sequence[RunRecord]) -> Certificate | None:
    """The certificate of an invalid run, with the first reference, if more copies could make it valid; None if not.

    Only the certificate may have refused the run, and none of its ranks.
    """
    if record is None or not known or any(one.status is not Status.OK for one in record.outcomes):
        return None
    certificate = certify(record, known[0], peers=())
    return certificate if certificate.is_narrow else None


def refusal_text(refused: Certificate, reference: RunSpec) -> str:
    """`gradient norm 1.1 times the limit that 3 re-seeded references give`."""
    beyond = " and ".join(f"{check.name} {check.excess:.3g} times" for check in refused.failed)
    copies = int(str(reference.workload.options["variants"])) - 1
    return f"{beyond} the limit that {copies} re-seeded reference{' gives' if copies == 1 else 's give'}"
