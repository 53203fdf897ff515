"""Proof of equal work: each run is compared with the one-process reference and the other runs of the same work.

See docs/method.md. Every recorded step is compared: with the reference as far as it goes, then with the other cells of
the group. A check states what was expected, what was seen, and whether that was observed, counted or only declared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
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


Values = Callable[[Observed, int], list[float | None]]
# What is compared at each step; the norm on every rank.
LOSS, NORM = "loss trajectory", "gradient norm"
QUANTITIES: Mapping[str, Values] = {
    LOSS: lambda run, step: [run.losses[step]],
    NORM: lambda run, step: run.table.at(step, "grad_norm"),
}


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
    """What every run of one work is compared with. reference is None if none is usable; missing then says why.

    group: all runs of the work. cells: by quantity and cell, the value at each step after the reference, the median of
    the cell's launches.
    """

    reference: Observed | None
    variants: tuple[Observed, ...]
    missing: str
    group: tuple[Observed, ...]
    cells: Mapping[str, Mapping[str, Mapping[int, float]]]


def standard_of(reference: RunRecord | None, group: Sequence[Observed]) -> Standard:
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
    numbers = sorted(set(StepSeries.of(reference.steps).column("variant")) - {0})
    variants = tuple(observe(reference, number) for number in numbers)
    base = observe(reference)
    cells = {name: _cells_after(base, group, values) for name, values in QUANTITIES.items()}
    return Standard(base, variants, "", tuple(group), cells)


def _cells_after(reference: Observed, group: Sequence[Observed], values: Values) -> dict[str, dict[int, float]]:
    """By cell and step after the reference, the median of the cell's launches."""
    found: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    last = max(reference.steps)
    for run in group:
        for step in (s for s in run.steps if s > last):
            first = next(iter(values(run, step)), None)
            if first is not None and math.isfinite(first):
                found[run.spec.cell][step].append(first)
    return {cell: {s: statistics.median(v) for s, v in steps.items()} for cell, steps in found.items()}


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
    problems = [
        f"{n:,} bytes on rank {rank} at step {step}"
        for (rank, step), n in sorted(reduced.items())
        if abs(n - times * once) > slack
    ]
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


def _payload(run: Observed, operations: tuple[str, ...]) -> Counter[tuple[int, int]]:
    """Bytes of these operations by rank and audited step."""
    found: Counter[tuple[int, int]] = Counter({(w.rank, w.step): 0 for w in run.record.wire})
    for sample in run.record.wire:
        if sample.operation in operations:
            found[sample.rank, sample.step] += sample.payload_bytes
    return found


def gradients_reduced(run: Observed, standard: Standard) -> Check | None:
    """A lower bound on every audited step: the gradients of all trainable weights were reduced at least once."""
    spec = run.spec
    if spec.topology.world_size == 1 or (spec.tuning is not None and spec.tuning.has_adapters):
        return None
    least = trained_count(run) * DTYPE_BYTES[spec.training.precision.reduce]
    reduced = _payload(run, REDUCTIONS)
    problems = [
        f"{bytes_:,} bytes on rank {rank} at step {step}"
        for (rank, step), bytes_ in sorted(reduced.items())
        if bytes_ < (1 - BYTES_TOLERANCE) * least
    ]
    problems = problems if reduced else ["no collective was counted"]
    seen = (
        f"at least {min(reduced.values(), default=0):,} bytes at {len({s for _, s in reduced})} steps chosen at random"
    )
    return checked("gradients reduced", f"at least {least:,} bytes on every rank", problems, seen)


