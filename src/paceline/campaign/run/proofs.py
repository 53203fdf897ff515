"""Proof groups: which works have no reference that fits a device, and on which reduced form they are proved instead.

    Proving(specs) ── for each work a reference, or a proof group, or the reason why it has neither
    after_oom ── a proof group, or a smaller one, for a reference that ran out of memory after all
    refusal ── why a run of the whole is not started: its configuration was not certified on the reduced form

A proof group has the same configurations as the work, and a one-process reference of exactly their reduced form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.analysis.grouping import grouped
from paceline.analysis.training.certificate import certify
from paceline.campaign.run import copies, rehearsed
from paceline.campaign.run.references import references_of, runs_here, unsupported
from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.layout import layout_of, replicas_of
from paceline.experiment.proof import NEVER, SIZES, Reduction
from paceline.experiment.reduced import reduced
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.memory_limit import GIB
from paceline.models import adapters, arithmetic
from paceline.results.memory_components import SPARE_RATIO, goal_bytes
from paceline.results.records import RunRecord, Status

# Two layers per stage of a pipeline, if they fit: both what is between layers and what is between stages is proved.
LAYERS_OF_A_STAGE = (2, 1)
SHORTEST_SEQUENCE = 128
ARITHMETIC = "at least, by arithmetic"
# A rehearsal of a large model takes a minute.
REHEARSAL_S = 180.0
# Below this share of the memory, by a generous estimate, a reference fits without a rehearsal.
SMALL_SHARE = 0.5
# Generous bytes per token: of one layer per element of its hidden size and of its MLP, and per word of the vocabulary.
HIDDEN_BYTES, FFN_BYTES, WORD_BYTES = 80, 20, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that a reference needs beside what it may use."""

    needed_bytes: int
    room_bytes: int
    basis: str

    @property
    def fits(self) -> bool:
        """With some room to spare."""
        return self.needed_bytes <= goal_bytes(self.room_bytes, None)

    @property
    def exceeds(self) -> bool:
        """Whether trying would be in vain, even if the prediction is too high. In between, the device decides."""
        exact = self.basis == ARITHMETIC
        return self.needed_bytes * (1 if exact else 1 - SPARE_RATIO) > self.room_bytes

    @property
    def text(self) -> str:
        return f"needs {_size(self.needed_bytes)} ({self.basis}) and may use {_size(self.room_bytes)}"


