"""Plugins: a module is a plugin, its folder the registry, its first docstring line the description.

`names(kind)` reads the folder without importing anything; the word for suite_json.py is suite-json. A dotted name is
any importable module; installed packages may register modules under the entry points `paceline.<kind>`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from paceline.experiment.spec import RunSpec
from paceline.results.records import Evidence, Sample, Status

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one rank sits: which of how many, the device it drives, since when (`time.monotonic`), and the folder of
    its run's checkpoints."""

    rank: int
    local_rank: int
    world_size: int
    device: str
    taken_at_s: float = field(default_factory=time.monotonic, compare=False)
    checkpoints: str | None = None

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.local_rank}" if self.device == "cuda" else "cpu"


class Trainer(Protocol):
    """A model under one strategy. Losses arrive undivided: dividing by the accumulation is its own affair.

    One that can be continued also has `save(folder)` and `load(folder)`, called on every rank between two steps: what
    has learned and the optimizer's state, as this rank and its peers hold it, to the last bit.
    """

    @property
    def updates(self) -> int:
        """Optimizer steps really taken so far."""

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        """Loss of one micro batch; `last` is true for the final one before `update`."""

    def backward(self, loss: Tensor, last: bool) -> None: ...

    def update(self) -> Tensor | float:
        """Clip, step, clear gradients; returns the global gradient norm before clipping."""

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole, unsharded weights under the decoder's own names, the same on every rank."""

    def declare(self) -> tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]:
        """dtypes, optimizer and settings as really configured: evidence for the certificate."""


class Recorder(Protocol):
    """Takes what a workload observes. Nothing may be computed from samples before they are handed over."""

    def add(self, sample: Sample) -> None: ...
    def progress(self, step: int, phase: str) -> None: ...
    def conclude(self, evidence: Evidence) -> None: ...
    def keep(self, name: str, content: bytes) -> None:
        """A file that another program wrote, as it is; the name begins with what `parcel` carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launcher will start; `str(job)` is the dry run: the command, then the files it needs.

    name: what the engine shall call it, the same for the same run folder, so that it can be found again. settings: what
    the launcher's own `submit` needs to know besides.
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
    """Our word for what the engine says. exit_code is None while the job runs.

    waiting: why it has not begun yet, in the engine's words. status and reason: how the engine says it ended, where it
    knows what no rank could leave behind (pre-empted, evicted, out of its time); None where the ranks' word is enough.
    lost: nodes that went away and whose ranks need not speak, see `may_be_lost`.
    """

    running: bool
    exit_code: int | None = None
    waiting: str | None = None
    status: Status | None = None
    reason: str | None = None
    lost: tuple[int, ...] = ()


def may_be_lost(spec: RunSpec) -> range:
    """Nodes that a job can go on without, once rank 0 asks: of served replicas all but that of the client, which gives
    what a lost replica leaves unanswered to the others, and says so."""
    return range(1, spec.topology.nodes if spec.serving is not None else 1)


class Workload(Protocol):
    """A workload that searches also has `follow(spec, records) -> RunSpec | None`: given the spec that was asked for
    and the sealed records of its series so far, the next run to make, or None at the end. It is called on the
    controller, again from the start when a search is resumed, so it must answer by the records alone. One whose size
    is not told by steps also has `outline(spec) -> str`, for `paceline plan`."""

    def check(self, spec: RunSpec) -> str | None: ...
    def run(self, spec: RunSpec, seat: Seat, recorder: Recorder) -> None: ...


class Strategy(Protocol):
    """One whose ranks import large packages also has `preload(device)`, which imports them, starts no thread and
    touches no device: ranks on a CPU are forked from a process that has called it (see launchers/local)."""

    def check(self, spec: RunSpec) -> str | None: ...
    def wrap(self, spec: RunSpec, seat: Seat) -> Trainer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One replica that answers. secret is what it wants to be shown; it is sent, and never written down."""

    url: str
    model: str
    secret: str | None = field(default=None, repr=False)
    certificates: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """`open` gives the replicas of this rank for as long as its block lasts, and leaves nothing running after it. Every
    engine answers over HTTP as OpenAI's does, so that all are asked by the same client. One that starts servers on the
    devices of its rank has `STARTS = True`: what else runs there is then counted.

    One whose servers can be asked before any run also has `preflight(spec)`, which raises UnsupportedError where a run
    of these options could not begin now. It is called where the client runs on this host, and starts nothing."""

    def check(self, spec: RunSpec) -> str | None: ...
    def open(self, spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]: ...


class Launcher(Protocol):
    """`prepare` is pure: the same spec and folder give the same job. `poll` also moves what ranks have sent so far into
    the run folder; an engine that is away for a moment is asked again. `cancel` ends the job, removes what it left
    with the engine, and may be called after its end or twice; False says that the job may still be there. `submit`,
    `poll` and `collect` raise LaunchError with one sentence when the engine refuses.

    One on whose engine a job outlives the controller also has `adopt(job, handle) -> handle | None`: the job that an
    earlier controller has submitted, whether or not it lived to write the handle down. One without a shared disk also
    has `collect(handle, run_dir) -> str | None`, called after the end: brings home what is missing, and says what
    could not be. One with machines of its own also has `offer(choice) -> Offer`. One that keeps something between the
    jobs of a campaign also has `close()`, called after the last of them. One whose ranks are processes of this
    host has `HERE = True`.

    One whose engine can be asked before any job also has `preflight(specs)`: given the runs of one choice of options
    that are still to be made, it raises LaunchError where it is sure that none of them could begin (no such cluster,
    partition or right). It is called once per choice, before anything is written, and not where a job of these runs may
    be adopted. It starts no job and leaves nothing with the engine; what holds for some runs only, or may pass while
    they wait in a queue, is left to them.
    """

    def check(self, spec: RunSpec) -> str | None: ...
    def prepare(self, spec: RunSpec, run_dir: Path) -> Job: ...
    def submit(self, job: Job) -> Mapping[str, Any]: ...
    def poll(self, handle: Mapping[str, Any]) -> JobState: ...
    def cancel(self, handle: Mapping[str, Any]) -> bool | None: ...