def moved(run: Observed, standard: Standard) -> Check | None:
    """Every trainable tensor changed about as much as in the reference, and no frozen weight changed.

    Only tensors stored in fp32 are compared: a 16-bit copy may stay the same while its master weight changes. Adam's
    steps hardly depend on the size of a gradient, so a tensor that moved much less missed updates or had another
    learning rate. The comparison needs a reference of as many steps; without one, every tensor must have changed.
    """
    tuning = run.spec.tuning
    frozen = [
        f"frozen weights changed on rank {r}"
        for r, e in run.evidence.items()
        if e.frozen_digest and e.final_frozen_digest and e.final_frozen_digest != e.frozen_digest
    ]
    old = [
        f"{len(e.unmoved)} did not change on rank {r}, first {e.unmoved[0]}"
        for r, e in run.evidence.items()
        if e.unmoved
    ]
    own = run.evidence[0].movements if 0 in run.evidence else None
    adapted = tuning is not None and tuning.has_adapters
    if not own and not (adapted and any(e.unmoved is not None for e in run.evidence.values())):
        return None
    reference = standard.reference
    known = reference.evidence[0].movements if reference and len(reference.steps) == len(run.steps) else None
    problems = [*frozen, *old]
    for name, change in (own or {}).items():
        wanted = (known or {}).get(name)
        if change == 0 and (wanted is None or wanted > 0):
            problems.append(f"{name} did not change")
        elif wanted and not 1 / MOVEMENT_FACTOR <= change / wanted <= MOVEMENT_FACTOR:
            problems.append(f"{name} changed {change / wanted:.2g} times as much as in the reference")
    expected = "every trainable tensor changed"
    expected += f", within a factor of {MOVEMENT_FACTOR:g} of the reference" if known else ""
    expected += ", no frozen weight did" if adapted else ""
    return checked("weights moved", expected, problems, f"{len(own or {})} tensors" if own else "every adapter")


def ranks_agree(run: Observed, standard: Standard) -> Check | None:
    """After the window every rank has the same weights: gradients that were not reduced make them differ."""
    digests = {rank: e.final_digests for rank, e in run.evidence.items() if e.final_digests is not None}
    if not digests or run.spec.topology.world_size == 1:
        return None
    first = digests[min(digests)]
    problems = silent_ranks(run)
    for rank, other in digests.items():
        differing = [name for name, digest in other.items() if first.get(name) != digest]
        if differing:
            problems.append(f"{len(differing)} tensors differ on rank {rank}, first {differing[0]}")
    seen = f"equal on {len(digests)} ranks"
    return checked("weights after the window", "the same on every rank", problems, seen)


def norms_agree(run: Observed, standard: Standard) -> Check | None:
    """All ranks report the same gradient norm, because it is computed from the reduced gradients."""
    if run.spec.topology.world_size == 1:
        return None
    worst, at = 0.0, None
    for step in run.steps:
        known = [x for x in run.table.at(step, "grad_norm") if x is not None and math.isfinite(x)]
        if known and (spread := (max(known) - min(known)) / max(max(known), 1e-30)) > worst:
            worst, at = spread, step
    seen = f"equal at {len(run.steps)} steps" if at is None else f"a spread of {worst:.2g} at step {at}"
    problems = [seen] if worst > RANK_TOLERANCE else []
    return checked("gradient norm on all ranks", f"equal at every step, within {RANK_TOLERANCE:g}", problems, seen)


