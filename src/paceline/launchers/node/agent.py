"""One node of a job: find the other nodes, start the ranks, pass on their files.

Used as `python -m paceline.launchers.node.agent`.

Engines start this once per node, by whatever means; what follows is the same on all of them. The spec is in the run
folder, in the variable PACELINE_SPEC or the first line of standard input; without a shared run folder what ranks leave
travels as lines of this process's output (see `parcel`).

However the node ends, its ranks end with it and its scratch folder is gone; the folder that a kill of this very process
leaves is removed by the next agent of this host. What kept ranks from starting is told as the outcome of the node's
first rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from paceline import __version__
from paceline.errors import PacelineError, RequestError
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.processes import end_all, end_with_parent
from paceline.host.scratch import own_folder
from paceline.launchers.node import job_disk, log_transport, placement, reachability, rendezvous
from paceline.launchers.node.controller_link import Tether, first_line
from paceline.launchers.node.output import Voice
from paceline.results import store
from paceline.results.records import Outcome, Status

SPEC = "PACELINE_SPEC"
POLL_S = 0.1
RELAY_S = 1.0
# How long ranks have to write their stacks before they are ended.
STACKS_S = 0.5
# How long what ranks printed may take to be passed on after their end.
LAST_WORDS_S = 5.0
PATIENCE_S = 240.0
TORCHRUN = "torch.distributed.run"
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(Exception):
    """Somebody asked this node to end."""


def main(argv: list[str]) -> int:
    """The exit code of the ranks' starter; 1 when they could not be started."""
    arguments = _parse(argv)
    if arguments.facts:
        return tell_facts()
    if arguments.handover:
        return hand_over(arguments.run_dir)
    end_with_parent(signal.SIGTERM)
    for number in _ENDS:
        signal.signal(number, _end)
    try:
        text = _spec_text(arguments)
        held = None if arguments.tether is None else Tether(sys.stdin.fileno(), arguments.tether or None)
        return Node(store.spec_of(text), placement.here(os.environ), arguments, held).live(text)
    except (PacelineError, ValueError, TypeError, KeyError, OSError) as error:
        sys.stderr.write(f"paceline.launchers.node.agent: {error}\n")
    except Ended:
        return 128 + signal.SIGTERM
    return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paceline.launchers.node.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, help="a folder that all nodes share; without it each has its own")
    parser.add_argument("--scratch", type=Path, help="where to make that one; else where temporary files are")
    parser.add_argument("--relay", action="store_true", help="print what ranks leave as lines")
    parser.add_argument("--handover", action="store_true", help="only print what a run folder holds, as lines")
    parser.add_argument("--spec-stdin", action="store_true", help="the first line of input holds spec and variables")
    silence = "end when standard input is closed, or silent for SECONDS"
    parser.add_argument("--tether", nargs="?", type=float, const=0.0, metavar="SECONDS", help=silence)
    parser.add_argument("--port", type=int, default=placement.RENDEZVOUS_PORT, help="where ranks meet on node 0")
    parser.add_argument("--rendezvous", choices=("static", "c10d"), default="static")
    parser.add_argument("--patience", type=float, help=f"seconds to wait for the other nodes (default: {PATIENCE_S:g})")
    parser.set_defaults(brought=False)
    parser.add_argument("--per-rank", action="store_true", help="for one rank alone: places count ranks, not nodes")
    parser.add_argument("--runner", default=TORCHRUN, help="module that starts the ranks of a node")
    parser.add_argument("--facts", action="store_true", help="tell versions, GPUs and the time, and end")
    return parser.parse_args(argv[1:])


