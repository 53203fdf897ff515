"""What a user sees while a campaign runs: a live bar on a terminal, plain lines anywhere else. Observers of `run`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.records import Status
from paceline.run import Observer
from paceline.spec import PROBING, RunSpec
from paceline.store import Progress

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {Status.OK: "[green]✓[/]", Status.UNSUPPORTED: "[yellow]-[/]", Status.INVALID: "[red]≠[/]"}
FAILED_MARK, PROBED_MARK = "[red]✗[/]", "[yellow]▲[/]"


def title(spec: RunSpec) -> str:
    """One run in the words of its axes that vary."""
    if not spec.is_trained:
        return f"{spec.workload.name} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    if spec.workload.name in ("memory", "frontier"):
        batch = f"micro batch {spec.training.micro_batch} x {spec.training.sequence_length}"
        return f"{spec.workload.name} of {spec.strategy} {spec.model} x{spec.topology.world_size}, {batch}"
    if spec.strategy is None:
        return f"reference of {spec.model} (global batch {spec.global_batch})"
    return f"{spec.strategy} {spec.model} x{spec.topology.world_size} repeat {spec.repeat + 1}"


class Lines:
    """One line per event: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0
        self.began = time.monotonic()
        self.run_began = self.began
        self.timed: list[float] = []

    def begin(self, specs: Sequence[RunSpec]) -> None:
        self.total = len(specs)

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        self.run_began = time.monotonic()

    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None:
        """A log wants results, not every step."""

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        from rich.markup import escape

        self.done += 1
        took = time.monotonic() - self.run_began
        if not known:
            self.timed.append(took)
        tail = "already measured" if known else f"{took:.1f} s"
        reason = f": {escape(error)}" if error else ""
        probed = status is Status.OOM and spec.workload.name in PROBING
        mark = PROBED_MARK if probed else MARKS.get(status, FAILED_MARK)
        self.console.print(
            f"{mark} {self.done:>3}/{self.total} {escape(title(spec))} {status} ({tail}){reason}", highlight=False
        )

    def close(self) -> None:
        """Nothing stays open."""

    def left_s(self) -> float | None:
        """Expected time to the end of the campaign, from the mean of the runs so far."""
        return (self.total - self.done) * sum(self.timed) / len(self.timed) if self.timed else None


class Bars(Lines):
    """The same lines above a live bar with the current run, its step, tokens/s and loss, and the time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__(console)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.overall = self.progress.add_task("campaign", total=None)
        self.current = self.progress.add_task("", total=None, visible=False)
        self.first_beat: tuple[int, float] | None = None

    def begin(self, specs: Sequence[RunSpec]) -> None:
        super().begin(specs)
        self.progress.update(self.overall, total=len(specs))
        self.progress.start()

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        super().started(spec, run_dir)
        self.first_beat = None
        self.progress.reset(
            self.current, total=spec.steps if spec.is_trained else None, visible=True, description=title(spec)
        )

    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None:
        if not positions:
            return
        slowest = min(positions, key=lambda p: p.step)
        description = f"{title(spec)} [dim]{slowest.phase}{self._rate(spec, slowest)}[/]"
        self.progress.update(self.current, completed=slowest.step, description=description)

    def _rate(self, spec: RunSpec, position: Progress) -> str:
        if position.step < 1 or not spec.is_trained:
            return ""
        if self.first_beat is None:
            self.first_beat = (position.step, position.beat)
        steps, seconds = position.step - self.first_beat[0], position.beat - self.first_beat[1]
        rate = f" {spec.tokens_per_step * steps / seconds:,.0f} tokens/s" if steps and seconds > 0 else ""
        loss = "" if math.isnan(position.loss) else f" loss {position.loss:.3f}"
        return rate + loss

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        super().ended(spec, status, error, known)
        left = self.left_s()
        text = "campaign" if left is None or self.done == self.total else f"campaign, about {left / 60:.1f} min left"
        self.progress.update(self.overall, completed=self.done, description=text)
        self.progress.update(self.current, visible=False)

    def close(self) -> None:
        self.progress.stop()


def observer_for(console: Console) -> Lines:
    return Bars(console) if console.is_terminal else Lines(console)


def _implements_observer(lines: Lines) -> Observer:
    """Keeps the type checker honest about the protocol."""
    return lines
