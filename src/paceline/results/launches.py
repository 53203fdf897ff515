"""The finished runs of a results directory or of a capsule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import RequestError
from paceline.results import capsule, store
from paceline.results.records import RunRecord

T = TypeVar("T")


def read_experiment(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """The newest launch of each run in a results directory or capsule, and the reasons for what was skipped."""
    launches, unreadable = read_launches(directory)
    records, _, passed_over = store.newest(launches)
    return records, [*unreadable, *passed_over]


def read_launches(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """As `read_experiment`, with every launch of a run that was repeated on another day.

    RequestError if the directory does not exist or contains no runs.
    """
    return read_judged(directory, store.unjudged)[:2]


def read_judged(directory: Path, judge: Callable[[list[RunRecord]], T]) -> tuple[list[RunRecord], list[str], list[T]]:
    """As `read_launches`, and what `judge` says about parts of the launches (`store.read_judged`)."""
    if not directory.exists():
        raise RequestError(
            f"results: got {str(directory)!r}, which does not exist; expected a results directory or capsule."
        )
    judged: list[T] = []
    if directory.is_dir():
        launches, skipped, judged = store.read_judged(directory, judge)
    else:
        launches, skipped = capsule.read_runs(directory)
    if (directory / "spec.json").is_file() and launches:
        references, unreadable = capsule.references_beside(directory, launches[0])
        launches, skipped = [*launches, *references], [*skipped, *unreadable]
    if not launches and not skipped:
        raise RequestError(
            f"results: got {str(directory)!r}, which contains no runs; expected a directory from `paceline run`."
        )
    return launches, skipped, judged
