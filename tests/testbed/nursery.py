"""Fork servers: processes that have imported torch once and fork the ranks of every run that a test starts.

There is one server (a "nursery") for each set of imports. The first run that needs it starts it, and a new one if it
has died. All servers end with the process that NURSERY_OWNER names: pytest, whose workers share them. A server that
needs more than torch is forked from the one that has imported torch.

A client connects to a socket in the directory NURSERY, passes its output and its environment, and waits for the exit
code. If the client goes away, its ranks are killed. Another server has imported the command line and forks
`paceline ARGUMENTS`. `started` runs any program in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# Importing takes seconds, on a busy machine many of them.
PATIENCE_S = 240.0
# What is read while it is imported, by Python, OpenMP, torch, DeepSpeed and transformers: runs that differ in one of
# these have different nurseries.
READ = (
    "OMP_",
    "MKL_",
    "KMP_",
    "MALLOC_",
    "LD_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "DS_",
    "HF_HOME",
    "HF_HUB_",
    "LC_",
    "LANG",
)
READ += ("PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONMALLOC")
COMMAND = "command"
# What a program is given of its asker's namespaces; how many files it may be given; numbers beyond those of any file.
SPACES, MOST_FILES, BEYOND = ("net", "uts"), 64, 512
USUAL = "usual.json"


def command(
    arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `paceline ARGUMENTS` in a child of the server that has imported the command line."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        request = {"arguments": [str(word) for word in arguments], "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        code = _asked(COMMAND, request["env"], request, (out.fileno(), err.fileno()), timeout_s)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(io.TextIOWrapper(file).read())
    return subprocess.CompletedProcess(["paceline", *arguments], code, *texts)


def answered(kind: str, run_dir: Path) -> int:
    """The exit code of a run, forked by the server of this kind, which is started if there is none.

    SIGTERM ends the ranks, then this process: whoever waits for it must not find a rank that still writes."""
    request = {"run_dir": str(run_dir), "cwd": str(Path.cwd()), "env": dict(os.environ)}
    with _connected(_path(kind, os.environ), kind, os.environ) as link:
        signal.signal(signal.SIGTERM, lambda *_: link.shutdown(socket.SHUT_WR))
        return _answer(link, request, (sys.stdout.fileno(), sys.stderr.fileno()), None)


def started(module: str, arguments: Sequence[str]) -> int:
    """The exit code of `python -m MODULE ARGUMENTS`, forked by the server of the kind NURSERY_KIND (default: torch).

    The program inherits the open files of this process under the same numbers, its network namespace, its host name and
    its environment. Variables that differ from USUAL come too late for the import of torch."""
    request = {"module": module, "arguments": list(arguments), "cwd": str(Path.cwd()), "env": dict(os.environ)}
    opened = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    numbers = [number for number in opened if _is_inherited(number)]
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in SPACES]
    usual = json.loads((Path(os.environ["NURSERY"]) / USUAL).read_text())
    return _asked(os.environ.get("NURSERY_KIND", "1"), usual, {**request, "files": numbers}, [*numbers, *spaces], None)


def fork_programs() -> None:
    """What this process starts from now on by `sys.executable -m MODULE` is forked from the nursery."""
    os.environ["NURSERY_PYTHON"] = sys.executable
    sys.executable = str(Path(__file__).with_name("python.sh"))


def _is_inherited(file: int) -> bool:
    """Whether children inherit this file descriptor; those that Python opened itself are not inherited."""
    with contextlib.suppress(OSError):  # closed by now
        return os.get_inheritable(file)
    return False


def begin(folder: Path, owner: int, usual: Mapping[str, str]) -> dict[str, str]:
    """Create the directory of the servers that belong to the process `owner`.

    Returns the variables by which clients find it. usual: the environment in which a server of programs is started."""
    variables = {"NURSERY": str(folder), "NURSERY_OWNER": str(owner)}
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / str(os.getpid())
    own.write_text(json.dumps({**usual, **variables}))
    own.rename(folder / USUAL)
    return variables


def end(folder: Path) -> None:
    """Remove the directory, if no other process uses it."""
    (folder / USUAL).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _asked(
    kind: str, env: Mapping[str, str], request: Mapping[str, Any], files: Sequence[int], timeout_s: float | None
) -> int:
    with _connected(_path(kind, env), kind, env) as link:
        return _answer(link, request, files, timeout_s)


def _answer(link: socket.socket, request: Mapping[str, Any], files: Sequence[int], timeout_s: float | None) -> int:
    _send(link, request, files)
    link.settimeout(timeout_s)
    said = link.makefile().readline()
    return int(said or 1)


def _send(link: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> None:
    socket.send_fds(link, [json.dumps(request).encode() + b"\n"], files)


def _path(kind: str, env: Mapping[str, str]) -> Path:
    return Path(env["NURSERY"]) / f"{_mark(kind, env)}.sock"


def _mark(kind: str, env: Mapping[str, str]) -> str:
    told = json.dumps([kind, *((name, env[name]) for name in sorted(env) if name.startswith(READ))])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class Forked:
    """A server forked from another one, as seen by its parent: the link stays open as long as it lives."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def poll(self) -> int | None:
        return 1 if select.select([self.link], [], [], 0)[0] else None


