"""Intervals of one launch and of several: they hold the truth of one law."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from answered_records import NS, build_record, build_request, build_spec

from paceline.analysis.findings import Measurement
from paceline.analysis.served import extrapolation, latency_bounds, measurements
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.clustered_percentiles import clustered_percentiles
from paceline.analysis.statistics.intervals import Array, Resampled
from paceline.report.text.measurements import format_measurement
from paceline.results.records import RunRecord

SLOTS, ANSWERS, TRIALS = 8, 480, 300


# --- a stationary law with shared waits ---


@cache
def places_of_answers() -> tuple[Array, Array]:
    """The steps between which each answer decodes: a slot that is free is filled at once."""
    sizes = np.random.default_rng(0).integers(6, 15, size=ANSWERS)
    free, begins = np.zeros(SLOTS, dtype=np.int64), np.zeros(ANSWERS, dtype=np.int64)
    for n, size in enumerate(sizes):
        slot = int(free.argmin())
        begins[n] = free[slot]
        free[slot] += size
    return begins, begins + sizes


def times_per_token(rng: np.random.Generator, level: float = 1.0) -> Array:
    """Of the answers of one launch, whose steps are shared by all in flight; some stall behind a prefill."""
    begins, ends = places_of_answers()
    steps = rng.lognormal(0, 0.3, int(ends.max())) * np.where(rng.random(int(ends.max())) < 0.15, 5.0, 1.0)
    elapsed = np.concatenate(([0.0], np.cumsum(steps)))
    return np.asarray(level * (elapsed[ends] - elapsed[begins]) / (ends - begins))


def median_of(launches: Sequence[Array], seed: int = 1) -> Resampled:
    clusters = latency_bounds.blocks(np.arange(ANSWERS), SLOTS, latency_bounds.MOST_BLOCKS)
    (found,) = clustered_percentiles([(values, clusters) for values in launches], (50,), seed, resamples=200)
    assert found is not None
    return found


def width(found: Resampled) -> float:
    """Of the logarithm."""
    low, high = found.interval
    assert low is not None
    assert high is not None
    return math.log(high / low)


@cache
def stationary(launches: int) -> tuple[float, float]:
    """How often the interval of so many launches holds the truth, and its median width."""
    truth = float(np.median(np.concatenate([times_per_token(np.random.default_rng(10_000 + n)) for n in range(300)])))
    rng, held, widths = np.random.default_rng(launches), 0, []
    for trial in range(TRIALS):
        found = median_of([times_per_token(rng) for _ in range(launches)], trial)
        low, high = found.interval
        held += low is not None and high is not None and low <= truth <= high
        widths.append(width(found))
    return held / TRIALS, float(np.median(widths))


@pytest.mark.parametrize(("launches", "least"), [(1, 0.88), (2, 0.93), (3, 0.92), (5, 0.93)])
def test_bounds_hold_the_truth_of_a_stationary_law(launches: int, least: float) -> None:
    """90, 97, 93 and 97 %: blocks of one launch see a little less than all of its variance."""
    coverage, _ = stationary(launches)
    assert coverage >= least


def test_more_launches_of_one_law_have_narrower_bounds() -> None:
    two, three, five = (stationary(launches)[1] for launches in (2, 3, 5))
    assert three < 0.6 * two
    assert five < 0.6 * three


@pytest.mark.parametrize("percent", [50, 90])
@pytest.mark.parametrize("levels", [(1.00, 1.04), (1.00, 1.02, 1.04), (0.974, 1.524, 1.495)])
def test_launches_have_students_interval(levels: tuple[float, ...], percent: float) -> None:
    """t * s / sqrt(n) of the logarithms of their own percentiles. The percentile of all launches together often stays
    at one of them, so drawing launches again would show half of it."""
    rng = np.random.default_rng(3)
    launches = [(level * rng.lognormal(0, 1e-5, 400), np.repeat(np.arange(40), 10)) for level in levels]
    (found,) = clustered_percentiles(launches, (percent,), 1)
    assert found is not None
    assert (found.freedom, found.launches) == (len(levels) - 1, len(levels))
    half = intervals.student_t(len(levels) - 1) * np.log(levels).std(ddof=1) / math.sqrt(len(levels))
    assert width(found) == pytest.approx(2 * half, rel=1e-3)


# --- all due at once ---


def queue(repeat: int, answers: int = 460, each_s: float = 0.25, seed: int = 0, wanted: int | None = None) -> RunRecord:
    """Four are answered together, the others wait: the n-th is answered after n / 4 turns, so that waits are a ramp."""
    noise = np.random.default_rng(seed).lognormal(0, 0.02, answers)
    ends, free = [], np.zeros(4)
    for n in range(answers):
        slot = int(free.argmin())
        begin, free[slot] = free[slot], free[slot] + each_s * noise[n]
        ends.append((begin, free[slot]))
    asked = []
    for n, (begin, end) in enumerate(ends):
        gaps = (round((end - begin) * NS / 10),) * 9
        times = {"sent_ns": round(begin * NS), "first_ns": round(end * NS) - sum(gaps), "last_ns": round(end * NS)}
        asked.append(build_request(n, 0.0, end, **times, token_ns=gaps, tokens=10, pieces=10))
    spec = build_spec("openai:url=http://x", repeat, scenario="offline", concurrency=4, full_set=wanted)
    return build_record(spec, asked, started_at=1e6 + repeat)


def told(*records: RunRecord) -> dict[str, Measurement]:
    (load,) = measurements.gather(records)
    return {m.metric: m for m in measurements.measure(load)}


@pytest.mark.parametrize("name", ["ttft", "latency"])
def test_waits_of_one_launch_have_no_bounds_and_the_reason(name: str, golden: object) -> None:
    for percent in measurements.PERCENTILES:
        found = told(queue(0))[f"{name}_p{percent}_s"]
        assert found.value is not None
        assert (found.low, found.high) == (None, None)
        assert found.note == golden


def test_what_is_no_wait_keeps_its_blocks() -> None:
    found = told(queue(0))["tpot_p50_s"]
    assert found.low is not None
    assert found.note is None


@pytest.mark.parametrize(("count", "reach"), [(2, 0.15), (3, 0.05)])
def test_waits_of_several_launches_have_the_bounds_of_launches(count: int, reach: float, golden: object) -> None:
    """Launches 1.6 % apart at most, of waits from 0 to 7 s: as wide as their own values tell, not as the ramp."""
    launches = [queue(n, each_s=0.25 * level) for n, level in enumerate((1.0, 1.016, 1.008)[:count])]
    found = told(*launches)["ttft_p50_s"]
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    assert found.value * (1 - reach) < found.low < found.value < found.high < found.value * (1 + reach)
    assert found.note is not None
    assert found.note == golden


# --- the time for the whole set ---


def test_the_full_set_has_the_interval_of_launches() -> None:
    """Two launches 1 % apart: 12.7 times half of that, however steady each of them was."""

    def share(*records: RunRecord) -> float:
        (load,) = measurements.gather(records)
        found = extrapolation.full_set(load)
        assert found is not None
        assert found.time is not None
        assert found.time.low is not None
        assert found.time.high is not None
        return math.log(found.time.high / found.time.low)

    slower = queue(1, each_s=0.25 * 1.01, wanted=12_000)
    assert share(queue(0, wanted=12_000), slower) == pytest.approx(2 * 12.706 * 0.005, rel=0.1)


# --- as it is printed ---


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1673.0, 5.0, 26_000.0), "1,670 [5, 26,000] ms"),
        ((23_976.6, 15_700.0, 32_800.0), "24,000 [15,700, 32,800] ms"),
        ((1673.0, 1602.0, 1744.0), "1,673 [1,602, 1,744] ms"),
        ((1.2345, 0.5, 2.5), "1.23 [0.50, 2.50] ms"),
    ],
)
def test_a_value_has_three_digits_whatever_its_interval(numbers: tuple[float, float, float], text: str) -> None:
    found = told(queue(0))["ttft_p50_s"]
    value, low, high = (number / 1e3 for number in numbers)
    fields = {**{name: getattr(found, name) for name in found.__dataclass_fields__}, "value": value}
    assert format_measurement(Measurement(**{**fields, "low": low, "high": high})) == text
