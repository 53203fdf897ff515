"""Equal work, proved: what a run did, held against the one-process reference and the other runs of the same work.

method.md, section 1. A check says what was expected and what was seen in words a reader can act on.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.training import finetuned
from paceline.analysis.training.observed import Observed, Standard, checked, observe, silent_ranks, standard_of
from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.models.adapters import DTYPE_BYTES
from paceline.results.records import RunRecord, Status

FP32_TOLERANCE = 1e-4
# Another run of the same arithmetic is one more draw beside the three re-seeded references: it goes beyond their
# farthest now and then, beyond twice that hardly ever.
SPREAD_FACTOR = 2.0
# A spread of three can be small by luck, above all at the first steps, hence floors: half of bf16's rounding error
# (2**-9) for the loss, in which rounding averages out over tokens; five times that error for the norm, in which it
# does not.
LOSS_FLOOR = 1e-3
NORM_FLOOR = 1e-2
# Loss and norm scalars are reduced in fp32 whatever the gradients; only traffic above this share of them is judged.
GRADIENT_SHARE = 0.01


def certify(record: RunRecord, reference: RunRecord | None, peers: Sequence[RunRecord]) -> Certificate:
    """Judges one run; peers are the other runs of the same work."""
    run = observe(record)
    return _judge(run, standard_of(reference, [run, *(observe(p) for p in peers if p.evidence)]))


def certify_all(records: Sequence[RunRecord]) -> dict[str, Certificate]:
    """Certificates by run id of all runs that left evidence, each judged within its work; a work is read once."""
    references: dict[str, RunRecord] = {}
    for record in records:
        if record.is_reference and (record.spec.work not in references or record.status == Status.OK):
            references[record.spec.work] = record
    groups: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        judged = record.status in (Status.OK, Status.INVALID) and record.spec.is_certified
        if judged and (record.status == Status.OK or record.evidence):
            groups[record.spec.work].append(record)
    found: dict[str, Certificate] = {}
    for work, members in groups.items():
        runs = [observe(record) for record in members]
        standard = standard_of(references.get(work), runs)
        found |= {run.run: _judge(run, standard) for run in runs}
    return found


def _judge(run: Observed, standard: Standard) -> Certificate:
    checks = [check(run, standard) for check in CHECKS]
    return Certificate(
        run=run.run,
        cell=run.spec.cell,
        work=run.spec.work,
        reference=standard.reference.run if standard.reference else None,
        checks=tuple(check for check in checks if check is not None),
    )


# --- the same start, data and amount of work ---


def _reference(run: Observed, standard: Standard) -> Check:
    problems = [standard.missing] if standard.missing else []
    seen = f"{standard.reference.run}, {len(standard.reference.steps)} steps" if standard.reference else ""
    return checked("reference", "a completed one-process reference of the same work", problems, seen)


def _initial_weights(run: Observed, standard: Standard) -> Check:
    expected = standard.reference.evidence[0] if standard.reference else run.evidence.get(0)
    if expected is None:
        return checked("initial weights", "a hash of the weights on every rank", silent_ranks(run), "")
    problems = silent_ranks(run)
    for rank, seen in run.evidence.items():
        if seen.init_digest != expected.init_digest:
            differing = [k for k, v in seen.init_digests.items() if expected.init_digests.get(k, v) != v]
            where = f" (first differing: {differing[0]})" if differing else ""
            problems.append(f"{seen.init_digest} on rank {rank}{where}")
    return checked(
        "initial weights", f"hash {expected.init_digest} on every rank", problems, f"equal on {len(run.evidence)} ranks"
    )


def _parameters(run: Observed, standard: Standard) -> Check:
    """(7) of method.md section 6: what was counted in the process equals what the configuration implies."""
    wanted: dict[str, int] = {}
    with contextlib.suppress(RequestError):
        wanted["the configuration"] = finetuned.trained_count(run)
    if standard.reference:
        wanted["the reference"] = standard.reference.evidence[0].parameters
    seen = {e.parameters for e in run.evidence.values()}
    problems = [f"{n:,}" for n in sorted(seen) if any(n != w for w in wanted.values())]
    expected = ", ".join(f"{count:,} by {source}" for source, count in wanted.items()) or "one count on all ranks"
    if not seen or (not problems and len(seen) > 1):
        problems = [" and ".join(f"{n:,}" for n in sorted(seen)) or "no count"]
    return checked("parameters", expected, problems, ", ".join(f"{n:,}" for n in sorted(seen)))


def _data(run: Observed, standard: Standard) -> Check:
    """The reference decides as far as it goes, the majority of the group after that."""
    known = standard.reference.digests if standard.reference else {}
    common = [step for step in run.digests if step in known]
    other = [step for step in common if run.digests[step] != known[step]]
    later = [step for step in run.digests if step not in known and not _agreed(run, standard, step)]
    problems = [f"other token ids than the reference at {_steps(other)}"] if other else []
    problems += [f"other token ids than the group at {_steps(later)}"] if later else []
    if not common and standard.reference:
        problems.append("no step in common with the reference")
    expected = "the token ids of the reference, then of the group, at every step"
    rest = len(run.digests) - len(common)
    return checked("data", expected, problems, f"equal to the reference at {len(common)} steps, to the group at {rest}")


def _agreed(run: Observed, standard: Standard, step: int) -> bool:
    votes = standard.digests[step]
    own = votes[run.digests[step]]
    return all(count < own for digest, count in votes.items() if digest != run.digests[step])


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:3]))
    return f"step {shown}" if len(steps) == 1 else f"{len(steps)} steps ({shown}{', ...' if len(steps) > 3 else ''})"


def _tokens(run: Observed, standard: Standard) -> Check:
    """The whole global batch, or what the reference counted where its data holds padding."""
    whole = run.spec.tokens_per_step
    known = standard.reference.tokens if standard.reference else {}
    padded = any(tokens < whole for tokens in known.values())
    seen = run.tokens
    problems = [
        f"{tokens:,} at step {step}"
        for step, tokens in seen.items()
        if (tokens > whole or known.get(step, tokens) != tokens if padded else tokens != whole)
    ]
    problems = problems if seen else ["no step was recorded"]
    expected = f"the reference's non-pad tokens, at most {whole:,}" if padded else f"{whole:,}"
    return checked("tokens per optimizer step", expected, problems, f"as expected at all {len(seen)} steps")


def _optimizer_steps(run: Observed, standard: Standard) -> Check:
    """Every rank records every step, and every step updates the weights once.

    In fp16 a step whose gradients overflow is skipped by design: accepted where the reference skipped it too.
    """
    wanted = run.spec.steps
    per_rank = Counter(run.table.values("rank"))
    ranks = range(run.spec.topology.world_size)
    problems = [f"{per_rank[r]} steps on rank {r}" for r in ranks if per_rank[r] != wanted]
    fp16 = run.spec.training.precision.compute == "fp16"
    wrong: defaultdict[int, list[int]] = defaultdict(list)
    skipped = standard.reference.by_step("updates") if fp16 and standard.reference else {}
    if set(run.table.values("updates")) != {1}:
        for step, seen in run.by_step("updates").items():
            for updates in {*seen} - {1, *skipped.get(step, ())}:
                wrong[updates].append(step)
    problems += [f"{updates} updates at {_steps(steps)}" for updates, steps in sorted(wrong.items())]
    return checked("optimizer steps", f"{wanted} steps of 1 update each", problems, f"{wanted} steps of 1 update each")


def _micro_batches(run: Observed, standard: Standard) -> Check:
    wanted = run.spec.training.accumulation
    seen = Counter(run.table.values("micro_batches"))
    problems = [f"{count} on {times} of {seen.total()} rank-steps" for count, times in seen.items() if count != wanted]
    problems = problems if seen else ["no step was recorded"]
    return checked("micro batches per step", f"{wanted} on every rank", problems, f"{wanted} on every rank")


# --- the same arithmetic ---


def expected_dtypes(spec: RunSpec) -> dict[str, str]:
    """Weights are used in the compute dtype and kept, like Adam's moments, in fp32; gradients follow `reduce`.

    Fine-tuning says in what frozen weights and moments are held; see `adapted.expected_dtypes`.
    """
    precision = spec.training.precision
    wanted = {
        "compute": precision.compute,
        "gradient": precision.reduce,
        "gradient_reduction": precision.reduce,
        "optimizer_state": "fp32",
        "master_weights": "fp32",
    }
    return wanted if spec.tuning is None else finetuned.expected_dtypes(wanted, spec.tuning, precision.compute)


def _dtypes(run: Observed, standard: Standard) -> Check:
    agreed = dict(standard.reference.evidence[0].dtypes) if standard.reference else {}
    wanted = {**agreed, **expected_dtypes(run.spec)}
    problems = silent_ranks(run)
    for key, dtype in wanted.items():
        seen = sorted({e.dtypes.get(key, "not observed") for e in run.evidence.values()} - {dtype})
        problems += [f"{key} {other}" for other in seen]
    return checked("dtypes", _words(wanted), problems, "as expected on every rank")


def _wire_dtype(run: Observed, standard: Standard) -> Check:
    """The declared reduction dtype is a claim; this is what the collectives carried."""
    wanted, world_size = run.spec.training.precision.reduce, run.spec.topology.world_size
    if world_size == 1:
        return checked("reduction dtype on the wire", "nothing: one process reduces with nobody", [], "one process")
    gradient_bytes = max((e.parameters for e in run.evidence.values()), default=0) * DTYPE_BYTES[wanted]
    payload: Counter[tuple[int, int, str]] = Counter()
    for w in run.record.wire:
        if w.operation in finetuned.REDUCTIONS:
            payload[w.rank, w.step, w.dtype] += w.payload_bytes
    seen = {dtype for (_, _, dtype), size in payload.items() if size > GRADIENT_SHARE * gradient_bytes}
    problems = [f"gradients crossed in {dtype}" for dtype in sorted(seen - {wanted})]
    problems = problems if seen else ["no reduction of gradients was counted"]
    return checked("reduction dtype on the wire", wanted, problems, wanted)


def _optimizer(run: Observed, standard: Standard) -> Check | None:
    if standard.reference is None:
        return None
    wanted = dict(standard.reference.evidence[0].optimizer)
    problems = silent_ranks(run)
    for rank, evidence in run.evidence.items():
        differing = [k for k in {**wanted, **evidence.optimizer} if evidence.optimizer.get(k) != wanted.get(k)]
        problems += [f"{k} {evidence.optimizer.get(k)!r} on rank {rank}" for k in differing]
    return checked("optimizer", _words(wanted), problems, "equal to the reference's")


def _words(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())


# --- the same trajectory ---


def _finite(run: Observed, standard: Standard) -> Check:
    sound = all(map(math.isfinite, run.table.values("loss")))
    by_step = {} if sound else run.by_step("loss")
    bad = [step for step, losses in by_step.items() if not all(map(math.isfinite, losses))]
    problems = [f"a loss that is no number at {_steps(bad)}"] if bad else []
    problems = problems if run.steps else ["no step was recorded"]
    return checked("finite loss", "a finite loss on every rank at every step", problems, f"{len(run.steps)} steps")


def _loss(run: Observed, step: int) -> list[float | None]:
    return [run.losses[step]]


def _norms(run: Observed, step: int) -> list[float | None]:
    return run.table.at(step, "grad_norm")


Values = Callable[[Observed, int], list[float | None]]


def _deviations(run: Observed, reference: Observed, values: Values) -> dict[int, float]:
    """|x - reference| / |reference| by step common to both, the worst rank's; infinite where a value is missing.

    A step the fp16 reference skipped for overflow has no norm to compare with.
    """
    found = {}
    skips = reference.spec.training.precision.compute == "fp16"
    for step in (s for s in reference.steps if s in run.steps):
        base = values(reference, step)[0]
        if base is None or not math.isfinite(base):
            if not skips:
                found[step] = math.inf
            continue
        errors = [math.inf if x is None else abs(x - base) / max(abs(base), 1e-30) for x in values(run, step)]
        found[step] = max((math.inf if math.isnan(e) else e for e in errors), default=math.inf)
    return found


def _limits(standard: Standard, reference: Observed, values: Values, floor: float) -> tuple[Mapping[int, float], str]:
    """The deviation that rounding alone explains at each step of the reference, and where that comes from.

    In 16 bit it grows with the spread of the re-seeded references as that grows: a step is never excused by how far
    they have drifted apart later.
    """
    compute = reference.spec.training.precision.compute
    if compute == "fp32":
        return dict.fromkeys(reference.steps, FP32_TOLERANCE), "fixed for fp32"
    spread: defaultdict[int, float] = defaultdict(float)
    for variant in standard.variants:
        for step, deviation in _deviations(variant, reference, values).items():
            spread[step] = max(spread[step], deviation)
    so_far, limits = 0.0, {}
    for step in reference.steps:
        so_far = max(so_far, spread[step] if math.isfinite(spread[step]) else 0.0)
        limits[step] = max(floor, SPREAD_FACTOR * so_far)
    origin = f"{SPREAD_FACTOR:g} x the spread so far of {len(standard.variants)} re-seeded references in {compute}"
    return limits, f"{origin}, {so_far:.2g} at the last step; at least {floor:g}"


def _trajectory(name: str, values: Values, floor: float) -> Callable[[Observed, Standard], Check | None]:
    def check(run: Observed, standard: Standard) -> Check | None:
        if standard.reference is None:
            return None
        limits, origin = _limits(standard, standard.reference, values, floor)
        deviations = _deviations(run, standard.reference, values)
        if not deviations:
            return checked(name, f"the reference's ({origin})", ["no step in common with the reference"], "")
        # The step that comes nearest to its limit, or goes farthest beyond it.
        step = max(deviations, key=lambda s: deviations[s] / limits[s])
        worst, limit = deviations[step], limits[step]
        expected = f"within {limit:.2g} of the reference at step {step}, relative ({origin})"
        seen = f"{worst:.2g} at step {step}, the nearest to its limit of {len(deviations)} steps compared"
        seen = seen if math.isfinite(worst) else f"no number at step {step}"
        return checked(name, expected, [] if worst <= limit else [seen], seen)

    return check


def _switches(run: Observed, standard: Standard) -> Check:
    own, others = run.switches, sum(s != run.switches for s in standard.switches)
    expected = "none, or the same in every run of the group"
    if own and others:
        problems = [f"{_words(own)}, not so in {others} of {len(standard.switches)} runs"]
        return checked("debug switches", expected, problems, "")
    return checked("debug switches", expected, [], f"{_words(own)}, in every run" if own else "none")


CHECKS: tuple[Callable[[Observed, Standard], Check | None], ...] = (
    _reference,
    _initial_weights,
    finetuned.frozen_weights,
    _parameters,
    _data,
    _tokens,
    finetuned.label_tokens,
    _optimizer_steps,
    _micro_batches,
    _dtypes,
    _wire_dtype,
    finetuned.only_adapters,
    finetuned.moved,
    _optimizer,
    _finite,
    _trajectory("loss trajectory", _loss, LOSS_FLOOR),
    _trajectory("gradient norm", _norms, NORM_FLOOR),
    _switches,
)
