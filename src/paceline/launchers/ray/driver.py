"""The driver of one job on Ray (`python -m paceline.launchers.ray.driver`): a request comes in, its state goes out.

The request is the first line of standard input; the job ends when that is closed. Each line of standard output is the
state of the job: {"waiting": why}, {"running": true}, {"refused": sentence}, or {"ended": exit_code, ...}. What ranks
leave is written into the run folder as it comes.
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
from paceline.launchers._losses import is_past_setup, reported_failure
from paceline.launchers._start import agent_arguments
from paceline.launchers.node import log_transport
from paceline.launchers.ray import actor as _ray_actor
from paceline.launchers.ray import cluster
from paceline.launchers.ray.request import Request
from paceline.results.records import Status

READ_S = 0.25
# What the ranks that are left have to say when one of them has ended badly: most notice at once.
AFTERMATH_S = 3.0
# The same where the job may go on without it: how far rank 0 has come is told once a second, later on a busy node.
DOUBT_S = 10.0
GRACE_S = 10.0
# How long an actor may be out of Ray's reach before it counts as lost.
AWAY_S = 60.0


class Ended(Exception):
    """Nobody waits for this job any more."""


@dataclass(slots=True)
class Member:
    """One rank of the job as the driver knows it. taken: lines of it that have come. away_since: when Ray last failed
    to reach its actor. lost: why Ray has no actor for it any more. is_spared: it ended badly, and the job goes on."""

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
class Home:
    """Where what ranks send arrives: their files in the run folder, what else they print in its log."""

    receiver: log_transport.Receiver
    log: IO[str]

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            if (printed := self.receiver.feed(line)) is not None:
                self.log.write(printed if printed.endswith("\n") else printed + "\n")
        self.log.flush()

    def exit_code(self, rank: int) -> int | None:
        """As the rank's agent told it: that of the rank itself, where a shell would show 1 or 137."""
        arrival = self.receiver.arrivals.get(rank)
        return None if arrival is None else arrival.exit_code


def main() -> None:
    end_with_parent(signal.SIGTERM)
    # Ray and its libraries print what they like; the launcher reads nothing but states.
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


def _left() -> None:
    """Raise when the launcher has closed its end; it never sends more than the request."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    if readable:
        raise Ended


def drive(request: Request, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The whole job; whatever ends this function ends the ranks and gives back what they held."""
    import ray

    cluster.connect(request.address)
    # Ray puts a handler of its own in its place.
    signal.signal(signal.SIGTERM, _end)
    run_dir = Path(request.run_dir)
    try:
        with (
            cluster.reserved(request, lambda why: tell({"waiting": why}), _left) as group,
            (run_dir / "log.txt").open("a") as log,
        ):
            home = Home(log_transport.Receiver(run_dir), log)
            with crew(request, group, home) as members:
                tell({"running": True})
                patience_s = DOUBT_S if request.expendable else AFTERMATH_S
                follow(members, home, lambda: spare(request, members, home), patience_s)
            spared = [member.rank for member in members if member.is_spared]
            return conclusion(members, run_dir, home.receiver.missing(request.world_size, but=spared))
    finally:
        ray.shutdown()


@contextlib.contextmanager
def crew(request: Request, group: Any, home: Home) -> Iterator[list[Member]]:
    """All ranks, started; at the end none runs any more, and their last words are in the run folder."""
    members = [
        Member(rank, rank // request.processes_per_node, actor) for rank, actor in enumerate(_actors(request, group))
    ]
    try:
        _introduce(request, members)
        for member, variables in zip(members, seats(request, members), strict=True):
            arguments = agent_arguments(port=int(variables["MASTER_PORT"]), controller_link=True)
            arguments += [f"--scratch={request.scratch}"] if request.scratch else []
            member.actor.start.remote([*arguments, "--per-rank", f"--runner={request.runner}"], variables)
        yield members
    finally:
        _dismiss([member for member in members if not member.is_over], home)


def _actors(request: Request, group: Any) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(_ray_actor)
    each = dict(request.each)
    kind = ray.remote(
        num_cpus=each.pop("CPU"), num_gpus=each.pop("GPU", 0), resources=each, max_restarts=0, max_task_retries=0
    )(_ray_actor.RankActor)
    return [
        kind.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=rank // request.processes_per_node
            )
        ).remote()
        for rank in range(request.world_size)
    ]


def _introduce(request: Request, members: list[Member]) -> None:
    """Learn where Ray has put each rank; nodes that cannot do its work are refused before anything starts."""
    import ray

    asked = [member.actor.facts.remote(request.scratch) for member in members]
    while len(ray.wait(asked, num_returns=len(asked), timeout=READ_S)[0]) < len(asked):
        _left()
    names = {node["NodeID"]: cluster.node_name(node) for node in ray.nodes()}
    for member, answer in zip(members, asked, strict=True):
        try:
            member.facts = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray started no actor for rank {member.rank}: {_first_line(error)}") from None
        member.name = names.get(member.facts["node_id"], member.facts["address"])
        if (problem := unfit(request, member)) is not None:
            raise LaunchError(problem)


def unfit(request: Request, member: Member) -> str | None:
    version = member.facts["version"]
    if version is None:
        return f"the Ray node {member.name} has no Paceline: install paceline {request.version} there"
    if version != request.version:
        return f"the Ray node {member.name} has Paceline {version}, this controller {request.version}"
    if not member.facts["has_scratch"]:
        return f"the Ray node {member.name} has no folder {request.scratch!r} that Ray may write to (launcher.scratch)"
    return None


