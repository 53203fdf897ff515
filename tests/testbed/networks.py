"""Hosts of network namespaces on this machine, joined by veth to a bridge. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The highest priority that is no real-time one.
FIRST = -20
# Of <linux/sched.h>.
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def why_not(*tools: str) -> str | None:
    """What keeps this machine from having such hosts; None where nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", *tools) if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"plprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


@dataclass(frozen=True)
class Network:
    """Hosts at `subnet`.1, .2 ... on their eth0; the bridge is in a namespace of its own, out of the host firewall's
    reach, and has host number n at its port n."""

    subnet: str
    bridge: str
    hosts: tuple[str, ...]

    def inside(self, namespace: str, *command: str) -> None:
        call("ip", "netns", "exec", namespace, *command)

    def build(self) -> None:
        for name in (self.bridge, *self.hosts):
            call("ip", "netns", "add", name)
        self.inside(self.bridge, "ip", "link", "add", "bridge0", "type", "bridge")
        self.inside(self.bridge, "ip", "link", "set", "bridge0", "up")
        for number, host in enumerate(self.hosts):
            ends = ("type", "veth", "peer", "name", "eth0", "netns", host)
            self.inside(self.bridge, "ip", "link", "add", f"port{number}", *ends)
            self.inside(self.bridge, "ip", "link", "set", f"port{number}", "master", "bridge0", "up")
            self.inside(host, "ip", "addr", "add", f"{self.subnet}.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.inside(host, "ip", "link", "set", device, "up")

    def destroy(self) -> None:
        for name in (*self.hosts, self.bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextlib.contextmanager
def network(subnet: str, hosts: int) -> Iterator[Network]:
    """One whose names no other process of this machine has."""
    mark = f"{subnet.split('.')[1]}x{os.getpid()}"
    built = Network(subnet, f"plbridge{mark}", tuple(f"plhost{mark}-{number}" for number in range(hosts)))
    try:
        built.build()
        yield built
    finally:
        built.destroy()


def put_first() -> None:
    """Give this process priority over others on this machine.

    A limit of `tc` is an upper bound: emulated hosts share one CPU that carries every byte, and a link reaches its
    limit only while they get it. The session's priority is raised too, because kernels that group processes by session
    weigh groups before their members.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(FIRST))


def enter(namespace: str, name: str) -> None:
    """Take this process, which has one thread, to a host, and give it a name that no other sees."""
    system = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        if system.setns(place.fileno(), CLONE_NEWNET) or system.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace {namespace}")
    socket.sethostname(name)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
