"""Joules of a window on numbers worked out by hand: counters, power, ends between readings, and who cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.analysis.training import energy, metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import GaugeSample, RunRecord

Builder = Callable[..., Any]
BEGAN = 1000.0


def reading(at_s: float, rank: int = 0, device: int | None = 0, **gauges: Any) -> GaugeSample:
    return GaugeSample(rank=rank, host="node-a", at_s=at_s, device=device, **gauges)


def counter(times: Sequence[float], watts: float, start: float = 5e6, **more: Any) -> tuple[GaugeSample, ...]:
    """A device that draws the same power all the time."""
    return tuple(reading(at, energy_j=start + watts * (at - times[0]), **more) for at in times)


def steadily(begin: float, end: float, every: float = 0.5) -> list[float]:
    return [begin + every * i for i in range(round((end - begin) / every) + 1)]


# --- one device ---


def test_a_counter_is_read_as_a_difference() -> None:
    found = energy.between(counter(steadily(990, 1050), watts=400), 1000, 1020)
    assert (found.joules, found.seconds, found.how) == (8000, 20, energy.COUNTER)
    assert found.margin_j == 0, "both ends meet a reading"


def test_ends_between_readings_are_interpolated_with_their_error() -> None:
    samples = [reading(0, energy_j=0.0), reading(10, energy_j=100.0), reading(20, energy_j=300.0)]
    found = energy.between(samples, 4, 15)
    # 40 J at 4 s and 200 J at 15 s; the first may have been 0 to 100, the second 100 to 300.
    assert found.joules == pytest.approx(160)
    assert found.margin_j == pytest.approx(60 + 100)


def test_power_is_integrated_by_trapezoids_without_a_counter() -> None:
    samples = [reading(0, power_w=100.0), reading(2, power_w=300.0), reading(4, power_w=300.0)]
    found = energy.between(samples, 0, 4)
    assert (found.joules, found.how) == (400 + 600, energy.POWER)


def test_a_counter_that_was_set_back_gives_way_to_power(golden: object) -> None:
    counts = [100.0, 200.0, 5.0, 105.0]
    with_power = [reading(i, energy_j=count, power_w=100.0) for i, count in enumerate(counts)]
    assert energy.between(with_power, 0, 3) == energy.WindowEnergy(300.0, 3, 0.0, 1, energy.POWER)
    without = [reading(i, energy_j=count) for i, count in enumerate(counts)]
    assert energy.between(without, 0, 3).reason == golden


def test_a_counter_set_back_before_the_window_does_not_matter() -> None:
    samples = [reading(i, energy_j=count) for i, count in enumerate([900.0, 0.0, 100.0, 200.0])]
    assert energy.between(samples, 1, 3).joules == 200


@pytest.mark.parametrize(
    "samples",
    [
        [reading(i) for i in range(9)],
        counter(steadily(3, 9), 100),
        [reading(at, power_w=100.0) for at in (0, 1, 9)],
    ],
)
def test_an_unknown_energy_has_a_reason(samples: Sequence[GaugeSample], golden: object) -> None:
    found = energy.between(samples, 1, 8)
    assert found.joules is None
    assert str(found.reason) == golden


@pytest.mark.parametrize("gauge", ["energy_j", "power_w"])
@pytest.mark.parametrize("times", [(0, 1, 2, 3, 2.5, 3.5, 4.5, 9), (0, 1, 2, 2, 3, 9), (0, 5, 6, 7, 0.5, 9)])
def test_a_clock_that_was_set_back_leaves_the_energy_unknown(
    times: Sequence[float], gauge: str, golden: object
) -> None:
    samples = [reading(at, **{gauge: 100.0 * i}) for i, at in enumerate(times)]
    found = energy.between(samples, 1, 4)
    assert found.joules is None
    assert found.reason == golden


# --- a run ---


@pytest.fixture
def run_on_gpus(make_spec: Builder, make_record: Builder) -> Builder:
    """30 steps of 1 s on two GPUs after one step of warm-up: the window is 1001 s to 1030 s."""

    def build(gauges: Sequence[GaugeSample] | None = None, repeat: int = 0, **more: Any) -> RunRecord:
        usual = (
            *counter(steadily(990, 1050), 400, device=0),
            *counter(steadily(990, 1050), 600, device=1),
        )
        evidence = {"window_began_at_s": BEGAN, **more.pop("evidence", {})}
        record: RunRecord = make_record(
            make_spec(device="cuda", repeat=repeat),
            evidence=evidence,
            gauges=usual if gauges is None else tuple(gauges),
            **more,
        )
        return record

    return build


def measured(records: Sequence[RunRecord], metric: str) -> Any:
    (cell,) = metrics.gather([open_window(record) for record in records])
    return next(m for m in cell.measurements if m.metric == metric)


def test_joules_per_token_are_those_of_all_gpus_over_all_tokens(run_on_gpus: Builder, golden: object) -> None:
    record = run_on_gpus()
    tokens = sum(s.tokens for s in record.steps if s.step >= 1)
    found = measured([record], "joules_per_token")
    assert found.value == pytest.approx(29 * (400 + 600) / tokens)
    assert (found.unit, found.better, found.low) == ("J/token", "lower", None)
    assert found.note == golden
    assert measured([record], "power_w").value == pytest.approx(1000)


def test_launches_give_the_interval(run_on_gpus: Builder) -> None:
    launches = [
        run_on_gpus(
            (
                *counter(steadily(990, 1050), 400 + extra, device=0),
                *counter(steadily(990, 1050), 600, device=1),
            ),
            repeat=repeat,
        )
        for repeat, extra in enumerate((0, 30, 60))
    ]
    found = measured(launches, "power_w")
    assert found.value == pytest.approx(1030)
    assert found.low < 1030 < found.high


@pytest.mark.parametrize(
    "change",
    [
        {"gauges": ()},
        {"evidence": {"settings": {"shared_gpu": True}}},
        {"evidence": {"neighbours": 1}},
        {"evidence": {"window_began_at_s": None}},
        {"gauges": counter(steadily(990, 1050), 400)},
        {"gauges": [s for d in (0, 1) for s in counter(steadily(980, 1060, 40.0), 400, device=d)]},
    ],
)
def test_a_run_that_cannot_tell_has_no_number_but_a_reason(
    run_on_gpus: Builder, change: dict[str, Any], golden: object
) -> None:
    found = measured([run_on_gpus(**change)], "joules_per_token")
    assert found.value is None
    assert found.note == golden


def test_one_launch_without_energy_leaves_the_cell_without(run_on_gpus: Builder, golden: object) -> None:
    found = measured([run_on_gpus(), run_on_gpus((), repeat=1)], "joules_per_token")
    assert found.value is None
    assert found.note == golden


def test_a_run_on_processors_takes_the_hosts_counter(make_spec: Builder, make_record: Builder) -> None:
    gauges = counter(steadily(990, 1050), 150, device=None)
    again = tuple(reading(s.at_s, rank=1, device=None, energy_j=s.energy_j) for s in gauges)
    record = make_record(make_spec(), evidence={"window_began_at_s": BEGAN}, gauges=(*gauges, *again))
    assert measured([record], "power_w").value == pytest.approx(150), "a host that two ranks read counts once"


def test_a_counter_beyond_64_bits_is_still_a_number() -> None:
    start = 2**70
    samples = [reading(float(second), energy_j=start) for second in range(5)]
    assert energy.between(samples, 1, 3).joules == 0.0
