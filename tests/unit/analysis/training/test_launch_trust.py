"""The trust light of launches whose hosts were read every second: only the measured window counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from answered_records import build_record as served_record
from answered_records import build_spec as served_spec
from answered_records import build_stage

from paceline.analysis import report
from paceline.analysis.training.trust import finding, launch_trust
from paceline.experiment.choices import Choice
from paceline.host.trust import AMBER, GREEN, RED, UNKNOWN
from paceline.results.records import AttemptSample, GaugeSample, RunRecord, StartSample, Status

Builder = Callable[..., Any]
BEGAN = 1000.0
CORES = 8


def readings(
    others: Callable[[float], float] = lambda _at: 0.0,
    own: float = 2.0,
    elsewhere: float = 0.0,
    rank: int = 0,
    host: str = "node-a",
    since: int = 990,
    **more: Any,
) -> list[GaugeSample]:
    """A host with 8 cores, read every second until 1040 s: `own` cores are busy with what the reader sees, `elsewhere`
    with other containers of the run, others(at) with other processes."""
    usual: dict[str, Any] = {"kernel": "7ee33d80", "namespace": "1", "cores": CORES, "steal_s": 0.0, "swap_bytes": 0}
    busy_s = float(since)
    samples = []
    for second in range(since, 1041):
        counters = {"at_s": float(second), "total_s": CORES * second, "busy_s": busy_s, "own_s": own * (second - since)}
        samples.append(
            GaugeSample(rank=rank, host=host, at_s=float(second), cpu_ratio=0.5, usage=usual | counters | more)
        )
        busy_s += own + elsewhere + others(float(second))
    return samples


def between(begin: float, end: float, cores: float) -> Callable[[float], float]:
    return lambda at: cores if begin <= at < end else 0.0


@pytest.fixture
def launch(make_spec: Builder, make_record: Builder) -> Builder:
    """30 steps of 1 s from 1000 s; the first is warm-up."""

    def build(*gauges: Sequence[GaugeSample], record: dict[str, Any] | None = None, **spec: Any) -> RunRecord:
        found: RunRecord = make_record(
            make_spec(**spec),
            evidence={"window_began_at_s": BEGAN},
            gauges=tuple(sample for each in gauges for sample in each),
            **(record or {}),
        )
        return found

    return build


def test_a_quiet_launch_is_green(launch: Builder) -> None:
    light = launch_trust(launch(readings()))
    assert light is not None
    assert (light.level, light.reasons) == (GREEN, ())


def test_a_neighbour_in_the_window_is_named_with_its_share(launch: Builder) -> None:
    light = launch_trust(launch(readings(between(1010, 1025, 6.0))))
    assert light is not None
    # 15 of the 29 measured seconds.
    assert (light.level, light.reasons) == (RED, ("other processes used 3.1 of 8 cores",))


def test_a_neighbour_before_or_after_the_window_does_not_count(launch: Builder) -> None:
    light = launch_trust(launch(readings(lambda at: 6.0 if at < 1000 or at > 1031 else 0.0)))
    assert light is not None
    assert light.level == GREEN


def test_pods_of_one_run_on_one_kernel_are_no_neighbours(launch: Builder) -> None:
    """Each container counts the busy seconds of the whole host, but sees only its own processes."""
    first = readings(own=3.0, elsewhere=3.0, namespace="11", host="pod-0")
    second = readings(own=3.0, elsewhere=3.0, namespace="12", host="pod-1", rank=1)
    alone, both = launch_trust(launch(first)), launch_trust(launch(first, second))
    assert alone is not None
    assert both is not None
    assert (alone.level, both.level) == (RED, GREEN)


def test_readers_that_see_the_same_processes_count_them_once(launch: Builder) -> None:
    busy = between(1000, 1031, 4.0)
    light = launch_trust(launch(readings(busy, own=3.0), readings(busy, own=3.0, host="same", rank=1)))
    assert light is not None
    assert light.reasons == ("other processes used 4.0 of 8 cores",)


def test_the_worst_of_several_hosts_is_named(launch: Builder) -> None:
    calm = readings(kernel="aaaa", host="node-a")
    busy = readings(between(1000, 1031, 4.0), kernel="bbbb", host="node-b", rank=1)
    light = launch_trust(launch(calm, busy))
    assert light is not None
    assert light.reasons == ("other processes used 4.0 of 8 cores on node-b",)


def test_only_the_last_attempt_of_a_restarted_launch_is_graded(launch: Builder) -> None:
    """Counters of processes start over; what disturbed a lost attempt did not disturb what counts."""
    starts = tuple(
        StartSample(rank=0, step=step, setup_s=1.0, at_s=at, attempt=number)
        for number, (step, at) in enumerate([(0, BEGAN), (15, 1016.0)], 1)
    )
    ends = [
        AttemptSample(rank=0, attempt=n, submitted_at=1.0, began_at=1.0, ended_at=2.0, status="x", reason=None)
        for n in (1, 2)
    ]
    lost = [sample for sample in readings(between(990, 1014, 6.0)) if sample.at_s < 1014]
    record = launch(lost, readings(since=1014), record={"starts": starts, "attempts": tuple(ends)})
    light = launch_trust(record)
    assert light is not None
    assert (light.level, light.reasons) == (GREEN, ())


def test_launches_without_such_readings_have_no_light(launch: Builder) -> None:
    old = [dataclasses.replace(sample, usage=None) for sample in readings()]
    light = launch_trust(launch(old))
    assert light is not None
    assert light.level == UNKNOWN
    assert finding(launch(old)) is None
    assert finding(launch(readings(), record={"status": Status.FAILED})) is None


def test_what_is_not_timed_has_no_light(launch: Builder, make_reference: Builder, make_spec: Builder) -> None:
    assert launch_trust(make_reference(make_spec(), gauges=tuple(readings(lambda _at: 6.0)))) is None
    assert launch_trust(launch(readings(lambda _at: 6.0), workload="memory")) is None


def test_the_governor_counts_on_cpus_only(launch: Builder) -> None:
    slow = readings(governor="powersave")
    on_cpu, on_gpu = launch_trust(launch(slow)), launch_trust(launch(slow, device="cuda"))
    assert on_cpu is not None
    assert on_gpu is not None
    assert (on_cpu.level, on_gpu.level) == (AMBER, GREEN)


# --- served ---


@pytest.mark.parametrize(("engine", "level"), [("vllm", RED), ("openai", UNKNOWN)])
def test_the_load_of_a_server_that_we_did_not_start_is_not_blamed_on_others(engine: str, level: str) -> None:
    spec = dataclasses.replace(served_spec(), engine=Choice(engine))
    stage = dataclasses.replace(build_stage(0, 0.0, 20.0), began_at_s=BEGAN)
    light = launch_trust(served_record(spec, (), stages=(stage,), gauges=tuple(readings(lambda _at: 4.0))))
    assert light is not None
    assert light.level == level


@pytest.mark.parametrize(
    ("grades", "level", "texts"),
    [
        (("good", "good"), GREEN, ()),
        (("good", "tight"), AMBER, ("load 1 is tight",)),
        (("insufficient", "tight"), RED, ("load 0 is insufficient",)),
        (("insufficient", "insufficient"), RED, ("load 0 is insufficient (and 1 more)",)),
        (("unknown", None), GREEN, ()),
    ],
)
def test_the_headroom_of_the_client_counts_but_repeating_does_not_help(
    grades: Sequence[str | None], level: str, texts: tuple[str, ...]
) -> None:
    stages = [
        dataclasses.replace(
            build_stage(number, 10.0 * number, 10.0 * number + 10),
            began_at_s=BEGAN + 10 * number,
            headroom=grade and f"load {number} is {grade}",
            headroom_grade=grade,
        )
        for number, grade in enumerate(grades)
    ]
    spec = dataclasses.replace(served_spec(), engine=Choice("vllm"))
    light = launch_trust(served_record(spec, (), stages=tuple(stages), gauges=tuple(readings())))
    assert light is not None
    assert (light.level, light.reasons, light.is_worth_repeating) == (level, texts, False)


# --- GPUs ---


def gpu(at: float, *reasons: str, busy: float = 0.9) -> GaugeSample:
    return GaugeSample(
        rank=0, host="node-a", at_s=at, device=0, throttle_reasons=reasons, sm_clock_hz=1.7e9, utilisation_ratio=busy
    )


def test_a_gpu_that_was_hot_in_the_window_is_named(launch: Builder) -> None:
    hot = [gpu(990.0 + i, *(("hardware thermal slowdown",) if i > 25 else ()), busy=0.0) for i in range(50)]
    light = launch_trust(launch(readings(), hot, device="cuda"))
    assert light is not None
    assert light.level == RED
    assert light.reasons == ("GPU 0 was slowed down in 50 % of the readings (hardware thermal slowdown)",)


@pytest.mark.parametrize(
    ("neighbours", "busy", "level"), [(0, 0.9, GREEN), (1, 0.0, AMBER), (1, 0.9, RED), (None, 0.0, GREEN)]
)
def test_neighbours_on_the_gpu_are_graded(
    make_spec: Builder, make_record: Builder, neighbours: int | None, busy: float, level: str
) -> None:
    record = make_record(
        make_spec(device="cuda"),
        evidence={"window_began_at_s": BEGAN, "neighbours": neighbours},
        gauges=(*readings(), gpu(990.0, busy=busy), gpu(1010.0)),
    )
    light = launch_trust(record)
    assert light is not None
    assert light.level == level


# --- in a report ---


def test_a_report_carries_the_light_of_each_launch(launch: Builder, make_reference: Builder) -> None:
    red = launch(readings(between(1000, 1031, 4.0)), record={"repeated": 2})
    calm = launch(readings(), repeat=1)
    runs = report.build([make_reference(red.spec), red, calm], "t").runs
    assert [run.trust for run in runs if run.is_reference] == [None]
    found = {run.repeat: run.trust for run in runs if not run.is_reference}
    assert found[0] is not None
    assert found[1] is not None
    assert (found[0].level, found[0].reasons, found[0].repeated) == (RED, ("other processes used 4.0 of 8 cores",), 2)
    assert (found[1].level, found[1].reasons, found[1].repeated) == (GREEN, (), 0)