def _end(number: int, frame: FrameType | None) -> None:
    """Once: whoever asks again must not interrupt the clearing up."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise Ended


def hand_over(run_dir: Path) -> int:
    """What a run left on a disk that the controller does not reach, as lines."""
    for line in job_disk.hand_over(run_dir, {"host": placement.node_name(os.environ), "version": __version__}):
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
    return 0


def tell_facts() -> int:
    """What a controller asks before it starts anything: one line of facts, then the time, once for each line of input.

    The times of a short exchange tell how far the clocks are apart.
    """
    facts = machine.to_dict(machine.probe())
    kept = {name: facts[name] for name in ("host", "gpus", "driver", "cuda", "versions")}
    Voice(sys.stdout.fileno()).say([json.dumps({**kept, "paceline": __version__})])
    while os.read(sys.stdin.fileno(), 1):
        Voice(sys.stdout.fileno()).say([repr(time.time())])
    return 0


def _spec_text(arguments: argparse.Namespace) -> str:
    """From the shared folder, the input or the environment. With the input come variables: none of them, and nothing
    of the spec, stands in a list of processes."""
    if arguments.spec_stdin:
        given = json.loads(first_line(sys.stdin.fileno()))
        os.environ.update(given["env"])
        text = json.dumps(given["spec"])
        if arguments.run_dir is None:
            # By this ranks tell that their run folder is this node's own and ends with it.
            os.environ[SPEC] = text
        return text
    if arguments.run_dir is not None:
        brought = os.environ.pop(SPEC, None)
        if brought is None:
            return Path(arguments.run_dir, "spec.json").read_text()
        # A disk that only the nodes reach: no controller has laid the spec there.
        job_disk.enter(arguments.run_dir, brought)
        arguments.brought = True
        return brought
    if SPEC not in os.environ:
        raise RequestError(f"environment: {SPEC} is not set; accepted is it, --run-dir or --spec-stdin")
    return os.environ[SPEC]


@contextlib.contextmanager
def folder(shared: Path | None, scratch: Path | None, spec_text: str) -> Iterator[Path]:
    """The shared run folder, or one of this node's own that is gone afterwards."""
    if shared is not None:
        yield shared
        return
    with own_folder(scratch) as own:
        (own / "spec.json").write_text(spec_text)
        yield own


