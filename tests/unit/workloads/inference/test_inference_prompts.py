"""Prompts of a run against its API: what is made here fits either, a file's token ids and messages fit one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.fields import Cell, build
from paceline.workloads.inference import prompts_of


def asked(**more: Any) -> Any:
    values = {"workload": "inference", "model": "tiny", "processes": 1, "requests": 2}
    return prompts_of(build("test", Cell(**{**values, **more}), "cpu"))


def test_synthetic_prompts_are_messages_in_a_chat() -> None:
    assert all(prompt.token_ids for prompt in asked())
    assert all(prompt.messages for prompt in asked(api="chat"))


@pytest.mark.parametrize(
    ("line", "api"),
    [
        ('{"token_ids": [1, 2]}', "chat"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "completions"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(tmp_path: Path, line: str, api: str, golden: object) -> None:
    (tmp_path / "f").write_text(line)
    with pytest.raises(RequestError) as caught:
        asked(api=api, data=f"jsonl:path={tmp_path / 'f'}")
    assert str(caught.value) == golden
