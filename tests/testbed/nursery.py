"""A process that has imported torch and forks the ranks of one run after another: what importing costs is paid once.

One for each set of imports, started by the first run that needs it, anew where it has died, and gone with the process
NURSERY_OWNER names (pytest: its workers share them). A run reaches it through a socket in NURSERY, hands over its
output and its environment, and waits; when it goes away, its ranks are ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

# Importing takes seconds, on a busy machine many of them.
PATIENCE_S = 240.0
# What nothing reads while it is imported: pytest's own, secrets, and what tests tell their ranks. Folders that tests
# add to the path hold plugins, which are found after forking; each worker of pytest has a state folder of its own.
UNREAD = (
    "PYTEST_",
    "NURSERY",
    "MORTAL_",
    "FAULTY_",
    "FORKED_",
    "MESH_",
    "PYTHONPATH",
    "XDG_STATE_HOME",
    "HF_TOKEN",
    "WANDB_",
)
# Schedules have a crontab of their own, and a shell starts them.
UNREAD += ("PATH", "TZ", "TAB", "PWD", "OLDPWD", "SHLVL", "_")


def answered(kind: str, run_dir: Path) -> int:
    """The exit code of a run that the nursery of this kind has brought up; it is started where there is none."""
    path = Path(os.environ["NURSERY"]) / f"{_mark(kind)}.sock"
    with _connected(path, kind) as link:
        request = {"run_dir": str(run_dir), "cwd": str(Path.cwd()), "env": dict(os.environ)}
        socket.send_fds(link, [json.dumps(request).encode() + b"\n"], [sys.stdout.fileno(), sys.stderr.fileno()])
        said = link.makefile().readline()
    return int(said or 1)


def _mark(kind: str) -> str:
    """Variables decide what is imported, and from where: runs that differ in one have different nurseries."""
    names = sorted(name for name in os.environ if not name.startswith(UNREAD))
    told = json.dumps([kind, *((name, os.environ[name]) for name in names)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _connected(path: Path, kind: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    path.parent.mkdir(mode=0o700, exist_ok=True)
    mine: subprocess.Popen[bytes] | None = None
    while time.monotonic() < deadline:
        link = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            link.connect(str(path))
            return link
        link.close()
        if mine is not None and mine.poll() is not None:
            raise ChildProcessError(f"the nursery at {path} ended before it served: see its log beside it")
        mine = mine or _start(path, kind)
        time.sleep(0.05)
    raise TimeoutError(f"no nursery at {path}: see its log beside it")


def _start(path: Path, kind: str) -> subprocess.Popen[bytes] | None:
    """None where one lives, or is being started: its log is locked for as long as it has it open."""
    with path.with_suffix(".log").open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        path.unlink(missing_ok=True)  # of one that has died
        return _begun(path, kind, log)


def _begun(path: Path, kind: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "testbed.nursery", "serve", kind, str(path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def serve(path: Path, owner: int, bring_up: Callable[[Path, socket.socket], int]) -> None:
    """Fork a process for every run that asks, until the owner is gone."""
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
            _live(link, bring_up)
        link.close()


def clear(path: Path) -> None:
    """The last of several removes the folder."""
    for mine in (path, path.with_suffix(".log")):
        mine.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _live(link: socket.socket, bring_up: Callable[[Path, socket.socket], int]) -> None:
    """One run, from its request to its exit code. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        text, files, _, _ = socket.recv_fds(link, 1 << 20, 2)
        while not text.endswith(b"\n"):
            text += link.recv(1 << 20)
        request = json.loads(text)
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        code = bring_up(Path(request["run_dir"]), link)
        sys.stdout.flush()
        link.sendall(f"{code}\n".encode())
    finally:
        os._exit(code)


def main(verb: str, kind: str, path: Path) -> int:
    if verb == "run":
        return answered(kind, path)
    # Only here: whoever asks for a run shall not import it all.
    from testbed import forked

    forked.import_for(kind)
    serve(path, int(os.environ["NURSERY_OWNER"]), forked.bring_up)
    # Nothing to tidy: the interpreter would look through all of torch for garbage.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
