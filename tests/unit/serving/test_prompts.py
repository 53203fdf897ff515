"""Prompts by law and by file: the same for the same seed, of the stated lengths, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.serving.prompts import SYNTHETIC_COUNT, Prompt, check, form_of, open_prompts


def prompts(data: str, count: int | None = None, **more: Any) -> list[Prompt]:
    return open_prompts(Choice.parse(data), **{"count": count, "seed": 1, "vocab": 1000, "max_tokens": 64, **more})


def sizes(found: list[Prompt]) -> list[int]:
    return [len(prompt.token_ids or ()) for prompt in found]


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert prompts("synthetic", 20) == prompts("synthetic", 20)
    assert prompts("synthetic", 20) != prompts("synthetic", 20, seed=2)


def test_laws_of_length() -> None:
    fixed = prompts("synthetic:prompt=fixed,prompt_mean=100,answer_mean=30", 50)
    assert set(sizes(fixed)) == {100}
    assert {prompt.max_tokens for prompt in fixed} == {30}
    even = sizes(prompts("synthetic:prompt=uniform,prompt_mean=100,prompt_spread=0.5", 2000))
    assert min(even) >= 50
    assert max(even) <= 150
    assert fmean(even) == pytest.approx(100, rel=0.02)
    drawn = sizes(prompts("synthetic:prompt=lognormal,prompt_mean=200,prompt_spread=0.6", 5000))
    assert fmean(drawn) == pytest.approx(200, rel=0.03)
    assert max(drawn) > 600


def test_prefixes_are_shared_and_dialogues_grow() -> None:
    found = prompts("synthetic:prompt=fixed,prompt_mean=10,answer_mean=5,shared_prefix=50,prefixes=2,turns=3", 12)
    assert sizes(found) == [60, 75, 90] * 4
    heads = [(prompt.token_ids or ())[:50] for prompt in found]
    assert heads[0] == heads[1] == heads[6] != heads[3]
    assert (found[1].token_ids or ())[:60] == found[0].token_ids


def test_what_is_made_of_tokens_can_be_words() -> None:
    """As many words as tokens, each prompt its own; a chat has the turns of its dialogue."""
    law = "prompt=fixed,prompt_mean=10,answer_mean=5,shared_prefix=3,turns=2"
    first, second = prompts(f"synthetic:{law},form=text", 2)
    assert len((first.text or "").split()) == 13
    assert (second.text or "").startswith(f"{first.text} ")
    opening, reply = prompts(f"synthetic:{law}", 2, api="chat")
    assert [said["role"] for said in reply.messages or ()] == ["system", "user", "assistant", "user"]
    assert [len(said["content"].split()) for said in reply.messages or ()] == [3, 10, 5, 10]
    assert (reply.messages or ())[:2] == opening.messages
    assert opening.token_ids is opening.text is None


def test_synthetic_prompts_have_a_number_without_one() -> None:
    assert len(prompts("synthetic:prompt=fixed,prompt_mean=1")) == SYNTHETIC_COUNT


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_files(tmp_path: Path) -> None:
    lines = [{"prompt": "hi", "max_tokens": 3}, {"token_ids": [1, 2], "reference": "r"}]
    lines += [{"messages": [{"role": "user", "content": "x"}]}]
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    text, tokens, chat = prompts(f"jsonl:path={file}")
    assert (text.text, text.max_tokens, tokens.token_ids, tokens.reference) == ("hi", 3, (1, 2), "r")
    assert chat.messages == ({"role": "user", "content": "x"},)
    said = [
        {"conversations": [{"from": "gpt", "value": "no"}, {"from": "human", "value": "why"}]},
        {"conversations": []},
    ]
    assert [p.text for p in prompts(f"sharegpt:path={write(tmp_path / 's.json', said)}")] == ["why"]
    summaries = [{"tok_input": [5, 6], "output": "short"}, {"input": "long text", "output": "s"}]
    found = prompts(f"summaries:path={write(tmp_path / 'c.json', summaries)}")
    assert [(p.token_ids, p.text, p.reference) for p in found] == [((5, 6), None, "short"), (None, "long text", "s")]


def test_likes_of_sharegpt(tmp_path: Path) -> None:
    lines = [{"id": 1, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "why"}]}]
    lines += [
        {"conversation": [{"from": "human", "value": "how"}]},
        {"conversations": [{"from": "human", "value": " "}]},
    ]
    file = write(tmp_path / "s.jsonl", "\ufeff" + "\n".join(map(json.dumps, lines)))
    assert [p.text for p in prompts(f"sharegpt:path={file}")] == ["why", "how"]


def test_only_line_feeds_end_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n')
    assert [p.text for p in prompts(f"jsonl:path={file}")] == ["a\u2028b", "c"]


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 500, "input_length": 7, "output_length": 3}',
        '{"timestamp_s": 2.5, "input_length": 1, "output_length": 1}',
    ]
    found = prompts(f"trace:path={write(tmp_path / 't.jsonl', chr(10).join(lines))}")
    assert [(p.due_s, len(p.token_ids or ()), p.max_tokens) for p in found] == [(0.5, 7, 3), (2.5, 1, 1)]
    (first, _) = prompts(f"trace:path={tmp_path / 't.jsonl'},form=text")
    assert (len((first.text or "").split()), first.due_s) == (7, 0.5)
    (first, _) = prompts(f"trace:path={tmp_path / 't.jsonl'}", api="chat")
    assert len((first.messages or ())[0]["content"].split()) == 7


@pytest.mark.parametrize(
    "data",
    [
        "synthetic:prompt=normal",
        "synthetic:prompt_mean=0",
        "synthetic:turns=0",
        "synthetic:size=3",
        "books",
        "jsonl:path=/nowhere",
        "jsonl",
        "jsonl:path=/x,form=text",
        "synthetic:form=chat",
    ],
)
def test_what_cannot_be_is_one_sentence(data: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        prompts(data, 3)
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", "{}"),
        ("jsonl", '{"prompt": "x"}\n[1]'),
        ("jsonl", '{"token_ids": [1000]}'),
        ("jsonl", '{"prompt": "x", "max_tokens": 0}'),
        ("jsonl", ""),
        ("jsonl", '{"prompt": ""}'),
        ("jsonl", '{"prompt": "x"}\n\n{"prompt": "y", "reference": 5}'),
        ("jsonl", '{"prompt": "x", "max_tokens": true}'),
        ("jsonl", '{"prompt": "x"}\n{"prompt": '),
        ("sharegpt", '[{"conversations": [{"from": "human"}]}]'),
        ("sharegpt", '[{"id": 1}]'),
        ("sharegpt", '{"conversations": []}\n[]'),
        ("summaries", '[{"tok_input": [1, 2000], "input": "x", "output": "y"}]'),
        ("summaries", "["),
        ("sharegpt", "{}"),
        ("summaries", '[{"input": "x"}]'),
        ("trace", '{"timestamp": -1, "input_length": 1, "output_length": 1}'),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, kind: str, text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        prompts(f"{kind}:path={write(tmp_path / 'f', text)}")
    assert str(caught.value) == golden


def test_a_trace_scenario_needs_the_times_of_a_trace(golden: object) -> None:
    check(Choice.parse("trace:path=t.jsonl"), "trace")
    check(Choice.parse("trace:path=t.jsonl"), "offline")
    with pytest.raises(RequestError) as caught:
        check(Choice.parse("synthetic"), "trace")
    assert str(caught.value) == golden
    assert "synthetic" in str(caught.value)
    assert "FILE" in str(caught.value)


def test_the_form_of_prompts_is_recorded() -> None:
    ids, words = Prompt(token_ids=(1,), max_tokens=1), Prompt(text="x", max_tokens=1)
    assert form_of([ids, ids]) == "token_ids"
    assert form_of([words]) == "text"
    assert form_of([ids, words]) == "mixed"
    assert form_of([Prompt(messages=({"role": "user", "content": "x"},), max_tokens=1)]) == "messages"