def seats(request: Request, members: list[Member]) -> Iterator[dict[str, str]]:
    """The variables of each rank: its place, where all meet, and the GPUs of its node, as torchrun would show them.

    Ray shows an actor its own GPU only; ranks that see those of their node number them as everywhere else.
    """
    first = members[0].facts
    port = str(request.port or first["port"])
    spec = (Path(request.run_dir) / "spec.json").read_text()
    for member in members:
        mates = [other for other in members if other.node == member.node]
        variables = {
            "RANK": str(member.rank),
            "LOCAL_RANK": str(mates.index(member)),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_WORLD_SIZE": str(request.processes_per_node),
            "MASTER_ADDR": first["address"],
            "MASTER_PORT": port,
            # Every rank has an agent of its own, which meets those of all others.
            "PACELINE_NODE_RANK": str(member.rank),
            "PACELINE_NODES": str(request.world_size),
            "PACELINE_MASTER": first["address"],
            "PACELINE_NODE": member.name,
            "PACELINE_SPEC": spec,
        }
        if member.facts["gpus"]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for mate in mates for gpu in mate.facts["gpus"])
        if member.facts["interface"]:
            variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), member.facts["interface"])
        yield {**variables, **request.env}


def follow(members: list[Member], home: Home, look: Callable[[], None], patience_s: float) -> None:
    """Take in what ranks print until all have ended, or the rest is only waiting for one that ended badly, and has been
    for patience_s. look: told at each round, to see without whom the job goes on."""
    import ray

    asked = {member.actor.read.remote(member.taken): member for member in members}
    hopeless_at = None
    while asked:
        _left()
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=READ_S)
        for answer in answered:
            member = asked.pop(answer)
            _take(member, answer, home)
            if not member.is_over:
                asked[member.actor.read.remote(member.taken)] = member
        look()
        if not any(member.ended_badly and not member.is_spared for member in members):
            # Whoever failed before rank 0 was past its setup may be expendable by now.
            hopeless_at = None
        elif hopeless_at is None:
            hopeless_at = time.monotonic() + patience_s
        if hopeless_at is not None and time.monotonic() > hopeless_at:
            return
        time.sleep(READ_S)


def spare(request: Request, members: list[Member], home: Home) -> None:
    """Let the job go on without ranks of expendable nodes that ended badly, once rank 0 needs only answers of others.
    Nobody has to end those that are left: no torchrun is above them, and each hears of rank 0's end by itself."""
    run_dir = Path(request.run_dir)
    for member in members:
        bad = member.ended_badly and not member.is_spared and member.node in request.expendable
        if bad and is_past_setup(run_dir) and not reported_failure(run_dir, [member.rank]):
            member.is_spared = True
            who = f"rank {member.rank} on {member.name}"
            why = member.lost[1] if member.lost else f"{who} ended with exit code {member.code}"
            home.take([f"paceline: {why}; rank 0 goes on with the other replicas\n"])


def _take(member: Member, answer: Any, home: Home) -> None:
    """What a rank has sent. A call that did not get through is made again: Ray may not yet know that a node died."""
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
    home.take(lines)
    if code is not None:
        told = home.exit_code(member.rank)
        member.code = code if told is None else told


def _loss(member: Member, error: Any) -> tuple[Status, str]:
    """Why an actor is gone: its node was taken away, has died, or its process was ended."""
    import ray

    who = f"rank {member.rank} on {member.name}"
    if error.preempted:
        return Status.PREEMPTED, f"{who}: its Ray node was pre-empted"
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if "node has died" in str(error) or member.facts["node_id"] not in alive:
        return Status.FAILED, f"{who}: its node has left the Ray cluster"
    return Status.FAILED, f"{who}: Ray lost its actor ({_first_line(error)})"


def _first_line(error: Exception) -> str:
    """The last line says why; those before it are numbers of Ray's own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _dismiss(members: list[Member], home: Home) -> None:
    """End what still runs, all at once, and keep its last words."""
    import ray

    asked = [member.actor.end.remote(member.taken, GRACE_S) for member in members]
    if not asked:
        return
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=GRACE_S * 1.5)
    for answer in answered:
        with contextlib.suppress(ray.exceptions.RayError):
            home.take(ray.get(answer))


def conclusion(members: list[Member], run_dir: Path, missing: str | None) -> dict[str, Any]:
    """The state that ends the job. A rank that vanished is to blame: the others, which noticed, left a word."""
    awaited = [member for member in members if not member.is_spared]
    lost = [member.lost for member in awaited if member.lost is not None]
    silent = [m for m in awaited if m.code and not (run_dir / f"outcome-{m.rank}.json").is_file()]
    status, reason = None, None
    if lost:
        status, reason = lost[0]
    elif silent:
        status, reason = Status.FAILED, _silence(silent[0], run_dir)
    code = next((member.code for member in awaited if member.code), 1 if lost else 0)
    spared = sorted({member.node for member in members if member.is_spared})
    return {"ended": code, "status": status, "reason": reason, "missing": missing, "lost": spared}


def _silence(member: Member, run_dir: Path) -> str:
    who, code = f"rank {member.rank} on {member.name}", member.code or 0
    if code == -signal.SIGKILL:
        return f"{who} was killed by signal 9 (by hand, or because the host ran out of memory)"
    if code < 0:
        return f"{who} was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"{who} ended with exit code {code} and left no outcome; see {run_dir / 'log.txt'}"


if __name__ == "__main__":
    main()
