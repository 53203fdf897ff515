"""What every kind of test needs: specs in one line, run folders by hand, and the command line as a user starts it."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from testbed import EXHAUSTIVE, workers
from testbed.nursery import begin, command, end

from paceline import __version__
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, WarmUp
from paceline.host.processes import collection_paused
from paceline.results import sealing, store
from paceline.results.records import Evidence, Outcome, Sample, Status, StepSample

# A shell starts what it runs in the background deaf to Ctrl-C, which children inherit; those of tests are sent it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side: threads of several processes would wait for each other's turn on the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# oneDNN prepares every product of an Arm processor for longer than the tiny ones of tests take.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_DIM", "1000000")
# They are each other's busy neighbours too: without this, every run would be launched three times.
os.environ.setdefault("PACELINE_RED_REPEATS", "0")
# Experiments of tests are in temporary directories, outside of the current one, and name what is in these packages.
os.environ.setdefault("PACELINE_ALLOW_MODULES", "testbed,faulty,adversary,engine,launcher,strategy,env")

TESTS = Path(__file__).parent
NURSERY = Path(tempfile.gettempdir()) / f"nursery-{workers.OWNER}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: workers take files in this order, and short ones at the end let them end together."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not EXHAUSTIVE:
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(pytest.mark.skip(reason="one combination of many: make test-all"))


GENEROUS_S = 240.0


def spec_of(strategy: str | None = "ddp", processes: int = 2, **more: Any) -> RunSpec:
    """A spec of the tiny model on CPU; any field of Training, Topology or RunSpec by name, precision `bf16/fp32`."""
    values: dict[str, Any] = {"model": "tiny", "workload": "pretrain", "launcher": "local", "device": "cpu", **more}
    compute, _, reduce = values.pop("precision", "fp32").partition("/")
    training: dict[str, Any] = {"sequence_length": 32, "micro_batch": 1, "accumulation": 2}
    training |= {f.name: values.pop(f.name) for f in dataclasses.fields(Training) if f.name in values}
    training["precision"] = Precision(compute=compute, reduce=reduce or "fp32")
    topology = Topology(device=values.pop("device"), nodes=values.pop("nodes", 1), processes_per_node=processes)
    fields: dict[str, Any] = {"experiment": "test", "steps": 4, "warmup": WarmUp(minimum=1, maximum=2, window=2)}
    fields |= values
    for key in ("workload", "model", "launcher"):
        fields[key] = Choice.parse(fields[key])
    return RunSpec(
        strategy=Choice.parse(strategy) if strategy else None,
        topology=topology,
        training=Training(**training),
        **fields,
    )


def step_of(rank: int = 0, step: int = 0, **more: Any) -> StepSample:
    usual: dict[str, Any] = {
        "duration_s": 0.5,
        "data_wait_s": 0.01,
        "h2d_s": None,
        "h2d_bytes": None,
        "forward_s": 0.2,
        "backward_s": 0.2,
        "optimizer_s": 0.05,
        "tokens": 64,
        "samples": 2,
        "micro_batches": 2,
        "updates": 1,
        "loss": 5.5,
        "grad_norm": 1.0,
        "data_digest": 7,
    }
    return StepSample(rank=rank, step=step, **usual | more)


def outcome_of(rank: int = 0, status: Status = Status.OK, error: str | None = None, **more: Any) -> Outcome:
    usual: dict[str, Any] = {"host": "node-a", "pid": 1, "started_at": 0.0, "ended_at": 1.0 + rank}
    return Outcome(rank=rank, status=status, error=error, **usual | more)


def evidence_of(**more: Any) -> Evidence:
    usual: dict[str, Any] = {
        "init_digest": "abc",
        "parameters": 1,
        "dtypes": {"compute": "fp32"},
        "optimizer": {"lr": 1e-4},
        "settings": {},
        "switches": {},
        "neighbours": None,
        "window_wall_s": 1.0,
    }
    return Evidence(**usual | more)


def write_run(
    out: Path,
    spec: RunSpec,
    status: Status | None = Status.OK,
    error: str | None = None,
    samples: Iterable[Sample] | None = None,
    outcomes: Iterable[Outcome] | None = None,
) -> Path:
    """A run folder as a finished (status None: interrupted) run leaves it."""
    run_dir = store.create(out, spec)
    ranks = range(spec.topology.world_size)
    found = [step_of(r, s) for r in ranks for s in range(spec.steps)] if samples is None else list(samples)
    for rank in ranks:
        lines = [store.sample_line(s) for s in found if s.rank == rank]
        (run_dir / f"samples-{rank}.jsonl").write_text("".join(lines))
    for outcome in [outcome_of(r, evidence=evidence_of()) for r in ranks] if outcomes is None else outcomes:
        store.write_outcome(run_dir, outcome)
    if status is not None:
        store.seal(run_dir, status, error, 100.0, 160.0)
    return run_dir


def reseal(run_dir: Path, **changes: object) -> None:
    """Seal a run folder again, as if the run itself had left what a test added to it or changed in it."""
    body = json.loads((run_dir / "status.json").read_text())
    sealing.write(run_dir, {**body, **changes})


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What Paceline keeps for its user is read and written beside the tests, here and in processes they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # As after a self-test: measuring a client before its first load would take seconds, in each of these processes.
        from paceline.results.served_samples import CeilingSample
        from paceline.serving import client_ceiling

        for processes in range(1, 5):
            client_ceiling.keep(
                CeilingSample(rank=0, processes=processes, events_per_s=2e4, streams=500, measured_at_s=1.0)
            )
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """The folder of the processes that fork ranks (see testbed/nursery.py). They live as long as pytest, whose workers
    share them, and remove the folder at their end. Names of sockets must be short."""
    usual = clean_environment(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore::FutureWarning")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in begin(NURSERY, workers.OWNER, usual).items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def forking_python(nursery: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process starts by `sys.executable -m` is forked from the nursery."""
    for name, value in clean_environment(NURSERY_PYTHON=sys.executable).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(TESTS / "testbed" / "python.sh"))


