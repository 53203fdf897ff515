"""Launches with a red trust light are repeated: how often, which one counts, and where the others stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.training.trust import finding
from paceline.campaign.run import controller, references, supervision
from paceline.contract import Job, JobState
from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.host import trust
from paceline.report.tables.one_run import record_lines
from paceline.results import store
from paceline.results.records import CollectiveSample, GaugeSample, Status
from paceline.results.store import Progress

Make = Callable[..., Any]
BUSY, CALM = 1.0, 0.0


class Watcher:
    """An observer that does nothing."""

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None: ...


class Weather:
    """A launcher whose n-th job runs beside so many busy cores of 2 for 10 s; a text is its error, a status its end, an
    exception is raised instead."""

    def __init__(self, make_outcome: Make, make_evidence: Make) -> None:
        self.script: list[float | str | Status | BaseException] = []
        self.submitted = 0
        self.outcome, self.evidence = make_outcome, make_evidence

    def check(self, spec: RunSpec) -> str | None:
        return None

    def prepare(self, spec: RunSpec, run_dir: Path) -> Job:
        return Job(argv=("true", str(run_dir)))

    def submit(self, job: Job) -> Mapping[str, Any]:
        found, run_dir = self.script[self.submitted], Path(job.argv[1])
        self.submitted += 1
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, Status):
            store.write_outcome(run_dir, self.outcome(0, found, "the node was taken"))
            return {}
        if isinstance(found, str):
            store.write_outcome(run_dir, self.outcome(0, Status.FAILED, found))
            return {}
        usage = {"cores": 2, "own_s": 0.0}
        sweep = {
            "operation": "all_reduce",
            "dtype": "fp32",
            "size_bytes": 4,
            "count": 1,
            "group_size": 1,
            "mode": "single",
        }
        row = CollectiveSample(rank=0, **sweep, in_place=True, batch=1, durations_s=(1.0,), wrong=0)
        (run_dir / "samples-0.jsonl").write_text(store.sample_line(row))
        lines = [
            GaugeSample(rank=0, host="a", at_s=at, usage=usage | {"at_s": at, "total_s": 2 * at, "busy_s": found * at})
            for at in (0.0, 10.0)
        ]
        (run_dir / "samples-gauges-0.jsonl").write_text("".join(map(store.sample_line, lines)))
        store.write_outcome(run_dir, self.outcome(0, evidence=self.evidence()))
        return {}

    def poll(self, handle: Mapping[str, Any]) -> JobState:
        return JobState(running=False, exit_code=0)

    def cancel(self, handle: Mapping[str, Any]) -> None: ...


@pytest.fixture
def spec(make_spec: Make) -> RunSpec:
    found: RunSpec = make_spec(None, 1, workload="collectives")
    return found


@pytest.fixture
def weather(make_outcome: Make, make_evidence: Make, monkeypatch: pytest.MonkeyPatch) -> Weather:
    """Repeats are on, as they are for users."""
    monkeypatch.delenv("PACELINE_RED_REPEATS", raising=False)
    made, load = Weather(make_outcome, make_evidence), plugins.load
    for module in (controller, references):
        monkeypatch.setattr(module, "load", lambda kind, name: made if kind == "launchers" else load(kind, name))
    return made


def errors_aside(run_dir: Path) -> list[str | None]:
    paths = sorted((run_dir / "attempts").glob("*/status.json")) if (run_dir / "attempts").is_dir() else []
    return [json.loads(path.read_text())["error"] for path in paths]


@pytest.mark.parametrize(
    ("script", "level", "repeated", "aside"),
    [
        ([CALM], "green", 0, []),
        ([0.15], "amber", 0, []),
        ([BUSY, CALM], "green", 1, [None]),
        ([BUSY, 0.15], "amber", 1, [None]),
        ([BUSY, BUSY, CALM], "green", 2, [None, None]),
        ([BUSY, BUSY, BUSY], "red", 2, [None, None]),
        # A disturbed measurement is better than none.
        ([BUSY, "no disk", CALM], "green", 2, ["no disk", None]),
        ([BUSY, BUSY, "no disk"], "red", 2, [None, "no disk"]),
    ],
)
def test_a_red_launch_is_repeated_at_most_twice(
    tmp_path: Path,
    spec: RunSpec,
    weather: Weather,
    script: list[float | str],
    level: str,
    repeated: int,
    aside: list[str | None],
) -> None:
    weather.script = [*script, AssertionError("one launch too many")]
    messages: list[str] = []
    end = controller.execute(spec, tmp_path, Watcher(), None, messages.append)
    run_dir = tmp_path / spec.experiment / spec.run_id
    assert (end, weather.submitted) == ((Status.OK, None), len(script))
    record = store.read_run(run_dir)
    light = finding(record)
    assert light is not None
    assert (light.level, light.repeated, record.repeated) == (level, repeated, repeated)
    assert sorted(errors_aside(run_dir), key=str) == sorted(aside, key=str)
    assert store.read_runs(tmp_path)[0] == [record], "the others do not count"
    assert sum("Launching it again" in message for message in messages) == repeated
    assert len(messages) == repeated + (level != "green")
    (line,) = [line for line in record_lines(record, None, light) if line.startswith("  trust: ")]
    assert ("after" in line) is bool(repeated)


def test_a_restarted_launch_is_not_repeated_because_its_restart_is_a_result(
    tmp_path: Path, spec: RunSpec, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)
    weather.script = [Status.PREEMPTED, BUSY, BUSY, CALM, AssertionError("one launch too many")]
    repeats, messages = controller.RedRepeats(2), []  # type: ignore[var-annotated]
    restarted = replace(spec, max_restarts=1)
    assert controller.execute(restarted, tmp_path, Watcher(), None, messages.append, repeats) == (Status.OK, None)
    record = store.read_run(tmp_path / spec.experiment / restarted.run_id)
    assert (len(record.attempts), record.repeated, weather.submitted) == (2, 0, 2)
    assert len(messages) == 1
    assert "Launching it again" not in messages[0]
    # The next run was not red before, so it has its repeats.
    other = replace(spec, seed=spec.seed + 1)
    controller.execute(other, tmp_path, Watcher(), None, messages.append, repeats)
    assert store.read_run(tmp_path / spec.experiment / other.run_id).repeated == 1


def test_ranks_that_share_a_gpu_are_no_measurement_to_repeat(tmp_path: Path, spec: RunSpec, weather: Weather) -> None:
    weather.script = [BUSY, AssertionError("one launch too many")]
    shared = replace(spec, launcher=Choice("local", {"shared_gpu": True}))
    assert controller.execute(shared, tmp_path, Watcher(), None) == (Status.OK, None)
    assert weather.submitted == 1


def test_the_messages_name_the_run_and_the_reason(tmp_path: Path, spec: RunSpec, weather: Weather) -> None:
    weather.script = [BUSY, CALM]
    messages: list[str] = []
    controller.execute(spec, tmp_path, Watcher(), None, messages.append)
    assert messages == [
        f"trust: red during {spec.run_id}: other processes used 1.0 of 2 cores. "
        "Stop them, or expect wide intervals. Launching it again (extra launch 1 of 2)."
    ]


def test_a_disturbance_that_lasts_is_not_repeated_in_every_run(
    tmp_path: Path, spec: RunSpec, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "before", lambda **_uses: trust.Trust(()))
    # The first run stays red, so the next two are launched once, and the user is told once. The fourth is calm, so the
    # last one is repeated again.
    weather.script = [BUSY, BUSY, BUSY, BUSY, BUSY, CALM, BUSY, CALM]
    specs = [replace(spec, repeat=number) for number in range(5)]
    messages: list[str] = []
    controller.campaign(specs, tmp_path, Watcher(), notify=messages.append)
    assert weather.submitted == len(weather.script)
    records = {record.spec.repeat: record.repeated for record in store.read_runs(tmp_path)[0]}
    assert records == {0: 2, 1: 0, 2: 0, 3: 0, 4: 1}
    (once,) = [message for message in messages if "Not launched again" in message]
    assert once.startswith(f"trust: red during {specs[1].run_id}: other processes used 1.0 of 2 cores.")


@pytest.mark.parametrize(
    ("here", "first"),
    [
        (True, "trust: amber: it is warm."),
        (False, "trust: unknown before the first run: other hosts run it. They are graded during each run."),
    ],
)
def test_one_line_comes_before_the_first_run(
    tmp_path: Path, spec: RunSpec, weather: Weather, monkeypatch: pytest.MonkeyPatch, here: bool, first: str
) -> None:
    monkeypatch.setattr(weather, "HERE", here, raising=False)
    asked: list[dict[str, bool]] = []

    def before(**uses: bool) -> trust.Trust:
        asked.append(uses)
        return trust.Trust((trust.Check("CPU temperature", trust.AMBER, "it is warm"),))

    monkeypatch.setattr(trust, "before", before)
    weather.script = [CALM]
    messages: list[str] = []
    for _ in range(2):
        controller.campaign([spec], tmp_path, Watcher(), notify=messages.append)
    assert messages == [first], "a campaign that has nothing left to run needs no light"
    assert asked == ([{"uses_cpu": True, "uses_gpu": False}] if here else [])


def test_an_interrupted_repeat_leaves_the_measurement(tmp_path: Path, spec: RunSpec, weather: Weather) -> None:
    weather.script = [BUSY, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        controller.execute(spec, tmp_path, Watcher(), None)
    record = store.read_run(tmp_path / spec.experiment / spec.run_id)
    assert (record.status, record.repeated) == (Status.OK, 1)


@pytest.mark.parametrize(("setting", "launches"), [("0", 1), ("1", 2)])
def test_the_number_of_repeats_is_a_setting(
    tmp_path: Path, spec: RunSpec, weather: Weather, monkeypatch: pytest.MonkeyPatch, setting: str, launches: int
) -> None:
    monkeypatch.setenv("PACELINE_RED_REPEATS", setting)
    weather.script = [BUSY] * 3
    controller.execute(spec, tmp_path, Watcher(), None)
    assert weather.submitted == launches


def test_a_wrong_number_of_repeats_is_refused_before_anything_runs(
    tmp_path: Path, spec: RunSpec, weather: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RED_REPEATS", "many")
    with pytest.raises(RequestError, match="PACELINE_RED_REPEATS: got 'many', expected a whole number, 0 or more"):
        controller.campaign([spec], tmp_path, Watcher())
    assert (weather.submitted, list(tmp_path.iterdir())) == (0, [])
