"""What every exporter promises: whole files, the same for the same report, never a missing number printed as 0."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically

EXPORTERS = ("csv", "html", "json", "markdown", "plots", "suite_json")
GOLDEN = {"markdown": ("report.md",), "csv": ("metrics.csv", "cells.csv"), "json": ("report.json",)}


def exporter(name: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"paceline.report.exporters.{name}")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", EXPORTERS)
def test_returns_exactly_the_files_it_leaves_and_the_same_bytes_again(
    name: str, report: Report, tmp_path: Path
) -> None:
    written = exporter(name).export(report, tmp_path / "deep" / "out")
    assert written
    assert sorted(written) == sorted(p for p in tmp_path.rglob("*") if p.is_file())
    exporter(name).export(report, tmp_path / "b")
    assert contents(tmp_path / "deep" / "out") == contents(tmp_path / "b")


def test_last_digits_of_the_layout_do_not_reach_the_files(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver of matplotlib's layout orders by memory address, so its last digits differ between two drawings."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    solve = ConstrainedLayoutEngine.execute
    first = exporter("plots").image(report, "step_time", "svg")

    def solve_otherwise(self: ConstrainedLayoutEngine, figure: Figure) -> None:
        solve(self, figure)
        for axes in figure.axes:
            x, y, width, height = axes.get_position(original=True).bounds
            axes._set_position((x + 1e-9, y - 1e-9, width, height), which="original")  # type: ignore[attr-defined]

    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", solve_otherwise)
    assert exporter("plots").image(report, "step_time", "svg") == first


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_report_without_runs_is_exported_too(name: str, empty_report: Report, tmp_path: Path) -> None:
    written = exporter(name).export(empty_report, tmp_path)
    assert bool(written) == (name != "plots")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, report: Report, tmp_path: Path, golden_folder: Path) -> None:
    """PACELINE_UPDATE_GOLDEN=1 writes what is produced now; read the difference before you commit it."""
    written = {path.name: path.read_bytes() for path in exporter(name).export(report, tmp_path)}
    assert set(written) == set(GOLDEN[name])
    for file, content in written.items():
        if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
            write_atomically(golden_folder / file, content)
        assert content == (golden_folder / file).read_bytes()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomically(tmp_path / "report.md", "old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert contents(tmp_path) == {"report.md": b"old"}