def pytest_unconfigure() -> None:
    if os.getpid() == workers.OWNER:
        end(NURSERY)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("general")._addoption(
        "-n", dest="workers", metavar="N", type=int, default=0, help="Run tests in N forked processes, file by file."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With `-n`, after a successful collection; snapshots are written by one process."""
    option = session.config.option
    if not option.workers or session.testsfailed or option.collectonly or option.update_snapshots:
        return None
    workers.run(session, option.workers)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    """Their owner knows nothing of the snapshots that workers looked at."""
    if config.option.workers:
        config._syrupy.report = SimpleNamespace(lines=())  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """`--snapshot-update` writes every expected text anew, those in `tests/golden` too.

    Stored texts of tests that did not run are no failure, and workers do not know of each other's.
    """
    config.option.warn_unused_snapshots = True
    config.option.disable_unused_snapshots = config.option.workers > 0
    if config.getoption("update_snapshots", default=False):
        os.environ["PACELINE_UPDATE_GOLDEN"] = "1"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What tests import stays until the end: no garbage collection looks through it, half a second each for torch."""
    with collection_paused():
        yield
    gc.freeze()


@pytest.fixture
def golden(snapshot: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`assert text == golden` compares with `__snapshots__/MODULE.ambr`; `pytest --snapshot-update` writes it anew.

    What depends on machine and moment is replaced first: paths, Python, the host, ports, dates, Paceline's version.
    """
    replaced = [
        (rf"{re.escape(str(tmp_path_factory.getbasetemp()))}(/[\w.\[\]-]+)?", "TMP"),
        (re.escape(sys.executable), "PYTHON"),
        (re.escape(str(TESTS.parent)), "ROOT"),
        (rf"{re.escape(str(Path.home()))}(?=/)", "HOME"),
        (rf"\b{re.escape(socket.gethostname())}\b", "HOST"),
        (rf"{re.escape(tempfile.gettempdir())}/[\w.-]+", "TMP"),
        (r"\b20\d\d-\d\d-\d\d(T\d{6}[+-]\d{4}| \d\d:\d\d(:\d\d)?)", "MOMENT"),
        (rf"(?:(?<=Paceline )|(?<=accepted is )){re.escape(__version__)}\b", "VERSION"),
        (r"(?<=\b127\.0\.0\.1[: ])\d{4,5}\b", "PORT"),
        (r"((?<=\bport )|(?<= = :)|(?<='', )|(?<=-p ))\d{5}\b", "PORT"),
        (r"\b\d\d:\d\d:\d\d(?= host)", "TIME"),
        (r"(?<=\bprocess )\d{3,}\b", "PID"),
        (r"(?<=-r\d-[0-9a-f]{10}-)[0-9a-f]{8}\b|\b[0-9a-f]{8}(?=\.timer\b)", "HASH"),
    ]

    def neutral(*, data: Any, path: Any) -> Any:
        if isinstance(data, str):
            for pattern, name in replaced:
                data = re.sub(pattern, name, data)
        return data

    return snapshot.with_defaults(matcher=neutral)


class Command(Protocol):
    def __call__(
        self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]: ...


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what a developer may have set; the faulty plugins are importable as `faulty.NAME`."""
    dropped = ("OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING")
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    paths = (more.pop("PYTHONPATH", None), str(TESTS), os.environ.get("PYTHONPATH"))
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200", **more}


@pytest.fixture(scope="session")
def paceline(nursery: None) -> Command:
    """`paceline ARGUMENTS` in a process of its own, forked from one that has imported the command line."""

    def call(
        *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return command(arguments, clean_environment(**(env or {})), cwd, GENEROUS_S)

    return call


@pytest.fixture(scope="session")
def environment() -> Callable[..., dict[str, str]]:
    return clean_environment


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., RunSpec]:
    return spec_of


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session", name="reseal")
def reseal_fixture() -> Callable[..., None]:
    return reseal


@pytest.fixture(scope="session")
def make_step() -> Callable[..., StepSample]:
    return step_of


@pytest.fixture(scope="session")
def make_outcome() -> Callable[..., Outcome]:
    return outcome_of


@pytest.fixture(scope="session")
def make_evidence() -> Callable[..., Evidence]:
    return evidence_of
