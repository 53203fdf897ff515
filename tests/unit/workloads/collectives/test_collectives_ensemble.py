"""Iterations within a budget, and what a rank may allocate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.contract import Seat
from paceline.training.instruments import HostClock
from paceline.workloads.collectives import ensemble as ensemble_module
from paceline.workloads.collectives.ensemble import Ensemble, affordable


@pytest.mark.parametrize(
    ("asked", "seconds_each", "budget_s", "paid"),
    [
        (100, 0.001, 2.0, 100),
        (100, 0.1, 2.0, 20),
        (100, 10.0, 2.0, 5),  # never fewer than 5
        (3, 10.0, 2.0, 3),  # unless fewer were asked for
        (0, 1.0, 2.0, 0),
        (100, 0.0, 2.0, 100),
    ],
)
def test_iterations_that_a_budget_pays_for(asked: int, seconds_each: float, budget_s: float, paid: int) -> None:
    assert affordable(asked, seconds_each, budget_s) == paid


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Ensemble:
    """One of two ranks on a host with 1 GiB left."""
    monkeypatch.setattr(ensemble_module, "_available_host_bytes", lambda: 1 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    recorder: Any = SimpleNamespace()
    return Ensemble(Seat(rank=0, local_rank=0, world_size=2, device="cpu"), recorder)


def test_memory_is_shared_with_the_other_ranks_of_the_host(alone: Ensemble) -> None:
    assert alone.free_bytes() == 1 << 29
    assert alone.empty(16, "fp8").nbytes == 16


def test_memory_that_the_host_does_not_have_is_not_asked_for(alone: Ensemble, golden: object) -> None:
    """A row has two buffers, and the first one granted still counts as free: so half of it is the most."""
    with pytest.raises(MemoryError) as caught:
        alone.empty((1 << 26) + 1, "fp32")
    assert str(caught.value) == golden
    assert "268435460" in str(caught.value)
    assert "536870912" in str(caught.value)


def test_the_limit_of_an_unasked_sweep(alone: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "largest", list)
    assert alone.size_limit_bytes() == 64 << 20, "a quarter of 512 MiB in two buffers"
    monkeypatch.setattr(ensemble_module, "_available_host_bytes", lambda: 1 << 40)
    assert alone.size_limit_bytes() == 64 << 20, "never more on a CPU"
    monkeypatch.setattr(ensemble_module, "_available_host_bytes", lambda: 1 << 20)
    assert alone.size_limit_bytes() == 64 << 10


def test_durations_are_between_marks_and_drained_once(alone: Ensemble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches of 1, 2 and 4 s on a clock of its own: nothing before the first mark and no barrier counts."""
    now, events = [100.0], []
    seconds = iter([1.0, 2.0, 4.0])

    class Clock:
        def mark(self) -> float:
            return now[0]

        def elapsed_s(self, begin: float, end: float) -> float:
            return end - begin

        def drain(self) -> None:
            events.append("drain")

    def barrier() -> None:
        now[0] += 50.0
        events.append("barrier")

    def launch() -> None:
        now[0] += next(seconds)
        events.append("launch")

    alone.clock = Clock()  # type: ignore[assignment]
    monkeypatch.setattr(ensemble_module.dist, "barrier", barrier)
    assert alone.durations(launch, 3) == (1.0, 2.0, 4.0)
    assert events == ["drain", "barrier", "drain", "launch", "launch", "launch", "drain"]


def test_what_a_late_rank_does_between_launches_is_not_in_its_own_time(
    alone: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers wait inside the collective meanwhile: by the difference it is known."""
    now = [0.0]

    class LateClock(HostClock):
        def mark(self) -> float:
            now[0] += 5.0  # every mark comes 5 s after what was before it
            return now[0]

    def launch() -> None:
        now[0] += 1.0

    monkeypatch.setattr(alone, "clock", LateClock())
    monkeypatch.setattr(alone, "fence", lambda: None)
    assert alone.durations(launch, 3) == (6.0, 6.0, 6.0), "1 s and the closing mark's 5; the opening mark's are outside"
