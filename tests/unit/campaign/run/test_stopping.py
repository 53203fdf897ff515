"""Campaigns that repeat until they are precise enough, on launches whose spread is known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.instant import Instant, Watcher

from paceline.analysis.compare.precision import Precision, launches_left
from paceline.analysis.statistics.verdict import FEWEST_LAUNCHES
from paceline.campaign.run import controller
from paceline.campaign.run.stopping import MOST_LAUNCHES, Stopping, parse_budget, parse_until
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.machine_samples import KernelSample
from paceline.results.records import Status

Make = Callable[..., Any]


@pytest.fixture
def launch(make_spec: Make, make_outcome: Make, launcher: Make) -> Callable[..., tuple[RunSpec, Instant]]:
    """A kernel whose launches alternate by +-`spread` around 1 ms."""

    def use(spread: float) -> tuple[RunSpec, Instant]:
        spec = replace(make_spec(None, 1), workload=Choice("compute"))

        def leave(run_dir: Path) -> None:
            seconds = 1e-3 * (1 + spread * (-1) ** store.read_spec(run_dir).repeat)
            sample = KernelSample(
                kernel="copy",
                rank=0,
                dtype="bytes",
                label="1 MiB",
                variant="",
                flops=None,
                moved_bytes=2**20,
                durations_s=(seconds,) * 9,
            )
            (run_dir / "samples-0.jsonl").write_text(store.sample_line(sample))
            store.write_outcome(run_dir, make_outcome(0))

        return spec, launcher(leave)

    return use


def run(spec: RunSpec, out: Path, rule: Stopping) -> tuple[list[Status], list[str]]:
    messages: list[str] = []
    watcher = Announced()
    return controller.campaign([spec], out, watcher, stopping=rule, notify=messages.append), messages


class Announced(Watcher):
    """Every run that ends was announced before: a display counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: set[str] = set()

    def begin(self, specs: Sequence[RunSpec]) -> None:  # type: ignore[override]
        self.announced = {spec.run_id for spec in specs}

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:  # type: ignore[override]
        super().ended(spec, status, error, known)
        assert spec.run_id in self.announced


def test_a_quiet_cell_gets_the_fewest_launches(tmp_path: Path, launch: Make) -> None:
    spec, instant = launch(0.0)
    statuses, messages = run(spec, tmp_path, Stopping(until=0.02))
    assert statuses == [Status.OK] * FEWEST_LAUNCHES
    assert instant.submitted == FEWEST_LAUNCHES
    assert messages[-1] == "after 3 launches, the widest interval is +-0 %, as asked for"


def test_a_noisy_cell_is_repeated_until_its_interval_is_that_narrow(tmp_path: Path, launch: Make) -> None:
    """The interval of n launches that alternate by +-1 % is about t * 1 % / sqrt(n): 2.3 % of 3 and 0.9 % of 7."""
    spec, instant = launch(0.01)
    _, messages = run(spec, tmp_path, Stopping(until=0.01))
    assert instant.submitted == 7
    assert any("about" in message for message in messages)
    assert messages[-1].endswith("as asked for")
    plan = json.loads((tmp_path / "test" / "campaign.json").read_text())
    assert plan["rule"] == Stopping(until=0.01).text
    assert len(plan["runs"]) == 7
    # The same command again finds everything done.
    run(spec, tmp_path, Stopping(until=0.01))
    assert instant.submitted == 7


def test_there_is_an_end_to_it(tmp_path: Path, launch: Make) -> None:
    spec, instant = launch(0.2)
    run(spec, tmp_path, Stopping(until=0.001))
    assert instant.submitted == MOST_LAUNCHES


def test_a_budget_is_spent_and_not_exceeded(tmp_path: Path, launch: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 5 s whenever it is read: a launch takes 10 s or more."""
    spec, instant = launch(0.01)
    clock = itertools.count(0.0, 5.0)
    monkeypatch.setattr(controller.time, "monotonic", lambda: next(clock))
    _, messages = run(spec, tmp_path, Stopping(budget_s=300.0))
    assert FEWEST_LAUNCHES < instant.submitted < MOST_LAUNCHES
    assert messages[-1].endswith("left")


def test_time_goes_where_it_helps_most(make_spec: Make) -> None:
    """A launch of the noisy cell gains 9 times as much as one of the quiet cell; a slow one gains less per second."""
    quiet, noisy, slow = (make_spec(name, 1) for name in ("ddp", "fsdp2", "zero:stage=1"))
    known = {
        quiet.cell: Precision(3, 0.01, 0.003, 10.0),
        noisy.cell: Precision(3, 0.03, 0.009, 10.0),
        slow.cell: Precision(3, 0.03, 0.009, 100.0),
    }
    found = Stopping(budget_s=600.0).next_round([quiet, noisy, slow], known, spent_s=0.0)
    assert [(spec.cell, spec.repeat) for spec in found] == [(noisy.cell, 1)]
    wanted = Stopping(until=0.02).next_round([quiet, noisy, slow], known, spent_s=0.0)
    assert {spec.cell for spec in wanted} == {noisy.cell, slow.cell}
    assert Stopping(until=0.02, budget_s=50.0).next_round([slow], known, spent_s=0.0) == []
    assert launches_left(known, 0.02, MOST_LAUNCHES) == {noisy.cell: 4, slow.cell: 4}


def test_the_outlook_names_launches_time_and_cost() -> None:
    known = {"a": Precision(4, 0.04, 0.02, 60.0)}
    rule = Stopping(until=0.02, budget_s=3600.0, usd_per_hour=2.5)
    assert rule.outlook(known, 600.0, {"a": 8}) == (
        "after 4 launches, the widest interval is +-4 %, asked for +-2 %: about 12 more launches, 12 min 00 s, 4 USD; "
        "50 min 00 s left"
    )


@pytest.mark.parametrize("text", ["2", "0%", "100%", "-1%", "2 percent", ""])
def test_a_wrong_width_is_one_sentence(text: str) -> None:
    with pytest.raises(RequestError, match="--until: got"):
        parse_until(text)


@pytest.mark.parametrize("text", ["10", "0m", "-5m", "ten minutes", "5y", ""])
def test_a_wrong_budget_is_one_sentence(text: str) -> None:
    with pytest.raises(RequestError, match="--time-budget: got"):
        parse_budget(text)


def test_times_and_widths_are_read_as_people_write_them() -> None:
    assert [parse_budget(text) for text in ("90s", "10m", "1.5h", "2 H")] == [90.0, 600.0, 5400.0, 7200.0]
    assert [parse_until(text) for text in ("2%", "0.5 %")] == [0.02, 0.005]
