"""A container as a process in namespaces of its own: mounts, host name, process numbers.

Its root is this host's, read-only at the top, with the pod's volumes mounted over it and an /etc/hosts of its own: that
file stands for the cluster's DNS, so that every resolver in the container, also that of C++ libraries, knows the
names of its peers. The network is this host's: pods have loopback addresses, and two pods cannot listen on one port.
When the first process of the container ends, the kernel ends every other.
"""

from __future__ import annotations

import functools
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation", "private")


@functools.cache
def why_not() -> str | None:
    """Why containers cannot be run on this machine; None where they can."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return "containers of the Kubernetes double need Linux and unshare (package util-linux)"
    with tempfile.TemporaryDirectory() as place:
        script = f"mount -t tmpfs none {shlex.quote(place)} && chroot / true"
        done = subprocess.run(
            ["unshare", *_NAMESPACES, "sh", "-c", script], capture_output=True, text=True, check=False
        )
    if done.returncode:
        return f"containers of the Kubernetes double need mount namespaces: {done.stderr.strip()}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What is started. mounts: path in the container -> folder of this host. memory: path -> size of a memory disk.
    kept: folders of this host that must stay visible although a volume lies over them (the interpreter and the sources
    under test)."""

    argv: Sequence[str]
    env: Mapping[str, str]
    hostname: str
    root: Path
    hosts: Path
    mounts: Mapping[str, Path] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[Path] = ()
    workdir: str = "/"


def start(container: Container) -> subprocess.Popen[bytes]:
    """Its output, both streams, is the process's stdout."""
    container.root.mkdir(parents=True, exist_ok=True)
    unshare = shutil.which("unshare")
    assert unshare is not None
    return subprocess.Popen(
        [unshare, *_NAMESPACES, "/bin/sh", "-c", _script(container)],
        env=dict(container.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _script(container: Container) -> str:
    root = str(container.root)
    tool = {name: shlex.quote(shutil.which(name) or name) for name in ("mount", "mkdir", "cp", "chroot")}
    lines = [
        "set -e",
        f"echo {shlex.quote(container.hostname)} > /proc/sys/kernel/hostname",
        f"{tool['mount']} -t tmpfs none {shlex.quote(root)}",
    ]
    for entry in sorted(Path("/").iterdir()):
        inside = shlex.quote(root + str(entry))
        if entry.is_symlink():
            lines.append(f"{tool['cp']} -P {shlex.quote(str(entry))} {inside}")
        elif entry.is_dir():
            lines.append(f"{tool['mkdir']} {inside}; {tool['mount']} --rbind {shlex.quote(str(entry))} {inside}")
    lines.append(f"{tool['mount']} -t proc proc {shlex.quote(root + '/proc')}")
    lines.append(_bind(tool, container.hosts, root + "/etc/hosts"))
    for path, source in sorted(container.mounts.items()):
        lines.append(f"{tool['mkdir']} -p {shlex.quote(root + path)}; {_bind(tool, source, root + path)}")
    for path, size in sorted(container.memory.items()):
        target = shlex.quote(root + path)
        lines.append(f"{tool['mkdir']} -p {target}; {tool['mount']} -t tmpfs -o size={size} none {target}")
    hidden = [p for p in container.kept if any(p.is_relative_to(m) for m in [*container.mounts, *container.memory])]
    lines += [f"{tool['mkdir']} -p {shlex.quote(f'{root}{p}')}; {_bind(tool, p, f'{root}{p}')}" for p in hidden]
    lines.append(f"{tool['mount']} -o remount,ro {shlex.quote(root)}")
    inside = f"cd {shlex.quote(container.workdir)} && exec {shlex.join(container.argv)}"
    lines.append(f"exec {tool['chroot']} {shlex.quote(root)} /bin/sh -c {shlex.quote(inside)}")
    return "\n".join(lines)


def _bind(tool: Mapping[str, str], source: Path, target: str) -> str:
    return f"{tool['mount']} --rbind {shlex.quote(str(source))} {shlex.quote(target)}"


def ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the container's first process, as the runtime sends it."""
    _signal(process, signal.SIGTERM)


def end_now(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """The first process is the child of unshare; before it exists nothing was started that could be asked."""
    try:
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)
    except psutil.NoSuchProcess:
        return
    if number is signal.SIGKILL and process.poll() is None:
        process.kill()


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As a container's status says it: 128 and the signal."""
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code