Started = subprocess.Popen[bytes] | Forked


def _connected(path: Path, kind: str, env: Mapping[str, str]) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    path.parent.mkdir(mode=0o700, exist_ok=True)
    mine: Started | None = None
    while time.monotonic() < deadline:
        link = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            link.connect(str(path))
            return link
        link.close()
        if mine is not None and mine.poll() is not None:
            raise ChildProcessError(f"the nursery at {path} ended before it served: see its log beside it")
        mine = mine or _start(path, kind, env)
        time.sleep(0.05)
    raise TimeoutError(f"no nursery at {path}: see its log beside it")


def _start(path: Path, kind: str, env: Mapping[str, str]) -> Started | None:
    """Start a server; None if one runs or is being started, which its lock on the log file shows."""
    with path.with_suffix(".log").open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        path.unlink(missing_ok=True)  # of one that has died
        return _begun(path, kind, env, log)


def _begun(path: Path, kind: str, env: Mapping[str, str], log: IO[bytes]) -> Started:
    *extras, threads = kind.split("-")
    if extras:
        link = _connected(_path(threads, env), threads, env)
        request = {"serves": [kind, str(path)], "cwd": str(Path.cwd()), "env": dict(env)}
        _send(link, request, (log.fileno(), log.fileno()))
        return Forked(link)
    words = [sys.executable, "-m", "testbed.nursery", "serve", kind, str(path)]
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


Answer = Callable[[Mapping[str, Any], socket.socket], int]


def serve(path: Path, owner: int, answer: Answer) -> None:
    """Accept requests and fork a process for each, until the owner has ended."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    watched = os.pidfd_open(owner)
    while True:
        ready, _, _ = select.select([listening, watched], [], [])
        if watched in ready:
            return clear(path)
        link, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _live(link, answer)
        link.close()


def clear(path: Path) -> None:
    for mine in (path, path.with_suffix(".log")):
        mine.unlink(missing_ok=True)
    end(path.parent)


def _live(link: socket.socket, answer: Answer) -> None:
    """Handle one request in the forked process, up to its exit code. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        text, files, _, _ = socket.recv_fds(link, 1 << 20, MOST_FILES)
        while not text.endswith(b"\n"):
            more = link.recv(1 << 20)
            if not more:
                os._exit(1)  # whoever asked is gone
            text += more
        request = json.loads(text)
        link = _take(link, files, request.get("files", (1, 2)))
        os.environ.clear()
        os.environ.update(request["env"])
        time.tzset()
        os.chdir(request["cwd"])
        sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        code = _become(*request["serves"]) if "serves" in request else answer(request, link)
        sys.stdout.flush()
        link.sendall(f"{code}\n".encode())
    finally:
        os._exit(code)


def _take(link: socket.socket, files: Sequence[int], numbers: Sequence[int]) -> socket.socket:
    """Move received files to these numbers and enter the received namespaces; the link gets another number."""
    received = (link.detach(), *files)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, BEYOND) for file in received]
    for file in received:
        os.close(file)
    for file, number in zip(high[1:], numbers, strict=False):
        os.dup2(file, number)
    for file in high[1 + len(numbers) :]:
        ctypes.CDLL(None).setns(file, 0)
    for file in high[1:]:
        os.close(file)
    return socket.socket(fileno=high[0])


def main(verb: str, *words: str) -> int:
    if verb == "start":
        return start_here(words)
    kind, path = words
    return answered(kind, Path(path)) if verb == "run" else _become(kind, path)


def start_here(words: Sequence[str]) -> int:
    """Do what `python WORDS` would do. `-u -m MODULE ARGUMENTS` is run by a server, and this process ends as that one
    does, also by a signal."""
    if "-m" not in words[:2]:
        os.execv(sys.executable, [sys.executable, *words])
    module, *arguments = words[words.index("-m") + 1 :]
    code = started(module, arguments)
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


def _become(kind: str, path: Path | str) -> NoReturn:
    """Import what this kind needs, then serve. The imports are here so that clients do not pay for them."""
    from testbed import forked

    forked.import_for(kind)
    serve(Path(path), int(os.environ["NURSERY_OWNER"]), forked.run_command if kind == COMMAND else forked.bring_up)
    # Nothing to tidy: the interpreter would look through all of torch for garbage.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
