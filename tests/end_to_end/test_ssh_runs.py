"""Runs on two hosts behind a real sshd each: a certified campaign, and every way in which one may go wrong.

What goes wrong is tried with ranks that need no torch. Whatever happened, nothing may be left on the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed import sshd
from testbed.observers import live_looks, seen_live

from paceline import __version__
from paceline.campaign.run import controller as run
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job
from paceline.launchers import ssh as launcher
from paceline.launchers.node import clock_offsets
from paceline.launchers.ssh import sessions as ssh_sessions
from paceline.results import store
from paceline.results.records import Status

WHY_NOT = sshd.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
FIRST, SECOND = sshd.ADDRESSES
Eventually = Callable[..., Any]


class Silent:
    """An observer that does what a test asks for once ranks move."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self._then = then

    def moved(self, spec: RunSpec, positions: Any) -> None:
        if self._then is not None and len(positions) == spec.topology.world_size:
            then, self._then = self._then, None
            then()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Hosts]:
    hosts = sshd.Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


@dataclass
class Field:
    """Runs of light ranks on the two hosts."""

    hosts: sshd.Hosts
    out: Path
    make_spec: Callable[..., RunSpec]
    run_dir: Path = Path()

    def spec(self, fault: str = "", life_s: float = 0.3, nodes: int = 2, **more: Any) -> RunSpec:
        limits = {name: more.pop(name) for name in ("timeout_s", "stall_s") if name in more}
        variables = {"LIGHT_FAULT": fault, "LIGHT_S": life_s}
        usual = {"timeout_s": 100.0, "stall_s": 90.0}
        spec = self.make_spec(None, processes=1, nodes=nodes, workload="reference", **usual | limits)
        return replace(spec, launcher=Choice("ssh", self.hosts.options(env=variables, **more)))

    def run(self, fault: str = "", then: Callable[[], None] | None = None, **more: Any) -> tuple[Status, str]:
        spec = self.spec(fault, **more)
        self.run_dir = self.out / spec.experiment / spec.run_id
        status, error = run.execute(spec, self.out, Silent(then), None)
        assert store.read_run(self.run_dir).status is status, "sealed"
        return status, str(error)

    def leftovers(self) -> list[str]:
        """Processes on the hosts, folders in their scratch."""
        found = []
        for process in (p for address in sshd.ADDRESSES for p in self.hosts.processes(address)):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended while we look, or a zombie
                found.append(" ".join(process.cmdline()))
        return found + [path.name for path in self.hosts.folder.glob("paceline-*")]


