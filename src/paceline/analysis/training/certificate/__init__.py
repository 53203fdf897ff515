"""Proof of equal work: each run is compared with the one-process reference and the other runs of the same work.

See docs/method.md. Every recorded step is compared: with the reference as far as it goes, then with the other cells of
the group. A check states what was expected, what was seen, and whether that was observed, counted or only declared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.grouping import grouped
from paceline.analysis.training.certificate.arithmetic import products, recomputation
from paceline.analysis.training.certificate.observed import (
    LOSS,
    NORM,
    Observed,
    ProofGroup,
    Standard,
    observe,
    proved_standard,
    standard_of,
)
from paceline.analysis.training.certificate.routing import computed_choices, router_decisions
from paceline.analysis.training.certificate.settings import (
    clipping,
    debug_switches,
    declared_dtypes,
    optimizer_class,
    parameter_groups,
    precision_switches,
)
from paceline.analysis.training.certificate.traffic import (
    declared_traffic,
    gradients_reduced,
    only_adapters,
    wire_dtype,
)
from paceline.analysis.training.certificate.trajectory import (
    compared_steps,
    finite_loss,
    first_loss,
    loss_curve,
    norms_agree,
    replicas_agree,
    trajectory,
)
from paceline.analysis.training.certificate.work import (
    completed_reference,
    data_digests,
    frozen_weights,
    initial_weights,
    label_tokens,
    micro_batches,
    moved,
    optimizer_steps,
    parameter_count,
    ranks_agree,
    tokens_per_step,
)
from paceline.analysis.training.equality import certify_scripts
from paceline.experiment.reduced import configuration
from paceline.results.records import RunRecord, Status


def certify(
    record: RunRecord,
    reference: RunRecord | None,
    peers: Sequence[RunRecord],
    more: Sequence[RunRecord] = (),
) -> Certificate:
    """Certificate of one run. peers: the other runs of the same work. more: further references of this work, and its
    proof group."""
    run = observe(record)
    if record.spec.script:
        return certify_scripts([run, *map(observe, peers)])[run.run]
    known = [*filter(None, [reference]), *more]
    own = [each for each in known if each.spec.reduction == record.spec.reduction]
    proofs = _proof_groups([each for each in known if each.spec.reduction != record.spec.reduction])
    group = [run, *(observe(p) for p in peers if p.evidence)]
    return _judge(run, _with_proof(standard_of(own, group), proofs.get(record.spec.work, ())))


def certify_all(records: Sequence[RunRecord]) -> dict[str, Certificate]:
    """Certificates by run id of all runs with evidence, each judged within its work; each work is read once.

    A work without a usable reference is judged by its proof group, if it has one."""
    in_proofs = [record for record in records if record.spec.reduction]
    found = _certify_works(in_proofs, {})
    return found | _certify_works([r for r in records if not r.spec.reduction], _proof_groups(in_proofs, found))


def _certify_works(records: Sequence[RunRecord], proofs: Mapping[str, Sequence[ProofGroup]]) -> dict[str, Certificate]:
    references: defaultdict[str, list[RunRecord]] = defaultdict(list)
    groups: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.is_reference:
            references[record.spec.work].append(record)
        judged = record.status in (Status.OK, Status.INVALID) and record.spec.is_certified
        if judged and (record.status == Status.OK or record.evidence):
            groups[record.spec.work].append(record)
    found: dict[str, Certificate] = {}
    for work, members in groups.items():
        runs = [observe(record) for record in members]
        if members[0].spec.script:
            found |= certify_scripts(runs)
            continue
        standard = _with_proof(standard_of(references[work], runs), proofs.get(work, ()))
        found |= {run.run: _judge(run, standard) for run in runs}
    return found


def _proof_groups(
    records: Sequence[RunRecord], certificates: Mapping[str, Certificate] | None = None
) -> dict[str, list[ProofGroup]]:
    """The proof groups with a usable reference, by the work that they prove. certificates: of their runs, if they are
    known already."""
    found: defaultdict[str, list[ProofGroup]] = defaultdict(list)
    known = _certify_works(records, {}) if certificates is None else certificates
    for members in grouped(records, lambda record: record.spec.work).values():
        standard = standard_of([record for record in members if record.is_reference], ())
        reduction = members[0].spec.reduction
        if standard.reference is not None and reduction is not None:
            certified = ((r.spec, known.get(r.spec.run_id)) for r in members)
            runs = {configuration(spec): own for spec, own in certified if own is not None}
            found[reduction.work].append(ProofGroup(reduction, standard.reference, standard.variants, runs))
    return dict(found)


def _with_proof(standard: Standard, proofs: Sequence[ProofGroup]) -> Standard:
    """With the largest of these proof groups, if there is no usable reference of the whole."""
    if standard.reference is not None or not proofs:
        return standard
    return proved_standard(standard, max(proofs, key=lambda group: group.reduction.size))


def _judge(run: Observed, standard: Standard) -> Certificate:
    checks = [
        # Not `replace`, which takes longer than some of the checks.
        Check(
            name=check.name,
            ok=check.ok,
            expected=check.expected,
            observed=check.observed,
            basis=basis,
            excess=check.excess,
        )
        for decide, basis in (APPROXIMATE_CHECKS if run.spec.approximation else CHECKS)
        if (check := decide(run, standard)) is not None
    ]
    level = standard.proof.reduction.level if standard.proof else None
    return Certificate(
        run=run.run,
        cell=run.spec.cell,
        work=run.spec.work,
        reference=standard.plain.run if standard.plain else None,
        checks=tuple(checks),
        steps=len(run.steps),
        compared_steps=compared_steps(run, standard),
        loss=loss_curve(run, standard),
        level=level,
        grade=level,
        proves_only=run.spec.proves_only,
    )


OBSERVED, COUNTED, DECLARED = "observed", "counted", "declared"
_TRAJECTORIES = (trajectory(LOSS), trajectory(NORM))
CHECKS: tuple[tuple[Callable[[Observed, Standard], Check | None], str], ...] = (
    (completed_reference, OBSERVED),
    (initial_weights, OBSERVED),
    (frozen_weights, OBSERVED),
    (parameter_count, COUNTED),
    (data_digests, OBSERVED),
    (tokens_per_step, COUNTED),
    (label_tokens, COUNTED),
    (optimizer_steps, COUNTED),
    (micro_batches, COUNTED),
    (declared_dtypes, DECLARED),
    (products, COUNTED),
    (recomputation, COUNTED),
    (wire_dtype, COUNTED),
    (gradients_reduced, COUNTED),
    (only_adapters, COUNTED),
    (router_decisions, OBSERVED),
    (computed_choices, COUNTED),
    (moved, OBSERVED),
    (ranks_agree, OBSERVED),
    (optimizer_class, DECLARED),
    (parameter_groups, OBSERVED),
    (clipping, OBSERVED),
    (precision_switches, OBSERVED),
    (finite_loss, OBSERVED),
    *((check, OBSERVED) for check in _TRAJECTORIES),
    (norms_agree, OBSERVED),
    (replicas_agree, OBSERVED),
    (debug_switches, OBSERVED),
)
# Of a strategy that declares other arithmetic. Start, data, tokens, updates, products and optimizer are still proved,
# and that all ranks have the same weights; such runs are compared by what was reduced and where that led.
_BY_ARITHMETIC = (wire_dtype, gradients_reduced, only_adapters, *_TRAJECTORIES)
APPROXIMATE_CHECKS = (
    *((check, basis) for check, basis in CHECKS if check not in _BY_ARITHMETIC),
    (first_loss, OBSERVED),
    (declared_traffic, COUNTED),
)
