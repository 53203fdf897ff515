"""Reference run: one process trains on the same global batches; certificates compare losses with it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.contract import Recorder, Seat
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load as load_shape

TRAITS = Traits(trains=True)


@dataclass(frozen=True)
class Options:
    """variants: loss trajectories to compute. All but the first re-seed what must not matter: the order of sequences in
    each global batch, and the rounding of trainable initial weights to 16 bit. Their spread is the certificate's
    tolerance."""

    variants: int = 1


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.workload)
    if spec.topology.world_size != 1:
        return "a reference run uses one process"
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    from paceline.training.data.corpus import Partition, facts_of, open_data
    from paceline.training.instruments import attention_backends, clock_for, release_unused
    from paceline.workloads._loop import Loop
    from paceline.workloads.pretrain import digest_weights, evidence

    corpus = open_data(spec, load_shape(spec.model).vocab)
    single = load("strategies", "single")
    for variant in range(parse_options(Options, spec.workload).variants):
        recorder.progress(0, f"setup of variant {variant}")
        with attention_backends(seat.device):
            trainer = single.wrap(spec, seat, reseed=variant)
            start = digest_weights(spec, trainer) if variant == 0 else None
            partition = Partition.of(spec, seat.rank, shuffle=variant)
            loop = Loop(trainer, corpus, partition, seat, clock_for(seat.device), recorder, spec.steps, variant)
            wall_s = loop.window(range(spec.steps))
        if start is not None:
            recorder.conclude(evidence(spec, seat, trainer, start, wall_s, facts_of(corpus)))
        # A trainer and its optimizer refer to each other: collect them now to free the device for the next variant.
        del trainer, loop
        release_unused(seat.device)
