"""Campaigns in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.instant import Instant

from paceline.campaign.run import controller, references
from paceline.experiment import plugins


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], Instant]:
    def use(leave: Callable[[Path], None]) -> Instant:
        instant = Instant(leave)
        load = plugins.load
        for module in (controller, references):
            monkeypatch.setattr(module, "load", lambda kind, name: instant if kind == "launchers" else load(kind, name))
        return instant

    return use
