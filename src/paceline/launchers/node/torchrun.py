"""torchrun, with its store bound to one address (`python -m paceline.launchers.node.torchrun`).

A job on one node does not wait until torchrun has imported torch: `ranks` starts it with the same variables.

torchrun itself opens its store on every interface and, with its default rendezvous, unpickles what it reads there: any
program that reaches the port can run code in the ranks. Here the store listens on one address and nothing is unpickled.
One node uses loopback and a port that the kernel chooses. With several nodes, the agent of node 0 opens the socket on
the interface that connects the nodes (see `rendezvous`) and passes it on.

The store has no password. Its port must be reachable by the nodes of the job only.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import socket
import sys
from typing import Any, NoReturn

from paceline.launchers.node import ranks

LOOPBACK = "127.0.0.1"
BACKLOG = 4096
PATIENCE = datetime.timedelta(minutes=10)
# The descriptor of an open socket on which rank 0 must run the store, if there is no torchrun (see `host_store`).
STORE_FD = "PACELINE_STORE_FD"


def listen(address: str = LOOPBACK) -> socket.socket:
    """Open a socket on a port that the kernel chooses. Connections wait in it until the store answers."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def serve(listener: socket.socket) -> Any:
    """Run a store on the socket, which it takes over, for as long as the returned object exists."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = listener.getsockname()[:2]
    # A store on all addresses of a host with several networks is reached by loopback here.
    host = LOOPBACK if address in ("0.0.0.0", "::") else address
    return TCPStore(
        host, port, is_master=True, timeout=PATIENCE, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def host_store() -> Any:
    """Run the store of the job in this rank if its agent passed a socket for it. Returns None otherwise."""
    descriptor = os.environ.pop(STORE_FD, None)
    return None if descriptor is None else serve(socket.socket(fileno=int(descriptor)))


def store_variables(master: str, port: int, descriptor: int | None) -> dict[str, str]:
    """Return the variables of a rank that no torchrun starts. The rank with the descriptor calls `host_store`."""
    variables = {"MASTER_ADDR": master, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return variables if descriptor is None else {**variables, STORE_FD: str(descriptor)}


def launch_store(timeout_s: float) -> Any:
    """Return the store of this rank's launch, by the variables that torchrun sets. Waits end after `timeout_s`."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    return store


def launch_address() -> tuple[str, int]:
    """Return where the store of this rank's launch listens, for processes that the rank starts."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def parser() -> argparse.ArgumentParser:
    """The arguments by which an agent tells a runner where the store of the job is."""
    known = argparse.ArgumentParser(prog="paceline.launchers.node.torchrun", allow_abbrev=False)
    known.add_argument("--nnodes", type=int, default=1)
    known.add_argument("--node-rank", type=int, default=0)
    known.add_argument("--master-addr", default=LOOPBACK)
    known.add_argument("--master-port", type=int, default=0)
    known.add_argument("--store-fd", type=int, help="an open socket for the store, on node 0")
    return known


def main(argv: list[str]) -> None:
    arguments, words = parser().parse_known_args(argv[1:])
    if arguments.nnodes == 1:
        _run_here(arguments, words)
    # Collections would scan all of torch, while it is imported and at exit: a quarter of what this process computes.
    gc.disable()
    from torch.distributed import PrefixStore, TCPStore, run  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    gc.freeze()
    gc.enable()
    listener = _open(arguments.store_fd)
    master, port = arguments.master_addr, arguments.master_port

    class FixedRendezvous(RendezvousHandler):
        """The nodes are known and have met; only the store is missing."""

        def __init__(self) -> None:
            self._store = serve(listener) if listener else TCPStore(master, port, is_master=False, timeout=PATIENCE)

        def next_rendezvous(self) -> RendezvousInfo:
            store = PrefixStore("torchrun", self._store)
            return RendezvousInfo(store, arguments.node_rank, arguments.nnodes, RendezvousStoreInfo(master, port))

        def get_backend(self) -> str:
            return "paceline"

        @property
        def use_agent_store(self) -> bool:
            return True

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """The store ends with this process."""

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "paceline"

        def shutdown(self) -> bool:
            return True

    rendezvous_handler_registry.register("paceline", lambda _: FixedRendezvous())
    # The endpoint is not used, but torchrun warns without one.
    known = ["--rdzv-backend=paceline", "--rdzv-id=paceline", f"--rdzv-endpoint={master}:{port}"]
    run.main([*known, f"--nnodes={arguments.nnodes}", *words])


def _open(descriptor: int | None) -> socket.socket | None:
    if descriptor is None:
        return None
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    return listener


def _run_here(arguments: argparse.Namespace, words: list[str]) -> NoReturn:
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--nproc-per-node", type=int, default=1)
    # torchrun's own; the output of these ranks is that of this process.
    options.add_argument("--log-dir")
    known, command = options.parse_known_args(words)
    # Collections would scan all of torch.
    gc.disable()
    code = ranks.run(command, known.nproc_per_node, _open(arguments.store_fd) or listen(), serve)
    gc.freeze()
    raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv)
