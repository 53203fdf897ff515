"""GPU tests: skipped without a CUDA device, run on one with `make gpu-test`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.results.records import Status
from paceline.results.store import Progress


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    # Other tests compute in this process, which then holds the GPU until it ends. A run beside it rightly has no
    # energy of its own, so the test of energy comes before them all.
    items.sort(key=lambda item: item.path != here / "test_gpu_gauges.py")
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.gpu)
            if machine.device_count() == 0:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class Remember:
    """An observer that keeps how every run ended."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[Status, str | None]] = {}

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        self.ends[spec.run_id] = (status, error)


@pytest.fixture(scope="session")
def remember() -> Remember:
    return Remember()