class Node:
    """This node from its first word to its last."""

    def __init__(
        self, spec: RunSpec, place: placement.Place, arguments: argparse.Namespace, held: Tether | None
    ) -> None:
        self.spec, self.place, self.arguments, self.held = spec, place, arguments, held
        self.host = placement.node_name(os.environ)
        self.sender = log_transport.Sender(None, place.node) if arguments.relay else None
        self.voice = Voice(sys.stdout.fileno(), self.sender.keep if self.sender else None)

    def live(self, spec_text: str) -> int:
        code, run_dir, last = 1, None, []
        if self.sender:
            self.voice.say([self.sender.hello({"host": self.host, "version": __version__})])
        try:
            with folder(self.arguments.run_dir, self.arguments.scratch, spec_text) as run_dir:
                code = self.work(run_dir)
                last = self.farewell(code)
        except OSError as error:
            # The folder could not even be made.
            self.leave_word(None, self.trouble(error))
            last = self.farewell(code)
        # Nothing is left on this host by now: a reader that hangs can only cost the farewell.
        self.voice.say_last(last)
        return code

    def farewell(self, code: int) -> list[str]:
        heard = self.held is None or not self.held.is_cut
        return list(self.sender.farewell(code)) if self.sender and heard else []

    def work(self, run_dir: Path) -> int:
        """Meet the other nodes and run the ranks; what prevents it is left as the word of the first of them."""
        if self.arguments.brought:
            own = job_disk.own_files(self.spec, self.place.node, self.host)
            job_disk.clear(run_dir, own)
            if self.sender:
                self.sender.own = own
        if self.sender:
            self.sender.run_dir = run_dir
        try:
            return self.run_ranks(run_dir, self.meet())
        except PacelineError as error:
            self.leave_word(run_dir, str(error))
        except OSError as error:
            self.leave_word(run_dir, self.trouble(error))
        except Ended:
            return 128 + signal.SIGTERM
        return 1

    def meet(self) -> dict[str, str]:
        """Return when all nodes are there: the interface by which they came, for the ranks to use."""
        place, spec = self.place, self.spec
        wanted = spec.topology.world_size if self.arguments.per_rank else spec.topology.nodes
        if place.nodes != wanted:
            raise RequestError(f"{place.nodes} nodes were started for a spec of {wanted}")
        names = ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if spec.topology.device == "cuda" else ()))
        reachability.check_interfaces(os.environ, names)
        if place.nodes == 1:
            return {}
        gathering = rendezvous.Gathering(
            key=f"{spec.run_id} {os.environ.get(placement.ATTEMPT, '')}",
            node=place.node,
            nodes=place.nodes,
            master=place.master,
            port=self.arguments.port,
            host=self.host,
        )
        # A controller takes a run in which nothing moves for stall_s to hang: who knows more must speak before. A
        # launcher that says how long to wait knows of nodes that are still to come.
        own = rendezvous.meet(gathering, self.arguments.patience or min(PATIENCE_S, 0.8 * spec.stall_s))
        interface = reachability.interface_of(own)
        return {} if interface is None else {name: interface for name in names if name not in os.environ}

    def run_ranks(self, run_dir: Path, network: dict[str, str]) -> int:
        """Start this node's ranks and stay until they have ended; whatever ends this function ends them."""
        child = subprocess.Popen(
            command(self.spec, run_dir, self.place, self.arguments),
            env={**os.environ, **network},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_agent,
        )
        assert child.stdout is not None
        self.voice.pass_on(os.dup(child.stdout.fileno()))
        child.stdout.close()
        relayed_at = time.monotonic()
        try:
            while child.poll() is None:
                if self.sender and time.monotonic() - relayed_at > RELAY_S:
                    self.voice.say(self.sender.changes())
                    relayed_at = time.monotonic()
                time.sleep(POLL_S)
            return child.returncode
        except Ended:
            ask_for_stacks(run_dir)
            raise
        finally:
            end_all(child)
            self.voice.finish(LAST_WORDS_S)

    def trouble(self, error: OSError) -> str:
        if error.errno == errno.ENOSPC:
            where = self.arguments.run_dir or self.arguments.scratch or tempfile.gettempdir()
            return f"no room is left on the disk of {self.host} for the run's files; try there: df -h {where}"
        return f"{self.host}: {error}"

    def leave_word(self, run_dir: Path | None, sentence: str) -> None:
        """In the place of ranks that were never started: the first of this node says why."""
        now = time.time()
        outcome = Outcome(
            rank=self.place.node * (1 if self.arguments.per_rank else self.spec.topology.processes_per_node),
            status=Status.FAILED,
            error=sentence,
            host=self.host,
            pid=os.getpid(),
            started_at=now,
            ended_at=now,
        )
        try:
            if run_dir is not None:
                store.write_outcome(run_dir, outcome)
                return
        except OSError:
            pass
        sys.stderr.write(f"paceline.launchers.node.agent: {sentence}\n")
        if self.sender:
            self.sender.keep(f"outcome-{outcome.rank}.json", json.dumps(dataclasses.asdict(outcome)).encode())


def _end_with_agent() -> None:
    """torchrun is told to stop when the agent is killed; ranks follow torchrun (see worker.py)."""
    end_with_parent(signal.SIGTERM)


def ask_for_stacks(run_dir: Path) -> None:
    """Every rank of this node writes down where it is, before it is ended. In a shared folder ranks of other nodes have
    left their numbers too, which mean other processes here."""
    import psutil

    below = {process.pid for process in psutil.Process().children(recursive=True)}
    asked = [position.pid for position in store.read_progress(run_dir) if position.pid in below]
    for pid in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_S if asked else 0)


def command(spec: RunSpec, run_dir: Path, place: placement.Place, arguments: argparse.Namespace) -> list[str]:
    starter = [sys.executable, "-m", arguments.runner, f"--log-dir={os.devnull}"]
    starter += [f"--nproc-per-node={spec.topology.processes_per_node}"]
    if place.nodes == 1:
        # By its own name torchrun would wait for itself for minutes, where that name does not resolve.
        starter += ["--standalone", "--local-addr=127.0.0.1"]
    elif arguments.rendezvous == "c10d":
        first = "true" if place.node == 0 else "false"
        meeting_point = f"{place.master}:{arguments.port}"
        starter += [f"--nnodes={place.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting_point}"]
        starter += [f"--rdzv-id={spec.run_id}", f"--rdzv-conf=is_host={first}"]
    else:
        starter += [f"--nnodes={place.nodes}", f"--node-rank={place.node}"]
        starter += [f"--master-addr={place.master}", f"--master-port={arguments.port}"]
    return [*starter, "-m", "paceline.workloads.worker", str(run_dir)]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
