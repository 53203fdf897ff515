"""The local launcher: its text without a cluster, its effect with real processes that are not torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.contract import Job
from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec, Tuning
from paceline.host import machine, processes
from paceline.launchers import _warm, local

GOLDEN = Path(__file__).parents[2] / "golden" / "launchers" / "local.txt"
Make = Callable[..., RunSpec]


@pytest.fixture
def texts(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    """str(job) of a few specs, with what belongs to this machine replaced."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    specs = {
        "two processes": make_spec("ddp", 2),
        "one process, four threads": make_spec("zero:stage=3", 1, launcher="local:threads=4"),
        "eight GPUs": make_spec("fsdp2", 8, device="cuda"),
        "a GPU shared by two": make_spec("fsdp2", 2, device="cuda", launcher="local:shared_gpu=true"),
    }
    jobs = {name: str(local.prepare(spec, Path("RUN_DIR"))) for name, spec in specs.items()}
    return "".join(f"# {name}\n{job.replace(sys.executable, 'PYTHON')}\n" for name, job in jobs.items())


def test_the_text_of_a_job_is_the_golden_one(texts: str) -> None:
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(texts)
    assert texts == GOLDEN.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"


def test_preparing_changes_nothing(make_spec: Make, tmp_path: Path) -> None:
    local.prepare(make_spec(), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_interface_the_user_names_is_kept(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setattr(sys, "platform", "linux")
    assert local.prepare(make_spec(), Path("x")).env["GLOO_SOCKET_IFNAME"] == "eth7"


def test_what_one_machine_cannot_do_is_said(make_spec: Make, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(machine, "device_count", lambda: 2)
    assert local.check(make_spec("ddp", 64)) is None, "CPU processes may share cores"
    assert local.check(make_spec("ddp", 2, device="cuda")) is None
    assert local.check(make_spec("ddp", 4, device="cuda")) == golden
    monkeypatch.setattr(machine, "device_count", lambda: 0)
    assert local.check(make_spec("ddp", 1, device="cuda")) == golden
    assert local.check(make_spec("ddp", 4, device="cuda", launcher="local:shared_gpu=true")) is None
    assert local.check(make_spec("ddp", 2, nodes=2)) == golden
    with pytest.raises(RequestError) as caught:
        local.check(make_spec("ddp", launcher="local:threads=0"))
    assert str(caught.value) == golden
    assert "local.threads" in str(caught.value)


FAMILY = """
import subprocess, sys, signal, time
if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf_child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf_child])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_cancel_ends_the_whole_family(tmp_path: Path, deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    job = Job(argv=(sys.executable, "-c", FAMILY.format(deaf=deaf)), log=str(tmp_path / "log.txt"))
    handle = local.submit(job)
    while not (tmp_path / "log.txt").read_text().strip():
        assert local.poll(handle).running
    grandchild = int((tmp_path / "log.txt").read_text())
    local.cancel(handle)
    for pid in (int(handle["pid"]), grandchild):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    state = local.poll(handle)
    assert not state.running
    assert state.exit_code is not None
    local.cancel(handle)


def test_a_job_that_ended_has_its_exit_code_and_its_log(tmp_path: Path) -> None:
    job = Job(argv=(sys.executable, "-c", "print('hello'); raise SystemExit(3)"), log=str(tmp_path / "log.txt"))
    handle = local.submit(job)
    local._children[int(handle["pid"])].wait()
    assert local.poll(handle).exit_code == 3
    assert (tmp_path / "log.txt").read_text() == "hello\n"


def test_torch_is_imported_early_where_ranks_are_forked(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the environment of the first run, which is a reference without variables of its own."""
    begun: list[Any] = []
    monkeypatch.setattr(local._warm, "begin", lambda *words: begun.append(words))
    local.expect([make_spec("ddp", 2, launcher="local:warm=false"), make_spec("ddp", 2, launcher="local:threads=2")])
    assert begun == []
    specs = [make_spec("ddp", 2, env={"NCCL_ALGO": "Ring"}), make_spec("zero:stage=1", 2)]
    local.expect(specs)
    assert begun == [(_warm.Kind(), {**os.environ, **local.prepare(specs[1], Path("x")).env})]


def test_on_gpus_what_compiled_runs_import_is_imported_early_too(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(local._warm, "begin", lambda kind, environment: begun.append(kind))
    monkeypatch.setattr(machine, "device_count", lambda: 2)
    specs = [make_spec("ddp", 2, device="cuda", compile=compiled) for compiled in (True, False)]
    local.expect([*specs, make_spec("ddp", 2, device="cuda", compile=True, env={"NCCL_ALGO": "Ring"})])
    assert begun == [_warm.Kind("cuda"), _warm.Kind("cuda", "", ("torch._inductor.compile_fx",))]


def test_what_is_imported_before_ranks_are_forked(make_spec: Make) -> None:
    """On a CPU only what a strategy asks for, because the resident memory is measured."""

    def kind(*words: Any, **more: Any) -> _warm.Kind:
        return _warm.Kind.of(local.prepare(make_spec(*words, **more), Path("x")).settings)

    compiler, transformers = "torch._inductor.compile_fx", "transformers.models.mistral.configuration_mistral"
    tuned = {"workload": "finetune", "tuning": Tuning(method="lora")}
    assert kind("ddp", 2, compile=True) == kind("single", 1, **tuned) == _warm.Kind("cpu")
    assert kind("zero:stage=1", 2) == _warm.Kind("cpu", "zero")
    assert kind("ddp", 2, device="cuda") == _warm.Kind("cuda")
    assert kind("ddp", 2, device="cuda", compile=True) == _warm.Kind("cuda", "", (compiler,))
    assert kind("zero:stage=1", 2, device="cuda") == _warm.Kind("cuda", "zero")
    assert kind("single", 1, device="cuda", **tuned) == _warm.Kind("cuda", "", (compiler, transformers))


@pytest.mark.parametrize(
    "other",
    [
        {"launcher": "local:warm=false"},
        {"launcher": "local:threads=2"},
        {"workload": "collectives", "strategy": None},
    ],
)
def test_other_ranks_on_gpus_are_new_interpreters(make_spec: Make, other: dict[str, Any]) -> None:
    assert local.prepare(make_spec(processes=2, device="cuda", **other), Path("x")).settings == {}


def test_a_job_of_another_controller_is_not_running() -> None:
    assert not local.poll({"pid": 999_999_999}).running
    local.cancel({"pid": 999_999_999})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_job_ends_with_its_controller(tmp_path: Path) -> None:
    code = (
        "import os, sys; from paceline.launchers import local; from paceline.contract import Job\n"
        f"job = Job(argv=(sys.executable, '-c', 'import time; time.sleep(600)'), log={str(tmp_path / 'log.txt')!r})\n"
        "print(local.submit(job)['pid'], flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    orphan = int(done.stdout)
    psutil.wait_procs([psutil.Process(orphan)] if psutil.pid_exists(orphan) else [], timeout=30)
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


# --- an emulated network ---


def test_an_emulated_network_is_unsupported_where_namespaces_are_not_allowed(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.launchers import _network

    limited = make_spec("ddp", launcher="local:network_mbit=100")
    monkeypatch.setattr(_network.os, "geteuid", lambda: 1000)
    assert "only root" in (local.check(limited) or "")
    monkeypatch.setattr(_network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(_network.shutil, "which", lambda tool: None)
    assert "needs ip and tc" in (local.check(limited) or "")
    threads = make_spec("ddp", launcher="local:network_mbit=100,threads=2")
    assert "one thread" in (local.check(threads) or "")
    with pytest.raises(RequestError, match=r"local.network_mbit: got 0.5, expected 0 for none, or Mbit/s from 1"):
        local.check(make_spec("ddp", launcher="local:network_mbit=0.5"))
