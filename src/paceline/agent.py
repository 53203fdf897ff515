"""One node of a job (`python -m paceline.agent`): take a place, meet the others, start the ranks, hand on their files.

Engines start this once per node, by whatever means; what follows is the same on all of them. The spec is in the run
folder, or in the variable PACELINE_SPEC where there is no shared one; then what ranks leave travels as lines of this
process's output (see `parcel`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from paceline import __version__, parcel, places, reach, store
from paceline.errors import PacelineError
from paceline.offspring import end_all
from paceline.processes import end_with_parent
from paceline.records import Outcome, Status
from paceline.spec import RunSpec

SPEC = "PACELINE_SPEC"
POLL_S = 0.1
RELAY_S = 1.0
TORCHRUN = "torch.distributed.run"


class Ended(Exception):
    """Somebody asked this node to end."""


def main(argv: list[str]) -> int:
    """The exit code of the ranks' starter; 1 when they could not be started."""
    arguments = _parse(argv)
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    place = places.here(os.environ)
    with folder(arguments.run_dir, arguments.scratch) as run_dir:
        spec = store.read_spec(run_dir)
        sender = parcel.Sender(run_dir, place.node) if arguments.relay else None
        if sender:
            _say(sender.hello({"host": places.node_name(os.environ), "version": __version__}))
        code = 1
        try:
            code = run_ranks(spec, run_dir, place, arguments, sender)
        except PacelineError as error:
            first = place.node * (1 if arguments.per_rank else spec.topology.processes_per_node)
            _leave_word(first, run_dir, str(error))
        except (Ended, KeyboardInterrupt):
            code = 128 + signal.SIGTERM
        if sender:
            for line in sender.farewell(code):
                _say(line)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paceline.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, help="a folder that all nodes share; without it each has its own")
    parser.add_argument("--scratch", type=Path, help="where to make that one; else where temporary files are")
    parser.add_argument("--relay", action="store_true", help="print what ranks leave as lines")
    parser.add_argument("--tether", action="store_true", help="end when standard input is closed")
    parser.add_argument("--port", type=int, default=places.RENDEZVOUS_PORT, help="where ranks meet on node 0")
    parser.add_argument("--rendezvous", choices=("static", "c10d"), default="static")
    parser.add_argument("--patience", type=float, default=reach.PATIENCE_S, help="seconds to wait for node 0")
    parser.add_argument("--per-rank", action="store_true", help="for one rank alone: places count ranks, not nodes")
    parser.add_argument("--runner", default=TORCHRUN, help="module that starts the ranks of a node")
    return parser.parse_args(argv[1:])


def _end(number: int, frame: FrameType | None) -> None:
    """Once: whoever asks again must not interrupt the clearing up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def folder(shared: Path | None, scratch: Path | None = None) -> Iterator[Path]:
    """The shared run folder, or one of this node's own that is gone afterwards."""
    if shared is not None:
        yield shared
        return
    own = Path(tempfile.mkdtemp(prefix="paceline-", dir=scratch))
    try:
        (own / "spec.json").write_text(os.environ[SPEC])
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def run_ranks(
    spec: RunSpec, run_dir: Path, place: places.Place, arguments: argparse.Namespace, sender: parcel.Sender | None
) -> int:
    """Start this node's ranks and stay until they have ended; whatever ends this function ends them."""
    wanted = spec.topology.world_size if arguments.per_rank else spec.topology.nodes
    if place.nodes != wanted:
        raise PacelineError(f"{place.nodes} nodes were started for a spec of {wanted}")
    if place.node > 0:
        reach.await_master(place.master, arguments.port, arguments.patience)
    child = subprocess.Popen(
        command(spec, run_dir, place, arguments),
        env={**os.environ, **network(place)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    relayed_at = time.monotonic()
    try:
        while child.poll() is None:
            if arguments.tether and _is_closed(sys.stdin.fileno()):
                raise Ended
            if sender and time.monotonic() - relayed_at > RELAY_S:
                for line in sender.changes():
                    _say(line)
                relayed_at = time.monotonic()
            time.sleep(POLL_S)
        return child.returncode
    finally:
        end_all(child)


def command(spec: RunSpec, run_dir: Path, place: places.Place, arguments: argparse.Namespace) -> list[str]:
    starter = [sys.executable, "-m", arguments.runner, f"--log-dir={os.devnull}"]
    starter += [f"--nproc-per-node={spec.topology.processes_per_node}"]
    if place.nodes == 1:
        # By its own name torchrun would wait for itself for minutes, where that name does not resolve.
        starter += ["--standalone", "--local-addr=127.0.0.1"]
    elif arguments.rendezvous == "c10d":
        first = "true" if place.node == 0 else "false"
        meeting = f"{place.master}:{arguments.port}"
        starter += [f"--nnodes={place.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}"]
        starter += [f"--rdzv-id={spec.run_id}", f"--rdzv-conf=is_host={first}"]
    else:
        starter += [f"--nnodes={place.nodes}", f"--node-rank={place.node}"]
        starter += [f"--master-addr={place.master}", f"--master-port={arguments.port}"]
    return [*starter, "-m", "paceline.worker", str(run_dir)]


def network(place: places.Place) -> dict[str, str]:
    """Which interface leads to the others, where the user has not said so: libraries guess, and often wrongly."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if place.nodes == 1 or all(name in os.environ for name in names):
        return {}
    found = reach.interface_towards(place.master)
    # On its own node the way to the master is loopback, by which no other node comes.
    if found is None or found[0] == "lo":
        return {}
    return {name: found[0] for name in names if name not in os.environ}


def _leave_word(first_rank: int, run_dir: Path, sentence: str) -> None:
    """In the place of ranks that were never started: the first of this node says why."""
    now = time.time()
    outcome = Outcome(
        rank=first_rank,
        status=Status.FAILED,
        error=sentence,
        host=places.node_name(os.environ),
        pid=os.getpid(),
        started_at=now,
        ended_at=now,
    )
    store.write_outcome(run_dir, outcome)


def _is_closed(descriptor: int) -> bool:
    """Whether whoever held the other end is gone; anything that is sent is read and means nothing."""
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable) and not os.read(descriptor, 4096)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
