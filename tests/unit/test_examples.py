"""The worked examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
SHOWN = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_statistics_wording_and_errors_have_examples() -> None:
    assert {"paceline.analysis.statistics.intervals", "paceline.wording", "paceline.errors"} <= set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _, module = name.rpartition(".")
    if package.endswith(".attachment"):
        # These modules import each other without the package, as in the process of a script.
        monkeypatch.syspath_prepend(ROOT / "training" / "attachment")
        name = module
    failed, run = doctest.testmod(importlib.import_module(name))
    assert run
    assert not failed
