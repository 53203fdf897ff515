"""One node of a job: find the other nodes, start the ranks, pass on their files and output.

Used as `python -m paceline.launchers.node.agent`. Every engine starts it once per node; from then on all engines behave
the same. The spec is in the run directory, in the variable PACELINE_SPEC, or in the first line of standard input.
Without a shared run directory, the files of the ranks are printed as lines (see `log_transport`).

However the agent ends, its ranks end with it and its scratch directory is removed; if the agent itself is killed, the
next agent on this host removes the directory. If ranks cannot be started, the reason becomes the outcome of the node's
first rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from paceline import __version__
from paceline.errors import PacelineError, RequestError
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.processes import end_all, end_with_parent
from paceline.host.scratch import own_folder
from paceline.launchers.node import log_transport, placement, rendezvous
from paceline.launchers.node.placement import NodePosition
from paceline.launchers.node.rendezvous import Meeting
from paceline.results import store
from paceline.results.records import Outcome, Status

SPEC = "PACELINE_SPEC"
POLL_S = 0.1
RELAY_S = 1.0
# How long ranks have to write their stacks before they are ended.
STACKS_S = 0.5
# How long the last output of the ranks may take to be passed on.
LAST_OUTPUT_S = 5.0
PATIENCE_S = 240.0
TORCHRUN = "paceline.launchers.node.torchrun"
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(Exception):
    """This node was asked to end."""


def main(argv: list[str]) -> int:
    """Return the exit code of torchrun; 1 if the ranks could not be started."""
    parser = argparse.ArgumentParser(prog="paceline.launchers.node.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, help="a directory that all nodes share; default: one per node")
    parser.add_argument("--scratch", type=Path, help="parent of that directory; default: the temporary directory")
    parser.add_argument("--relay", action="store_true", help="print the files of the ranks as lines")
    parser.add_argument("--handover", action="store_true", help="only print the files of a run directory as lines")
    parser.add_argument("--spec-stdin", action="store_true", help="read spec and variables from the first input line")
    link_help = "end when standard input is closed, or silent for SECONDS"
    parser.add_argument("--controller-link", nargs="?", type=float, const=0.0, metavar="SECONDS", help=link_help)
    parser.add_argument("--port", type=int, default=placement.RENDEZVOUS_PORT, help="rendezvous port on node 0")
    parser.add_argument("--patience", type=float, help=f"seconds to wait for the other nodes (default: {PATIENCE_S:g})")
    parser.set_defaults(brought=False)
    parser.add_argument("--per-rank", action="store_true", help="one agent per rank: node ranks are ranks")
    parser.add_argument("--runner", default=TORCHRUN, help="module that starts the ranks of a node")
    parser.add_argument("--facts", action="store_true", help="print versions, GPUs and the time, and end")
    arguments = parser.parse_args(argv[1:])
    if arguments.facts:
        return print_facts()
    if arguments.handover:
        facts = {"host": placement.node_name(os.environ), "version": __version__}
        for line in log_transport.hand_over(arguments.run_dir, facts):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        return 0
    end_with_parent(signal.SIGTERM)
    for number in _ENDS:
        signal.signal(number, _end)
    try:
        text = _spec_text(arguments)
        silence_s = arguments.controller_link
        link = None if silence_s is None else ControllerLink(sys.stdin.fileno(), silence_s or None)
        return Node(store.spec_of(text), placement.here(os.environ), arguments, link).live(text)
    except (PacelineError, ValueError, TypeError, KeyError, OSError) as error:
        sys.stderr.write(f"paceline.launchers.node.agent: {error}\n")
    except Ended:
        return 128 + signal.SIGTERM
    return 1


def _end(number: int, frame: FrameType | None) -> None:
    """Raise Ended once. Further signals must not interrupt the cleanup."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise Ended


def print_facts() -> int:
    """Print one line of facts, then the time once for each line of input.

    The controller computes the clock offset from the times of this short exchange.
    """
    facts = machine.to_dict(machine.probe())
    kept = {name: facts[name] for name in ("host", "gpus", "driver", "cuda", "versions")}
    Output(sys.stdout.fileno()).write_lines([json.dumps({**kept, "paceline": __version__})])
    while os.read(sys.stdin.fileno(), 1):
        Output(sys.stdout.fileno()).write_lines([repr(time.time())])
    return 0


def _spec_text(arguments: argparse.Namespace) -> str:
    """Read the spec from standard input, the shared directory or the environment.

    Standard input also carries variables, so that neither they nor the spec show in the process list.
    """
    if arguments.spec_stdin:
        given = json.loads(first_line(sys.stdin.fileno()))
        os.environ.update(given["env"])
        text = json.dumps(given["spec"])
        if arguments.run_dir is None:
            # Shows the ranks that their run directory belongs to this node and ends with it.
            os.environ[SPEC] = text
        return text
    if arguments.run_dir is not None:
        brought = os.environ.pop(SPEC, None)
        if brought is None:
            return Path(arguments.run_dir, "spec.json").read_text(encoding="utf-8")
        # A disk that only the nodes reach: no controller has written the spec there.
        log_transport.put_spec(arguments.run_dir, brought)
        arguments.brought = True
        return brought
    if SPEC not in os.environ:
        raise RequestError(f"environment: got no {SPEC}, expected it, --run-dir or --spec-stdin.")
    return os.environ[SPEC]


