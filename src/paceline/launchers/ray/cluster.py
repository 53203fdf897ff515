"""A Ray cluster: the request of a job, the connection, the reservation, and one sentence for each refusal.

`python -m paceline.launchers.ray.cluster ADDRESS` connects to a cluster and disconnects, or prints why it cannot.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers._job import NoAnswerError

CONNECT_S = 5.0
POLL_S = 0.2
# Marks the sentence of a refusal among other output of Ray and its libraries.
REFUSED = "paceline: refused: "
# Resources worth showing: not the one named after the node's address, and not memory.
_SHOWN = re.compile(r"(?!node:|memory$|object_store_memory$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the launcher sends its driver, as one JSON line; the same for the same spec and directory.

    each: what one rank reserves, by Ray's names. env: variables of all ranks. expendable: nodes without which the job
    continues once rank 0 is past setup.
    """

    name: str
    run_dir: str
    version: str
    address: str
    placement: str
    nodes: int
    processes_per_node: int
    each: Mapping[str, float]
    env: Mapping[str, str]
    runner: str
    port: int
    scratch: str
    pending_s: float
    expendable: Sequence[int] = ()

    @property
    def bundle(self) -> dict[str, float]:
        """What one node reserves. Ray never splits a bundle between machines."""
        return {name: amount * self.processes_per_node for name, amount in self.each.items()}

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


def connect(address: str) -> None:
    """Connect to the cluster as a driver."""
    probe(address)
    import ray

    try:
        ray.init(
            address=address,
            namespace="paceline",
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=False,
        )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, AssertionError, OSError) as error:
        raise LaunchError(refusal(address, str(error))) from None


def probe(address: str) -> None:
    """Raise NoAnswerError if nothing listens at the address. Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        why = error.strerror or error
        raise NoAnswerError(
            f"no Ray cluster answers at {address} ({why}); try `ray status --address {address}` on its head"
        ) from None


def refusal(address: str, message: str) -> str:
    """Return one sentence for a refusal. Ray's own messages are paragraphs."""
    versions = re.findall(r"(?:Ray|Python): (\S+)", message)
    if "Version mismatch" in message and len(versions) == 4:
        theirs, mine = (f"Ray {ray} on Python {python}" for ray, python in (versions[:2], versions[2:]))
        return f"the cluster at {address} has {theirs}, this controller has {mine}: they must be the same"
    if "Could not find any running Ray instance" in message:
        return "no Ray runs on this host and RAY_ADDRESS is not set; give launcher.address=HOST:PORT or ray://HOST:PORT"
    if "raylet" in message and "ray://" not in address:
        return (
            f"this host is not a node of the Ray cluster at {address}; from outside use ray://HOST:10001 "
            f"({_shortened(message)})"
        )
    return f"Ray at {address} refused: {_shortened(message)}"


def _shortened(message: str) -> str:
    return " ".join(message.split())[:300]


@contextlib.contextmanager
def reserved(request: Request, report: Callable[[str], None], check: Callable[[], None]) -> Iterator[Any]:
    """Yield a placement group until the block ends. While it waits, `report` gets the reason; `check` may raise."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([request.bundle] * request.nodes, strategy=request.placement, name=request.name)
    try:
        deadline = time.monotonic() + request.pending_s
        while not group.wait(POLL_S):
            check()
            why = shortage(request, ray.nodes(), ray.available_resources())
            report(why)
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray did not place the job within {request.pending_s:g} s: {why}")
        yield group
    finally:
        remove_placement_group(group)


def shortage(request: Request, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """Say what was requested, what the cluster has, and whether the cluster could ever provide it."""

    def fits(node: Mapping[str, Any]) -> bool:
        return all(node["Resources"].get(name, 0) >= amount for name, amount in request.bundle.items())

    alive = [node for node in nodes if node["Alive"]]
    fitting = sum(map(fits, alive))
    needed = request.nodes if request.placement == "STRICT_SPREAD" else 1
    wanted = f"the job requests {request.nodes} x {amounts(request.bundle)} under {request.placement}"
    if fitting >= needed:
        count = f"{fitting} nodes are" if fitting > 1 else "1 node is"
        return f"{wanted}; {count} large enough, and {amounts(free)} is free in all"
    has = "; ".join(f"{node_name(node)}: {amounts(node['Resources'])}" for node in alive[:8])
    more = f"; and {len(alive) - 8} more" if len(alive) > 8 else ""
    return f"{wanted}, more than the cluster has ({has}{more})"


def amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if _SHOWN.match(name)]
    return " + ".join(shown) or "nothing"


def node_name(node: Mapping[str, Any]) -> str:
    """Return the name of a Ray node, or its host name: without a name, Ray repeats the address."""
    name, address = str(node.get("NodeName") or ""), str(node.get("NodeManagerAddress") or "")
    return name if name and name != address else str(node.get("NodeManagerHostname") or address)


def main(address: str) -> None:
    try:
        connect(address)
    except LaunchError as refusal:
        sys.stdout.write(f"{REFUSED}{refusal}\n")


if __name__ == "__main__":
    main(sys.argv[1])
