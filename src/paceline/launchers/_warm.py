"""Ranks of CPU runs, forked from a warm process that has imported torch once (`python -m paceline.launchers._warm`).

Importing torch and DeepSpeed in torchrun and in every rank takes longer than a small run itself. Three kinds of
processes take part:

    controller   starts the warm process, sends it one request per run, and reads the exit code of each run
    warm process imports torch; forks one supervisor per run; starts no thread. A strategy with imports of its own has
                 a second warm process, forked from the first, so that its imports do not count in the memory of others
    supervisor   leads a session of its own, forks the ranks, waits for them, and ends all of them when one fails

Each run has a socket between controller and supervisor. The supervisor writes its process id and then its exit code.
When the controller shuts its side down, or dies, the supervisor ends the ranks. Ranks die with their supervisor.

Ranks have the environment variables that torchrun sets, and write a failure report that `ending` can parse. Two things
differ from torchrun: the ranks of all runs share one address space layout and one hash seed, and code pages that a rank
never uses do not count in its resident memory. The evidence of a run says `started: forked`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import PacelineError
from paceline.experiment import plugins
from paceline.host.processes import GRACE_S, end_with_parent
from paceline.launchers._network import BRIDGE, Network
from paceline.launchers.node import placement, torchrun
from paceline.launchers.node import ranks as node_ranks
from paceline.results import store

MAX_REQUEST_BYTES = 1 << 16
_warm: dict[str, WarmProcess] = {}


# --- the controller's side ---


@dataclass(slots=True)
class WarmProcess:
    """A process that forks supervisors: its request socket, and the environment that its imports have read."""

    process: subprocess.Popen[bytes] | ForkedRun
    requests: socket.socket
    environment: Mapping[str, str]
    directory: str

    def close(self) -> None:
        self.requests.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(slots=True)
class ForkedRun:
    """The ranks of one run, with the methods of `subprocess.Popen` that the launcher local uses. Also a warm process
    that was forked from another."""

    link: socket.socket
    server: subprocess.Popen[bytes] | ForkedRun
    received: bytes = b""
    ended: bool = False
    returncode: int | None = field(default=None)

    @property
    def pid(self) -> int:
        """The supervisor's process id, or the warm process's while it still imports torch."""
        self._receive(0)
        lines = self.received.split(b"\n")
        return int(lines[0]) if len(lines) > 1 else self.server.pid

    def poll(self) -> int | None:
        self._receive(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        while not self.ended:
            if not self._receive(timeout):
                raise subprocess.TimeoutExpired("ranks", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _receive(self, timeout: float | None) -> bool:
        """Read what the supervisor wrote. Returns False if nothing came in time."""
        if self.ended or not select.select([self.link], [], [], timeout)[0]:
            return self.ended
        try:
            text = self.link.recv(4096)
        except ConnectionResetError:
            text = b""
        self.received += text
        if not text:
            self.ended = True
            self.link.close()
            lines = self.received.split()
            # Without an exit code, the supervisor was killed, or the warm process failed before it could fork.
            self.returncode = int(lines[1]) if len(lines) > 1 else self.server.poll() or -signal.SIGKILL
        return True


def begin(environment: Mapping[str, str]) -> None:
    """Begin to import torch for runs with this environment. What goes wrong is in the log of the first run, for which
    the process is started again."""
    with Path(os.devnull).open("wb") as output:
        _warm_process("", environment, output.fileno())


def start(settings: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> ForkedRun:
    """Ask the warm process for the ranks of one run. Returns at once, also while torch is still being imported.

    The warm process is restarted if it has died, or if the environment differs: variables such as OMP_NUM_THREADS are
    only read during the import. Its own output is in the log of the run that started it.
    """
    request = json.dumps({key: value for key, value in settings.items() if key != "preload"}).encode()
    ours, theirs = socket.socketpair()
    with log.open("wb") as output, theirs:
        server = _warm_process(settings["preload"], environment, output.fileno())
        _send(server, request, theirs.fileno(), output.fileno())
    return ForkedRun(ours, server.process)


def _warm_process(strategy: str, environment: Mapping[str, str], output: int) -> WarmProcess:
    """The living warm process of a strategy with this environment, which may be a new one."""
    known = _warm.get(strategy)
    if known and (known.process.poll() is not None or known.environment != environment or known.directory != _here()):
        known.close()
        known = None
    if known is None:
        begin = _fork_warm_process if strategy else _start_warm_process
        known = _warm[strategy] = begin(strategy, environment, output)
    return known


def _start_warm_process(_: str, environment: Mapping[str, str], output: int) -> WarmProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return WarmProcess(process, ours, dict(environment), _here())


def _fork_warm_process(strategy: str, environment: Mapping[str, str], output: int) -> WarmProcess:
    """One that has torch from the warm process of all strategies, and imports the rest."""
    first = _warm_process("", environment, output)
    link, their_link = socket.socketpair()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their_link, theirs:
        _send(first, json.dumps({"preload": strategy}).encode(), their_link.fileno(), output, theirs.fileno())
    return WarmProcess(ForkedRun(link, first.process), ours, dict(environment), _here())


def _send(server: WarmProcess, request: bytes, *files: int) -> None:
    # If it dies now, what was requested ends without an exit code.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(server.requests, [request], files)


def _here() -> str:
    return str(Path.cwd())


def close() -> None:
    """End all warm processes of this controller."""
    while _warm:
        _warm.popitem()[1].close()


# --- the warm process ---


def main(argv: list[str]) -> None:
    """Import torch, then fork a process for every request until the controller closes the socket."""
    requests = socket.socket(fileno=int(argv[1]))
    requests.set_inheritable(False)
    preload()
    serve(requests)


def serve(requests: socket.socket, link: socket.socket | None = None) -> NoReturn:
    """Fork a supervisor, or a warm process of a strategy, for every request. link: open as long as this one lives."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports, and only one survives a fork: use local:warm=false")
    while True:
        message, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        # Processes that have ended keep their process ids until here.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            # Skip the garbage collection of all of torch at exit.
            os._exit(0)
        if os.fork() == 0:
            for inherited in filter(None, (requests, link)):
                inherited.close()
            request = json.loads(message)
            _become_warm_process(request, *files) if "preload" in request else _become_supervisor(request, *files)
        for file in files:
            os.close(file)


