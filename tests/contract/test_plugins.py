"""Every plugin file keeps the contract of its kind; `names` and `load` keep theirs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec

# Read from the package's folders, so a plugin that somebody installs beside it is not judged here.
SHIPPED = [
    (kind, name) for kind in plugins.KINDS for name, text in plugins.names(kind).items() if not text.startswith("from ")
]
# Options without which a plugin has nothing to work with.
NEEDED = {
    "kubernetes": {"image": "paceline"},
    "ssh": {"hosts": ["gpu1"]},
    "openai": {"url": "http://localhost:8000"},
}
# The launcher `here` needs a job to be in.
SURROUNDINGS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
IDS = [f"{kind}.{name}" for kind, name in SHIPPED]


def test_the_plugins_of_the_foundation_are_there() -> None:
    assert {"single", "ddp", "fsdp2", "zero"} <= set(plugins.names("strategies"))
    assert {"pretrain", "reference"} <= set(plugins.names("workloads"))
    assert {"local"} <= set(plugins.names("launchers"))
    assert {"html", "markdown", "csv", "json", "plots"} <= set(plugins.names("exporters"))
    assert set(plugins.CONTRACT) == set(plugins.KINDS)


@pytest.mark.parametrize(("kind", "name"), SHIPPED, ids=IDS)
def test_functions_and_parameters(kind: str, name: str) -> None:
    module = plugins.load(kind, name)
    optional = plugins.OPTIONAL.get(kind, {})
    for function, parameters in {**plugins.CONTRACT[kind], **optional}.items():
        found = getattr(module, function, None)
        if found is None and function in optional:
            continue
        assert callable(found), f"{name} has no {function}"
        asked = inspect.signature(found).parameters
        assert tuple(asked)[: len(parameters)] == parameters, function
        more = list(asked.values())[len(parameters) :]
        assert all(p.default is not p.empty for p in more), f"{function} is called with {parameters} alone"


@pytest.mark.parametrize(("kind", "name"), SHIPPED, ids=IDS)
def test_the_first_docstring_line_is_a_description(kind: str, name: str) -> None:
    text = plugins.names(kind)[name]
    assert text.endswith(".")
    assert 20 < len(text) < 121
    assert (plugins.load(kind, name).__doc__ or "").startswith(text)


def test_importing_every_plugin_imports_no_torch() -> None:
    code = "import sys\nfrom paceline.experiment import plugins\n"
    code += "".join(f"plugins.load({kind!r}, {name!r})\n" for kind, name in SHIPPED)
    code += "print(sorted({'torch', 'deepspeed', 'transformers', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["workloads", "strategies", "launchers", "engines"])
def test_check_is_arithmetic_on_the_controller(kind: str) -> None:
    """`check` answers without torch, for every plugin of the kind, given what it cannot do without."""
    code = f"""
import sys
from paceline.experiment import plugins
import dataclasses
from paceline.experiment.choices import Choice
from paceline.experiment.spec import *
from paceline.experiment.script import Script
from paceline.experiment.serving import Serving
for name in plugins.names({kind!r}):
    spec = RunSpec(experiment="x", workload=Choice("pretrain"), model=Choice("tiny-llama"), steps=1,
                   strategy=Choice("ddp"), topology=Topology(device="cpu"),
                   tuning=Tuning() if name == "finetune" else None,
                   training=Training(sequence_length=8, micro_batch=1))
    if name == "inference" or {kind!r} == "engines":
        engine = Choice("openai", {NEEDED}["openai"])
        spec = dataclasses.replace(spec, workload=Choice("inference"), serving=Serving(), engine=engine)
    if name == "script":
        spec = dataclasses.replace(spec, script=Script(command=("train.py",)), strategy=None, steps=0)
    fields = {{"workloads": "workload", "strategies": "strategy", "launchers": "launcher", "engines": "engine"}}
    field = fields[{kind!r}]
    chosen = Choice(name, {NEEDED}.get(name, {{}}))
    reason = plugins.load({kind!r}, name).check(dataclasses.replace(spec, **{{field: chosen}}))
    assert reason is None, (name, reason)
    assert "torch" not in sys.modules, name
