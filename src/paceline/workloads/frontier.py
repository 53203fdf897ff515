"""The largest micro batch that fits: probes in processes of their own, real out-of-memory caught, then bisected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.footprint import largest_fitting, predicted_peaks
from paceline.plugins import Recorder, Seat, options
from paceline.records import ComponentSample, RunRecord, Status
from paceline.spec import RunSpec, require
from paceline.workloads import memory

GIB = 2**30
# Of the host's free memory, for a CPU run that was given no limit: the rest of the host must live on.
CPU_SHARE = 0.5


@dataclass(frozen=True)
class Options:
    """most: the largest micro batch to try. limit_gib: memory each process may use; on a GPU of the device's, on a CPU
    beyond what it holds at its start. Without it a GPU is filled, and a CPU process gets its share of half of what is
    free."""

    most: int = 1024
    limit_gib: float | None = None

    def __post_init__(self) -> None:
        require(self.most >= 1, "frontier.most", self.most, "a whole number from 1")
        valid = self.limit_gib is None or (type(self.limit_gib) in (int, float) and 0 < self.limit_gib < math.inf)
        require(valid, "frontier.limit_gib", self.limit_gib, "a positive number of GiB")


def check(spec: RunSpec) -> str | None:
    chosen = options(Options, spec.workload)
    accepted = f"at most frontier.most ({chosen.most})"
    require(spec.training.micro_batch <= chosen.most, "micro_batch of frontier", spec.training.micro_batch, accepted)
    return memory.check_training(spec)


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """One probe. Running out of memory is its result as much as running through."""
    chosen = options(Options, spec.workload)
    capacity = capacity_bytes(chosen, spec, seat)
    recorder.add(
        ComponentSample(
            rank=seat.rank,
            component="capacity",
            source="held",
            bytes=capacity,
            micro_batch=spec.training.micro_batch,
        )
    )
    with memory.Prediction.asked(spec, seat, recorder, capacity, chosen.most) as prediction:
        confine(chosen, capacity, seat)
        memory.observe(spec, seat, recorder, prediction)


def follow(spec: RunSpec, records: Sequence[RunRecord]) -> RunSpec | None:
    """The next probe: the predicted largest micro batch first, then outwards from it, then between the two nearest.

    None when a micro batch that ran and the next one that did not are known, when `most` ran, when not even 1 did, or
    when a probe ended in any other way: what it would have shown is not known.
    """
    if any(record.status not in (Status.OK, Status.OOM) for record in records):
        return None
    most = options(Options, spec.workload).most
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
    """The micro batch to try between the largest that ran and the smallest that did not; None when they are neighbours.

    Around a guess the distance grows with every probe on the same side; without one the micro batch doubles.
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
    """A guess is mostly right, so its neighbour is next; after that it is wrong by some share of itself."""
    return max(missed_by, guess // 12, 1) if missed_by else 1


def capacity_bytes(chosen: Options, spec: RunSpec, seat: Seat) -> int:
    """What this process may allocate."""
    if seat.device == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved()
        return min(free, int(chosen.limit_gib * GIB)) if chosen.limit_gib else free
    if chosen.limit_gib:
        return int(chosen.limit_gib * GIB)
    import psutil

    return int(psutil.virtual_memory().available * CPU_SHARE / spec.topology.processes_per_node)


def confine(chosen: Options, capacity: int, seat: Seat) -> None:
    """Make the limit real: whoever asks for more gets the error that a full device or host gives."""
    if seat.device == "cuda":
        if chosen.limit_gib:
            import torch

            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / total))
        return
    import resource

    held = _data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + capacity, hard))


def _data_bytes() -> int:
    """Private writable memory of this process, which is what RLIMIT_DATA counts."""
    from pathlib import Path

    from paceline.errors import UnsupportedError

    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise UnsupportedError("a limit on a CPU's memory needs Linux") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
