"""Ranks forked from a warm process that has imported torch once (`python -m paceline.launchers._warm`).

Importing torch in every rank takes longer than a small run itself. Three kinds of processes take part:

    controller   starts the warm process, sends it one request per run, and reads the exit code of each run
    warm process imports torch; forks one supervisor per run. A strategy with imports of its own, and runs on a GPU that
                 are compiled or fine-tune, have a second warm process, forked from the first, so that these imports do
                 not count in the memory of others
    supervisor   leads a session of its own, forks the ranks, waits for them, and ends all of them when one fails

Each run has a socket between controller and supervisor. The supervisor writes its process id and then its exit code.
When the controller shuts its side down, or dies, the supervisor ends the ranks. Ranks die with their supervisor.

Threads do not survive a fork, and CUDA does not work in the child of a process that has started it. So imports are
made in a child of the warm process, which then looks at itself (`why_unfit`). If it is unfit, it ends, and the process
before these imports serves in its place: without the imports of the second kind, the ranks have to make them; without
torch, the supervisor runs the job's command, which starts new interpreters. Either way the run takes place.

Ranks have the environment variables that torchrun sets, and write a failure report that `ending` can parse. Two things
differ from torchrun: the ranks of all runs share one address space layout and one hash seed, and code pages that a rank
never uses do not count in its resident memory. The evidence of a run says `started: forked`, or `not_forked` and why.
"""

from __future__ import annotations

