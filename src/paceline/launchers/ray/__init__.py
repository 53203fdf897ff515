"""Ray: an existing cluster, with one placement group per run and one actor per rank.

The controller never imports ray. A driver process does (see `driver`), and Ray regards it as the owner of the job.
However the controller or the driver ends, Ray removes the group and its actors, and each rank ends with its actor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.contract import Job, JobState, may_be_lost
from paceline.errors import LaunchError, MissingPackageError, require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.environment import is_secret
from paceline.host.processes import end_all, end_with_parent
from paceline.launchers import _job
from paceline.launchers._job import retry_once
from paceline.launchers.ray.cluster import REFUSED, Request, probe
from paceline.results.records import Status

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {"port": "where ranks rendezvous before they choose their own ports"}
PLACEMENTS = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
# Ranks have 5 s to end (see `host.processes`), then their files are fetched.
END_S = 30.0
# Connecting takes some seconds; Ray itself gives up after half a minute, or never.
ENTER_S = 120.0
_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9._-]+:\d{1,5}|(ray://)?\[[0-9A-Fa-f:.]+\]:\d{1,5}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Options:
    """address: `auto` (the cluster of this host, or RAY_ADDRESS), HOST:PORT of the head (from a node of the cluster),
    or ray://HOST:PORT (from anywhere else).

    placement: Ray's strategy for nodes. The default STRICT_SPREAD puts each on its own machine; with any other, two
    nodes of the spec may share a machine.

    gpus: GPUs per node if the experiment says `device: auto` or `processes: all`; 0 means CPU.

    cpus: Ray CPUs that each rank reserves. threads: CPU threads per rank. resources: what else a rank reserves, by
    Ray's names.

    env: more variables for the ranks; they are recorded, so no secrets.

    port: rendezvous port on the first node; 0 means any free one. scratch: directory on each node for the files of a
    running run; default: the temporary directory. pending_s: how long to wait for free resources.
    """

    address: str = "auto"
    placement: str = "STRICT_SPREAD"
    gpus: int = 1
    cpus: int = 1
    threads: int = 1
    resources: Any = None
    env: Any = None
    port: int = 0
    scratch: str = ""
    pending_s: float = 600.0

    def __post_init__(self) -> None:
        accepted = "auto, HOST:PORT or ray://HOST:PORT"
        require(_ADDRESS.fullmatch(self.address) is not None, "ray.address", self.address, accepted)
        require(self.placement in PLACEMENTS, "ray.placement", self.placement, ", ".join(PLACEMENTS))
        require(self.gpus >= 0, "ray.gpus", self.gpus, "a whole number, 0 or more")
        require(self.cpus >= 1, "ray.cpus", self.cpus, "a whole number, 1 or more")
        require(self.threads >= 1, "ray.threads", self.threads, "a whole number, 1 or more")
        require(0 <= self.port < 65536, "ray.port", self.port, "a port number, or 0 for any free port")
        require(self.pending_s > 0, "ray.pending_s", self.pending_s, "a positive number of seconds")
        require(not self.scratch or self.scratch.startswith("/"), "ray.scratch", self.scratch, "an absolute path")
        amounts = self.resources.values() if isinstance(self.resources, Mapping) else [None]
        fits = all(isinstance(amount, int | float) and amount > 0 for amount in amounts)
        reserved = isinstance(self.resources, Mapping) and {"CPU", "GPU"} & set(self.resources)
        accepted = "a mapping of Ray's names to positive numbers, without CPU and GPU"
        require(self.resources is None or (fits and not reserved), "ray.resources", self.resources, accepted)
        require(self.env is None or isinstance(self.env, Mapping), "ray.env", self.env, "a mapping of names to text")
        for name, value in (self.env or {}).items():
            require(bool(_VARIABLE.fullmatch(str(name))), "ray.env", name, "names of letters, digits and underscores")
            require(isinstance(value, str | int | float), f"ray.env.{name}", value, "text or a number")
            accepted = "no secret, because it would be recorded; set it in the environment of the Ray nodes"
            require(not is_secret(str(name), str(value)), f"ray.env.{name}", "...", accepted)


def offer(choice: Choice) -> Offer:
    """Offer what the options say. The cluster is only queried for a job."""
    chosen = parse_options(Options, choice)
    return Offer(device="cuda" if chosen.gpus else "cpu", processes=max(1, chosen.gpus))


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.launcher)
    if importlib.util.find_spec("ray") is None:
        return str(MissingPackageError("ray", "the launcher ray", "'paceline[ray]'"))
    return None


def preflight(specs: Sequence[RunSpec]) -> None:
    """Connect to the cluster once, in a separate process."""
    address = parse_options(Options, specs[0].launcher).address
    retry_once(lambda: probe(address))
    command = [sys.executable, "-m", "paceline.launchers.ray.cluster", address]
    try:
        done = subprocess.run(
            command,
            env=_driver_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENTER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"could not connect to Ray at {address} within {ENTER_S:g} s; try `ray status --address {address}`"
        ) from None
    refused = [line for line in done.stdout.splitlines() if line.startswith(REFUSED)]
    if refused:
        raise LaunchError(refused[-1].removeprefix(REFUSED))


def _driver_environment() -> dict[str, str]:
    """Disable Ray's usage reports unless the user has chosen."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0")}


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    request = Request(
        name=_job.job_name(spec, run_dir),
        run_dir=str(run_dir),
        version=__version__,
        address=chosen.address,
        placement=chosen.placement,
        nodes=topology.nodes,
        processes_per_node=topology.processes_per_node,
        each={"CPU": chosen.cpus, **({"GPU": 1} if topology.device == "cuda" else {}), **(chosen.resources or {})},
        env=_job.rank_environment(spec, chosen.threads, chosen.env),
        runner="paceline.launchers.ray.actor",
        port=chosen.port,
        scratch=chosen.scratch,
        pending_s=chosen.pending_s,
        expendable=tuple(may_be_lost(spec)),
    )
    driver = (sys.executable, "-m", "paceline.launchers.ray.driver")
    text = json.dumps(asdict(request), indent=2)
    return Job(argv=driver, files={"request.json": text}, log=str(run_dir / "log.txt"), name=request.name)