def _size(size: int) -> str:
    if size < GIB:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / GIB:,.3g} GiB" if size < 1000 * GIB else f"{size / GIB:,.0f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The proof group of one work. runs: by cell of the whole. why: there is no reference of the whole. smaller: the
    reductions to try next if the reference of this group runs out of memory."""

    reduction: Reduction
    reference: RunSpec
    runs: dict[str, RunSpec]
    why: str
    smaller: tuple[Reduction, ...]

    @property
    def text(self) -> str:
        """What will happen, for whoever starts or plans it."""
        return _groups_text([self])


def _groups_text(groups: Sequence[Group]) -> str:
    """What will happen with proof groups that have one reason and one reduction, such as those of several seeds."""
    first, count = groups[0], sum(len(group.runs) for group in groups)
    them = "1 configuration is" if count == 1 else f"{count} configurations are"
    others = "each other" if len(groups) == 1 else "the others of the same work"
    after = f", then compared with {others} at full size" if any(len(group.runs) > 1 for group in groups) else ""
    return f"proof: {first.why}. {them} certified on {first.reduction.text}{after}."


class Proving:
    """How each work of a campaign is proved. RequestError if sizes are given that no proof group can have."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self._whole = references_of(specs)
        certified = (s for s in specs if s.is_certified and s.script is None and unsupported(s) is None)
        self._members = grouped(certified, lambda spec: spec.work)
        self.groups: dict[str, Group] = {}
        self.refused: dict[str, str] = {}
        for work, reference in self._whole.items():
            other = next((spec for spec in self._members[work] if spec.proof != reference.proof), None)
            accepted = "the same for all configurations of one work, because they share one reference or proof"
            require(other is None, "proof", f"another one for {other and other.strategy}", accepted)
            if reference.proof.has_sizes:
                self.groups[work] = _sized_group(self._members[work])
            elif reference.proof.mode != NEVER and (need := need_of(reference)) is not None and need.exceeds:
                self._reduce(work, f"the one-process reference of {reference.model_text} {need.text}")

    @property
    def references(self) -> dict[str, RunSpec]:
        """The reference of each work that has one; those of proof groups by the work of their runs."""
        whole = {
            work: spec for work, spec in self._whole.items() if work not in self.groups and work not in self.refused
        }
        return whole | {group.reference.work: group.reference for group in self.groups.values()}

    @property
    def runs(self) -> list[RunSpec]:
        """All runs that only prove others, in the order in which they start."""
        return [*self.references.values(), *(run for group in self.groups.values() for run in group.runs.values())]

    def is_current(self, spec: RunSpec) -> bool:
        """Whether a planned run is still needed: its proof group may have been replaced by a smaller one."""
        group = self.groups.get(spec.group_work)
        return spec.reduction is None or (group is not None and group.reduction == spec.reduction)

    def lines(self) -> list[str]:
        """What is proved on less and why, and why works have neither reference nor proof; each sentence once."""
        alike = grouped(self.groups.values(), lambda group: (group.why, group.reduction.text)).values()
        return [*map(_groups_text, alike), *dict.fromkeys(f"proof: {why}." for why in self.refused.values())]

    def after_oom(self, reference: RunSpec) -> list[RunSpec]:
        """The runs that follow because this reference ran out of memory; none if the user wants no proof."""
        work, to = reference.group_work, reference.reduction
        if to is not None and work in self.groups:
            before = self.groups.pop(work)
            ran_out = f"{before.why}; on {to.text} it ran out of memory"
            self._reduce(work, ran_out, before.smaller)
        elif to is None and reference.proof.mode != NEVER and work in self._whole:
            self._reduce(work, f"the one-process reference of {reference.model_text} ran out of memory")
        group = self.groups.get(work)
        return [] if group is None else [group.reference, *group.runs.values()]

    def _reduce(self, work: str, why: str, sizes: Sequence[Reduction] | None = None) -> None:
        members = self._members[work]
        group = _first_fitting(members, why, tuple(reductions(members)) if sizes is None else tuple(sizes))
        if group is None:
            limited = members[0].proof.limit_gib is not None
            help_ = "raise proof.limit_gib" if limited else "use a device with more memory"
            self.refused[work] = f"{why}, and no reduced form of it fits either; {help_}"
        else:
            self.groups[work] = group

    def judges(self, spec: RunSpec, out: Path) -> list[RunRecord]:
        """The finished runs of the proof group of a run of the whole; none if it has a reference."""
        group = self.groups.get(spec.work)
        if group is None:
            return []
        proofs = (copies.read(proof, out) for proof in group.runs.values())
        return [*copies.references(group.reference, out), *(record for record in proofs if record is not None)]

    def refusal(self, spec: RunSpec, out: Path) -> str | None:
        """Why a run of the whole is not started; None if it may be."""
        if spec.work in self.refused:
            return f"not started: {self.refused[spec.work]}"
        group = self.groups.get(spec.work)
        if group is None or (proof := group.runs.get(spec.cell)) is None:
            return None
        what = f"not started: not proved on {group.reduction.text}: {proof.run_id}"
        record = copies.read(proof, out)
        if record is None:
            return f"{what} did not finish"
        if record.status is not Status.OK:
            return f"{what} ended {record.status}: {record.error}"
        known = copies.references(group.reference, out)
        certificate = certify(record, known[0] if known else None, (), known[1:])
        return None if certificate.valid else f"{what} is not certified: {'; '.join(certificate.reasons)}"


# --- sizes ---


def reductions(members: Sequence[RunSpec]) -> Iterator[Reduction]:
    """Smaller and smaller forms of the model of these runs of one work: fewer layers, as many for each stage, and then
    shorter sequences. A smaller batch would need as much memory: a reference accumulates its gradients."""
    whole = _whole_of(members[0])
    layers, stages = whole.of_layers, _stages(members)
    fewer = [n * stages for n in LAYERS_OF_A_STAGE if n * stages < layers]
    for count in fewer:
        yield _to(whole, layers=count)
    length = whole.of_sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        yield _to(whole, layers=fewer[-1] if fewer else layers, sequence_length=length)
        length //= 2


def _whole_of(spec: RunSpec) -> Reduction:
    """Not yet reduced."""
    layers, length = arithmetic.load(spec.model).layers, spec.training.sequence_length
    return Reduction(
        work=spec.work,
        layers=layers,
        of_layers=layers,
        sequence_length=length,
        of_sequence_length=length,
        global_batch=spec.global_batch,
        of_global_batch=spec.global_batch,
    )


def _to(whole: Reduction, **sizes: Any) -> Reduction:
    return replace(whole, **sizes)


def _stages(members: Sequence[RunSpec]) -> int:
    """The least number of layers that gives each stage of every pipeline as many."""
    return math.lcm(*(layout_of(spec).stages for spec in members))


def _first_fitting(members: Sequence[RunSpec], why: str, sizes: tuple[Reduction, ...]) -> Group | None:
    """The group of the first of these sizes with which every configuration works and the reference may fit."""
    for number, to in enumerate(sizes):
        runs = {spec.cell: reduced(spec, to) for spec in members}
        if any(unsupported(run) for run in runs.values()):
            continue
        (reference,) = references_of(list(runs.values())).values()
        need = need_of(reference)
        if need is None or need.fits:
            return Group(reduction=to, reference=reference, runs=runs, why=why, smaller=sizes[number + 1 :])
    return None


def _sized_group(members: Sequence[RunSpec]) -> Group:
    """The group with the sizes that the user gives; RequestError if a configuration cannot have them."""
    wanted, whole, stages = members[0].proof, _whole_of(members[0]), _stages(members)
    given = {name: getattr(wanted, name) for name in SIZES}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        most = getattr(whole, f"of_{name}")
        require(value <= most, f"proof.{name}", value, f"at most {most:,}, that of the experiment")
    to = _to(whole, **given)
    require(to != whole, "proof", _words(given), "at least one size smaller than that of the experiment")
    accepted = f"a multiple of {stages}, so that each stage of a pipeline has as many layers"
    require(to.layers % stages == 0, "proof.layers", to.layers, accepted)
    for spec in members:
        share = spec.training.micro_batch * replicas_of(spec.strategy, spec.topology.world_size)
        accepted = f"a multiple of {share}, which {spec.strategy} needs"
        require(to.global_batch % share == 0, "proof.global_batch", to.global_batch, accepted)
        reason = unsupported(reduced(spec, to))
        require(reason is None, "proof", _words(given), f"sizes with which {spec.strategy} works: {reason}")
    runs = {spec.cell: reduced(spec, to) for spec in members}
    (reference,) = references_of(list(runs.values())).values()
    return Group(
        reduction=to,
        reference=reference,
        runs=runs,
        why=f"the experiment gives the sizes for {members[0].model_text}",
        smaller=(),
    )


def _words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


# --- memory ---


def need_of(reference: RunSpec) -> Need | None:
    """The memory that a reference needs, as exactly as the decision requires; None if it is not known, or surely
    enough."""
    key = reference.run_id
    if key not in _needs:
        _needs[key] = _need_of(reference)
    return _needs[key]


# By run id: a command asks several times, and a rehearsal takes seconds.
_needs: dict[str, Need | None] = {}


def _need_of(reference: RunSpec) -> Need | None:
    room = _room_bytes(reference)
    if room is None:
        return None
    training, shape = reference.training, arithmetic.load(reference.model)
    single, base = Choice("single"), training.precision.base
    if reference.tuning is not None:
        # An upper bound: paged optimizers may leave the device.
        state = int(adapters.state_bytes(shape, reference.tuning, single, 1, base) or 0)
    else:
        state = int(arithmetic.state_bytes(single, arithmetic.parameters(shape), 1, base) or 0)
        if state > room:
            return Need(needed_bytes=state, room_bytes=room, basis=ARITHMETIC)
    tokens = training.micro_batch * training.sequence_length
    width = HIDDEN_BYTES * shape.hidden + FFN_BYTES * shape.ffn * (shape.experts_per_token or 1)
    if state + tokens * (shape.layers * width + WORD_BYTES * shape.vocab) <= SMALL_SHARE * room:
        return None
    # The trainer of a reference is that of the strategy single.
    workload = Choice("pretrain" if reference.tuning is None else "finetune")
    one = rehearsed.rehearse_spec(_plain(reference, workload), _major(reference), REHEARSAL_S)
    if one.peak_bytes is None:
        return None
    return Need(needed_bytes=one.peak_bytes, room_bytes=room, basis="rehearsed")


def _plain(reference: RunSpec, workload: Choice) -> RunSpec:
    return replace(reference, workload=workload, strategy=Choice("single"))


def _room_bytes(reference: RunSpec) -> int | None:
    """The memory that a reference may use; None if its device is not known before it starts."""
    if reference.proof.limit_gib is not None:
        return int(reference.proof.limit_gib * GIB)
    if not runs_here(reference):
        return None
    facts = machine.probe()
    if reference.topology.device == "cpu":
        return facts.memory_bytes
    return min((gpu.memory_bytes for gpu in facts.gpus if gpu.memory_bytes), default=None)


def _major(reference: RunSpec) -> int:
    """The first number of the GPU's compute capability; 0 for a CPU."""
    known = [gpu.capability for gpu in machine.probe().gpus if gpu.capability]
    return int(known[0].partition(".")[0]) if reference.topology.device == "cuda" and known else 0
