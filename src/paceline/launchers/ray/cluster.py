"""Ray itself: reach a cluster, reserve what a job needs, and say in one sentence why that cannot be.

`python -m paceline.launchers.ray.cluster ADDRESS` enters a cluster and leaves it again, or prints why it cannot.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers._retry import SilenceError
from paceline.launchers.ray.request import Request

CONNECT_S = 5.0
LOOK_S = 0.2
# Before the sentence of a refusal, as Ray and its libraries print what they like besides.
REFUSED = "paceline: refused: "
# Anything may be asked for by these names; what a node has by its own address says nothing.
_SHOWN = re.compile(r"(?!node:|memory$|object_store_memory$)")


def connect(address: str) -> None:
    """Enter the cluster as a driver of its own."""
    knock(address)
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


def knock(address: str) -> None:
    """Ray itself tries for minutes where nobody listens."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        why = f"nobody answers there ({error.strerror or error})"
        raise SilenceError(
            f"no Ray cluster at {address}: {why}; try `ray status --address {address}` on its head"
        ) from None


def refusal(address: str, words: str) -> str:
    """Ray's own words are paragraphs; the causes that users meet are told in one sentence each."""
    versions = re.findall(r"(?:Ray|Python): (\S+)", words)
    if "Version mismatch" in words and len(versions) == 4:
        theirs, mine = (f"Ray {ray} on Python {python}" for ray, python in (versions[:2], versions[2:]))
        return f"the cluster at {address} has {theirs}, this controller {mine}: both must be the same"
    if "Could not find any running Ray instance" in words:
        return "no Ray runs on this host and RAY_ADDRESS is not set; give launcher.address=HOST:PORT or ray://HOST:PORT"
    if "raylet" in words and "ray://" not in address:
        return (
            f"this host is no node of the Ray cluster at {address}; from outside it the address is ray://HOST:10001 "
            f"({_shortened(words)})"
        )
    return f"Ray at {address} refused: {_shortened(words)}"


def _shortened(words: str) -> str:
    return " ".join(words.split())[:300]


@contextlib.contextmanager
def reserved(request: Request, tell: Callable[[str], None], left: Callable[[], None]) -> Iterator[Any]:
    """A placement group that Ray has made room for, given back at the end. While there is none, `tell` says why and
    `left` may raise."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([request.bundle] * request.nodes, strategy=request.placement, name=request.name)
    try:
        _await(group, request, tell, left)
        yield group
    finally:
        remove_placement_group(group)


def _await(group: Any, request: Request, tell: Callable[[str], None], left: Callable[[], None]) -> None:
    import ray

    deadline = time.monotonic() + request.pending_s
    while not group.wait(LOOK_S):
        left()
        why = shortage(request, ray.nodes(), ray.available_resources())
        tell(why)
        if time.monotonic() > deadline:
            raise LaunchError(f"Ray did not place the job within {request.pending_s:g} s: {why}")


def shortage(request: Request, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """What was asked, what the cluster has, and whether the second could ever hold the first."""
    alive = [node for node in nodes if node["Alive"]]
    fitting = sum(_holds(node["Resources"], request.bundle) for node in alive)
    needed = request.nodes if request.placement == "STRICT_SPREAD" else 1
    asked = f"{request.nodes} x {amounts(request.bundle)} under {request.placement}"
    if fitting >= needed:
        return f"{asked} was asked for; {_count(fitting)} could hold one, and free is {amounts(free)} in all"
    has = "; ".join(f"{node_name(node)}: {amounts(node['Resources'])}" for node in alive[:8])
    more = f"; and {len(alive) - 8} more" if len(alive) > 8 else ""
    return f"{asked} was asked for, which the cluster cannot hold (it has {has}{more})"


def _count(nodes: int) -> str:
    return f"{nodes} nodes" if nodes > 1 else "1 node"


def _holds(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())


def amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{amount:g} {name}" for name, amount in sorted(resources.items()) if _SHOWN.match(name)]
    return " + ".join(shown) or "nothing"


def node_name(node: Mapping[str, Any]) -> str:
    """The name it was started under; without one Ray repeats the address, and the host's name says more."""
    name, address = str(node.get("NodeName") or ""), str(node.get("NodeManagerAddress") or "")
    return name if name and name != address else str(node.get("NodeManagerHostname") or address)


def main(address: str) -> None:
    try:
        connect(address)
    except LaunchError as refusal:
        sys.stdout.write(f"{REFUSED}{refusal}\n")


if __name__ == "__main__":
    main(sys.argv[1])