"""
    env = {**os.environ, **SURROUNDINGS}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_reads_without_importing() -> None:
    code = "import sys; from paceline.experiment import plugins; [plugins.names(kind) for kind in plugins.KINDS];"
    code += "print([m for m in sys.modules if m.startswith(tuple('paceline.' + k + '.' for k in plugins.KINDS))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_underscore_modules_are_not_plugins() -> None:
    assert not [name for kind in plugins.KINDS for name in plugins.names(kind) if name.startswith("_")]
    with pytest.raises(RequestError):
        plugins.load("strategies", "_torch")


def test_a_hyphen_in_the_word_is_an_underscore_in_the_file() -> None:
    assert "suite-json" in plugins.names("exporters")
    assert "suite_json" not in plugins.names("exporters")
    assert plugins.load("exporters", "suite-json") is plugins.load("exporters", "suite_json")


@pytest.mark.parametrize(
    ("kind", "given", "meant"), [("strategies", "fsdp", "fsdp2"), ("exporters", "markdwon", "markdown")]
)
def test_an_unknown_name_is_one_sentence_with_a_close_match(kind: str, given: str, meant: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        plugins.load(kind, given)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert repr(given) in sentence
    assert sentence == golden
    assert f"{meant!r}" in sentence
    assert all(name in sentence for name in plugins.names(kind))


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        ("strategies", "zero3", "zero:stage=3"),
        ("strategies", "zero-3", "zero:stage=3"),
        ("strategies", "zero_2", "zero:stage=2"),
        ("strategies", "ZeRO1", "zero:stage=1"),
        ("strategies", "zero-stage-2", "zero:stage=2"),
        ("strategies", "zero9", "zero"),
        ("strategies", "fsdp1", "fsdp2"),
        ("strategies", "ddp2", "ddp"),
        ("workloads", "reference4", "reference:variants=4"),
        ("workloads", "compute-iters-20", "compute:iters=20"),
    ],
)
def test_a_number_behind_a_name_is_matched_to_a_whole_number_option(kind: str, given: str, meant: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"Did you mean {meant!r}?")):
        plugins.load(kind, given)


def test_a_name_like_nothing_gets_the_list_without_a_guess(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        plugins.load("strategies", "qqqqqqq")
    assert str(caught.value) == golden


def test_a_dotted_name_is_any_importable_module(golden: object) -> None:
    assert (
        plugins.load("strategies", "paceline.training.strategies.ddp").wrap.__module__
        == "paceline.training.strategies.ddp"
    )
    with pytest.raises(RequestError) as caught:
        plugins.load("strategies", "nowhere.at_all")
    assert str(caught.value) == golden


def test_entry_points_are_listed_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = importlib.import_module("paceline.training.strategies.single")
    information = tmp_path / "theirs-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[paceline.strategies]\ntheirs = {ours.__name__}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.names("strategies")["theirs"] == f"from {ours.__name__}"
    assert plugins.load("strategies", "theirs") is ours
    assert "theirs" not in plugins.names("workloads")


def test_options_are_typed_and_named(make_spec: Callable[..., RunSpec]) -> None:
    check = plugins.load("strategies", "zero").check
    assert check(make_spec("zero:stage=2")) is None
    for wrong, part in {
        "zero:stage=4": "1, 2 or 3",
        "zero:stage=true": "expected a whole number",
        "zero:sage=1": "expected stage, overlap",
        "zero:overlap=1": "expected true or false",
    }.items():
        with pytest.raises(RequestError) as caught:
            check(make_spec(wrong))
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_option_that_is_a_number_takes_whole_and_broken_ones() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Options:
        share: float = 0.5
        limit: int | None = None

    assert plugins.parse_options(Options, Choice("x", {"share": 1, "limit": 3})).share == 1
    with pytest.raises(RequestError):
        plugins.parse_options(Options, Choice("x", {"share": "half"}))
