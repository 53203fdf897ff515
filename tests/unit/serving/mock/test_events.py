"""The server of known law counts what it was asked by a stated rule, so that prompt tokens a second can be tried."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serving.mock import events


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": "two  words"}, 2),
        ({"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "why"}]}, 3),
        ({"messages": ["no message"]}, 0),
        ({}, 0),
    ],
)
def test_prompts_are_counted_by_ids_or_words(asked: dict[str, Any], count: int) -> None:
    assert events.prompt_tokens(asked) == count
    told = events.goodbye(2, count).split(b"data: ")[1].split(b"\n")[0]
    assert json.loads(told)["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 2,
        "total_tokens": count + 2,
    }
