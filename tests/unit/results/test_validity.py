"""Rules for values that come from files: closed objects are checked by column, and by name where one is incomplete."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.results.records import MemorySample
from paceline.results.validity import rule_of

WHOLE = dataclasses.asdict(
    MemorySample(rank=0, moment="steps", allocated_bytes=1, reserved_bytes=2, device_bytes=None, resident_bytes=3)
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"rank": -1}, "rank: got -1, expected a whole number from 0"),
        ({"rank": "0"}, "rank: got '0', expected a whole number from 0"),
        ({"moment": None}, "moment is missing"),
        ({"moment": None, "colour": "red"}, "moment is missing"),
        ({"colour": "red"}, "colour is unknown"),
    ],
)
def test_one_object_among_many_does_not_fit(change: dict[str, Any], problem: str | None) -> None:
    """None stands for a key that is left out; as many keys as there are fields need not be the fields."""
    changed = {**WHOLE, **change}
    if change.get("moment", "") is None:
        del changed["moment"]
    rule = rule_of(MemorySample)
    assert rule.fits([WHOLE, changed, WHOLE]) is (problem is None)
    assert rule.problem(changed) == problem
