"""Verbs that only read start without torch: checked in processes of their own, where nothing else imported it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.experiment.spec import RunSpec

PROBE = """
import sys
from paceline import cli
try:
    code = cli.main({arguments!r})
except SystemExit as end:
    code = end.code
heavy = sorted({{"torch", "deepspeed", "transformers"}} & set(sys.modules))
print("\\nHEAVY", heavy, "CODE", code)
"""


def probe(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=list(arguments))], capture_output=True, text=True, check=False
    )
    assert "HEAVY" in done.stdout, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture
def results(tmp_path: Path, make_spec: Callable[..., RunSpec], make_run: Callable[..., Path]) -> Path:
    make_run(tmp_path, make_spec("ddp"))
    return tmp_path / "test"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "--help"),
        ("list", "strategies"),
        ("list", "metrics"),
        ("list", "presets"),
        ("plan", "quick", "--set", "device=cpu"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_reading_verbs_do_not_import_torch(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert probe(*arguments).startswith("HEAVY [] CODE")


def test_help_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; from paceline import cli; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    third_party = {"numpy", "rich", "pydantic", "yaml", "matplotlib", "psutil", "torch"}
    assert not third_party & set(done.stdout.replace("'", "").strip("[]\n").split(", "))


def test_analysis_verbs_do_not_import_torch(results: Path) -> None:
    run = next(path for path in results.iterdir() if path.is_dir())
    assert probe("report", str(results)).startswith("HEAVY [] CODE 1")  # the run has no reference, so it is invalid
    assert probe("show", str(run)).startswith("HEAVY [] CODE 0")
    assert probe("compare", str(results), str(results)).startswith("HEAVY [] CODE")
    assert probe("status", "--out", str(results)).startswith("HEAVY [] CODE 0")
