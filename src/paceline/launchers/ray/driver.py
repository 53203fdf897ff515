"""The driver of one job on Ray (`python -m paceline.launchers.ray.driver`).

The request is the first line of standard input; the job ends when the input is closed. Each line of standard output is
the state of the job: {"waiting": why}, {"running": true}, {"refused": sentence}, or {"ended": exit_code, ...}. Files of
the ranks are written into the run directory as they arrive.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from paceline.errors import LaunchError
from paceline.host.processes import end_with_parent
from paceline.launchers._job import agent_arguments, is_past_setup, reported_failure
from paceline.launchers.node import log_transport, torchrun
from paceline.launchers.ray import actor as _ray_actor
from paceline.launchers.ray import cluster
from paceline.launchers.ray.cluster import Request
from paceline.results.records import Status

READ_S = 0.25
# After a rank has failed, how long the others may take to notice: most notice at once.
AFTERMATH_S = 3.0
# The same if the job may continue without it. Progress of rank 0 arrives once per second, later on a busy node.
DOUBT_S = 10.0
GRACE_S = 10.0
# How long an actor may be unreachable before it counts as lost.
AWAY_S = 60.0


class Ended(Exception):
    """The launcher has ended this job."""


@dataclass(slots=True)
class Member:
    """One rank of the job. taken: lines received. away_since: when Ray last failed to reach its actor. lost: why Ray
    has lost its actor. is_spared: it failed, and the job continues without it."""

    rank: int
    node: int
    actor: Any
    facts: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    taken: int = 0
    away_since: float | None = None
    code: int | None = None
    lost: tuple[Status, str] | None = None
    is_spared: bool = False

    @property
    def is_over(self) -> bool:
        return self.code is not None or self.lost is not None

    @property
    def ended_badly(self) -> bool:
        return bool(self.code) or self.lost is not None


@dataclass(frozen=True, slots=True)
class Inbox:
    """Receives the output of the ranks: files go into the run directory, all other lines into its log."""

    receiver: log_transport.Receiver
    log: IO[str]

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (printed := self.receiver.feed(line)) is not None:
                self.log.write(printed if printed.endswith("\n") else printed + "\n")
        self.log.flush()

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code that the agent reports: that of the rank itself, where a shell would show 1 or 137."""
        arrival = self.receiver.arrivals.get(rank)
        return None if arrival is None else arrival.exit_code


def main() -> None:
    end_with_parent(signal.SIGTERM)
    # Keep other output of Ray and its libraries away from the channel of states.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1) as channel:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        request = Request(**json.loads(sys.stdin.readline()))
        with contextlib.suppress(Ended, BrokenPipeError):
            try:
                state = drive(request, lambda state: _say(channel, state))
            except LaunchError as error:
                state = {"refused": str(error)}
            _say(channel, state)


def _say(channel: IO[str], state: dict[str, Any]) -> None:
    channel.write(json.dumps(state) + "\n")


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _check_input() -> None:
    """Raise Ended when the launcher has closed its end. It sends nothing after the request."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    if readable:
        raise Ended


def drive(request: Request, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the whole job. However this function ends, the ranks end and their resources are released."""
    import ray

    cluster.connect(request.address)
    # Ray installs its own handler.
    signal.signal(signal.SIGTERM, _end)
    run_dir = Path(request.run_dir)
    try:
        with (
            cluster.reserved(request, lambda why: report({"waiting": why}), _check_input) as group,
            (run_dir / "log.txt").open("a", encoding="utf-8") as log,
        ):
            inbox = Inbox(log_transport.Receiver(run_dir), log)
            with ranks(request, group, inbox) as members:
                report({"running": True})
                patience_s = DOUBT_S if request.expendable else AFTERMATH_S
                follow(members, inbox, lambda: spare(request, members, inbox), patience_s)
            spared = [member.rank for member in members if member.is_spared]
            return conclusion(members, run_dir, inbox.receiver.missing(request.world_size, but=spared))
    finally:
        ray.shutdown()


