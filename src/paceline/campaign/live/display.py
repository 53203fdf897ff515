"""Progress of a campaign: live bars on a terminal, plain lines elsewhere. Observers for `run.controller`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.campaign.live.progress import Titles, left_text, pulse_text, spent_text
from paceline.experiment.spec import RunSpec
from paceline.results import safe_text
from paceline.results.campaign_file import EndedRun, PlannedRun, Pulse, forecast_s, read_end, read_pulse
from paceline.results.records import Status
from paceline.results.store import Progress
from paceline.wording import format_duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MARKS = {Status.OK: "[green]✓[/]", Status.UNSUPPORTED: "[yellow]-[/]", Status.INVALID: "[red]≠[/]"}
FAILED_MARK, PROBED_MARK = "[red]✗[/]", "[yellow]▲[/]"
ADVISING = "out of memory; looking for settings that fit"
# How often a log gets a line about a long run.
HEARTBEAT_S = 30.0
# How often the run directory is read: less often than the controller polls, to disturb the measurement less.
REFRESH_S = 1.0


class Lines:
    """One line per event, and a line now and then during a long run: for logs and pipes.

    usd_per_hour is the price of one device; predicted has the seconds of runs that could be predicted.
    """

    refresh_s = HEARTBEAT_S

    def __init__(
        self, console: Console, usd_per_hour: float | None = None, predicted: Mapping[str, float] | None = None
    ) -> None:
        self.console = console
        self.usd_per_hour = usd_per_hour
        self.predicted = predicted or {}
        self.title = Titles(())
        self.began, self.device_s, self.launched = time.monotonic(), 0.0, 0
        self.running: RunSpec | None = None
        self.planned: dict[str, PlannedRun] = {}
        self.ends: dict[str, EndedRun] = {}
        self.unread: list[str] = []
        self.done = 0
        self.run_began = self.read_at = time.monotonic()
        self.run_dir: Path | None = None
        self.advised: str | None = None
        self.waited_for: set[tuple[str, str]] = set()

    @property
    def total(self) -> int:
        return len(self.planned)

    def begin(self, specs: Sequence[RunSpec]) -> None:
        self.planned = {spec.run_id: PlannedRun.of(spec) for spec in specs}
        self.title = Titles(specs)

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        if self.running is not None:
            # A disturbed launch is repeated without an end of its own.
            self.device_s += (time.monotonic() - self.run_began) * spec.topology.world_size
        self.running, self.launched = spec, self.launched + 1
        self.run_began = self.read_at = time.monotonic()
        self.run_dir = run_dir
        # Durations from an earlier campaign predict how long its repeats take.
        for run in self.unread:
            if (end := read_end(run_dir.parent / run)) is not None:
                self.ends[run] = end
        self.unread.clear()

    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None:
        now = time.monotonic()
        if now - self.read_at >= self.refresh_s and self.run_dir is not None:
            self.read_at = now
            pulse = read_pulse(self.run_dir, spec, positions)
            if pulse is not None:
                self.show(pulse)

    def show(self, pulse: Pulse) -> None:
        from rich.markup import escape

        ahead = f"{left_text(self.left_s(pulse))}{spent_text(self.usd())}"
        where = f"{self.title(pulse.spec)}: {pulse_text(pulse)}"
        self.console.print(
            f"  {escape(ahead)}: {self.done + 1}/{self.total} {escape(where)}", highlight=False, soft_wrap=True
        )

    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
        """Print each reason of the engine once, even if a number in it changes."""
        key = (spec.run_id, re.sub(r"\d+", "#", reason))
        if key not in self.waited_for:
            self.waited_for.add(key)
            where = f"  {self.done + 1:>3}/{self.total} {self.title(spec)}: waiting: {reason}"
            self.console.print(where, highlight=False, markup=False, soft_wrap=True)

    def restarting(self, spec: RunSpec, reason: str, left: int) -> None:
        allowed = f"{left} more restart{'' if left == 1 else 's'} allowed"
        where = f"  {self.done + 1:>3}/{self.total} {self.title(spec)}: restarting: {reason}; {allowed}"
        self.console.print(where, highlight=False, markup=False, soft_wrap=True)

    def advising(self, spec: RunSpec, seconds: float) -> None:
        """Print it once: it takes seconds for a small model, minutes for a large one."""
        if self.advised != spec.run_id:
            self.advised = spec.run_id
            self.console.print(
                f"  {self.done + 1:>3}/{self.total} {self.title(spec)}: {ADVISING}", highlight=False, markup=False
            )

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        from rich.markup import escape

        self.done += 1
        took = time.monotonic() - self.run_began
        self.run_began += took  # an unsupported run is never started
        if self.running is not None and self.running.run_id == spec.run_id:
            self.device_s += took * spec.topology.world_size
            self.running = None
        if known:
            self.unread.append(spec.run_id)
        else:
            self.ends[spec.run_id] = EndedRun(status, took)
        tail = "already measured" if known else f"{took:.1f} s"
        reason = f": {escape(safe_text.text(error))}" if error else ""
        probed = status is Status.OOM and spec.traits.probes_limit
        mark = PROBED_MARK if probed else MARKS.get(status, FAILED_MARK)
        self.console.print(
            f"{mark} {self.done:>3}/{self.total} {escape(self.title(spec))} {status} ({tail}){reason}", highlight=False
        )

    def close(self) -> None:
        """Nothing to close."""

    def left_s(self, pulse: Pulse | None) -> float | None:
        return forecast_s(self.planned.values(), self.ends, pulse, self.predicted)

    def usd(self) -> float | None:
        """What the devices have cost since the campaign began; None without a price."""
        if self.usd_per_hour is None:
            return None
        now = (time.monotonic() - self.run_began) * self.running.topology.world_size if self.running else 0.0
        return (self.device_s + now) / 3600 * self.usd_per_hour

    def spent(self) -> str:
        """`Took 12 min 03 s for 20 launches: 1.6 device-hours, 12.65 USD.`; empty if nothing was started."""
        if not self.launched:
            return ""
        runs = f"{self.launched} launch{'' if self.launched == 1 else 'es'}"
        usd = "" if self.usd_per_hour is None else f", {self.usd():.2f} USD at {self.usd_per_hour:.4g} USD per hour"
        hours = f"{self.device_s / 3600:.2g} device-hours{usd}"
        return f"Took {format_duration(time.monotonic() - self.began)} for {runs}: {hours}."


class Bars(Lines):
    """The same lines above two live bars (campaign, current run) and a line with the position of the run."""

    refresh_s = REFRESH_S

    def __init__(
        self, console: Console, usd_per_hour: float | None = None, predicted: Mapping[str, float] | None = None
    ) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(console, usd_per_hour, predicted)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.overall = self.progress.add_task("campaign", total=None)
        self.current = self.progress.add_task("", total=None, visible=False)
        self.below = ""
        self.live = Live(console=console, get_renderable=self.screen, transient=True)

    def screen(self) -> RenderableType:
        """The bars, then one line cut to the width of the terminal."""
        from rich.console import Group
        from rich.text import Text

        return Group(self.progress, Text(self.below, style="dim", no_wrap=True, overflow="ellipsis"))

    def begin(self, specs: Sequence[RunSpec]) -> None:
        super().begin(specs)
        self.progress.update(self.overall, total=self.total)
        self.live.start()

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        super().started(spec, run_dir)
        self.below = f"{left_text(self.left_s(None))}{spent_text(self.usd())}"
        steps = spec.steps or None if spec.is_trained else None
        self.progress.reset(self.current, total=steps, visible=True, description=self.title(spec))

    def show(self, pulse: Pulse) -> None:
        self.below = f"{left_text(self.left_s(pulse))}{spent_text(self.usd())}; {pulse_text(pulse)}"
        self.progress.update(self.current, completed=pulse.step)

    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
        self.below = f"waiting for {seconds:.0f} s: {reason}"

    def restarting(self, spec: RunSpec, reason: str, left: int) -> None:
        super().restarting(spec, reason, left)
        self.below = "restarting"

    def advising(self, spec: RunSpec, seconds: float) -> None:
        self.below = f"{ADVISING}, {seconds:.0f} s"

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        super().ended(spec, status, error, known)
        self.progress.update(self.overall, completed=self.done)
        self.progress.update(self.current, visible=False)
        self.below = ""

    def close(self) -> None:
        self.live.stop()


def observer_for(
    console: Console, usd_per_hour: float | None = None, predicted: Mapping[str, float] | None = None
) -> Lines:
    return (Bars if console.is_terminal else Lines)(console, usd_per_hour, predicted)
