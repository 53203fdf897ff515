"""What a user sees while a campaign runs, in a log and on a terminal."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.campaign.live import display
from paceline.campaign.live.progress import Titles
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., Any]


def console(width: int = 200, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def under_way(out: Path, spec: Any, make_step: Make) -> Path:
    run_dir = store.create(out, spec)
    (run_dir / "samples-0.jsonl").write_text("".join(store.sample_line(make_step(0, step)) for step in range(3)))
    position = store.ProgressFile(run_dir, 0)
    position.loss, position.peak_bytes = 5.5, 2**30
    position.mark(2, "forward")
    return run_dir


def test_a_log_gets_a_line_per_end_and_none_per_step(tmp_path: Path, make_spec: Make, make_step: Make) -> None:
    screen, spec = console(), make_spec("ddp")
    lines = display.Lines(screen)
    lines.begin([spec])
    run_dir = under_way(tmp_path, spec, make_step)
    lines.started(spec, run_dir)
    for _ in range(20):
        lines.moved(spec, store.read_progress(run_dir))
    assert text(screen) == ""
    lines.ended(spec, Status.OOM, "out of [memory]", False)
    assert text(screen).startswith("✗   1/1 ddp tiny x2 repeat 1 oom (")
    assert text(screen).endswith("s): out of [memory]\n")


def test_a_long_run_is_reported_at_intervals(
    tmp_path: Path, make_spec: Make, make_step: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    screen, spec = console(), make_spec("ddp")
    lines = display.observer_for(screen)
    assert type(lines) is display.Lines
    lines.begin([spec, make_spec("fsdp2")])
    run_dir = under_way(tmp_path, spec, make_step)
    lines.started(spec, run_dir)
    for seconds in range(70):
        now = 1000.0 + seconds
        lines.moved(spec, store.read_progress(run_dir))
    said = text(screen).splitlines()
    assert len(said) == 2, "at 30 and 60 seconds"
    assert said[0] == golden
    assert "left: 1/2 ddp: step 3 of 4" in said[0], "the strategy varies, the time left comes first"
    assert "256" in said[0]
    assert "1.00" in said[0]


def test_a_refused_run_takes_no_time(make_spec: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    screen, specs = console(), [make_spec("ddp"), make_spec("fsdp2")]
    lines = display.Lines(screen)
    lines.begin(specs)
    lines.started(specs[0], tmp_path)
    now += 60
    lines.ended(specs[0], Status.OK, None, False)
    lines.ended(specs[1], Status.UNSUPPORTED, "no", False)
    assert [line.split("(")[1].split(")")[0] for line in text(screen).splitlines()] == ["60.0 s", "0.0 s"]


def test_earlier_runs_predict_the_time_of_their_repeats(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    first, second = make_spec("ddp"), make_spec("ddp", repeat=1)
    make_run(tmp_path, first)
    lines = display.Lines(console())
    lines.begin([first, second])
    lines.ended(first, Status.OK, None, True)
    assert lines.left_s(None) is None
    lines.started(second, store.create(tmp_path, second))
    assert lines.left_s(None) == 60.0


def test_a_terminal_shows_the_campaign_the_run_and_where_it_is(
    tmp_path: Path, make_spec: Make, make_step: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(display.Bars, "refresh_s", 0.0)
    screen, spec = console(80, terminal=True), make_spec("ddp")
    bars = display.observer_for(screen)
    assert isinstance(bars, display.Bars)
    bars.begin([spec, make_spec("ddp", repeat=1)])
    try:
        run_dir = under_way(tmp_path, spec, make_step)
        bars.started(spec, run_dir)
        bars.moved(spec, store.read_progress(run_dir))
        shown = console(80)
        shown.print(bars.screen())
        campaign, run, where = text(shown).splitlines()
        assert "0/2" in campaign
        assert run == golden
        assert "x2" in run
        assert "2/4" in run
        assert where.startswith("about ")
        assert where.endswith(" left; step 3 of 4, forward, 256 tokens/s, peak 1.00 GiB, loss 5.500")
        bars.ended(spec, Status.OK, None, False)
    finally:
        bars.close()
    assert "✓   1/2 ddp tiny x2 repeat 1 ok" in text(screen)


def test_a_restart_is_shown_with_its_reason_and_how_many_are_left(make_spec: Make, golden: object) -> None:
    for terminal in (False, True):
        screen, spec = console(terminal=terminal), make_spec("ddp")
        lines = display.observer_for(screen)
        lines.begin([spec])
        try:
            lines.restarting(spec, "the node was [taken]", 1)
            lines.restarting(spec, "the node was [taken]", 0)
        finally:
            lines.close()
        shown = text(screen)
        assert shown == golden
        assert "x2" in shown


def test_a_reason_to_wait_is_shown_once_whatever_it_counts(make_spec: Make) -> None:
    screen, spec = console(), make_spec("ddp")
    lines = display.Lines(screen)
    lines.begin([spec])
    for reason in ("0 of 3 nodes are free", "1 of 3 nodes are free", "pulling the image", "2 of 3 nodes are free"):
        lines.waiting(spec, reason, 1.0)
    assert [line.partition("waiting: ")[2] for line in text(screen).splitlines()] == [
        "0 of 3 nodes are free",
        "pulling the image",
    ]


def test_a_run_is_named_by_the_axes_that_vary(make_spec: Make) -> None:
    specs = [make_spec("ddp", repeat=repeat) for repeat in range(2)]
    assert Titles(specs)(specs[1]) == "ddp tiny x2 repeat 2", "nothing varies"
    longer = dataclasses.replace(specs[0], training=dataclasses.replace(specs[0].training, micro_batch=8))
    name = Titles([*specs, longer])
    assert name(specs[1]) == f"ddp, micro batch {specs[0].training.micro_batch}, repeat 2 of 2"
    assert name(longer) == "ddp, micro batch 8, repeat 1 of 2"


def test_cost_so_far_counts_every_device_of_the_runs_of_this_campaign(
    tmp_path: Path, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices for 90 s and again for 30 s at 60 USD an hour; a run that was measured before costs nothing now."""
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    first, second, third = (make_spec("ddp", repeat=repeat) for repeat in range(3))
    lines = display.Lines(console(), usd_per_hour=60.0)
    lines.begin([first, second, third])
    lines.ended(first, Status.OK, None, True)
    lines.started(second, store.create(tmp_path, second))
    now += 90
    lines.ended(second, Status.OK, None, False)
    lines.started(third, store.create(tmp_path, third))
    now += 30
    assert lines.usd() == pytest.approx((2 * 90 + 2 * 30) / 3600 * 60)
    lines.ended(third, Status.OK, None, False)
    assert lines.spent() == "Took 2 min 00 s for 2 launches: 0.067 device-hours, 4.00 USD at 60 USD per hour."
    assert display.Lines(console()).usd() is None


def test_a_disturbed_launch_that_is_repeated_costs_too(
    tmp_path: Path, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    spec = make_spec("ddp")
    lines = display.Lines(console(), usd_per_hour=60.0)
    lines.begin([spec])
    run_dir = store.create(tmp_path, spec)
    for _ in range(2):
        lines.started(spec, run_dir)
        now += 45
    lines.ended(spec, Status.OK, None, False)
    assert lines.usd() == pytest.approx(2 * (45 + 45) / 3600 * 60)


def test_a_prediction_gives_the_time_left_before_anything_was_measured(make_spec: Make) -> None:
    specs = [make_spec("ddp"), make_spec("fsdp2")]
    lines = display.Lines(console(), predicted={spec.run_id: 40.0 for spec in specs})
    lines.begin(specs)
    assert lines.left_s(None) == 80.0
