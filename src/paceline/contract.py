"""What each kind of plugin must define: workloads, strategies, engines and launchers, and the values they exchange.

A plugin is a module; `experiment.plugins` finds and loads it. Every kind has `check(spec)`, which returns a sentence if
the plugin cannot do what the spec requests, else None. Exporters are described in `report.exporters`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.results.records import Evidence, Sample, Status

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank: its number, its device, when it started (`time.monotonic`), the directory for checkpoints, and the
    run directory on its node."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    taken_at_s: float = field(default_factory=time.monotonic, compare=False)
    checkpoints: str | None = None
    run_dir: str | None = None

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.local_rank}" if self.device == "cuda" else "cpu"


class Trainer(Protocol):
    """A model under one strategy. Losses are not divided by the accumulation; the trainer does that itself.

    A trainer with `interleaves = True` runs forward and backward of a step in one schedule, inside the last call of
    `backward`; their times are then not recorded apart. A trainer that can resume also has `save(folder)` and
    `load(folder)`, called on every rank between two steps. They store the parameters and the optimizer state exactly,
    each rank its own part. `save_later(folder, group)` does the same in the background: it returns when the state is
    copied, with a function that waits until it is written. A trainer that does not communicate in every step has
    `period`, the number of steps after which its communication repeats.
    """

    @property
    def updates(self) -> int:
        """Optimizer steps taken so far."""

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        """Return the loss of one micro batch; `last` is true for the last one before `update`."""

    def backward(self, loss: Tensor, last: bool) -> None: ...

    def update(self) -> Tensor | float:
        """Clip, step and clear gradients. Returns the global gradient norm before clipping."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the unsharded weights under the decoder's own names, the same on every rank.

        A trainer whose optimizer updates other copies of them has `master_parameters()` too, which yields those.
        """

    def declare(self) -> tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]:
        """Return dtypes, optimizer and settings as actually configured: evidence for the certificate."""


class Recorder(Protocol):
    """Stores what a workload observes. Samples must be raw: nothing is computed from them before."""

    def add(self, sample: Sample) -> None: ...
    def progress(self, step: int, phase: str) -> None: ...
    def conclude(self, evidence: Evidence) -> None: ...
    def keep(self, name: str, content: bytes) -> None:
        """Store a file of another program unchanged. Its name must match `log_transport.CARRIED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launcher will start. `str(job)` is the dry run: the command, then the files it needs.

    name: the name of the job in the engine, the same for the same run directory, so that it can be found again.
    settings: what the launcher's own `submit` also needs.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    log: str | None = None
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        command = " ".join([*(f"{k}={shlex.quote(v)}" for k, v in sorted(self.env.items())), shlex.join(self.argv)])
        return "\n".join(filter(None, (command.strip(), *self.files.values())))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job, the same for all engines. exit_code is None while the job runs.

    waiting: why it has not started, in the engine's words. status, reason: how it ended, if the engine knows what no
    rank could report (preempted, evicted, timed out); None if the outcomes of the ranks decide. lost: nodes that are
    gone and whose outcomes are not needed, see `may_be_lost`. recurs: the job ended for a reason that the same
    request would meet again, such as a missing image or too few nodes.
    """

    running: bool
    exit_code: int | None = None
    waiting: str | None = None
    status: Status | None = None
    reason: str | None = None
    lost: tuple[int, ...] = ()
    recurs: bool = False


def may_be_lost(spec: RunSpec) -> range:
    """Return the nodes without which a job can continue once rank 0 sends requests.

    In an inference run these are all nodes except those of the load generator and its own replica. It reassigns the
    unanswered requests of a lost replica to the others and records that.
    """
    return range(nodes_per_replica(spec), spec.topology.nodes) if spec.serving is not None else range(1, 1)


def nodes_per_replica(spec: RunSpec) -> int:
    """Return how many nodes serve one replica together; 1 unless the engine spreads them."""
    spread = None if spec.engine is None else getattr(load("engines", spec.engine.name), "nodes_per_replica", None)
    return 1 if spread is None else int(spread(spec))


def devices_per_rank(spec: RunSpec) -> int:
    """Return how many devices a rank uses: one, or its share of the tensor parallelism of a replica."""
    parallel = spec.engine.options.get("tensor_parallel") if spec.engine else None
    return int(str(parallel or 1)) // nodes_per_replica(spec)


class Workload(Protocol):
    """What each rank does.

    A workload that searches also has `follow(spec, records) -> RunSpec | None`: given the requested spec and the sealed
    records of the series so far, it returns the next run, or None at the end. It runs on the controller, and again from
    the start when a search is resumed, so it must decide by the records alone. A workload whose size is not given by
    steps also has `outline(spec) -> str`, for `paceline plan`. One that can know before a run that it cannot start has
    `preflight(spec)`, as engines have.
    """

    def check(self, spec: RunSpec) -> str | None: ...
    def run(self, spec: RunSpec, seat: Seat, recorder: Recorder) -> None: ...


class Strategy(Protocol):
    """How a model is trained on several ranks.

    A strategy that imports large packages also has `preload(device)`, which imports those that neither start a thread
    nor use the device. Ranks are forked from a process that has called it (see `launchers.local`).

    A strategy that changes the arithmetic on purpose has `approximation(options)`, which says in words how, or returns
    None if these options do not. Its runs are then not equal work (see docs/compression.md). It may also have
    `approximates_loss(options)`, true if the loss of given weights is not exact either, and `averages_every(options)`,
    the number of steps after which all ranks have the same weights, if that is not every step.
    """

    def check(self, spec: RunSpec) -> str | None: ...
    def wrap(self, spec: RunSpec, seat: Seat) -> Trainer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One replica that answers requests. secret: its API key, which is sent but never stored."""

    url: str
    model: str
    secret: str | None = field(default=None, repr=False)
    certificates: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Serves models. `open` provides the replicas of this rank while its block lasts and leaves nothing running.

    Every engine answers over HTTP like OpenAI's API, so that one client can test all of them. An engine that starts
    servers on the devices of its rank has `STARTS = True`; other processes on these devices are then counted.

    An engine that can spread one replica over several nodes has `nodes_per_replica(spec) -> int`; the ranks of all but
    the first of these nodes provide no replica. Its option `tensor_parallel` counts the devices of all of them.

    An engine whose servers can be queried before a run also has `preflight(spec)`, which raises UnsupportedError if a
    run with these options could not start now. It is called if the client runs on this host, and starts nothing.

    An engine that limits the length of a request has `longest_request(spec)`, which returns the most tokens of a prompt
    and its answer together and the option that decides it, or None if it is unknown.
    """

    def check(self, spec: RunSpec) -> str | None: ...
    def open(self, spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]: ...


class Launcher(Protocol):
    """Starts jobs on an engine: this machine, Kubernetes, Slurm, SSH, Ray.

    `prepare` is pure: the same spec and directory give the same job. `submit` starts it and returns a handle. `poll`
    returns its state and moves files that the ranks have sent into the run directory; it retries while the engine is
    unavailable. `cancel` ends the job and removes what it left in the engine. It may be called after the end, or twice;
    False means that the job may still exist. `submit`, `poll` and `collect` raise LaunchError with one sentence if the
    engine refuses.

    Optional:
    `adopt(job, handle) -> handle | None` if jobs outlive the controller: find the job that an earlier controller
    submitted, even if that controller died before it stored the handle.
    `collect(handle, run_dir) -> str | None` without a shared disk: after the end, fetch what is missing, and return a
    sentence about what could not be fetched.
    `offer(choice) -> Offer` if the launcher has its own machines.
    `attend(out, control) -> int` if every process of a running job runs the command: call `control`, the rest of the
    command, in one of them, and return its exit code in all of them.
    `expect(specs)` if the first job can be made faster: these runs will probably follow. It begins what takes long, and
    returns at once. It starts no job, and what it began ends with this process.
    `close()` if it keeps something between the jobs of a campaign; called after the last one.
    `HERE = True` if the ranks are processes of this host.
    `preflight(specs)` if the engine can be queried before a job: given the remaining runs of one set of options, raise
    LaunchError if certainly none of them could start (no such cluster, partition or permission). It is called once per
    set of options, before anything is written, unless a job of these runs may be adopted. It starts no job and leaves
    nothing in the engine. Problems of single runs, or that may pass while a job is queued, are left to the runs.
    """

    def check(self, spec: RunSpec) -> str | None: ...
    def prepare(self, spec: RunSpec, run_dir: Path) -> Job: ...
    def submit(self, job: Job) -> Mapping[str, Any]: ...
    def poll(self, handle: Mapping[str, Any]) -> JobState: ...
    def cancel(self, handle: Mapping[str, Any]) -> bool | None: ...
