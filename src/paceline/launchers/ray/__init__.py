"""A Ray cluster that is already there: a placement group, one actor per rank, the same worker.

The controller never imports ray: a driver process of its own does (see `_ray_driver`), which Ray takes for the owner of
the job. However the controller or the driver ends, Ray removes the group and its actors, and each rank ends with its
actor.
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
from paceline.launchers import _start
from paceline.launchers._retry import asked_again
from paceline.launchers.ray.cluster import REFUSED, knock
from paceline.launchers.ray.request import Request
from paceline.results.records import Status

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {"port": "where ranks rendezvous before they choose their own ports"}
PLACEMENTS = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
# Ranks get 5 s to end politely (see `host.processes`), and what they left is then fetched.
END_S = 30.0
# To enter a cluster takes some seconds; Ray itself gives up after half a minute, or never.
ENTER_S = 120.0
_ADDRESS = re.compile(r"auto|(ray://)?[A-Za-z0-9._-]+:\d{1,5}|(ray://)?\[[0-9A-Fa-f:.]+\]:\d{1,5}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Options:
    """address: `auto` (the cluster that this host is a node of, or RAY_ADDRESS), HOST:PORT of its head, seen from one
    of its nodes, or ray://HOST:PORT from anywhere else.

    placement: how Ray lays nodes out, STRICT_SPREAD by default: each on a machine of its own. Under any other one two
    nodes of the spec may be one machine.

    gpus: GPUs of a node where the experiment says `device: auto` or `processes: all`; 0 means CPU.

    cpus: Ray's CPUs that each rank reserves. threads: CPU threads of each rank. resources: what else a rank reserves,
    by Ray's names.

    env: further variables of the ranks; they are recorded, so none may hold a secret.

    port: where ranks meet on the first node; 0 is any free one. scratch: folder of each node for its files while it
    runs, by default the system's temporary one. pending_s: how long to wait for room on the cluster.
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
        require(self.gpus >= 0, "ray.gpus", self.gpus, "a whole number from 0")
        require(self.cpus >= 1, "ray.cpus", self.cpus, "a whole number from 1")
        require(self.threads >= 1, "ray.threads", self.threads, "a whole number from 1")
        require(0 <= self.port < 65536, "ray.port", self.port, "a port, or 0 for any free one")
        require(self.pending_s > 0, "ray.pending_s", self.pending_s, "a positive number of seconds")
        require(not self.scratch or self.scratch.startswith("/"), "ray.scratch", self.scratch, "an absolute path")
        _check_resources(self.resources)
        _check_variables(self.env)


def _check_resources(resources: object) -> None:
    amounts = resources.values() if isinstance(resources, Mapping) else [None]
    fits = all(isinstance(amount, int | float) and amount > 0 for amount in amounts)
    reserved = isinstance(resources, Mapping) and {"CPU", "GPU"} & set(resources)
    accepted = "a mapping of Ray's names to positive numbers, without CPU and GPU"
    require(resources is None or (fits and not reserved), "ray.resources", resources, accepted)


def _check_variables(variables: object) -> None:
    require(variables is None or isinstance(variables, Mapping), "ray.env", variables, "a mapping of names to text")
    for name, value in (variables or {}).items():  # type: ignore[attr-defined]
        require(bool(_VARIABLE.fullmatch(str(name))), "ray.env", name, "names of letters, digits and underscores")
        require(isinstance(value, str | int | float), f"ray.env.{name}", value, "text or a number")
        accepted = "no secret: this is recorded; set it in the environment of the Ray nodes"
        require(not is_secret(str(name), str(value)), f"ray.env.{name}", "...", accepted)


def offer(choice: Choice) -> Offer:
    """What the options say: a cluster is not asked before a job is."""
    chosen = parse_options(Options, choice)
    return Offer(device="cuda" if chosen.gpus else "cpu", processes=max(1, chosen.gpus))


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.launcher)
    if importlib.util.find_spec("ray") is None:
        return str(MissingPackageError("ray", "the launcher ray", "'paceline[ray]'"))
    return None


def preflight(specs: Sequence[RunSpec]) -> None:
    """Enter the cluster once, by a process of its own, and leave it again."""
    address = parse_options(Options, specs[0].launcher).address
    asked_again(lambda: knock(address))
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
            f"no Ray cluster let this host in at {address} within {ENTER_S:g} s; try `ray status --address {address}`"
        ) from None
    refused = [line for line in done.stdout.splitlines() if line.startswith(REFUSED)]
    if refused:
        raise LaunchError(refused[-1].removeprefix(REFUSED))


def _driver_environment() -> dict[str, str]:
    """Ray reports its use to its makers unless somebody has said otherwise."""
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0")}


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    request = Request(
        name=_start.job_name(spec, run_dir),
        run_dir=str(run_dir),
        version=__version__,
        address=chosen.address,
        placement=chosen.placement,
        nodes=topology.nodes,
        processes_per_node=topology.processes_per_node,
        each={"CPU": chosen.cpus, **({"GPU": 1} if topology.device == "cuda" else {}), **(chosen.resources or {})},
        env={**_start.rank_environment(chosen.threads), **{k: str(v) for k, v in (chosen.env or {}).items()}},
        runner=_start.RUNNER or "paceline.launchers.ray.rank",
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
    """A driver process, and the last it said of its job."""

    child: subprocess.Popen[bytes]
    rest: bytes = b""
    said: dict[str, Any] = field(default_factory=dict)


_drivers: dict[int, Driven] = {}


def submit(job: Job) -> Mapping[str, Any]:
    """Start the driver; whether Ray takes the job is known by the first polls."""
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
            preexec_fn=_end_with_controller,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    child.stdin.write(request + b"\n")
    child.stdin.flush()
    _drivers[child.pid] = Driven(child)
    return {"pid": child.pid, "name": job.name, "log": job.log}


def _end_with_controller() -> None:
    """The driver is told to stop when this process dies; it ends the ranks, and Ray whatever the driver cannot."""
    end_with_parent(signal.SIGTERM)


def poll(handle: Mapping[str, Any]) -> JobState:
    driven = _drivers.get(int(handle["pid"]))
    if driven is None:
        # A job of an earlier controller: it ended with that one.
        return JobState(running=False)
    code = driven.child.poll()
    _listen(driven)
    said = driven.said
    if "refused" in said:
        raise LaunchError(said["refused"])
    if "ended" in said:
        status = said["status"] and Status(said["status"])
        lost = tuple(said["lost"])
        return JobState(running=False, exit_code=said["ended"], status=status, reason=said["reason"], lost=lost)
    if code is not None:
        why = f"the driver of the Ray job ended with exit code {code}; see {handle['log']}"
        return JobState(running=False, exit_code=code, status=Status.FAILED, reason=why)
    return JobState(running=True, waiting=said.get("waiting", "connecting to Ray") if "running" not in said else None)


def _listen(driven: Driven) -> None:
    """Take in the lines that have come; the last one counts."""
    assert driven.child.stdout is not None
    while piece := driven.child.stdout.read():
        *lines, driven.rest = (driven.rest + piece).split(b"\n")
        for line in lines:
            driven.said = json.loads(line)


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    driven = _drivers.get(int(handle["pid"]))
    return None if driven is None else driven.said.get("missing")


def cancel(handle: Mapping[str, Any]) -> None:
    """Let the driver end the ranks and give back what they held; one that does not is ended, and Ray does it."""
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
