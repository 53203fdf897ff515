"""ZeRO's import: what DeepSpeed would pull in for nothing is kept out, and only while it is imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline.training.strategies.zero import _hidden


def test_a_hidden_package_cannot_be_imported_until_it_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with _hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_a_package_in_use_is_not_taken_away() -> None:
    with _hidden("json"):
        assert importlib.import_module("json") is sys.modules["json"]
    assert "json" in sys.modules