@contextlib.contextmanager
def ranks(request: Request, group: Any, inbox: Inbox) -> Iterator[list[Member]]:
    """Start all ranks. At the end none runs any more, and their last output is in the run directory."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(_ray_actor)
    each = dict(request.each)
    kind = ray.remote(
        num_cpus=each.pop("CPU"), num_gpus=each.pop("GPU", 0), resources=each, max_restarts=0, max_task_retries=0
    )(_ray_actor.RankActor)
    members = []
    for rank in range(request.world_size):
        node = rank // request.processes_per_node
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
        members.append(Member(rank, node, kind.options(scheduling_strategy=where).remote()))
    try:
        _check_nodes(request, members)
        for member, variables in zip(members, seats(request, members), strict=True):
            port = request.port or members[0].facts["port"]
            arguments = agent_arguments(port=port, controller_link=True)
            arguments += [f"--scratch={request.scratch}"] if request.scratch else []
            member.actor.start.remote([*arguments, "--per-rank", f"--runner={request.runner}"], variables)
        yield members
    finally:
        # End all running ranks at once and keep their last output.
        calls = [member.actor.end.remote(member.taken, GRACE_S) for member in members if not member.is_over]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=GRACE_S * 1.5) if calls else ([], [])
        for answer in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                inbox.take(ray.get(answer))


def _check_nodes(request: Request, members: list[Member]) -> None:
    """Find out where Ray has put each rank, and refuse unsuitable nodes before anything starts."""
    import ray

    calls = [member.actor.facts.remote(request.scratch) for member in members]
    while len(ray.wait(calls, num_returns=len(calls), timeout=READ_S)[0]) < len(calls):
        _check_input()
    names = {node["NodeID"]: cluster.node_name(node) for node in ray.nodes()}
    for member, answer in zip(members, calls, strict=True):
        try:
            member.facts = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray started no actor for rank {member.rank}: {_last_line(error)}") from None
        member.name = names.get(member.facts["node_id"], member.facts["address"])
        if (problem := unfit(request, member)) is not None:
            raise LaunchError(problem)


def unfit(request: Request, member: Member) -> str | None:
    version = member.facts["version"]
    if version is None:
        return f"the Ray node {member.name} does not have Paceline: install paceline {request.version} there"
    if version != request.version:
        return f"the Ray node {member.name} has Paceline {version}, this controller has {request.version}"
    if not member.facts["has_scratch"]:
        return (
            f"the Ray node {member.name} has no directory {request.scratch!r} that Ray can write to (launcher.scratch)"
        )
    return None


def seats(request: Request, members: list[Member]) -> Iterator[dict[str, str]]:
    """Yield the variables of each rank: its numbers, the rendezvous, and the GPUs of its node, as with torchrun.

    Ray shows an actor only its own GPU. Ranks see all GPUs of their node, so that device numbers are the usual ones.
    """
    first = members[0].facts
    # Ranks of one node need only loopback, where no other host can connect.
    alone = request.nodes == 1
    master = torchrun.LOOPBACK if alone else first["address"]
    spec = (Path(request.run_dir) / "spec.json").read_text(encoding="utf-8")
    for member in members:
        mates = [other for other in members if other.node == member.node]
        variables = {
            "RANK": str(member.rank),
            "LOCAL_RANK": str(mates.index(member)),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_WORLD_SIZE": str(request.processes_per_node),
            # Every rank has its own agent, which joins the rendezvous of all agents.
            "PACELINE_NODE_RANK": str(member.rank),
            "PACELINE_NODES": str(request.world_size),
            "PACELINE_MASTER": master,
            "PACELINE_NODE": member.name,
            "PACELINE_SPEC": spec,
        }
        if member.facts["gpus"]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for mate in mates for gpu in mate.facts["gpus"])
        if interface := "lo" if alone else member.facts["interface"]:
            variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
        yield {**variables, **request.env}


def follow(members: list[Member], inbox: Inbox, spare_lost: Callable[[], None], patience_s: float) -> None:
    """Take the output of the ranks until all have ended, or one has failed and the others have waited for patience_s.

    spare_lost: called each round, to find ranks without which the job continues.
    """
    import ray

    calls = {member.actor.read.remote(member.taken): member for member in members}
    hopeless_at = None
    while calls:
        _check_input()
        answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=READ_S)
        for answer in answered:
            member = calls.pop(answer)
            _take(member, answer, inbox)
            if not member.is_over:
                calls[member.actor.read.remote(member.taken)] = member
        spare_lost()
        if not any(member.ended_badly and not member.is_spared for member in members):
            # A rank that failed while rank 0 was in setup may be expendable by now.
            hopeless_at = None
        elif hopeless_at is None:
            hopeless_at = time.monotonic() + patience_s
        if hopeless_at is not None and time.monotonic() > hopeless_at:
            return
        time.sleep(READ_S)


def spare(request: Request, members: list[Member], inbox: Inbox) -> None:
    """Let the job continue without failed ranks of expendable nodes, once rank 0 is past setup.

    The remaining ranks need not be ended: there is no torchrun above them, and each notices the end of rank 0 itself.
    """
    run_dir = Path(request.run_dir)
    for member in members:
        bad = member.ended_badly and not member.is_spared and member.node in request.expendable
        if bad and is_past_setup(run_dir) and not reported_failure(run_dir, [member.rank]):
            member.is_spared = True
            who = f"rank {member.rank} on {member.name}"
            why = member.lost[1] if member.lost else f"{who} ended with exit code {member.code}"
            inbox.take([f"paceline: {why}; rank 0 continues with the other replicas\n"])


def _take(member: Member, answer: Any, inbox: Inbox) -> None:
    """Take the output of a rank. A failed call is repeated, because Ray may not know yet that a node died."""
    import ray

    try:
        lines, code = ray.get(answer)
    except ray.exceptions.ActorUnavailableError as error:
        member.away_since = member.away_since or time.monotonic()
        if time.monotonic() - member.away_since > AWAY_S:
            member.lost = _loss(member, error)
        return
    except ray.exceptions.RayActorError as error:
        member.lost = _loss(member, error)
        return
    member.away_since = None
    member.taken += len(lines)
    inbox.take(lines)
    if code is not None:
        reported = inbox.exit_code(member.rank)
        member.code = code if reported is None else reported


def _loss(member: Member, error: Any) -> tuple[Status, str]:
    """Explain why an actor is gone: its node was preempted or died, or its process was ended."""
    import ray

    who = f"rank {member.rank} on {member.name}"
    if error.preempted:
        return Status.PREEMPTED, f"{who}: its Ray node was preempted"
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if "node has died" in str(error) or member.facts["node_id"] not in alive:
        return Status.FAILED, f"{who}: its node has left the Ray cluster"
    return Status.FAILED, f"{who}: Ray lost its actor ({_last_line(error)})"


def _last_line(error: Exception) -> str:
    """Return the last line of an error, which has the reason; Ray's ids come before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def conclusion(members: list[Member], run_dir: Path, missing: str | None) -> dict[str, Any]:
    """Return the final state. A rank that vanished is the cause: those that noticed it have left an outcome."""
    awaited = [member for member in members if not member.is_spared]
    lost = [member.lost for member in awaited if member.lost is not None]
    silent = [m for m in awaited if m.code and not (run_dir / f"outcome-{m.rank}.json").is_file()]
    status, reason = None, None
    if lost:
        status, reason = lost[0]
    elif silent:
        who, code = f"rank {silent[0].rank} on {silent[0].name}", silent[0].code or 0
        status = Status.FAILED
        reason = f"{who} ended with exit code {code} and left no outcome; see {run_dir / 'log.txt'}"
        if code == -signal.SIGKILL:
            reason = f"{who} was killed by signal 9 (by hand, or because the host ran out of memory)"
        elif code < 0:
            reason = f"{who} was ended by signal {-code} ({signal.Signals(-code).name})"
    code = next((member.code for member in awaited if member.code), 1 if lost else 0)
    spared = sorted({member.node for member in members if member.is_spared})
    return {"ended": code, "status": status, "reason": reason, "missing": missing, "lost": spared}


if __name__ == "__main__":
    main()