@dataclass(slots=True)
class Driven:
    """A driver process and the last state it reported."""

    child: subprocess.Popen[bytes]
    rest: bytes = b""
    state: dict[str, Any] = field(default_factory=dict)


_drivers: dict[int, Driven] = {}


def submit(job: Job) -> Mapping[str, Any]:
    """Start the driver. The first polls show whether Ray accepts the job."""
    assert job.log is not None
    request = json.dumps(json.loads(job.files["request.json"])).encode()
    with Path(job.log).open("wb") as log:
        child = subprocess.Popen(
            job.argv,
            env=_driver_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            # The driver ends with this process. It ends the ranks, and Ray whatever the driver cannot.
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    child.stdin.write(request + b"\n")
    child.stdin.flush()
    _drivers[child.pid] = Driven(child)
    return {"pid": child.pid, "name": job.name, "log": job.log}


def poll(handle: Mapping[str, Any]) -> JobState:
    driven = _drivers.get(int(handle["pid"]))
    if driven is None:
        # A job of an earlier controller: it ended with it.
        return JobState(running=False)
    code = driven.child.poll()
    assert driven.child.stdout is not None
    while piece := driven.child.stdout.read():
        *lines, driven.rest = (driven.rest + piece).split(b"\n")
        for line in lines:
            driven.state = json.loads(line)
    state = driven.state
    if "refused" in state:
        raise LaunchError(state["refused"])
    if "ended" in state:
        status = state["status"] and Status(state["status"])
        lost = tuple(state["lost"])
        return JobState(running=False, exit_code=state["ended"], status=status, reason=state["reason"], lost=lost)
    if code is not None:
        why = f"the driver of the Ray job ended with exit code {code}; see {handle['log']}"
        return JobState(running=False, exit_code=code, status=Status.FAILED, reason=why)
    return JobState(running=True, waiting=None if "running" in state else state.get("waiting", "connecting to Ray"))


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    driven = _drivers.get(int(handle["pid"]))
    return None if driven is None else driven.state.get("missing")


def cancel(handle: Mapping[str, Any]) -> None:
    """Let the driver end the ranks and release their resources. If it does not, it is ended and Ray does that."""
    driven = _drivers.pop(int(handle["pid"]), None)
    if driven is None:
        return
    assert driven.child.stdin is not None
    assert driven.child.stdout is not None
    driven.child.stdin.close()
    try:
        driven.child.wait(END_S)
    except subprocess.TimeoutExpired:
        end_all(driven.child)
    driven.child.stdout.close()
