"""The mock server counts prompt tokens by a known rule, so that prompt tokens per second can be tested."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serving import mock


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
    assert mock.prompt_tokens(asked) == count
    last = mock.last_events(2, count).split(b"data: ")[1].split(b"\n")[0]
    assert json.loads(last)["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 2,
        "total_tokens": count + 2,
    }
