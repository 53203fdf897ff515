"""A launcher that starts nothing, and an observer that remembers: campaigns without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState
from paceline.experiment.spec import RunSpec
from paceline.results.records import Status
from paceline.results.store import Progress


class Instant:
    """A launcher whose job is over at once; `leave` writes what the ranks would have."""

    def __init__(self, leave: Callable[[Path], None]) -> None:
        self.leave, self.cancelled, self.submitted = leave, 0, 0

    def check(self, spec: RunSpec) -> str | None:
        return None

    def prepare(self, spec: RunSpec, run_dir: Path) -> Job:
        return Job(argv=("true", str(run_dir)))

    def submit(self, job: Job) -> Mapping[str, Any]:
        self.submitted += 1
        self.leave(Path(job.argv[1]))
        return {"pid": 1}

    def poll(self, handle: Mapping[str, Any]) -> JobState:
        return JobState(running=False, exit_code=0)

    def cancel(self, handle: Mapping[str, Any]) -> None:
        self.cancelled += 1


class Watcher:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.known: list[bool] = []

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        self.known.append(known)
