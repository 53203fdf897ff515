"""One rank: read the spec, run the workload, leave samples and an outcome.

Used as `python -m paceline.workloads.worker RUN_DIR`.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from paceline.contract import Seat
from paceline.errors import InvalidRunError, RequestError, UnsupportedError
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.gauges import DeviceSample, Sampler, Snapshot
from paceline.host.machine import probe
from paceline.host.machine import to_dict as machine_facts
from paceline.host.memory_limit import room_bytes
from paceline.host.processes import end_with_parent
from paceline.launchers.node import log_transport, placement
from paceline.results import store
from paceline.results.records import ComponentSample, Evidence, GaugeSample, Outcome, Sample, Status, StepSample
from paceline.training.instruments import collection_paused, peak_bytes

PEAK_INTERVAL_S = 1.0
# The CUDA and CPU allocators, the driver, the C++ library, the kernel (ENOMEM), and threads that find no stack.
_OOM = re.compile(
    r"out of memory|out_of_memory|can(no|')t allocate memory|DefaultCPUAllocator|bad_alloc|can't start new thread",
    re.IGNORECASE,
)


class FolderRecorder:
    """Implements `plugins.Recorder` in the run folder. Each line is handed to the system at once: a kill loses none."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._file = (run_dir / f"samples-{rank}.jsonl").open("w", buffering=1)
        self._position = store.ProgressFile(run_dir, rank)
        self.evidence: Evidence | None = None
        self.device: str | None = None
        self._looked_at = 0.0

    def add(self, sample: Sample) -> None:
        self._file.write(store.sample_line(sample))
        if isinstance(sample, StepSample):
            self._position.loss = sample.loss
            self._note_peak()

    def _note_peak(self) -> None:
        """Memory for whoever watches: the allocator's count takes tens of microseconds, so once a second at most."""
        now = time.monotonic()
        if self.device is None or now - self._looked_at < PEAK_INTERVAL_S:
            return
        self._looked_at = now
        held = peak_bytes(self.device)
        # The counter is set back once per run; the peak of the whole run is not.
        if not held <= self._position.peak_bytes:
            self._position.peak_bytes = held

    def progress(self, step: int, phase: str) -> None:
        self._position.mark(step, phase)

    def conclude(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def keep(self, name: str, content: bytes) -> None:
        (self._run_dir / name).write_bytes(content)

    def close(self) -> None:
        self._file.close()


def main(argv: list[str]) -> int:
    """Exit code 0 when the outcome is ok, 1 otherwise, so that the launcher ends the other ranks."""
    end_with_parent()
    run_dir = Path(argv[1])
    rank = int(os.environ.get("RANK", "0"))
    with (run_dir / f"stack-{rank}.txt").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        recorder = FolderRecorder(run_dir, rank)
        started_at = time.time()
        status, error = attempt(run_dir, rank, recorder)
        if status is Status.OOM:
            note_room(run_dir, rank, recorder)
        try:
            recorder.close()
        except OSError as full:
            # What was still to be written found no room.
            status, error = (Status.FAILED, f"OSError: {full}") if status is Status.OK else (status, error)
    outcome = Outcome(
        rank=rank,
        status=status,
        error=error,
        host=placement.node_name(os.environ),
        pid=os.getpid(),
        started_at=started_at,
        ended_at=time.time(),
        evidence=recorder.evidence,
    )
    return 0 if leave_outcome(run_dir, outcome) is Status.OK else 1


def leave_outcome(run_dir: Path, outcome: Outcome) -> Status:
    """Write the outcome; where the disk takes none it is printed, for the agent of this node to hand on. Returns the
    status that was told: without its evidence no run is ok."""
    try:
        store.write_outcome(run_dir, outcome)
        return outcome.status
    except OSError as full:
        sentence = outcome.error or f"the outcome could not be written: {full}"
    short = replace(outcome, status=_unless_ok(outcome.status), error=sentence, evidence=None)
    content = json.dumps(asdict(short)).encode()
    sys.stdout.write(f"{log_transport.file_line(f'outcome-{outcome.rank}.json', content)}\n")
    sys.stdout.flush()
    return short.status


def _unless_ok(status: Status) -> Status:
    return Status.FAILED if status is Status.OK else status


def attempt(run_dir: Path, rank: int, recorder: FolderRecorder) -> tuple[Status, str | None]:
    """Run the workload; whatever it raises becomes a status and one sentence."""
    try:
        spec = store.read_spec(run_dir)
        seat = replace(take_seat(spec, rank), checkpoints=checkpoint_folder(spec, run_dir))
        recorder.device = seat.device
        if seat.local_rank == 0:
            facts = {**machine_facts(probe()), "host": placement.node_name(os.environ)}
            store.write_json(run_dir / f"machine-{facts['host']}.json", facts)
        with gauged(run_dir, spec, seat):
            # Replicas compute nothing together: their ranks meet by the launch's store, and leave devices to engines.
            joins = spec.serving is None
            if joins:
                join(spec, seat)
            load("workloads", spec.workload.name).run(spec, seat, recorder)
            if joins:
                leave()
        recorder.progress(spec.steps, "done")
        return Status.OK, None
    except (UnsupportedError, RequestError) as error:
        # A request that only the data itself shows to be wrong, such as a late line of a file.
        return Status.UNSUPPORTED, str(error)
    except InvalidRunError as error:
        return Status.INVALID, str(error)
    except Exception as error:
        traceback.print_exc()
        return classify(error)


def classify(error: Exception) -> tuple[Status, str]:
    sentence = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    out_of_memory = isinstance(error, MemoryError) or _OOM.search(str(error)) is not None
    return (Status.OOM if out_of_memory else Status.FAILED), sentence


def note_room(run_dir: Path, rank: int, recorder: FolderRecorder) -> None:
    """The memory that this rank had to itself when there was not enough: what advice has to fit into.

    A device or a host that cannot even tell must not cost the run its outcome.
    """
    spec = store.read_spec(run_dir)
    with contextlib.suppress(RuntimeError, MemoryError, OSError):
        room, micro_batch = room_bytes(spec.topology.device), spec.training.micro_batch
        recorder.add(ComponentSample(rank=rank, component="room", source="held", bytes=room, micro_batch=micro_batch))


def take_seat(spec: RunSpec, rank: int) -> Seat:
    """The rank's place as the launcher's environment gives it (torchrun's variables)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != spec.topology.world_size:
        raise UnsupportedError(f"{world_size} processes were started for a spec of {spec.topology.world_size}")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if placement.shares_gpu(os.environ):
        # NCCL refuses two ranks of one host on one GPU; under host names of their own they talk through sockets.
        os.environ |= {"NCCL_HOSTID": f"paceline-rank-{rank}", "LOCAL_RANK": "0"}
        local_rank = 0
    return Seat(rank=rank, local_rank=local_rank, world_size=world_size, device=spec.topology.device)


def checkpoint_folder(spec: RunSpec, run_dir: Path) -> str:
    """Where the launcher says, or in the run folder, unless that is a node's own and ends with it."""
    named = os.environ.get("PACELINE_CHECKPOINTS")
    if spec.checkpoint_every is not None and named is None and "PACELINE_SPEC" in os.environ:
        raise UnsupportedError(
            "checkpoint_every was given, but this node's run folder ends with its job; accepted is a folder that all "
            "nodes share, which the variable PACELINE_CHECKPOINTS names"
        )
    return named or str(run_dir / store.CHECKPOINTS)


@contextlib.contextmanager
def gauged(run_dir: Path, spec: RunSpec, seat: Seat) -> Iterator[None]:
    """While the block runs, the first rank of each host writes down its gauges and those of the GPUs of its ranks.

    Each reading is handed to the system at once: a kill loses none.
    """
    shared = placement.shares_gpu(os.environ)
    # Ranks that share a GPU all have local rank 0.
    first = seat.rank == 0 if shared else seat.local_rank == 0
    if not spec.telemetry_hz or not first:
        yield
        return
    gpus = 0 if seat.device == "cpu" else 1 if shared else gpus_of_a_node(spec)
    host = placement.node_name(os.environ)
    with (run_dir / f"samples-gauges-{seat.rank}.jsonl").open("w", buffering=1) as file:

        def write(snapshot: Snapshot) -> None:
            file.write("".join(map(store.sample_line, gauge_samples(snapshot, seat.rank, host))))

        with Sampler(1 / spec.telemetry_hz, keep=1, devices=gpus, sink=write):
            yield


def gpus_of_a_node(spec: RunSpec) -> int:
    """One for each rank; a rank that serves has as many as its replica is cut over."""
    parallel = spec.engine.options.get("tensor_parallel", 1) if spec.engine else 1
    assert isinstance(parallel, int)
    return spec.topology.processes_per_node * parallel


def join(spec: RunSpec, seat: Seat) -> None:
    """Set the device and its arithmetic, then enter the process group; one process makes a group of one."""
    with collection_paused():
        import torch
        import torch.distributed as dist

        if spec.is_trained:
            # torch's optimizers import it at their first call.
            import torch._dynamo

    if seat.device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError("the spec asks for device cuda, but torch sees no GPU here")
        if seat.local_rank >= torch.cuda.device_count():
            raise UnsupportedError(
                f"local rank {seat.local_rank} has no GPU: this host shows {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(seat.local_rank)
    # fp32 means fp32: TF32 would be another precision under the same name.
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group(
        "nccl" if seat.device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=spec.timeout_s),
        device_id=torch.device(seat.torch_device) if seat.device == "cuda" else None,
    )


def leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def gauge_samples(snapshot: Snapshot, rank: int, host: str) -> list[GaugeSample]:
    """A reading as the samples of a run: the host first, then each GPU."""
    own = GaugeSample(
        rank=rank,
        host=host,
        at_s=snapshot.host.at_s,
        memory_used_bytes=snapshot.host.memory_used_bytes,
        energy_j=snapshot.host.energy_j,
        temperature_c=snapshot.host.temperature_c,
        cpu_ratio=snapshot.host.cpu_ratio,
        frequency_hz=snapshot.host.frequency_hz,
    )
    return [own, *(_gauge_sample(device, rank, host) for device in snapshot.devices)]


def _gauge_sample(device: DeviceSample, rank: int, host: str) -> GaugeSample:
    return GaugeSample(
        rank=rank,
        host=host,
        at_s=device.at_s,
        device=device.device,
        utilisation_ratio=device.utilisation_ratio,
        memory_used_bytes=device.memory_used_bytes,
        power_w=device.power_w,
        energy_j=device.energy_j,
        temperature_c=device.temperature_c,
        sm_clock_hz=device.sm_clock_hz,
        memory_clock_hz=device.memory_clock_hz,
        throttle_reasons=device.throttle_reasons,
    )


if __name__ == "__main__":
    exit_code = main(sys.argv)
    # The interpreter would look through all of torch for garbage before it ends, for most of a second.
    gc.freeze()
    sys.exit(exit_code)
