"""One rank: reads the spec, runs the workload, and writes samples and an outcome.

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
from dataclasses import asdict, fields, replace
from pathlib import Path

from paceline.contract import Seat, devices_per_rank
from paceline.errors import InvalidRunError, RequestError, ScriptError, UnsupportedError
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.gauges import Sampler, Snapshot
from paceline.host.machine import probe
from paceline.host.machine import to_dict as machine_facts
from paceline.host.memory_limit import room_bytes
from paceline.host.processes import collection_paused, end_with_parent
from paceline.host.rank_lines import marked_output
from paceline.launchers.node import log_transport, placement, torchrun
from paceline.results import store
from paceline.results.records import ComponentSample, Evidence, GaugeSample, Outcome, Sample, Status, StepSample
from paceline.training.instruments import peak_bytes

PEAK_INTERVAL_S = 1.0
# Messages of the CUDA and CPU allocators, the driver, the C++ library, the kernel (ENOMEM) and failed thread starts.
_OOM = re.compile(
    r"out of memory|out_of_memory|can(no|')t allocate memory|DefaultCPUAllocator|bad_alloc|can't start new thread",
    re.IGNORECASE,
)


class FolderRecorder:
    """Implements `contract.Recorder` in the run directory. Every line is flushed at once, so that a kill loses none."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir = run_dir
        self._file = (run_dir / f"samples-{rank}.jsonl").open("w", buffering=1)
        self._position = store.ProgressFile(run_dir, rank)
        self.evidence: Evidence | None = None
        self.device: str | None = None
        self._peak_read_at = 0.0

    def add(self, sample: Sample) -> None:
        self._file.write(store.sample_line(sample))
        if not isinstance(sample, StepSample):
            return
        self._position.loss = sample.loss
        # Reading the allocator's peak takes tens of microseconds, so the monitor gets it at most once per second.
        now = time.monotonic()
        if self.device is not None and now - self._peak_read_at >= PEAK_INTERVAL_S:
            self._peak_read_at = now
            peak = peak_bytes(self.device)
            # The counter is reset once per run; the peak shown is that of the whole run. It is NaN at first.
            if not peak <= self._position.peak_bytes:
                self._position.peak_bytes = peak

    def progress(self, step: int, phase: str) -> None:
        self._position.mark(step, phase)

    def conclude(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def keep(self, name: str, content: bytes) -> None:
        (self._run_dir / name).write_bytes(content)

    def close(self) -> None:
        self._file.close()


def main(argv: list[str]) -> int:
    """Returns 0 if the outcome is ok and 1 otherwise, so that the launcher ends the other ranks."""
    end_with_parent()
    run_dir = Path(argv[1])
    rank = int(os.environ.get("RANK", "0"))
    with (run_dir / f"stack-{rank}.txt").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        recorder = FolderRecorder(run_dir, rank)
        started_at = time.time()
        with marked_output(rank):
            status, error = attempt(run_dir, rank, recorder)
        if status is Status.OOM:
            record_room(run_dir, rank, recorder)
        try:
            recorder.close()
        except OSError as full:
            # The disk had no space for the last lines.
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
    """Write the outcome, or print it for the node's agent if the disk is full. Returns the status that was reported: a
    run without evidence is not ok."""
    try:
        store.write_outcome(run_dir, outcome)
        return outcome.status
    except OSError as full:
        sentence = outcome.error or f"the outcome could not be written: {full}"
    status = Status.FAILED if outcome.status is Status.OK else outcome.status
    short = replace(outcome, status=status, error=sentence, evidence=None)
    content = json.dumps(asdict(short)).encode()
    sys.stdout.write(f"{log_transport.file_line(f'outcome-{outcome.rank}.json', content)}\n")
    sys.stdout.flush()
    return short.status


def attempt(run_dir: Path, rank: int, recorder: FolderRecorder) -> tuple[Status, str | None]:
    """Run the workload; an exception becomes a status and one sentence."""
    try:
        spec = store.read_spec(run_dir)
        check_variables(spec)
        seat = replace(take_seat(spec, rank), checkpoints=checkpoint_folder(spec, run_dir), run_dir=str(run_dir))
        # The memory of a script is that of its own process.
        recorder.device = None if spec.script else seat.device
        if seat.local_rank == 0:
            facts = {**machine_facts(probe()), "host": placement.node_name(os.environ)}
            store.write_json(run_dir / f"machine-{facts['host']}.json", facts)
        with gauged(run_dir, spec, seat):
            # Inference ranks need no process group: they coordinate through a store and leave the GPUs to the engine.
            # A script joins its own.
            joins = spec.serving is None and spec.script is None
            # Without torchrun, rank 0 runs the store of the job until it ends.
            _store = torchrun.host_store()
            if joins:
                join(spec, seat)
            load("workloads", spec.workload.name).run(spec, seat, recorder)
            if joins:
                leave()
        if spec.steps:
            recorder.progress(spec.steps, "done")
        return Status.OK, None
    except (UnsupportedError, RequestError) as error:
        # Some request errors show only in the data, such as an invalid line late in a file.
        return Status.UNSUPPORTED, str(error)
    except InvalidRunError as error:
        return Status.INVALID, str(error)
    except ScriptError as error:
        # The script has printed its own traceback.
        return (Status.OOM if _OOM.search(str(error)) else Status.FAILED), str(error)
    except Exception as error:
        traceback.print_exc()
        return classify(error)


def classify(error: Exception) -> tuple[Status, str]:
    """OOM or failed, and the first line of the error."""
    sentence = f"{type(error).__name__}: {error}".strip().split("\n")[0]
    out_of_memory = isinstance(error, MemoryError) or _OOM.search(str(error)) is not None
    return (Status.OOM if out_of_memory else Status.FAILED), sentence


def record_room(run_dir: Path, rank: int, recorder: FolderRecorder) -> None:
    """Record how much memory this rank could use when it ran out: suggestions must fit into it.

    A device that cannot report it must not cost the run its outcome.
    """
    spec = store.read_spec(run_dir)
    with contextlib.suppress(RuntimeError, MemoryError, OSError):
        room, micro_batch = room_bytes(spec.topology.device), spec.training.micro_batch
        recorder.add(ComponentSample(rank=rank, component="room", source="held", bytes=room, micro_batch=micro_batch))


def check_variables(spec: RunSpec) -> None:
    """InvalidRunError if this rank does not have the variables of its spec: its speed would be another setting's."""
    for name, value in spec.env.items():
        if (own := os.environ.get(name)) != value:
            now = "is not set" if own is None else "has another value"
            raise InvalidRunError(
                f"env.{name}: {value!r} was requested, but the variable {now} in this rank. Look for what changes it "
                "on the way: the set-up lines of the launcher, the image, or a shell profile"
            )


def take_seat(spec: RunSpec, rank: int) -> Seat:
    """This rank's placement, from the launcher's environment (torchrun's variables)."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != spec.topology.world_size:
        raise UnsupportedError(f"got {world_size} processes, expected {spec.topology.world_size} as in the spec")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if placement.shares_gpu(os.environ):
        # NCCL rejects two ranks of one host on one GPU. With different host ids they communicate through sockets.
        os.environ |= {"NCCL_HOSTID": f"paceline-rank-{rank}", "LOCAL_RANK": "0"}
        local_rank = 0
    return Seat(rank=rank, local_rank=local_rank, world_size=world_size, device=spec.topology.device)


def checkpoint_folder(spec: RunSpec, run_dir: Path) -> str:
    """The directory that the launcher sets, or one in the run directory if that outlives the job."""
    configured = os.environ.get("PACELINE_CHECKPOINTS")
    if spec.checkpoint_every is not None and configured is None and "PACELINE_SPEC" in os.environ:
        raise UnsupportedError(
            "checkpoint_every: this node's run directory is deleted with its job, expected a directory that all nodes "
            "share. Set the variable PACELINE_CHECKPOINTS to such a directory."
        )
    return configured or str(run_dir / store.CHECKPOINTS)


@contextlib.contextmanager
def gauged(run_dir: Path, spec: RunSpec, seat: Seat) -> Iterator[None]:
    """Sample the gauges of this host and of its ranks' GPUs while the block runs, on the first rank of each host.

    Every reading is flushed at once, so that a kill loses none.
    """
    shared = placement.shares_gpu(os.environ)
    # Ranks that share a GPU all have local rank 0.
    first = seat.rank == 0 if shared else seat.local_rank == 0
    if not spec.telemetry_hz or not first:
        yield
        return
    gpus = 0 if seat.device == "cpu" else 1 if shared else spec.topology.processes_per_node * devices_per_rank(spec)
    host = placement.node_name(os.environ)
    with (run_dir / f"samples-gauges-{seat.rank}.jsonl").open("w", buffering=1) as file:

        def write(snapshot: Snapshot) -> None:
            file.write("".join(map(store.sample_line, gauge_samples(snapshot, seat.rank, host))))

        # Ranks of this launch that are not relatives of this process, as under Ray, are known by one of these.
        marks = (str(run_dir), spec.lineage or "")
        with Sampler(1 / spec.telemetry_hz, keep=1, devices=gpus, sink=write, marks=marks):
            yield


def gauge_samples(snapshot: Snapshot, rank: int, host: str) -> list[GaugeSample]:
    """One reading as samples: the host first, then each GPU."""
    recorded = {field.name for field in fields(GaugeSample)}
    usage = None if snapshot.usage is None else asdict(snapshot.usage)
    readings = [{**asdict(snapshot.host), "usage": usage}, *(asdict(device) for device in snapshot.devices)]
    return [
        GaugeSample(rank=rank, host=host, **{name: value for name, value in reading.items() if name in recorded})
        for reading in readings
    ]


def join(spec: RunSpec, seat: Seat) -> None:
    """Set the device and its precision, then join the process group (of one, for a single process)."""
    with collection_paused():
        import torch
        import torch.distributed as dist

        if spec.is_trained:
            # torch's optimizers would import it at their first step.
            import torch._dynamo

    # What the imports created stays until the end: later collections need not scan it, which would take 0.5 s each.
    gc.freeze()
    if seat.device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError("the spec requests device cuda, but torch sees no GPU here")
        if seat.local_rank >= torch.cuda.device_count():
            raise UnsupportedError(
                f"local rank {seat.local_rank} has no GPU: this host has {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(seat.local_rank)
    # fp32 means fp32: TF32 is a different precision.
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


if __name__ == "__main__":
    exit_code = main(sys.argv)
    # Without this, the garbage collector scans all of torch at exit, which takes most of a second.
    gc.freeze()
    sys.exit(exit_code)
