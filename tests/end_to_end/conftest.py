"""Campaigns of real torchrun processes on the tiny model, each run once and looked at by many tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from testbed.nursery import command

from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.results import store
from paceline.results.records import RunRecord

# What campaigns of tests write: pictures take longer than many of them, and have tests of their own.
TEXTS = ("html", "markdown", "csv", "json")
# A third of the CPU time of torchrun, which the campaigns about the launcher itself ask for (see testbed/forked.py).
QUICK_LAUNCHER = "testbed.forked"
# Small enough to end in a second of training; the limits are far beyond what a loaded machine needs.
BASE: dict[str, Any] = {
    "model": "tiny",
    "device": "cpu",
    "precision": "fp32",
    "sequence_length": 32,
    "global_batch": 8,
    "processes": 2,
    "steps": 4,
    "warmup": {"minimum": 1, "maximum": 1, "window": 2},
    "timeout_s": 300.0,
    "stall_s": 200.0,
}


# 16-bit arithmetic is emulated on most CPUs: a still smaller model, sequence and batch.
SMALLER: dict[str, Any] = {
    "model": "tiny:layers=1,hidden=32",
    "sequence_length": 8,
    "global_batch": 4,
    "steps": 3,
}


@dataclass(frozen=True)
class Campaign:
    """What `paceline run` left behind."""

    out: Path
    name: str
    code: int
    stdout: str
    stderr: str

    @property
    def directory(self) -> Path:
        return self.out / self.name

    @property
    def records(self) -> list[RunRecord]:
        records, skipped = store.read_runs(self.directory)
        assert not skipped
        return records

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return found

    def record(self, strategy: str | None, **axes: Any) -> RunRecord:
        """The one run of this strategy (None: the reference) whose axes have these values."""
        name = None if strategy is None else str(plugins.expanded("strategies", Choice.parse(strategy), 1, 1))
        wanted = {"strategy": name, **axes}
        # With its options: the axis has only the launcher's name.
        known = [(r, {**r.spec.axes(), "launcher": str(r.spec.launcher)}) for r in self.records]
        found = [r for r, axes_of in known if all(axes_of[key] == value for key, value in wanted.items())]
        assert len(found) == 1, f"{len(found)} runs of {wanted}"
        return found[0]

    def finding(self, record: RunRecord) -> dict[str, Any]:
        return next(run for run in self.report["runs"] if run["run"] == record.spec.run_id)


def write_experiment(path: Path, name: str, matrix: Any, **base: Any) -> Path:
    file = path / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"name": name, "base": BASE | base, "matrix": matrix}))
    return file


@pytest.fixture(scope="session")
def experiment_file() -> Callable[..., Path]:
    return write_experiment


@pytest.fixture(scope="session", autouse=True)
def forked_ranks(nursery: None) -> None:
    """Campaigns fork their ranks from the nursery."""


@pytest.fixture(scope="session")
def campaign(
    tmp_path_factory: pytest.TempPathFactory, environment: Callable[..., dict[str, str]]
) -> Callable[..., Campaign]:
    """Run an experiment through the command line to its end; its ranks are forked unless it names a launcher. Those
    that are forked can do without the profile of a run, which takes a third of a short one; profiled: True, or the
    strategies that have one."""

    def run(
        name: str,
        matrix: Any,
        env: dict[str, str] | None = None,
        formats: Sequence[str] = TEXTS,
        profiled: bool | Sequence[str] = True,
        **base: Any,
    ) -> Campaign:
        out = tmp_path_factory.mktemp(name)
        file = write_experiment(out, name, matrix, **{"launcher": QUICK_LAUNCHER} | base)
        wanted = [word for form in formats for word in ("--format", form)]
        arguments = ("run", str(file), "--out", str(out), "--verbose", *wanted)
        chosen = {} if profiled is True else {"FORKED_PROFILED": ";".join(profiled or ())}
        done = command(arguments, environment(**(env or {}), **chosen), None, 900)
        return Campaign(out, name, done.returncode, done.stdout, done.stderr)

    return run


# Modules from which ranks are forked.
STARTERS = {"testbed.nursery", "paceline.launchers._warm"}


def processes_of(out: Path) -> list[str]:
    """Command lines of living processes that work in this results folder; forked ranks have that of their nursery."""
    ranks = {position.pid for run_dir in store.run_dirs(out) for position in store.read_progress(run_dir)}
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        is_ours = any(str(out) in word for word in words) or (process.pid in ranks and STARTERS & set(words))
        if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="session")
def living() -> Callable[[Path], list[str]]:
    return processes_of


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """Wait for a condition; the limit is a guard against hanging tests, not a criterion."""

    def wait(condition: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            time.sleep(0.1)
        pytest.fail(f"{what} did not happen within {limit_s:g} s")

    return wait


@pytest.fixture(scope="session")
def smaller() -> dict[str, Any]:
    return SMALLER


@pytest.fixture(scope="session")
def reduced_dtypes() -> Callable[[RunRecord], set[str]]:
    """Dtypes of reductions that carried more than a few numbers of gradients."""
    reductions = ("all_reduce", "reduce_scatter")
    return lambda record: {w.dtype for w in record.wire if w.operation in reductions and w.payload_bytes > 64}
