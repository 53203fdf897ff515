"""A real Slurm on this host: munged, slurmctld and several slurmd under one folder, gone when the tests are.

Two plain nodes, and one with four GPUs that are terminals in truth. A job of the partition `urgent` takes the nodes of
one in `main` away; `closed` starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline.host.processes import end_with_parent
from testbed.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
NODES = {
    "n1": "CPUs=2 Sockets=1 CoresPerSocket=2",
    "n2": "CPUs=2 Sockets=1 CoresPerSocket=2",
    "g1": "CPUs=4 Sockets=1 CoresPerSocket=4 Gres=gpu:h100:4",
}
GPU_FILES = [Path(f"/dev/tty{number}") for number in range(4)]
CONFIGURATION = """
ClusterName=testbed
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={root}/ended.txt
GresTypes=gpu
KillWait=5
"""
PARTITIONS = """
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=9
PartitionName=closed Nodes=n[1-2] MaxTime=INFINITE State=DOWN
PartitionName=gpu Nodes=g1 MaxTime=INFINITE State=UP
"""
START_S = 60.0


def missing() -> str | None:
    """Why no Slurm can be started here."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root, which this user is not"
    if not all(path.exists() for path in GPU_FILES):
        return f"no {GPU_FILES[0]} to {GPU_FILES[-1]}, which stand for GPUs"
    return None


class Cluster:
    """Daemons by name (`munged`, `slurmctld`, `n1`, ...), each a child of this process that ends with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configuration = root / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        self._configure()
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        files = {"key": key, "socket": "munge.sock", "pid": "munged.pid", "log": "munged.log", "seed": "munge.seed"}
        words = [f"--{what}{'' if what == 'socket' else '-file'}={self.root / name}" for what, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *words)
        self._await(lambda: (self.root / "munge.sock").exists(), "munged's socket")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self._await(lambda: self.states() == dict.fromkeys(NODES, "idle"), "idle nodes")

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = [free_port() for _ in range(len(NODES) + 1)]
        text = CONFIGURATION.format(root=self.root, host=host, port=ports.pop())
        for node, kind in NODES.items():
            address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.pop()}"
            text += f"NodeName={node} {address} {kind} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN\n"
        self.configuration.write_text(text + PARTITIONS)
        (self.root / "gres.conf").write_text("NodeName=g1 Name=gpu Type=h100 File=/dev/tty[0-3]\n")

    def _start(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.configuration))

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-f", str(self.configuration), "-N", node)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one daemon. Steps of a node live on without it."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(how)
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def lose(self, node: str, reason: str) -> None:
        """A node that disappears with everything on it, and whom Slurm declares down."""
        steps = self.processes(node)
        self.end(node, signal.SIGKILL)
        for process in steps:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.command("scontrol", "update", f"nodename={node}", "state=down", f"reason={reason}")

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Steps of jobs, and whatever they have started; of one node or of all."""
        found = []
        for process in psutil.process_iter(["pid"]):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                ours = environ.get("SLURM_CONF") == str(self.configuration)
                # The one that keeps a step lives until Slurm has heard of its end.
                works = "SLURM_JOB_ID" in environ or process.name() == "slurmstepd"
                if ours and works and node in (None, environ.get("SLURMD_NODENAME")):
                    found.append(process)
        return found

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def states(self) -> dict[str, str]:
        lines = self.command("sinfo", "--noheader", "-N", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> list[str]:
        """Numbers of Paceline's jobs that wait or run."""
        lines = self.command("squeue", "--noheader", "-o", "%i %j").splitlines()
        return [line.split()[0] for line in lines if " paceline-" in line]

    def _await(self, condition: object, what: str) -> None:
        assert callable(condition)
        end = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"no {what} within {START_S:g} s: see the logs under {self.root}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.command("scancel", "--user=root")
        with contextlib.suppress(RuntimeError):
            self._await(lambda: not self.command("squeue", "--noheader"), "empty queue")
        for name in [*NODES, "slurmctld", "munged"]:
            if name in self._daemons:
                self.end(name)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def running(root: Path) -> Iterator[Cluster]:
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
