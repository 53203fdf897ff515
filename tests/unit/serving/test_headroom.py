"""Grades of the load generator's headroom, from ceilings that are known, and where a ceiling comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.results.served_samples import CeilingSample
from paceline.serving import client_ceiling, selftest
from paceline.serving import headroom as rooms
from paceline.serving.headroom import headroom

CEILING = CeilingSample(rank=0, processes=1, events_per_s=10_000.0, streams=500, measured_at_s=1.7e9)


@pytest.mark.parametrize(
    ("rate", "cores", "grade", "level", "what"),
    [
        (40.0, 8, "good", "green", ""),
        (500.0, 8, "good", "green", ""),
        (600.0, 8, "tight", "amber", ": use 2 client processes (`--set workload.shards=2`)"),
        (900.0, 8, "insufficient", "red", ": use 2 client processes (`--set workload.shards=2`)"),
        (2_200.0, 8, "insufficient", "red", ": use 5 client processes (`--set workload.shards=5`)"),
        (2_200.0, 4, "insufficient", "red", ": use a larger client host, or a lower rate or concurrency"),
    ],
)
def test_a_rate_is_graded_by_its_share_of_the_ceiling(
    rate: float, cores: int, grade: str, level: str, what: str
) -> None:
    """Answers of ten tokens: the ceiling is 1,000 requests a second."""
    found = headroom(10 * rate, None, CEILING, cores=cores, answer_tokens=10.0)
    needs = f"needs {rate:,.0f} of 1,000 requests/s; self-test of 2023-11-14"
    assert (found.grade, found.level) == (grade, level)
    assert found.text == f"client headroom: {grade} ({needs}){what}"


def test_a_closed_loop_needs_at_most_what_its_streams_could_bring() -> None:
    """The server may be slower, so that even more than the ceiling is no verdict."""
    found = headroom(30_000.0, 100, replace(CEILING, is_brief=True), cores=2)
    assert found.grade == "tight"
    assert "(needs up to 30,000 of 10,000 events/s; measured briefly on 2023-11-14)" in found.text


def test_more_streams_than_were_measured_are_no_good_grade() -> None:
    found = headroom(10.0, 2_000, CEILING)
    assert found.grade == "tight"
    assert found.text.endswith("run `paceline selftest --streams 2000`")


@pytest.mark.parametrize(("needed", "ceiling", "word"), [(None, CEILING, "warm-up"), (10.0, None, "too busy")])
def test_what_is_not_known_is_said(needed: float | None, ceiling: CeilingSample | None, word: str) -> None:
    found = headroom(needed, 1, ceiling)
    assert (found.grade, found.level) == ("unknown", "amber")
    assert word in found.text


def test_a_ceiling_is_measured_once_and_then_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tried: list[float] = []

    class Try:
        def __init__(self, events_per_s: float) -> None:
            self.events_per_s, self.streams = events_per_s, 500
            self.client_reasons = ("read late",) if events_per_s > 50_000 else ()

    def one(events_per_s: float, *_: Any) -> Try:
        tried.append(events_per_s)
        return Try(events_per_s)

    monkeypatch.setattr(selftest, "one", one)
    first, is_new = rooms.ceiling_for(2)
    assert first is not None
    assert (first.processes, first.events_per_s, first.is_brief, is_new) == (2, 16_000.0, True, True)
    assert tried == [1_000.0, 4_000.0, 16_000.0, 64_000.0]
    assert rooms.ceiling_for(2) == (first, False)
    assert client_ceiling.known() == [first]
    # A self-test replaces it.
    client_ceiling.keep(replace(CEILING, processes=2))
    assert rooms.ceiling_for(2) == (replace(CEILING, processes=2), False)


def test_a_busy_host_has_no_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    failed = type("Try", (), {"client_reasons": ("busy",), "events_per_s": 4_000.0, "streams": 500})
    monkeypatch.setattr(selftest, "one", lambda *_: failed())
    assert rooms.ceiling_for(1) == (None, True)
    assert client_ceiling.known() == []
