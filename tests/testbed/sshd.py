"""Two hosts on one machine: a real sshd at 127.0.0.1 and one at 127.0.0.2, each with its own key and processes.

Sessions get the Python path of the tests, as a login would on a host with Paceline installed. Everything lies below one
folder and ends with `stop`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from testbed.ports import free_port

ADDRESSES = ("127.0.0.1", "127.0.0.2")
READY_S = 60.0
_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_{address}
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
MaxStartups 100
SetEnv PYTHONPATH={path} OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE={compiled} NURSERY="{nursery}"
"""


def why_not() -> str | None:
    """Why no sshd can be started here; None where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "an sshd of one's own needs root on Linux"
    missing = [tool for tool in ("ssh", "ssh-keygen", "/usr/sbin/sshd") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (apt-get install openssh-server openssh-client)" if missing else None


class Hosts:
    """`options()` is what the launcher ssh needs to use both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key, self.known_hosts = folder, folder / "key", folder / "known_hosts"
        self.port = free_port()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        # sshd separates privileges below this folder, and does not make it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("key", *(f"host_{address}" for address in ADDRESSES)):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        (self.folder / "authorized").write_text((self.folder / "key.pub").read_text())
        known = ""
        for address in ADDRESSES:
            kind, key, *_ = (self.folder / f"host_{address}.pub").read_text().split()
            known += f"[{address}]:{self.port} {kind} {key}\n"
        self.known_hosts.write_text(known)
        for address in ADDRESSES:
            self.boot(address)

    def boot(self, address: str) -> None:
        """Switch a host on."""
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        config = self.folder / f"sshd_{address}.conf"
        compiled = os.environ.get("PYTHONDONTWRITEBYTECODE", "")
        nursery = os.environ.get("NURSERY", "")
        words = {"folder": self.folder, "path": path, "compiled": f'"{compiled}"', "nursery": nursery}
        config.write_text(_CONFIG.format(port=self.port, address=address, **words))
        with (self.folder / f"sshd_{address}.log").open("ab") as log:
            command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]
            self._servers[address] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + READY_S
        while not _answers(address, self.port):
            if time.monotonic() > end or self._servers[address].poll() is not None:
                raise OSError((self.folder / f"sshd_{address}.log").read_text())
            time.sleep(0.05)

    def processes(self, address: str) -> list[psutil.Process]:
        """Everything that runs on a host but the server itself."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self._servers[address].pid).children(recursive=True)
            return [process for process in found if _is_alive(process)]
        return []

    def crash(self, address: str) -> None:
        """The host is gone from one moment to the next: server, sessions and all they started."""
        for process in self.processes(address):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.switch_off(address)

    def switch_off(self, address: str) -> None:
        self._servers[address].kill()
        self._servers[address].wait()

    def stop(self) -> None:
        for address in ADDRESSES:
            self.crash(address)

    def options(self, **more: Any) -> dict[str, Any]:
        hosts = [f"root@{address}:{self.port}" for address in ADDRESSES]
        return {
            "hosts": hosts,
            "key": str(self.key),
            "known_hosts": str(self.known_hosts),
            "ssh_config": os.devnull,
            "python": sys.executable,
            "port": free_port(),
            "scratch": str(self.folder),
            **more,
        }


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