def preload(strategy: str | None = None) -> None:
    """Import what every rank imports, and what those of a strategy import besides, without starting a thread or using
    a device."""
    # Ranks enable it again. A collection here would make no difference to them, but takes most of a second.
    gc.disable()
    for name in ("torch._dynamo", "torch.distributed", "paceline.workloads.worker"):
        importlib.import_module(name)
    if strategy is not None:
        # The rank itself reports a missing package.
        with contextlib.suppress(PacelineError, ImportError):
            plugins.load("strategies", strategy).preload("cpu")
    # A collection in a rank would scan all of this, and copy every page of it that the ranks share.
    gc.freeze()


def _become_warm_process(request: Mapping[str, Any], link_file: int, log_file: int, requests_file: int) -> NoReturn:
    # As the first one, it ends when the controller closes the socket of requests.
    link = _begin(link_file, log_file)
    try:
        preload(request["preload"])
        serve(socket.socket(fileno=requests_file), link)
    except SystemExit as end:
        sys.stderr.write(f"{end}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        link.close()
        sys.stderr.flush()
        os._exit(1)


def _begin(link_file: int, log_file: int) -> socket.socket:
    """Start as a process of its own: a new session, output to the log, and the process id to the controller."""
    os.setsid()
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.close(log_file)
    link = socket.socket(fileno=link_file)
    link.sendall(f"{os.getpid()}\n".encode())
    return link


def _become_supervisor(request: Mapping[str, Any], link_file: int, log_file: int) -> NoReturn:
    code = 1
    link = _begin(link_file, log_file)
    try:
        mbit = request.get("network_mbit")
        network = Network(request["processes"], mbit) if mbit else None
        code = supervise(
            Path(request["run_dir"]), request["processes"], link, network.join if network else None, network
        )
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            link.sendall(f"{code}\n".encode())
        os._exit(code)


# --- the supervisor of one run ---


def supervise(
    run_dir: Path,
    processes: int,
    link: socket.socket,
    prepare_rank: Callable[[int], None] | None = None,
    network: Network | None = None,
) -> int:
    """Fork the ranks and wait for them. Returns 0 if all succeeded; a failure, or the end of the link, ends the others.

    prepare_rank is called in each rank before it begins. The ranks of a `network` join it there.
    """
    load_plugins(run_dir)
    # Connections wait in this socket until the store answers. The store starts a thread, so it comes after the forks.
    address = BRIDGE if network is not None else torchrun.LOOPBACK
    rendezvous = torchrun.listen(address)
    port = rendezvous.getsockname()[1]
    os.environ |= {**node_ranks.variables(address, port, processes), placement.FORKED: "1"}
    ranks: dict[int, int] = {}
    supervisor = os.getpid()
    try:
        for rank in range(processes):
            pid = os.fork()
            if pid == 0:
                link.close()
                rendezvous.close()
                _become_rank(rank, run_dir, supervisor, prepare_rank)
            ranks[pid] = rank
        if network is not None:
            network.connect({rank: pid for pid, rank in ranks.items()})
        _store = torchrun.serve(rendezvous)
        return _wait(ranks, link)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def load_plugins(run_dir: Path) -> None:
    """Import the workload and the strategy of a run before its ranks are forked, if they are Paceline's own: modules of
    users may start threads, or read the rank."""
    # The rank itself reports what is wrong with them.
    with contextlib.suppress(PacelineError, ImportError):
        spec = store.read_spec(run_dir)
        for kind, choice in (("workloads", spec.workload), ("strategies", spec.strategy)):
            if choice is not None and plugins.is_shipped(kind, choice.name):
                plugins.load(kind, choice.name)


def _become_rank(rank: int, run_dir: Path, supervisor: int, prepare_rank: Callable[[int], None] | None) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        if os.getppid() != supervisor:
            os._exit(code)  # it died before the kernel was asked to send a signal
        gc.enable()
        os.environ |= node_ranks.own_variables(rank)
        sys.argv = ["paceline.workloads.worker", str(run_dir)]
        if prepare_rank is not None:
            prepare_rank(rank)
        # By name, as torchrun does: launchers do not import the worker.
        code = importlib.import_module(sys.argv[0]).main(sys.argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: dict[int, int], link: socket.socket) -> int:
    """Wait for all ranks and remove those that have ended from `ranks`."""
    watched = {os.pidfd_open(pid): pid for pid in ranks}
    while watched:
        ready, _, _ = select.select([*watched, link.fileno()], [], [])
        failed: dict[int, int] = {}
        for file in [file for file in watched if file in ready]:
            pid = watched.pop(file)
            os.close(file)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            rank = ranks.pop(pid)
            if code:
                failed[pid] = code
                sys.stderr.write(node_ranks.death_text(rank, code, pid))
        if failed or (link.fileno() in ready and not link.recv(1)):
            return 1
    return 0


if __name__ == "__main__":
    main(sys.argv)
