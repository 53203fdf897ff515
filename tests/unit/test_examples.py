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
    for folder in ("analysis", ".")
    for path in sorted((ROOT / folder).glob("**/*.py" if folder != "." else "*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_statistics_wording_and_errors_have_examples() -> None:
    assert {"paceline.analysis.statistics.intervals", "paceline.wording", "paceline.errors"} <= set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name: str) -> None:
    failed, run = doctest.testmod(importlib.import_module(name))
    assert run
    assert not failed
