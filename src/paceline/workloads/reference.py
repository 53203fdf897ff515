"""Reference run: one process trains on the same global batches; certificates compare each step with it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from paceline.contract import Recorder, Seat
from paceline.errors import require
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.memory_limit import check_limit
from paceline.models.arithmetic import load as load_shape

TRAITS = Traits(trains=True)


@dataclass(frozen=True)
class Options:
    """variants: number of loss trajectories. All but the first re-seed what must not matter: the order of sequences in
    each global batch, and the rounding to 16 bit of initial weights or, with adapters, of activations. Their spread is
    the certificate's tolerance. first: the first one to compute; above 0 there are only more copies for a reference
    that has the others, over `least` steps. least: steps to train however long they take; None for all. budget_s: stop
    after this time beyond `least` steps; the certificate of later steps then rests on the other runs of the group.
    rounds_often: a run of the group rounds at more or other points than plain code, so copies also round the outputs of
    layers differently. shared_words: among how many ranks runs of the group share the output layer, as in 2+4; copies
    take turns to compute it in so many parts. limit_gib: memory that the process may use, as for `pretrain`."""

    variants: int = 1
    first: int = 0
    least: int | None = None
    budget_s: float = 30.0
    rounds_often: bool = False
    shared_words: str = ""
    limit_gib: float | None = None

    def __post_init__(self) -> None:
        require(self.variants >= 1, "reference.variants", self.variants, "a whole number from 1")
        require(0 <= self.first < self.variants, "reference.first", self.first, "a whole number from 0, below variants")
        require(self.budget_s > 0, "reference.budget_s", self.budget_s, "a positive number of seconds")
        numbers = not self.shared_words or all(part.isdecimal() for part in self.shared_words.split("+"))
        require(numbers, "reference.shared_words", self.shared_words, "numbers of ranks, such as 2+4")
        check_limit(self.limit_gib, "reference.limit_gib")

    def head_parts(self, variant: int) -> int:
        """In how many parts a variant computes the output layer."""
        if not (variant and self.shared_words):
            return 1
        degrees = self.shared_words.split("+")
        return int(degrees[(variant - 1) % len(degrees)])


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.workload)
    if spec.topology.world_size != 1:
        return "a reference run uses one process"
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    from paceline.training.data.corpus import Partition, facts_of, open_data
    from paceline.training.instruments import attention_backends, clock_for, release_unused
    from paceline.training.precision import matrix_products
    from paceline.workloads._loop import Loop
    from paceline.workloads.pretrain import (
        audit,
        digest_weights,
        evidence,
        initial_weights,
        memory_limited,
        with_final_weights,
    )

    options = parse_options(Options, spec.workload)
    corpus = open_data(spec, load_shape(spec.model).vocab)
    single = load("strategies", "single")
    covered = spec.steps
    for variant in range(options.first, options.variants):
        recorder.progress(0, f"setup of variant {variant}")
        with (
            attention_backends(seat.device),
            matrix_products(spec.training.precision),
            memory_limited(options.limit_gib, spec, seat, recorder),
        ):
            often, parts = options.rounds_often, options.head_parts(variant)
            trainer = single.wrap(spec, seat, reseed=variant, rounds_often=often, head_parts=parts)
            partition = Partition.of(spec, seat.rank, shuffle=variant)
            loop = Loop(trainer, corpus, partition, seat, clock_for(seat.device), recorder, spec.steps, variant)
            if variant > options.first:
                loop.window(range(covered))
            else:
                start, initial = digest_weights(spec, trainer), initial_weights(spec, trainer)
                least = min(options.least or spec.steps, spec.steps)
                wall_s = loop.window(range(least))
                # Every variant takes as long; a common length is what the budget allows, or all steps.
                affordable = 0 if options.first else int(options.budget_s * least / (options.variants * wall_s))
                covered = min(max(least, affordable), spec.steps)
                if covered > least:
                    wall_s += loop.window(range(least, covered))
                observed = evidence(spec, seat, trainer, start, loop, wall_s, facts_of(corpus))
                if variant == 0:
                    observed = with_final_weights(observed, spec, trainer, initial)
                    later = later_digests(partition, corpus, range(covered, spec.steps), options.budget_s)
                    whole = whole_digests(spec, options.budget_s)
                    observed = dataclasses.replace(observed, later_digests=later, whole_digests=whole)
                recorder.conclude(observed)
            if variant == 0:
                audit(spec, seat, loop, recorder, first=covered)
        # A trainer and its optimizer refer to each other: collect them now to free the device for the next variant.
        del trainer, loop
        release_unused(seat.device)


def whole_digests(spec: RunSpec, budget_s: float) -> list[int] | None:
    """Digests of the first global batches of the work that a proof group proves; None for other references."""
    from paceline.training.data.corpus import Partition, open_data

    to, training = spec.reduction, spec.training
    if to is None:
        return None
    batch = dataclasses.replace(
        training, sequence_length=to.of_sequence_length, micro_batch=1, accumulation=to.of_global_batch
    )
    whole = dataclasses.replace(spec, training=batch)
    corpus = open_data(whole, load_shape(spec.model).vocab)
    return later_digests(Partition.of(whole, 0), corpus, range(spec.steps), budget_s)


def later_digests(partition, corpus, steps: range, budget_s: float) -> list[int]:  # type: ignore[no-untyped-def]
    """Digests of the global batches that the reference does not train on, as far as the time allows."""
    began, digests = time.perf_counter(), []
    for step in steps:
        if time.perf_counter() - began > budget_s:
            break
        digests.append(partition.step_batch(corpus, step).digest)
    return digests