@pytest.fixture
def field(
    hosts: sshd.Hosts,
    tmp_path: Path,
    make_spec: Callable[..., RunSpec],
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> Iterator[Field]:
    monkeypatch.setattr(_job, "RUNNER", "testbed.light")
    # A reference is the run whose verdict needs finite losses only, but it has one process.
    monkeypatch.setattr(run, "unsupported", lambda spec: None)
    monkeypatch.setattr(ssh_sessions, "NOTICE_S", 0.5)
    field = Field(hosts, tmp_path, make_spec)
    yield field
    eventually(lambda: not field.leftovers(), "the end of everything on the hosts")
    assert not launcher._sessions


# --- what works ---


def test_a_campaign_on_two_hosts_ends_with_a_certified_report(
    hosts: sshd.Hosts, campaign: Callable[..., Any], smaller: dict[str, Any], eventually: Eventually
) -> None:
    """From the command line, by torchrun, the reference on the first host. The hosts offer the number of nodes."""
    options = {"name": "ssh", **hosts.options()}
    how: dict[str, Any] = {"formats": ("html", "json"), "env": {"FORKED_RUNNER": "testbed.forked_torchrun"}}
    done = campaign("ssh", {"strategy": ["ddp"]}, **how, launcher=options, **smaller | {"processes": 1})
    assert done.code == 0, done.stdout + done.stderr
    record = done.record("ddp")
    assert record.spec.topology.nodes == 2
    assert {outcome.host for outcome in record.outcomes} == {FIRST, SECOND}
    assert {machine["host"] for machine in record.machines} == {FIRST, SECOND}
    assert [c["valid"] for c in done.report["certificates"]] == [True]
    assert {outcome.host for outcome in done.record(None).outcomes} == {FIRST}
    assert (done.directory / "report.html").exists()
    eventually(lambda: not hosts.processes(FIRST) + hosts.processes(SECOND), "the end of all ranks")


def test_files_come_home_whole_and_clocks_are_compared(field: Field) -> None:
    """And while the run lasts, `paceline ui` sees both hosts and the steps of rank 0."""
    with live_looks(field.out) as looks:
        status, error = field.run(life_s=4.0)
    assert status is Status.OK, error
    assert seen_live(looks) == {FIRST, SECOND}
    assert [step.step for look in looks for step in look.steps][:2] == [0, 1]
    assert max(look.ranks for look in looks) == 2
    record = store.read_run(field.run_dir)
    assert [(o.rank, o.host) for o in record.outcomes] == [(0, FIRST), (1, SECOND)]
    assert len(record.steps) == 2 * record.spec.steps
    for clock in clock_offsets.read(field.run_dir):
        assert clock.low_s <= 0 <= clock.high_s, "both are this machine's"
        assert clock_offsets.warning(clock) is None


def test_a_disk_that_all_share_needs_no_lines(field: Field) -> None:
    status, error = field.run(shared=str(field.out), nodes=1)
    assert status is Status.OK, error
    assert len(store.read_run(field.run_dir).outcomes) == 1
    assert "@paceline" not in (field.run_dir / "log.txt").read_text()


# --- ranks that go wrong ---


def test_a_rank_that_is_killed_is_named(field: Field) -> None:
    status, error = field.run("die:1")
    assert status is Status.FAILED
    assert re.match(r"rank 1 on \S+ was killed by signal 9", error), error


@pytest.mark.exhaustive
def test_replicas_go_on_without_a_node_whose_rank_was_killed(field: Field) -> None:
    """These ranks ask nobody anything: that is what is wrong with the run, not that one of them is gone."""
    spec = field.make_spec(None, processes=1, nodes=2, workload="inference", serving=Serving(), engine=Choice("vllm"))
    variables = {"LIGHT_FAULT": "die:1", "LIGHT_S": 1.0}
    spec = replace(spec, launcher=Choice("ssh", field.hosts.options(env=variables)))
    status, error = run.execute(spec, field.out, Silent(), None)
    assert (status, error) == (Status.INVALID, "nothing was recorded")
    record = store.read_run(field.out / spec.experiment / spec.run_id)
    assert [(outcome.rank, outcome.status) for outcome in record.outcomes] == [(0, Status.OK)]
    assert record.lost_nodes == (1,)


@pytest.mark.exhaustive
def test_a_rank_that_hangs_leaves_its_stack(field: Field) -> None:
    status, error = field.run("hang:0", nodes=1, stall_s=5.0)
    assert status is Status.HANG
    assert "rank 0 stopped at step 1" in error
    assert "in suffer" in (field.run_dir / "stack-0.txt").read_text()


def test_the_time_limit_ends_the_job(field: Field) -> None:
    status, error = field.run(life_s=600, nodes=1, timeout_s=2.0)
    assert status is Status.TIMEOUT
    assert "did not end within 2 s" in error


# --- hosts and connections that go away ---


def sessions(hosts: sshd.Hosts, address: str) -> list[psutil.Process]:
    return [p for p in hosts.processes(address) if "paceline.launchers.node.agent" in " ".join(p.cmdline())]


def test_a_host_that_disappears_is_named(field: Field) -> None:
    """And has its scratch cleared by the next run, when it is back."""
    try:
        status, error = field.run(life_s=600, then=lambda: field.hosts.crash(SECOND))
    finally:
        field.hosts.boot(SECOND)
    assert list(field.hosts.folder.glob("paceline-*"))
    again, _ = field.run(life_s=0.2, nodes=1, hosts=[f"root@{SECOND}:{field.hosts.port}"])
    assert again is Status.OK
    assert status is Status.FAILED
    assert error.startswith(f"the connection to {SECOND} was lost")
    assert f"-p {field.hosts.port} root@{SECOND} uptime" in error


@pytest.mark.exhaustive
def test_an_agent_that_is_killed_takes_its_ranks_along(field: Field) -> None:
    def kill() -> None:
        sessions(field.hosts, FIRST)[0].kill()

    status, error = field.run(life_s=600, nodes=1, then=kill)
    assert status is Status.FAILED
    assert f"the agent on {FIRST} was killed" in error or f"the connection to {FIRST} was lost" in error
    assert field.run(nodes=1, life_s=0.2)[0] is Status.OK


def test_a_dropped_connection_leaves_nothing(field: Field) -> None:
    def drop() -> None:
        group = next(iter(launcher._sessions.values()))
        os.kill(group.pids[1], signal.SIGKILL)

    status, error = field.run(life_s=600, then=drop)
    assert status is Status.FAILED
    assert error.startswith(f"the ssh client to {SECOND} was ended by signal 9")


CONTROLLER = """
import sys
from pathlib import Path
from paceline.campaign.run import controller as run
from paceline.results import store
from paceline.launchers import _job
_job.RUNNER, run.unsupported = "testbed.light", lambda spec: None
class Silent:
    def __getattr__(self, name): return lambda *_: None
out = Path(sys.argv[1])
spec = store.spec_of((out / "asked.json").read_text())
run.interruptible(lambda: [run.execute(spec, out, Silent(), None)[0]])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_a_controller_that_ends_leaves_nothing(
    field: Field, eventually: Eventually, environment: Callable[..., dict[str, str]], how: signal.Signals
) -> None:
    """Killed or by Ctrl-C; the next one runs it again from the start."""
    spec = field.spec(life_s=600, nodes=1)
    (field.out / "asked.json").write_text(json.dumps(spec.to_dict()))
    command = [sys.executable, "-c", CONTROLLER, str(field.out)]
    controller = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    run_dir = field.out / spec.experiment / spec.run_id
    try:
        eventually(lambda: run_dir.is_dir() and store.read_progress(run_dir), "the first sign of a rank")
        controller.send_signal(how)
        assert controller.wait(60) != 0
    finally:
        controller.kill()
        controller.wait()
    eventually(lambda: not field.leftovers(), "the end of everything on the hosts")
    assert not store.is_sealed(run_dir)


# --- hosts that cannot be used ---


def test_a_wrong_key(field: Field) -> None:
    _, error = field.run(key=str(field.hosts.folder / f"host_{FIRST}"))
    assert error.startswith(f"root@{FIRST}:{field.hosts.port} rejects the key (or the user); root@{SECOND}")
    assert "try: ssh" in error


def test_hosts_that_no_run_can_use_are_one_sentence_before_the_first(
    hosts: sshd.Hosts, campaign: Callable[..., Any], smaller: dict[str, Any]
) -> None:
    """The first host is in every run: without it nothing can begin."""
    options = {"name": "ssh", **hosts.options(python="/nowhere/bin/python")}
    found = campaign("refused", {"strategy": ["ddp", "fsdp2"]}, launcher=options, **smaller | {"processes": 1})
    assert found.code == 2
    sentence = f"paceline: launcher ssh: root@{FIRST}:{hosts.port} has no Python at '/nowhere/bin/python'; set `python`"
    assert found.stderr.startswith(sentence)
    assert not found.directory.exists()


def test_a_host_whose_key_is_not_known(field: Field) -> None:
    _, error = field.run(known_hosts=os.devnull)
    assert "has an unknown host key" in error
    assert "compare its fingerprint in: ssh" in error


def test_a_host_that_is_not_there(field: Field) -> None:
    _, error = field.run(hosts=[f"{FIRST}:1", "nowhere.invalid"])
    assert f"{FIRST}:1 refuses the connection: no ssh server listens there" in error
    assert "nowhere.invalid has a name that does not resolve here" in error


@pytest.mark.exhaustive
def test_a_python_that_is_not_there(field: Field) -> None:
    _, error = field.run(python="/nowhere/bin/python", nodes=1)
    assert f"root@{FIRST}:{field.hosts.port} has no Python at '/nowhere/bin/python'; set `python`; try: ssh" in error


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., str]:
    """A Python of which something is different, by a line that it runs before all else, or by its own options."""

    def make(line: str, flags: str = "") -> str:
        (tmp_path / "sitecustomize.py").write_text(line + "\n")
        script = tmp_path / "python with $(touch hostile) 'quotes'"
        script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} {flags} "$@"\n')
        script.chmod(0o755)
        return str(script)

    return make


def differing(hosts: sshd.Hosts, python: str) -> list[Any]:
    return [f"root@{FIRST}:{hosts.port}", {"host": SECOND, "port": hosts.port, "user": "root", "python": python}]


def test_a_host_without_paceline(field: Field, altered: Callable[..., str]) -> None:
    python = altered("", flags="-I -S")
    _, error = field.run(hosts=differing(field.hosts, python))
    assert f"root@{SECOND}:{field.hosts.port} has no Paceline in its Python; try: ssh" in error
    assert f"pip install paceline=={__version__}" in error


@pytest.mark.exhaustive
def test_hosts_of_different_versions_are_refused(field: Field, altered: Callable[..., str]) -> None:
    """The path of this Python is hostile on top: it stays one word for the remote shell."""
    python = altered("import paceline; paceline.__version__ = '9.9'")
    _, error = field.run(hosts=differing(field.hosts, python))
    assert error.startswith(
        f"root@{SECOND}:{field.hosts.port} has paceline 9.9, this host has {__version__}: they must be"
    )
    python = altered(
        "from importlib import metadata; v = metadata.version\n"
        "metadata.version = lambda name: '1.0' if name == 'torch' else v(name)"
    )
    _, error = field.run(hosts=differing(field.hosts, python))
    assert "torch 1.0: all hosts of a run must have the same" in error
    assert not list(Path.home().glob("hostile"))


@pytest.mark.exhaustive
def test_a_wrong_clock_is_reported_and_stalls_nothing(
    field: Field, altered: Callable[..., str], paceline: Callable[..., Any]
) -> None:
    python = altered("import time; t = time.time; time.time = lambda: t() - 400")
    status, error = field.run(hosts=differing(field.hosts, python), stall_s=60.0)
    assert status is Status.OK, error
    first, second = clock_offsets.read(field.run_dir)
    assert clock_offsets.warning(first) is None
    assert -401 < second.low_s <= -400 <= second.high_s < -399
    shown = paceline("show", str(field.run_dir)).stdout
    assert f"the clock of {SECOND} is at least 400.0 s behind the controller's" in shown


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container allows no mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.exhaustive
def test_a_disk_that_ranks_fill_is_reported(field: Field, tiny: Path) -> None:
    """Neither the outcome nor anything else can be written any more: it travels without the disk."""
    status, error = field.run("fill:0", nodes=1, scratch=str(tiny))
    assert status is Status.FAILED
    assert error == "OSError: [Errno 28] No space left on device"
    assert not list(tiny.iterdir())


@pytest.mark.exhaustive
def test_a_full_disk_is_reported(field: Field, tiny: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (tiny / "ballast").write_bytes(bytes(1 << 20))
    status, error = field.run(nodes=1, scratch=str(tiny))
    assert status is Status.FAILED
    assert f"the disk of {FIRST} is full, no room for the run's files; try there: df -h {tiny}" in error