import contextlib
import functools
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
# What every rank imports.
MODULES = ("torch._dynamo", "torch.distributed", "paceline.workloads.worker")
# Files by which a driver is used: NVIDIA's, also under WSL, and AMD's.
DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd", "/dev/dri/")
_warm: dict[Kind, WarmProcess] = {}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a warm process has imported besides `MODULES`: nothing, or the imports of a strategy and more modules."""

    device: str = "cpu"
    strategy: str = ""
    modules: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Kind:
        return cls(request["device"], request["strategy"], tuple(request["modules"]))

    @property
    def first(self) -> Kind:
        """The kind of the process from which this one is forked; itself if it is the first."""
        return Kind(self.device)


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


def begin(kind: Kind, environment: Mapping[str, str]) -> None:
    """Begin to import what runs of this kind with this environment need. If the process dies, it is started again for
    the first run, whose log then has the reason."""
    with Path(os.devnull).open("wb") as output:
        _warm_process(kind, environment, output.fileno())


def start(request: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> ForkedRun:
    """Ask the warm process for the ranks of one run. Returns at once, also while torch is still being imported.

    The warm process is restarted if it has died, or if the environment differs: variables such as OMP_NUM_THREADS are
    only read during the import. Its own output is in the log of the run that started it.
    """
    ours, theirs = socket.socketpair()
    with log.open("wb") as output, theirs:
        server = _warm_process(Kind.of(request), environment, output.fileno())
        _send(server, json.dumps(request).encode(), theirs.fileno(), output.fileno())
    return ForkedRun(ours, server.process)


def _warm_process(kind: Kind, environment: Mapping[str, str], output: int) -> WarmProcess:
    """The living warm process of a kind with this environment, which may be a new one."""
    known = _warm.get(kind)
    if known and (known.process.poll() is not None or known.environment != environment or known.directory != _here()):
        known.close()
        known = None
    if known is None:
        begin = _start_warm_process if kind == kind.first else _fork_warm_process
        known = _warm[kind] = begin(kind, environment, output)
    return known


def _start_warm_process(kind: Kind, environment: Mapping[str, str], output: int) -> WarmProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), kind.device],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return WarmProcess(process, ours, dict(environment), _here())


def _fork_warm_process(kind: Kind, environment: Mapping[str, str], output: int) -> WarmProcess:
    """One that has torch from the warm process of all runs on this device, and imports the rest."""
    first = _warm_process(kind.first, environment, output)
    link, their_link = socket.socketpair()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their_link, theirs:
        request = json.dumps(asdict(kind)).encode()
        _send(first, request, their_link.fileno(), output, theirs.fileno())
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


@dataclass(frozen=True, slots=True)
class State:
    """What supervisors must know of the warm process. environment: as it was before the imports, which change it
    (DeepSpeed's sets DS_ACCELERATOR). unfit: why ranks must be new interpreters. left_out: why ranks have to make the
    imports of their kind."""

    environment: Mapping[str, str]
    unfit: str | None = None
    left_out: str | None = None


def main(argv: list[str]) -> None:
    """Import torch, then fork a process for every request until the controller closes the socket."""
    requests = socket.socket(fileno=int(argv[1]))
    requests.set_inheritable(False)
    environment = dict(os.environ)
    unfit = go_on_with(functools.partial(preload, Kind(argv[2])), argv[2])
    serve(requests, State(environment, unfit))


def go_on_with(imports: Callable[[], None], device: str) -> str | None:
    """Go on in a child process that has made these imports, and return None there. Returns why ranks cannot be forked
    from such a child, in this process, which has not made them."""
    answer, its_answer = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel was asked to send a signal
        os.close(answer)
        try:
            imports()
            reason = why_unfit(device)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            os.write(its_answer, reason.encode())
            os._exit(1)
        os.close(its_answer)
        return None
    os.close(its_answer)
    with os.fdopen(answer) as file:
        reason = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not reason:
        # It has served to its end, or was killed: this process ends in the same way.
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(abs(code))
    return reason


def why_unfit(device: str) -> str | None:
    """Why ranks for this device cannot be forked from this process; None if they can."""
    if device == "cuda" and (why := _why_cuda_has_started()):
        return f"{why}, and CUDA does not survive a fork"
    threads = len(list(Path("/proc/self/task").iterdir()))
    return f"{threads} threads run after the imports, and only one survives a fork" if threads > 1 else None


def _why_cuda_has_started() -> str | None:
    files = (str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    if used := next((file for file in files if file.startswith(DEVICES)), None):
        return f"the imports have opened {used}"
    cuda = importlib.import_module("torch.cuda")
    # The second one is only true in a child of the process that asked the driver.
    return "the imports have started CUDA" if cuda.is_initialized() or cuda._is_in_bad_fork() else None


def serve(requests: socket.socket, state: State, link: socket.socket | None = None) -> NoReturn:
    """Fork a supervisor, or a second warm process, for every request. link: open as long as this process lives."""
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
            if "run_dir" in request:
                _become_supervisor(request, state, *files)
            _become_warm_process(request, state, *files)
        for file in files:
            os.close(file)


def preload(kind: Kind, modules: Sequence[str] = MODULES) -> None:
    """Import what every rank imports, or what those of a kind import besides, without starting a thread or using a
    device."""
    # Ranks enable it again. A collection here would make no difference to them, but takes most of a second.
    gc.disable()
    with _unasked_driver() if kind.device == "cuda" else contextlib.nullcontext():
        environment = dict(os.environ)
        for name in modules:
            importlib.import_module(name)
        # torch's compiler sets TORCHINDUCTOR_CACHE_DIR; ranks have the variables of new interpreters.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        if kind.strategy:
            plugins.load("strategies", kind.strategy).preload(kind.device)
    # A collection in a rank would scan all of this, and copy every page of it that the ranks share.
    gc.freeze()


@contextlib.contextmanager
def _unasked_driver() -> Iterator[None]:
    """torch.cuda.is_available is True, as in the ranks, without asking the driver, which would start CUDA here: torch
    2.11 asks while its compiler is imported. The launcher has counted the GPUs."""
    cuda: Any = importlib.import_module("torch.cuda")
    asked = cuda.is_available
    cuda.is_available = lambda: True
    try:
        yield
    finally:
        cuda.is_available = asked


def _become_warm_process(
    request: Mapping[str, Any], state: State, link_file: int, log_file: int, requests_file: int
) -> NoReturn:
    # As the first one, it ends when the controller closes the socket of requests.
    link = _begin(link_file, log_file)
    try:
        kind = Kind.of(request)
        if state.unfit is None:
            why = go_on_with(functools.partial(preload, kind, kind.modules), kind.device)
            state = replace(state, left_out=why)
        serve(socket.socket(fileno=requests_file), state, link)
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


def _become_supervisor(request: Mapping[str, Any], state: State, link_file: int, log_file: int) -> NoReturn:
    code = 1
    link = _begin(link_file, log_file)
    try:
        run_dir, processes, mbit = Path(request["run_dir"]), request["processes"], request.get("network_mbit")
        if state.left_out is not None:
            sys.stderr.write(f"paceline: not imported before the ranks start: {state.left_out}\n")
        if (unfit := state.unfit) is None:
            load_plugins(run_dir)
            unfit = why_unfit(request["device"])
        if unfit is None:
            network = Network(processes, mbit) if mbit else None
            code = supervise(run_dir, processes, link, network.join if network else None, network)
        elif mbit:
            sys.stderr.write(f"an emulated network needs forked ranks, but {unfit}\n")
        else:
            sys.stderr.write(f"paceline: ranks are new interpreters, not forked: {unfit}\n")
            sys.stderr.flush()
            code = run_afresh(request["argv"], {**state.environment, placement.NOT_FORKED: unfit}, link)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            link.sendall(f"{code}\n".encode())
        os._exit(code if code >= 0 else 1)


# --- the supervisor of one run ---


def run_afresh(command: Sequence[str], environment: Mapping[str, str], link: socket.socket) -> int:
    """Run the command of a job, which starts its ranks as new interpreters. The end of the link ends it."""
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=lambda: end_with_parent(signal.SIGTERM)
    )
    ended = os.pidfd_open(child.pid)
    if ended not in select.select([ended, link.fileno()], [], [])[0]:
        child.terminate()
    return child.wait()


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
            # With what it started, such as processes that compile; itself if it does not lead a session yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
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
        os.setsid()
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
        _end_compilers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_compilers() -> None:
    """End the processes in which torch compiles, as torch itself does where an interpreter ends."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        with contextlib.suppress(Exception):
            compiler.shutdown_compile_workers()


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