# Ranks take the norm of the same reduced gradients, in sums of the same order.
RANK_TOLERANCE = 1e-5
# Adam moves a tensor without signal by noise of the same size, so honest runs agree within a few per cent.
MOVEMENT_FACTOR = 1.15
FP32_TOLERANCE = 1e-4
# Another run of the same arithmetic is one more sample next to the three re-seeded references: it sometimes exceeds
# their largest deviation, but hardly ever twice that.
SPREAD_FACTOR = 2.0
# After the reference, the losses of honest bf16 runs on an H200 drifted apart from 6e-4 to 1.5e-2 in 18 steps, never
# doubling in one of them. Their gradient norms jumped, by up to 0.05; a wrong mean would be a factor.
GROWTH = 2.0
LATER_NORM = 0.25
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
    checks = [
        dataclasses.replace(check, basis=basis)
        for decide, basis in CHECKS
        if (check := decide(run, standard)) is not None
    ]
    return Certificate(
        run=run.run,
        cell=run.spec.cell,
        work=run.spec.work,
        reference=standard.reference.run if standard.reference else None,
        checks=tuple(checks),
        steps=len(run.steps),
        compared_steps=len(_compared(run, standard, QUANTITIES[LOSS], LOSS)),
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
    """The reference computes the digests of all steps from the seed. Where an old one did not, most runs must agree."""
    known: dict[int, int] = {}
    if standard.reference:
        later = standard.reference.evidence[0].later_digests or ()
        known = {**standard.reference.digests, **dict(enumerate(later, max(standard.reference.steps) + 1))}
    common = [step for step in run.digests if step in known]
    other = [step for step in common if run.digests[step] != known[step]]
    disputed = []
    for step, digest in run.digests.items():
        votes = Counter(peer.digests[step] for peer in standard.group if step in peer.digests)
        if step not in known and any(votes[seen] >= votes[digest] for seen in votes if seen != digest):
            disputed.append(step)
    problems = [f"other token ids than the reference at {_steps(other)}"] if other else []
    problems += [f"other token ids than most of the group at {_steps(disputed)}"] if disputed else []
    if not common and standard.reference:
        problems.append("no step in common with the reference")
    rest = len(run.digests) - len(common)
    seen = f"equal to the reference at {len(common)} steps" + (f", to the group at {rest}" if rest else "")
    return checked("data", "the token ids of the reference at every step", problems, seen)


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

    In fp16 a step whose gradients overflow is skipped by design: accepted if no rank has a finite norm there.
    """
    wanted = run.spec.steps
    per_rank = Counter(run.table.values("rank"))
    ranks = range(run.spec.topology.world_size)
    problems = [f"{per_rank[r]} steps on rank {r}" for r in ranks if per_rank[r] != wanted]
    fp16 = run.spec.training.precision.compute == "fp16"
    wrong: defaultdict[int, list[int]] = defaultdict(list)
    if set(run.table.values("updates")) != {1}:
        for step, seen in run.by_step("updates").items():
            overflow = fp16 and all(norm is None for norm in run.table.at(step, "grad_norm"))
            for updates in {*seen} - ({0, 1} if overflow else {1}):
                wrong[updates].append(step)
    problems += [f"{updates} updates at {_steps(steps)}" for updates, steps in sorted(wrong.items())]
    return checked("optimizer steps", f"{wanted} steps of 1 update each", problems, f"{wanted} steps of 1 update each")


def _micro_batches(run: Observed, standard: Standard) -> Check:
    """As the loop counted them, and as token ids were looked up in the embedding on audited steps."""
    training = run.spec.training
    wanted, positions = training.accumulation, training.micro_batch * training.sequence_length
    seen = Counter(run.table.values("micro_batches"))
    problems = [f"{count} on {times} of {seen.total()} rank-steps" for count, times in seen.items() if count != wanted]
    problems = problems if seen else ["no step was recorded"]
    looked_up = _operations(run, "embedding")
    for (rank, step), counts in looked_up.items():
        calls, ids = sum(c for c, _ in counts.values()), sum(w for _, w in counts.values())
        if (calls, ids) != (wanted, wanted * positions):
            problems.append(f"{calls} forward passes over {ids:,} positions on rank {rank} at step {step}")
    expected = f"{wanted} of {positions:,} positions on every rank"
    return checked("micro batches per step", expected, problems, f"{wanted} on every rank")


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
    wanted = {k: v for k, v in standard.reference.evidence[0].optimizer.items() if k not in KERNELS}
    problems = silent_ranks(run)
    for rank, evidence in run.evidence.items():
        own = {k: v for k, v in evidence.optimizer.items() if k not in KERNELS}
        differing = [k for k in {**wanted, **own} if own.get(k) != wanted.get(k)]
        problems += [f"{k} {own.get(k)!r} on rank {rank}" for k in differing]
    return checked("optimizer", _words(wanted), problems, "equal to the reference's")


# Which kernels compute the update does not change what it computes.
KERNELS = ("fused", "foreach")
COUNTS = ("elements", "first_step", "steps")


def parameter_groups(run: Observed, standard: Standard) -> Check | None:
    """All parameter groups that any optimizer stepped in the window have the reference's hyper-parameters, and together
    they cover every trainable weight: on each rank, or once over all ranks if each rank updates its own part."""
    reference = standard.reference.evidence[0].groups if standard.reference else None
    observed = {rank: e.groups for rank, e in run.evidence.items() if e.groups is not None}
    if not reference or not observed:
        return None
    allowed = [{k: v for k, v in group.items() if k not in COUNTS} for group in reference]
    problems = silent_ranks(run)
    for rank, groups in observed.items():
        for group in groups:
            # Other implementations may lack a switch that is off, such as amsgrad.
            unlike = [[k for k, v in wanted.items() if group.get(k, None if v else v) != v] for wanted in allowed]
            differing = min(unlike, key=len)
            if differing:
                since = f" at {group['steps']} steps from step {group['first_step']}"
                values = ", ".join(f"{k} {group.get(k)}" for k in differing)
                problems.append(f"{values} for {group['elements']:,} weights on rank {rank}{since}")
    total, count = _stepped(observed), trained_count(run)
    # Shards may be padded, never short.
    if not any(0 <= total - times * count <= BYTES_TOLERANCE * count for times in range(1, len(observed) + 1)):
        problems.append(f"{total:,} weights stepped over all ranks of {count:,}")
    expected = f"{'; or '.join(map(_words, allowed))}, for all {count:,} weights"
    return checked("parameter groups", expected, problems, f"equal on {len(observed)} ranks")


def _stepped(observed: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """Weights that were stepped, over all ranks: the groups that appear in the same step add up."""
    total = 0
    for groups in observed.values():
        first = min((int(g["first_step"]) for g in groups), default=0)
        total += sum(int(g["elements"]) for g in groups if g["first_step"] == first)
    return total


def clipping(run: Observed, standard: Standard) -> Check | None:
    """On audited steps, the optimizer received gradients whose norm does not exceed `clip_norm`.

    Ranks that update all weights each have the whole norm; otherwise the squares of all ranks add up.
    """
    updates = [o for o in run.record.operations if o.operation == "update" and o.squares is not None]
    if not updates:
        return None
    limit, count, problems, largest = run.spec.training.clip_norm, trained_count(run), [], 0.0
    for step in sorted({o.step for o in updates}):
        by_rank: defaultdict[int, list[Any]] = defaultdict(list)
        for o in updates:
            if o.step == step:
                by_rank[o.rank].append(o)
        whole = [sum(o.squares for o in found) for found in by_rank.values()]
        is_whole = all(sum(o.work for o in found) > 0.75 * count for found in by_rank.values())
        norm = math.sqrt(max(whole) if is_whole else sum(whole))
        largest = max(largest, norm)
        if not norm <= limit * (1 + CLIP_TOLERANCE):
            problems.append(f"a norm of {norm:.4g} at step {step}")
    seen = f"a norm of at most {largest:.4g} after clipping"
    return checked("gradient clipping", f"a norm of at most {limit:g} after clipping", problems, seen)


# Rounding of the norm and of the factor, in 16 bit too.
CLIP_TOLERANCE = 0.01


def precision_switches(run: Observed, standard: Standard) -> Check | None:
    """torch's switches of numerical precision had the reference's values at every step."""
    wanted = standard.reference.evidence[0].flags if standard.reference else None
    observed = {rank: e.flags for rank, e in run.evidence.items() if e.flags is not None}
    if not wanted or not observed:
        return None
    problems = silent_ranks(run)
    for rank, flags in observed.items():
        problems += [f"{k} {flags.get(k)} on rank {rank}" for k, v in wanted.items() if flags.get(k) != v]
    return checked("precision switches", _words(wanted), problems, f"equal on {len(observed)} ranks")


# --- single steps, operator by operator ---

Counts = dict[tuple[int, int], dict[str, tuple[int, int]]]


def _operations(run: Observed, operation: str) -> Counts:
    """Calls and work by dtype of one kind of operator, by rank and audited step."""
    found: Counts = {(o.rank, o.step): {} for o in run.record.operations}
    for o in run.record.operations:
        if o.operation == operation:
            found[o.rank, o.step][o.dtype] = (o.calls, o.work)
    return found


def _dtypes_of(counts: Counts) -> set[str]:
    return {dtype for by_dtype in counts.values() for dtype in by_dtype}


def products(run: Observed, standard: Standard) -> Check | None:
    """Matrix products on audited steps: the dtypes of the reference's, and as many FLOPs. Values are not rounded to
    dtypes that the reference does not use, either."""
    reference = standard.reference
    if reference is None or not run.record.operations or not reference.record.operations:
        return None
    own, known = _operations(run, "product"), _operations(reference, "product")
    precision = run.spec.training.precision
    wanted = _dtypes_of(known)
    problems = [f"products of {dtype}" for dtype in sorted(_dtypes_of(own) - wanted)]
    casts = _dtypes_of(_operations(reference, "cast")) | wanted | {precision.compute, precision.reduce, *WIDE}
    problems += [f"values rounded to {dtype}" for dtype in sorted(_dtypes_of(_operations(run, "cast")) - casts)]
    expected = f"products of {' and '.join(sorted(wanted))}"
    if run.spec.training.checkpointing == reference.spec.training.checkpointing:
        per_step = _flops(known)
        total = statistics.median(per_step.values())
        expected += f", {total:.6g} FLOPs per step"
        problems += [
            f"{flops / total:.4g} times the FLOPs at step {step}"
            for step, flops in _flops(own).items()
            if abs(flops - total) > FLOPS_TOLERANCE * total
        ]
    plain = ", as plain code" if run.spec.training.compile else ""
    seen = f"as expected at {len(_flops(own))} steps chosen at random{plain}"
    return checked("matrix products", expected, problems, seen)


# Rounding to these loses nothing.
WIDE = ("fp32", "float64")
# Some layers pad the last micro batch or the vocabulary; a missing layer or a skipped product is more.
FLOPS_TOLERANCE = 0.005


def _flops(counts: Counts) -> dict[int, int]:
    """FLOPs by step over all ranks."""
    found: Counter[int] = Counter()
    for (_, step), by_dtype in counts.items():
        found[step] += sum(work for _, work in by_dtype.values())
    return dict(found)


def recomputation(run: Observed, standard: Standard) -> Check | None:
    """Activation checkpointing recomputes what it says: activations once more, and attention too if it is full."""
    if standard.reference is None or not run.record.operations:
        return None
    problems, expected = [], []
    for operation, repeated in (("attention", ("full",)), ("activation", ("full", "selective"))):
        ratios = [
            {key: sum(c for c, _ in by_dtype.values()) for key, by_dtype in _operations(each, operation).items()}
            for each in (run, standard.reference)
        ]

        def expect(each: Observed, again: tuple[str, ...] = repeated) -> int:
            training = each.spec.training
            return each.record.shape.layers * training.accumulation * (2 if training.checkpointing in again else 1)

        if not ratios[1] or set(ratios[1].values()) != {expect(standard.reference)}:
            continue  # operators that are not counted here, such as a fused layer
        expected.append(f"{expect(run)} of {operation}")
        problems += [
            f"{calls} calls of {operation} on rank {rank} at step {step}"
            for (rank, step), calls in ratios[0].items()
            if calls != expect(run)
        ]
    if not expected:
        return None
    how = run.spec.training.checkpointing
    return checked("activation checkpointing", f"{how}: {', '.join(expected)} per step", problems, "as expected")


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
        found[step] = _deviation(values(run, step), base)
    return found


def _deviation(values: Iterable[float | None], base: float) -> float:
    errors = [math.inf if x is None else abs(x - base) / max(abs(base), 1e-30) for x in values]
    return max((math.inf if math.isnan(e) else e for e in errors), default=math.inf)


def _compared(run: Observed, standard: Standard, values: Values, name: str) -> dict[int, float]:
    """Deviation at each step that can be compared: with the reference as far as it goes, then with the median of all
    cells, or with the other cell where there are two. A cell alone cannot be compared with itself."""
    if standard.reference is None:
        return {}
    found = _deviations(run, standard.reference, values)
    cells = standard.cells.get(name, {})
    peers = cells if len(cells) > 2 else {cell: steps for cell, steps in cells.items() if cell != run.spec.cell}
    overflows = run.spec.training.precision.compute == "fp16"
    for step in (s for s in run.steps if s > max(standard.reference.steps)):
        known = [steps[step] for steps in peers.values() if step in steps]
        own = values(run, step)
        if known and not (overflows and all(x is None for x in own)):
            found[step] = _deviation(own, statistics.median(known))
    return found


def _limits(
    standard: Standard, run: Observed, name: str, deviations: Mapping[int, float]
) -> tuple[Mapping[int, float], str]:
    """The deviation that rounding alone explains at each step, and where that comes from.

    It grows with the spread of the re-seeded references so far: a later spread never excuses an earlier step. After the
    reference, the differences of honest runs still grow, but not suddenly: one step may double the largest so far.
    """
    assert standard.reference is not None
    reference, compute = standard.reference, run.spec.training.precision.compute
    spread: defaultdict[int, float] = defaultdict(float)
    for variant in standard.variants:
        for step, deviation in _deviations(variant, reference, QUANTITIES[name]).items():
            spread[step] = max(spread[step], deviation)
    least = FP32_TOLERANCE if compute == "fp32" else 0.0
    so_far, reached, limits = 0.0, 0.0, {}
    for step in sorted({*reference.steps, *run.steps}):
        so_far = max(so_far, spread[step] if math.isfinite(spread[step]) else 0.0)
        limits[step] = max(least, SPREAD_FACTOR * so_far)
        if step not in reference.steps:
            limits[step] = max(limits[step], GROWTH * reached, LATER_NORM if name == NORM else 0.0)
        reached = max(reached, min(deviations.get(step, 0.0), limits[step]))
    origin = f"{SPREAD_FACTOR:g} x the spread so far of {len(standard.variants)} re-seeded references in {compute}"
    if compute == "fp32":
        return limits, f"at least {FP32_TOLERANCE:g}, or {origin}" if standard.variants else "fixed for fp32"
    return limits, f"{origin}, {so_far:.2g} at the last step"


def _trajectory(name: str) -> Callable[[Observed, Standard], Check | None]:
    values = QUANTITIES[name]

    def check(run: Observed, standard: Standard) -> Check | None:
        if standard.reference is None:
            return None
        deviations = _compared(run, standard, values, name)
        limits, origin = _limits(standard, run, name, deviations)
        if not any(step in standard.reference.steps for step in deviations):
            return checked(name, f"the reference's ({origin})", ["no step in common with the reference"], "")
        # The step closest to its limit, or furthest beyond it.
        step = max(deviations, key=lambda s: deviations[s] / max(limits[s], 1e-30))
        worst, limit = deviations[step], limits[step]
        cells = len(standard.cells.get(name, {}))
        others = f"the median of {cells} cells" if cells > 2 else "the other cell"
        source = "the reference" if step in standard.reference.steps else others
        expected = f"within {limit:.2g} of {source} at step {step}, relative ({origin})"
        seen = f"{worst:.2g} at step {step}, the closest to its limit of {len(deviations)} compared steps"
        seen = seen if math.isfinite(worst) else f"not a number at step {step}"
        return checked(name, expected, [] if worst <= limit else [seen], seen)

    return check


def _switches(run: Observed, standard: Standard) -> Check:
    own, others = run.switches, sum(peer.switches != run.switches for peer in standard.group)
    expected = "none, or the same in every run of the group"
    if own and others:
        problems = [f"{_words(own)}, but not in {others} of {len(standard.group)} runs"]
        return checked("debug switches", expected, problems, "")
    return checked("debug switches", expected, [], f"{_words(own)}, in every run" if own else "none")


OBSERVED, COUNTED, DECLARED = "observed", "counted", "declared"
CHECKS: tuple[tuple[Callable[[Observed, Standard], Check | None], str], ...] = (
    (_reference, OBSERVED),
    (_initial_weights, OBSERVED),
    (frozen_weights, OBSERVED),
    (_parameters, COUNTED),
    (_data, OBSERVED),
    (_tokens, COUNTED),
    (label_tokens, COUNTED),
    (_optimizer_steps, COUNTED),
    (_micro_batches, COUNTED),
    (_dtypes, DECLARED),
    (products, COUNTED),
    (recomputation, COUNTED),
    (_wire_dtype, COUNTED),
    (gradients_reduced, COUNTED),
    (only_adapters, COUNTED),
    (moved, OBSERVED),
    (ranks_agree, OBSERVED),
    (_optimizer, DECLARED),
    (parameter_groups, OBSERVED),
    (clipping, OBSERVED),
    (precision_switches, OBSERVED),
    (_finite, OBSERVED),
    (_trajectory(LOSS), OBSERVED),
    (_trajectory(NORM), OBSERVED),
    (norms_agree, OBSERVED),
    (_switches, OBSERVED),
)
