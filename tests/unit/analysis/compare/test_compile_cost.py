"""When compiling pays: its cost in the first steps over what it saves in each later one."""

from __future__ import annotations

import pytest
from training_records import build_record, build_reference, build_spec

from paceline.analysis.findings import BETTER, Report
from paceline.analysis.report import build
from paceline.report.tables import compilation as tables
from paceline.results.records import RunRecord


def runs(compiled: bool | str, seconds: float, first: tuple[float, ...]) -> list[RunRecord]:
    """One launch for each time of the first step; the others take `seconds`, a little more in later launches."""
    found = []
    for repeat, start in enumerate(first):
        spec = build_spec(compile=compiled, repeat=repeat)
        found.append(build_record(spec, [start, *[seconds * (1 + 1e-4 * repeat)] * 29]))
    return found


def reported(step_s: float, compiled: bool | str = True) -> Report:
    plain = runs(False, 1.0, (3.0, 3.0, 3.0))
    return build([*plain, *runs(compiled, step_s, (44.0, 14.0, 14.0)), build_reference(plain[0].spec)], "test")


def test_compile_time_is_amortised_over_steps() -> None:
    """The first step takes 2 s longer anyway; 43.2 - 2 s are lost by compiling, and 0.2 s gained per step."""
    (row,) = reported(0.8).compilations
    assert (row.mode, row.scope, row.launches, row.verdict) == ("default", None, 3, BETTER)
    assert row.compile_s == pytest.approx(41.2, abs=0.01)
    assert row.cached_s == pytest.approx(11.2, abs=0.01), "the later launches found a filled cache"
    assert row.pays_after_steps == pytest.approx(206, abs=1)
    assert row.text == f"compile default takes 41.2 s, 25 % faster: it pays after {row.pays_after_steps} steps."


def test_code_that_is_not_faster_never_pays() -> None:
    report = reported(1.1, "max-autotune-no-cudagraphs:scope=block")
    (row,) = report.compilations
    assert row.pays_after_steps is None
    (table,) = tables.tables(report)
    texts = [str(cell) for cell in table.rows[0]]
    assert any("max-autotune-no-cudagraphs, each block" in text for text in texts)
    assert any("never" in text for text in texts)
