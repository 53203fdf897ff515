"""Largest micro batch that fits in memory, found by bisection with real out-of-memory errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.contract import Recorder, Seat
from paceline.errors import require
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.memory_limit import allowed_bytes, check_limit, confine
from paceline.results.memory_components import largest_fitting, predicted_peaks
from paceline.results.records import RunRecord, Status
from paceline.workloads import memory
from paceline.workloads.pretrain import capacity_sample

TRAITS = Traits(trains=True, measures_memory=True, probes_limit=True, may_fine_tune=True)


@dataclass(frozen=True)
class Options:
    """most: the largest micro batch to try. limit_gib: memory each process may use: of the GPU, or on a CPU on top of
    what the process uses at its start. By default, all of the GPU; on a CPU, an equal share of half the free memory."""

    most: int = 1024
    limit_gib: float | None = None

    def __post_init__(self) -> None:
        require(self.most >= 1, "frontier.most", self.most, "a whole number from 1")
        check_limit(self.limit_gib, "frontier.limit_gib")


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.workload)
    accepted = f"at most frontier.most ({chosen.most})"
    require(spec.training.micro_batch <= chosen.most, "micro_batch of frontier", spec.training.micro_batch, accepted)
    return memory.check_training(spec)


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """Run one probe, which either completes or runs out of memory: both are results."""
    chosen = parse_options(Options, spec.workload)
    capacity = allowed_bytes(chosen.limit_gib, seat.device, spec.topology.processes_per_node)
    recorder.add(capacity_sample(spec, seat, capacity))
    with memory.Prediction.requested(spec, seat, recorder, capacity, chosen.most) as prediction:
        confine(chosen.limit_gib, capacity, seat.device)
        memory.observe(spec, seat, recorder, prediction)


def follow(spec: RunSpec, records: Sequence[RunRecord]) -> RunSpec | None:
    """The next probe, or None when the search is over.

    The predicted largest micro batch comes first, then sizes further and further from it, then bisection. The search
    ends when the limit is known, when `most` fits, when not even 1 fits, or when a probe fails for another reason.
    """
    if any(record.status not in (Status.OK, Status.OOM) for record in records):
        return None
    most = parse_options(Options, spec.workload).most
    ended = {record.spec.training.micro_batch: record.status for record in records}
    micro_batch = next_probe(ended, predicted_largest(records, most), most)
    if micro_batch is None:
        return None
    return replace(spec, training=replace(spec.training, micro_batch=micro_batch))


def predicted_largest(records: Sequence[RunRecord], most: int) -> int | None:
    samples = [sample for record in records for sample in record.components]
    capacity = min((s.bytes for s in samples if s.component == "capacity"), default=None)
    return None if capacity is None else largest_fitting(predicted_peaks(samples), capacity, most)


def next_probe(ended: Mapping[int, Status], guess: int | None, most: int) -> int | None:
    """The micro batch to try between the largest that ran and the smallest that did not; None if they are adjacent.

    Around a guess the distance grows with every probe on the same side. Without a guess the micro batch doubles.
    """
    low = max((size for size, status in ended.items() if status is Status.OK), default=0)
    high = min((size for size, status in ended.items() if status is Status.OOM), default=most + 1)
    if high - low <= 1:
        return None
    if guess is None:
        wanted = 2 * low if high > most else 0
    elif guess <= low:
        wanted = low + _stride(guess, low - guess)
    elif guess >= high:
        wanted = high - _stride(guess, guess - high)
    else:
        wanted = guess
    wanted = min(wanted, most)
    return wanted if low < wanted < high else (low + high) // 2


def _stride(guess: int, missed_by: int) -> int:
    """Distance to the next probe: 1 after an exact guess, otherwise at least the error and a twelfth of the guess."""
    return max(missed_by, guess // 12, 1) if missed_by else 1
