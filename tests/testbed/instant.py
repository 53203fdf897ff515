"""A launcher that starts nothing, and an observer that remembers: campaigns without processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState
from paceline.experiment.spec import RunSpec
from paceline.results.records import Status
from testbed.observers import Unseen


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


class Watcher(Unseen):
    """An observer that remembers which runs an earlier command had finished."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[bool] = []

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:  # type: ignore[override]
        self.known.append(known)