class Node:
    """This node, from its first line of output to its last."""

    def __init__(
        self, spec: RunSpec, position: NodePosition, arguments: argparse.Namespace, link: ControllerLink | None
    ) -> None:
        self.spec, self.position, self.arguments, self.link = spec, position, arguments, link
        self.host = placement.node_name(os.environ)
        self.sender = log_transport.Sender(None, position.node) if arguments.relay else None
        self.output = Output(sys.stdout.fileno(), self.sender.keep if self.sender else None)

    def live(self, spec_text: str) -> int:
        """Run the node and return its exit code."""
        code, last = 1, []
        if self.sender:
            self.output.write_lines([self.sender.hello({"host": self.host, "version": __version__})])
        try:
            # The shared run directory, or one of this node that is removed afterwards.
            shared: Path | None = self.arguments.run_dir
            with contextlib.nullcontext(shared) if shared else own_folder(self.arguments.scratch) as run_dir:
                if shared is None:
                    (run_dir / "spec.json").write_text(spec_text, encoding="utf-8")
                code = self.work(run_dir)
                last = self.farewell(code)
        except OSError as error:
            # The directory could not even be created.
            self.record_failure(None, self.explain(error))
            last = self.farewell(code)
        # This host is clean now, so a reader that hangs can only cost the farewell.
        self.output.write_last(last)
        return code

    def farewell(self, code: int) -> list[str]:
        if self.link is not None and self.link.is_cut:
            return []
        # A rank that was killed could not say where it ran, and torchrun knows only the name of the container.
        where = [placement.ran_on(self.ranks, self.host)] if code else []
        return [*where, *(self.sender.farewell(code) if self.sender else ())]

    def work(self, run_dir: Path) -> int:
        """Wait for the other nodes and run the ranks. A failure becomes the outcome of the first rank."""
        if self.arguments.brought:
            own = log_transport.own_files(self.spec, self.position.node, self.host)
            # An outcome of an earlier attempt must not be taken for this one's.
            for stale in log_transport.carried(run_dir, own):
                stale.unlink()
            if self.sender:
                self.sender.own = own
        if self.sender:
            self.sender.run_dir = run_dir
        try:
            return self.run_ranks(run_dir, self.rendezvous())
        except PacelineError as error:
            self.record_failure(run_dir, str(error))
        except OSError as error:
            self.record_failure(run_dir, self.explain(error))
        except Ended:
            return 128 + signal.SIGTERM
        return 1

    def rendezvous(self) -> Meeting:
        """Wait until all nodes have arrived."""
        position, spec = self.position, self.spec
        wanted = spec.topology.world_size if self.arguments.per_rank else spec.topology.nodes
        if position.nodes != wanted:
            raise RequestError(f"the engine started {position.nodes} nodes, but the spec has {wanted}")
        rendezvous.check_interfaces(os.environ, self.interface_variables)
        if position.nodes == 1:
            return rendezvous.alone()
        member = rendezvous.Member(
            # The mark of a launch is random and known to its nodes only.
            secret=f"{spec.lineage} {spec.run_id} {os.environ.get(placement.ATTEMPT, '')}",
            node=position.node,
            nodes=position.nodes,
            master=position.master,
            port=self.arguments.port,
            host=self.host,
        )
        # The controller considers a run without progress for stall_s as hung, so explain the problem before that. A
        # launcher that sets the patience knows of nodes that are still to come.
        return rendezvous.join(member, self.arguments.patience or min(PATIENCE_S, 0.8 * spec.stall_s))

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        count = 1 if self.arguments.per_rank else self.spec.topology.processes_per_node
        return range(self.position.node * count, (self.position.node + 1) * count)

    @property
    def interface_variables(self) -> tuple[str, ...]:
        return ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if self.spec.topology.device == "cuda" else ()))

    def run_ranks(self, run_dir: Path, meeting: Meeting) -> int:
        """Start the ranks of this node and wait for them. However this function ends, the ranks end too."""
        interface = rendezvous.interface_of(meeting.own)
        unset = [name for name in self.interface_variables if name not in os.environ]
        network = dict.fromkeys(unset, interface) if interface is not None else {}
        descriptors = [meeting.listener.fileno()] if meeting.listener else []
        child = subprocess.Popen(
            command(self.spec, run_dir, self.position, meeting, self.arguments.runner),
            env={**os.environ, **network},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # torchrun ends with the agent, and the ranks with torchrun (see worker.py).
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        if meeting.listener:
            meeting.listener.close()
        assert child.stdout is not None
        self.output.pass_on(os.dup(child.stdout.fileno()))
        child.stdout.close()
        relayed_at = time.monotonic()
        try:
            while child.poll() is None:
                if self.sender and time.monotonic() - relayed_at > RELAY_S:
                    self.output.write_lines(self.sender.changes())
                    relayed_at = time.monotonic()
                time.sleep(POLL_S)
            return child.returncode
        except Ended:
            request_stacks(run_dir)
            raise
        finally:
            end_all(child)
            self.output.finish(LAST_OUTPUT_S)

    def explain(self, error: OSError) -> str:
        if error.errno == errno.ENOSPC:
            where = self.arguments.run_dir or self.arguments.scratch or tempfile.gettempdir()
            return f"the disk of {self.host} is full, no room for the run's files; try there: df -h {where}"
        return f"{self.host}: {error}"

    def record_failure(self, run_dir: Path | None, sentence: str) -> None:
        """Record why no rank was started, as the outcome of the node's first rank."""
        now = time.time()
        outcome = Outcome(
            rank=self.ranks.start,
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


def request_stacks(run_dir: Path) -> None:
    """Ask every rank of this node to write its stack before it is ended.

    In a shared directory, ranks of other nodes have left process ids that mean other processes here.
    """
    import psutil

    descendants = {process.pid for process in psutil.Process().children(recursive=True)}
    pids = [position.pid for position in store.read_progress(run_dir) if position.pid in descendants]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACKS_S if pids else 0)


def command(spec: RunSpec, run_dir: Path, position: NodePosition, meeting: Meeting, runner: str) -> list[str]:
    """Return the command that starts the ranks of this node."""
    words = [sys.executable, "-m", runner, f"--log-dir={os.devnull}"]
    words += [f"--nproc-per-node={spec.topology.processes_per_node}", f"--nnodes={position.nodes}"]
    words += [f"--node-rank={position.node}", f"--master-addr={meeting.master}", f"--master-port={meeting.port}"]
    words += [f"--store-fd={meeting.listener.fileno()}"] if meeting.listener else []
    return [*words, "-m", "paceline.workloads.worker", str(run_dir)]


# --- standard input: the link to the controller ---

END = b"end"
LONGEST_LINE = 64 << 20


def first_line(descriptor: int) -> bytes:
    """Read the first line of input and nothing beyond it."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        # A spec has a few kilobytes, so one byte at a time is fast enough. What follows belongs to the controller link.
        piece = os.read(descriptor, 1)
        if not piece:
            break
        line += piece
    return bytes(line)


class ControllerLink:
    """Watches standard input and sends this process SIGTERM when the controller asks for it or is gone.

    The line `end` asks for an orderly end; any other line is a heartbeat. The end of input, or silence for longer than
    the limit, means that the controller is gone, and `is_cut` is then True.
    """

    def __init__(self, descriptor: int, silence_s: float | None) -> None:
        self._descriptor, self._silence_s = descriptor, silence_s
        self.is_cut = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while True:
            readable, _, _ = select.select([self._descriptor], [], [], self._silence_s)
            piece = os.read(self._descriptor, 4096) if readable else b""
            *lines, rest = (rest + piece).split(b"\n")
            if END in lines:
                break
            if not piece:
                self.is_cut = True
                break
        os.kill(os.getpid(), signal.SIGTERM)


# --- standard output ---

# A rank that never ends its line (a progress bar) is shown in pieces of this length.
LONGEST_PIECE = 8192
# How long a reader may leave one of the last lines unread before it counts as gone.
READER_S = 60


class Output:
    """Writes whole lines to standard output: those of the agent, and those of the ranks, which write in pieces.

    A reader that is gone is not an error. keep: called with the files that ranks print (see `log_transport.file_line`).
    """

    def __init__(self, descriptor: int, keep: Callable[[str, bytes], None] | None = None) -> None:
        self._descriptor, self._keep = descriptor, keep
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []

    def write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line.encode(errors="backslashreplace") + b"\n")

    def write_last(self, lines: Iterable[str]) -> None:
        """Write to a reader that may hang: the kernel ends this process if a line is not read in time."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for line in lines:
            signal.alarm(READER_S)
            self.write_lines([line])
        signal.alarm(0)

    def _write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def pass_on(self, pipe: int) -> None:
        """Copy a pipe line by line until it ends, then close it."""
        pump = threading.Thread(target=self._pump, args=(pipe,), daemon=True)
        pump.start()
        self._pumps.append(pump)

    def finish(self, patience_s: float) -> None:
        """Wait until all pipes are copied, but not for a pipe that some process keeps open."""
        for pump in self._pumps:
            pump.join(patience_s)

    def _pump(self, pipe: int) -> None:
        rest = b""
        while piece := os.read(pipe, 1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LONGEST_PIECE:
                lines, rest = [*lines, rest], b""
            self._write_rank_lines(lines)
        self._write_rank_lines([rest] if rest else [])
        os.close(pipe)

    def _write_rank_lines(self, lines: Iterable[bytes]) -> None:
        """Write lines of ranks, except the files they contain. None may look like a line of the agent."""
        for line in lines:
            file = log_transport.parse_file_line(line.decode(errors="replace")) if self._keep else None
            if file and self._keep:
                self._keep(*file)
            else:
                self._write((b" " if line.startswith(log_transport.MARK.encode()) else b"") + line + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
