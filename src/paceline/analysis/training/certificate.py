"""Proof of equal work: each run is compared with the one-process reference and the other runs of the same work.

See method.md, section 1. A check states what was expected and what was observed.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.training.window import StepTable, global_loss, learned_tokens, step_table
from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models import arithmetic
from paceline.models.adapters import DTYPE_BYTES, sharded_adapter_parameters, trained_parameters
from paceline.results.records import Evidence, RunRecord, Status
from paceline.results.samples import StepSeries


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
        """The recorded steps, in order."""
        return self.losses.keys()

    @property
    def spec(self) -> RunSpec:
        return self.record.spec

    def by_step(self, field: str) -> dict[int, list[Any]]:
        """Values of every rank, by step in order."""
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
    """What every run of one work is compared with. reference is None if none is usable; missing then says why."""

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
    missing = ""
    if reference is None:
        missing = "no reference run of this work was found"
    elif reference.status != Status.OK:
        error = reference.error or "no error was recorded"
        missing = f"the reference {reference.spec.run_id} ended {reference.status}: {error}"
    elif reference.evidence is None or 0 not in StepSeries.of(reference.steps).column("variant"):
        missing = f"the reference {reference.spec.run_id} left no evidence or no steps"
    if reference is None or missing:
        return Standard(None, (), missing, digests, tuple(switches))
    numbers = sorted(set(StepSeries.of(reference.steps).column("variant")) - {0})
    variants = tuple(observe(reference, number) for number in numbers)
    return Standard(observe(reference), variants, "", digests, tuple(switches))


def checked(name: str, expected: str, problems: Sequence[str], observed: str) -> Check:
    """Passes without problems. `observed` is the text of a pass, the first problems that of a failure."""
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return Check(name=name, ok=not problems, expected=expected, observed="; ".join(problems[:3]) + more or observed)


def silent_ranks(run: Observed) -> list[str]:
    return [f"rank {r} left no evidence" for r in range(run.spec.topology.world_size) if r not in run.evidence]


REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "broadcast")
# Padding of buckets, and scalars such as the gradient norm; a frozen weight would be many times larger.
BYTES_TOLERANCE = 0.01
SCALAR_BYTES = 1024


def trained_count(run: Observed) -> int:
    """Number of trained weights, by arithmetic on the shape."""
    tuning, shape = run.spec.tuning, run.record.shape
    return arithmetic.parameters(shape) if tuning is None else trained_parameters(shape, tuning)


def _tuned_dtypes(wanted: Mapping[str, str], tuning: Tuning, compute: str) -> dict[str, str]:
    """Dtypes for fine-tuning. Frozen weights are NF4 or of the compute dtype. Moments of an 8-bit optimizer are 8 bit
    except for small tensors, so the reference decides. Adapters are fp32 and their own master weights.
    """
    expected = dict(wanted)
    if tuning.has_adapters:
        expected |= {"parameters": "fp32", "frozen_weights": "nf4" if tuning.method == "qlora" else compute}
    if tuning.optimizer != "adamw":
        del expected["optimizer_state"]
    return expected


def frozen_weights(run: Observed, standard: Standard) -> Check | None:
    """The hash covers 4-bit codes and their scales as every rank stores them."""
    if run.spec.tuning is None or not run.spec.tuning.has_adapters:
        return None
    source = standard.reference or run
    wanted = source.evidence[0].frozen_digest if 0 in source.evidence else None
    problems = silent_ranks(run)
    problems += [f"{e.frozen_digest} on rank {r}" for r, e in run.evidence.items() if e.frozen_digest != wanted]
    problems = problems if wanted else ["no hash of the frozen weights"]
    seen = f"equal on {len(run.evidence)} ranks"
    return checked("frozen weights", f"hash {wanted} on every rank", problems, seen)


def label_tokens(run: Observed, standard: Standard) -> Check | None:
    """Trained tokens of the global batch: the loss is their mean, so another count is another loss."""
    if run.spec.tuning is None or standard.reference is None:
        return None
    seen, known = _sums(run), _sums(standard.reference)
    problems = [f"{n} at step {step}" for step, n in seen.items() if step in known and n != known[step]]
    problems = problems if seen else ["no step was recorded"]
    common = sum(step in known for step in seen)
    return checked("learned tokens per step", "the reference's", problems, f"equal at {common} steps")


def _sums(run: Observed) -> dict[int, int | None]:
    ranks = run.by_step("label_tokens")
    return {step: None if None in counts else sum(counts) for step, counts in ranks.items()}


def only_adapters(run: Observed, standard: Standard) -> Check | None:
    """Counted bytes of one step: reductions carry the gradients of the adapters once, or once per micro batch if the
    strategy reduces each. Gathered bytes are reported too: strategies that shard frozen weights must fetch them.
    """
    tuning, spec = run.spec.tuning, run.spec
    if tuning is None or not tuning.has_adapters or spec.topology.world_size == 1:
        return None
    count = trained_count(run)
    declared = plugins.declared("strategies", spec.strategy.name) if spec.strategy else None
    if declared and declared["PADS_SHARDS"]:  # it also reduces the padding of its shards
        count = sharded_adapter_parameters(run.record.shape, tuning, spec.topology.world_size)
    once = count * DTYPE_BYTES[spec.training.precision.reduce]
    times = reductions_per_step(run)
    reduced, gathered = _payload(run, REDUCTIONS), _payload(run, GATHERS)
    slack = BYTES_TOLERANCE * times * once + SCALAR_BYTES
    problems = [f"{n:,} bytes on rank {rank}" for rank, n in sorted(reduced.items()) if abs(n - times * once) > slack]
    problems = problems if reduced else ["no reduction was counted"]
    expected = f"{times * once:,} bytes of adapter gradients reduced per step, within 1 %"
    seen = f"{max(reduced.values(), default=0):,} bytes reduced, {max(gathered.values(), default=0):,} gathered"
    return checked("only adapters reduced", expected, problems, seen)


def reductions_per_step(run: Observed) -> int:
    """How often gradients are reduced: once, unless the strategy says otherwise."""
    strategy = run.spec.strategy
    plugin = plugins.find("strategies", strategy.name) if strategy else None
    if strategy is None or plugin is None or not hasattr(plugin, "reductions_per_step"):
        return 1
    return int(plugin.reductions_per_step(strategy.options, run.spec.training.accumulation))


def _payload(run: Observed, operations: tuple[str, ...]) -> Counter[int]:
    """Bytes by rank."""
    found: Counter[int] = Counter()
    for sample in run.record.wire:
        if sample.operation in operations:
            found[sample.rank] += sample.payload_bytes
    return found


def moved(run: Observed, standard: Standard) -> Check | None:
    """Every adapter changed and no frozen weight did. Both are read after the window, because in the first steps an
    adapter changes so little that a 16-bit trajectory cannot show it.

    Runs recorded before this was read are not checked.
    """
    read = {rank: e for rank, e in run.evidence.items() if e.unmoved is not None}
    if run.spec.tuning is None or not run.spec.tuning.has_adapters or not read:
        return None
    problems = [
        f"{len(e.unmoved)} did not change on rank {r}, first {e.unmoved[0]}" for r, e in read.items() if e.unmoved
    ]
    problems += [
        f"frozen weights changed on rank {r}" for r, e in read.items() if e.final_frozen_digest != e.frozen_digest
    ]
    return checked("adapters learn", "every adapter changed, no frozen weight did", problems, f"on {len(read)} ranks")


FP32_TOLERANCE = 1e-4
# Another run of the same arithmetic is one more sample next to the three re-seeded references: it sometimes exceeds
# their largest deviation, but hardly ever twice that.
SPREAD_FACTOR = 2.0
# A spread of three can be small by chance, mostly at the first steps, hence floors: half of bf16's rounding error
# (2**-9) for the loss, where rounding averages out over tokens; five times that error for the norm, where it does not.
LOSS_FLOOR = 1e-3
NORM_FLOOR = 1e-2
# Loss and norm scalars are always reduced in fp32; only traffic above this share of the gradients is checked.
GRADIENT_SHARE = 0.01


def certify(record: RunRecord, reference: RunRecord | None, peers: Sequence[RunRecord]) -> Certificate:
    """Certificate of one run; peers are the other runs of the same work."""
    run = observe(record)
    return _judge(run, standard_of(reference, [run, *(observe(p) for p in peers if p.evidence)]))


def certify_all(records: Sequence[RunRecord]) -> dict[str, Certificate]:
    """Certificates by run id of all runs with evidence, each judged within its work; each work is read once."""
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
    """(7) of method.md section 6: the count in the process equals what the configuration implies."""
    wanted: dict[str, int] = {}
    with contextlib.suppress(RequestError):
        wanted["the configuration"] = trained_count(run)
    if standard.reference:
        wanted["the reference"] = standard.reference.evidence[0].parameters
    seen = {e.parameters for e in run.evidence.values()}
    problems = [f"{n:,}" for n in sorted(seen) if any(n != w for w in wanted.values())]
    expected = ", ".join(f"{count:,} by {source}" for source, count in wanted.items()) or "one count on all ranks"
    if not seen or (not problems and len(seen) > 1):
        problems = [" and ".join(f"{n:,}" for n in sorted(seen)) or "no count"]
    return checked("parameters", expected, problems, ", ".join(f"{n:,}" for n in sorted(seen)))


def _data(run: Observed, standard: Standard) -> Check:
    """The reference decides as far as it goes, then the majority of the group."""
    known = standard.reference.digests if standard.reference else {}
    common = [step for step in run.digests if step in known]
    other = [step for step in common if run.digests[step] != known[step]]
    later = []
    for step, digest in run.digests.items():
        votes = standard.digests[step]
        if step not in known and any(votes[other] >= votes[digest] for other in votes if other != digest):
            later.append(step)
    problems = [f"other token ids than the reference at {_steps(other)}"] if other else []
    problems += [f"other token ids than the group at {_steps(later)}"] if later else []
    if not common and standard.reference:
        problems.append("no step in common with the reference")
    expected = "the token ids of the reference, then of the group, at every step"
    rest = len(run.digests) - len(common)
    return checked("data", expected, problems, f"equal to the reference at {len(common)} steps, to the group at {rest}")


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:3]))
    return f"step {shown}" if len(steps) == 1 else f"{len(steps)} steps ({shown}{', ...' if len(steps) > 3 else ''})"


def _tokens(run: Observed, standard: Standard) -> Check:
    """The whole global batch, or what the reference counted if its data has padding."""
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

    In fp16 a step whose gradients overflow is skipped by design: accepted if the reference skipped it too.
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
    """Weights are used in the compute dtype and stored, like Adam's moments, in fp32; gradients follow `reduce`.

    For fine-tuning, see `_tuned_dtypes`.
    """
    precision = spec.training.precision
    wanted = {
        "compute": precision.compute,
        "gradient": precision.reduce,
        "gradient_reduction": precision.reduce,
        "optimizer_state": "fp32",
        "master_weights": "fp32",
    }
    return wanted if spec.tuning is None else _tuned_dtypes(wanted, spec.tuning, precision.compute)


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
        return checked("reduction dtype on the wire", "nothing: one process does not reduce", [], "one process")
    gradient_bytes = max((e.parameters for e in run.evidence.values()), default=0) * DTYPE_BYTES[wanted]
    payload: Counter[tuple[int, int, str]] = Counter()
    for w in run.record.wire:
        if w.operation in REDUCTIONS:
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
    problems = [f"a loss that is not a number at {_steps(bad)}"] if bad else []
    problems = problems if run.steps else ["no step was recorded"]
    return checked("finite loss", "a finite loss on every rank at every step", problems, f"{len(run.steps)} steps")


Values = Callable[[Observed, int], list[float | None]]


def _deviations(run: Observed, reference: Observed, values: Values) -> dict[int, float]:
    """|x - reference| / |reference| by common step, worst rank; infinite if a value is missing.

    A step that the fp16 reference skipped for overflow has no norm to compare with.
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

    In 16 bit it grows with the spread of the re-seeded references so far: a later spread never excuses an earlier step.
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
        # The step closest to its limit, or furthest beyond it.
        step = max(deviations, key=lambda s: deviations[s] / limits[s])
        worst, limit = deviations[step], limits[step]
        expected = f"within {limit:.2g} of the reference at step {step}, relative ({origin})"
        seen = f"{worst:.2g} at step {step}, the closest to its limit of {len(deviations)} compared steps"
        seen = seen if math.isfinite(worst) else f"not a number at step {step}"
        return checked(name, expected, [] if worst <= limit else [seen], seen)

    return check


def _switches(run: Observed, standard: Standard) -> Check:
    own, others = run.switches, sum(s != run.switches for s in standard.switches)
    expected = "none, or the same in every run of the group"
    if own and others:
        problems = [f"{_words(own)}, but not in {others} of {len(standard.switches)} runs"]
        return checked("debug switches", expected, problems, "")
    return checked("debug switches", expected, [], f"{_words(own)}, in every run" if own else "none")


CHECKS: tuple[Callable[[Observed, Standard], Check | None], ...] = (
    _reference,
    _initial_weights,
    frozen_weights,
    _parameters,
    _data,
    _tokens,
    label_tokens,
    _optimizer_steps,
    _micro_batches,
    _dtypes,
    _wire_dtype,
    only_adapters,
    moved,
    _optimizer,
    _finite,
    _trajectory("loss trajectory", lambda run, step: [run.losses[step]], LOSS_FLOOR),
    _trajectory("gradient norm", lambda run, step: run.table.at(step, "grad_norm"), NORM_FLOOR),
    _switches,
)
