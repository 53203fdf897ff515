"""Those who watch a campaign: one who says nothing, and one who looks as `paceline ui` does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.campaign.live.nodes import Look, RunWatch
from paceline.results import store

LOOK_S = 0.2


class Unseen:
    """Takes every call of `supervision.Observer`; what runs were waiting for is kept."""

    def __init__(self) -> None:
        self.waited_for: list[str] = []

    def waiting(self, spec: Any, reason: str, seconds: float) -> None:
        self.waited_for.append(reason)

    def begin(self, *_: Any) -> None: ...

    started = moved = restarting = advising = ended = begin


@contextlib.contextmanager
def live_looks(out: Path) -> Iterator[list[Look]]:
    """Looks at the first run below a folder, taken before its seal while the block lasts."""
    looks: list[Look] = []
    is_over = threading.Event()

    def watch() -> None:
        run: RunWatch | None = None
        while not is_over.wait(LOOK_S):
            if run is None and (run_dir := next(iter(store.run_dirs(out)), None)):
                run = RunWatch(run_dir, store.read_spec(run_dir))
            look = run.look() if run else None
            if look is not None and run is not None and not store.is_sealed(run.run_dir):
                looks.append(look)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        is_over.set()
        thread.join()


def seen_live(looks: list[Look]) -> set[str]:
    """The hosts whose gauges were there before the run ended."""
    return {node.host for look in looks for node in look.nodes if node.cpu_ratio is not None}
