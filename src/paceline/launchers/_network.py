"""An emulated network between the ranks of one run on this machine: each rank is a host with a link of limited rate.

Every rank has a network namespace of its own; veth pairs join them to a bridge in the namespace of the supervisor (see
`_warm`). `tc` limits both directions of each link. The namespaces have no names: the kernel removes them with the last
process of the run, however it ends. Delay and loss are not emulated. All hosts share the CPUs of this machine, so a
rate is an upper limit.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shutil
import subprocess
import sys

from paceline.errors import LaunchError

# Of <linux/sched.h>.
CLONE_NEWNET = 0x40000000
SUBNET = "10.99.0"
# Ranks are 10.99.0.1 to 10.99.0.253; the bridge, on which their store listens, is the last address.
MOST_HOSTS, BRIDGE = 253, f"{SUBNET}.254"
LOWEST_MBIT, HIGHEST_MBIT = 1.0, 100_000.0
# A bucket must hold what the rate fills between two ticks of the kernel (at least 4 ms), and a large segment.
TICK_S, SMALLEST_BURST = 0.004, 65_536
QUEUE = "100ms"
PATIENCE_S = 60.0


def why_not() -> str | None:
    """What prevents emulated networks on this machine; None if nothing does."""
    needs = "an emulated network (local:network_mbit)"
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"{needs} needs network namespaces, which only root on Linux may make"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{needs} needs {' and '.join(missing)} (iproute2), which this machine does not have"
    lacks = _what_the_kernel_lacks()
    return None if lacks is None else f"{needs} needs {lacks}"


@functools.cache
def _what_the_kernel_lacks() -> str | None:
    """Try it in a child process, because a process cannot easily leave a namespace again. Every cell of a plan asks."""
    limits = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_limit(100.0)]
    try:
        tried = subprocess.run(limits, capture_output=True, text=True, check=False, preexec_fn=enter_new)
    except (OSError, subprocess.SubprocessError):
        return "network namespaces, which this kernel or container does not allow"
    if tried.returncode:
        return f"the queueing discipline tbf, which this kernel lacks ({tried.stderr.strip()[:80]})"
    return None


def enter_new() -> None:
    """Move this process, which has one thread, to a new network namespace."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Network:
    """The network of one run. The supervisor makes it before it forks, each rank joins, and the supervisor connects."""

    def __init__(self, hosts: int, mbit: float) -> None:
        enter_new()
        self.mbit = mbit
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "link", "add", "bridge0", "type", "bridge")
        _call("ip", "addr", "add", f"{BRIDGE}/24", "dev", "bridge0")
        _call("ip", "link", "set", "bridge0", "up")
        # One byte for each step of a rank's way into the network, in both directions.
        self.to_supervisor = [os.pipe() for _ in range(hosts)]
        self.to_rank = [os.pipe() for _ in range(hosts)]

    def join(self, rank: int) -> None:
        """In a rank: become a host of the network, and let gloo use its link."""
        enter_new()
        os.write(self.to_supervisor[rank][1], b"1")
        if not os.read(self.to_rank[rank][0], 1):
            raise LaunchError("the supervisor of the emulated network has ended")
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
        _call("ip", "link", "set", "eth0", "up")
        _call("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *_limit(self.mbit))
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def connect(self, pids: dict[int, int]) -> None:
        """In the supervisor: give each rank its link, as soon as it has a namespace; pids by rank."""
        for rank, pid in sorted(pids.items()):
            # Its siblings hold the pipe of a rank too, so the end of a rank that dies here does not close it.
            if not select.select([self.to_supervisor[rank][0]], [], [], PATIENCE_S)[0]:
                raise LaunchError(f"emulated network: rank {rank} made no network namespace in {PATIENCE_S:g} s")
            port = f"port{rank}"
            _call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _call("ip", "link", "set", port, "master", "bridge0", "up")
            _call("tc", "qdisc", "add", "dev", port, "root", "tbf", *_limit(self.mbit))
            os.write(self.to_rank[rank][1], b"1")


def _limit(mbit: float) -> tuple[str, ...]:
    """The words for tc.

    >>> _limit(1000.0)
    ('rate', '1000000000bit', 'burst', '500000', 'latency', '100ms')
    """
    burst = max(SMALLEST_BURST, int(mbit * 1e6 / 8 * TICK_S))
    return "rate", f"{mbit * 1e6:.0f}bit", "burst", str(burst), "latency", QUEUE


def _call(*command: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise LaunchError(f"emulated network: `{' '.join(command)}` failed ({finished.stderr.strip()})")
