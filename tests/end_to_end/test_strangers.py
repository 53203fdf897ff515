"""A stranger on the network, or another user of this host, finds nothing of a run to talk to but a store on loopback.

torchrun's own store listens on every interface, and its default rendezvous unpickles what is in there: whoever reached
the port could run code in the ranks.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from paceline.experiment.spec import RunSpec
from paceline.launchers import local
from paceline.launchers._job import spec_text

RANK = """
import os, sys, time, pathlib
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
folder = pathlib.Path(sys.argv[1])
(folder / f"port-{os.environ['RANK']}").write_text(os.environ["MASTER_PORT"])
while not (folder / "end").exists():
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


class Launch:
    """Processes under one command, and where they listen."""

    def __init__(self, argv: list[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self.output: list[str] = []
        self._reader = threading.Thread(target=self.output.extend, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def await_file(self, path: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not path():
            assert self.process.poll() is None, "".join(self.output)
            assert time.monotonic() < end, "".join(self.output)
            time.sleep(0.05)

    def listening(self) -> set[str]:
        root = psutil.Process(self.process.pid)
        return {address for process in (root, *root.children(recursive=True)) for address, _ in doors(process)}

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def launched(argv: list[str], environment: Mapping[str, str]) -> Iterator[Launch]:
    launch = Launch(argv, environment)
    try:
        yield launch
    finally:
        launch.process.terminate()
        launch.process.wait()


class Bomb:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def doors(process: psutil.Process) -> set[tuple[str, int]]:
    """Where a process listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {tuple(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return set()


def own_addresses() -> list[str]:
    entries = [entry for each in psutil.net_if_addrs().values() for entry in each]
    inet = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return [address for address in inet if not address.startswith("127.")]


@pytest.mark.slow
def test_a_stranger_reaches_no_store_and_plants_no_code(
    tmp_path: Path, make_spec: Callable[..., RunSpec], environment: Callable[..., dict[str, str]]
) -> None:
    """The command and variables of the launcher local, with ranks that only wait."""
    from torch.distributed import TCPStore

    job = local.prepare(make_spec("ddp", 2), tmp_path)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    argv = [*job.argv[: job.argv.index("paceline.workloads.worker") - 1], str(script), str(tmp_path)]
    with launched(argv, {**environment(), **job.env}) as launch:
        launch.await_file(lambda: all((tmp_path / f"port-{rank}").is_file() for rank in (0, 1)))
        assert launch.listening() == {"127.0.0.1"}
        ports = [port for _, port in doors(psutil.Process(launch.process.pid))]
        assert int((tmp_path / "port-0").read_text()) in ports
        for address, port in itertools.product(own_addresses(), ports):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
        # Another user of this host can connect to the store. Whatever it plants there is never unpickled.
        bomb = base64.b64encode(pickle.dumps(Bomb(tmp_path / "went-off")))
        for port in ports:
            store = TCPStore("127.0.0.1", port, is_master=False)
            for key in {*store.list_keys(), "torch.rendezvous.paceline"}:
                if "rendezvous" in key:
                    store.set(key, bomb)
        # torchrun's own rendezvous would read its state now, to close itself.
        (tmp_path / "end").touch()
        assert launch.end() == 0, "".join(launch.output)
    assert not (tmp_path / "went-off").exists()


SLURM = {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu7", "PACELINE_MASTER": "192.0.2.1"}


@pytest.mark.parametrize("variables", [{}, SLURM], ids=["agent", "slurm"])
def test_a_job_of_one_node_listens_on_loopback_only(
    tmp_path: Path,
    make_spec: Callable[..., RunSpec],
    environment: Callable[..., dict[str, str]],
    variables: dict[str, str],
) -> None:
    spec = make_spec(None, processes=1, workload="reference")
    argv = [sys.executable, "-m", "paceline.launchers.node.agent", "--runner=testbed.light", f"--scratch={tmp_path}"]
    more = {**variables, "LIGHT_S": "600", "PACELINE_SPEC": spec_text(spec)}
    with launched(argv, environment(**more)) as launch:
        launch.await_file(lambda: bool(list(tmp_path.glob("*/progress-0"))))
        assert launch.listening() == {"127.0.0.1"}
        (rank,) = psutil.Process(launch.process.pid).children()
        assert rank.environ()["GLOO_SOCKET_IFNAME"] == "lo"
