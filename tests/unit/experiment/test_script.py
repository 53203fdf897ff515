"""The command of a user's script as a template over the matrix."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from paceline.errors import RequestError
from paceline.experiment import expansion, foreign, recipe
from paceline.experiment.script import Script, fill, processes_of
from paceline.experiment.spec import RunSpec


def load(folder: Path, **experiment: object) -> list[RunSpec]:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": "sweep", **experiment}))
    return expansion.load(str(path))


def base(*command: str, **more: object) -> dict[str, object]:
    return {"workload": "script", "device": "cpu", "command": [*command], **more}


def test_names_in_braces_are_axes(tmp_path: Path) -> None:
    specs = load(
        tmp_path,
        base=base("train.py", "--fsdp={strategy}", "--lr", "{lr}", "{{kept}}", lr=0.5),
        matrix={"strategy": ["full_shard", "none"]},
        repeats=2,
    )
    assert len(specs) == 4
    assert len({spec.cell for spec in specs}) == 2
    assert {spec.axes()["strategy"] for spec in specs} == {"full_shard", "none"}
    words = {spec.script.rendered({}, ".")[0] for spec in specs if spec.script}
    assert ("train.py", "--fsdp=none", "--lr", "0.5", "{kept}") in words


def test_a_name_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"command: got \{rate\} without a value"):
        load(tmp_path, base=base("train.py", "{rate}"))


def test_a_field_of_our_own_loop_is_refused_for_a_script(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="script: got 'micro_batch'"):
        load(tmp_path, base=base("train.py", micro_batch=4))
    with pytest.raises(RequestError, match="parameters: got 'unused'"):
        load(tmp_path, base=base("train.py", parameters={"unused": 1}))


@pytest.mark.parametrize(
    ("name", "text", "filled"),
    [
        ("ds.json", '{"zero_optimization": {"stage": {stage}}}', '{"zero_optimization": {"stage": 3}}'),
        ("titan.toml", "[parallelism]\nstage = {stage}\n", "[parallelism]\nstage = 3\n"),
        ("accelerate.yaml", "deepspeed_config: {zero_stage: {stage}}\n", "deepspeed_config: {zero_stage: 3}\n"),
    ],
)
def test_config_files_are_templates_too(tmp_path: Path, name: str, text: str, filled: str) -> None:
    (tmp_path / name).write_text(text)
    files = {"config": str(tmp_path / name)}
    (spec,) = load(tmp_path, base=base("train.py", "--config", "{config}", files=files, stage=3))
    assert spec.script is not None
    words, texts = spec.script.rendered({}, "/run")
    assert words[-1] == f"/run/{name}"
    assert texts == {name: filled}


def test_a_config_file_that_is_no_longer_valid_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"stage": {stage}}')
    files = {"config": str(tmp_path / "ds.json")}
    with pytest.raises(RequestError, match=r"files: ds.json is not valid"):
        load(tmp_path, base=base("train.py", "{config}", files=files, stage="three"))


def test_another_version_of_the_script_is_another_run_of_the_same_cell(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1")
    (before,) = load(tmp_path, base=base(str(script)))
    script.write_text("a = 2")
    (after,) = load(tmp_path, base=base(str(script)))
    assert before.cell == after.cell
    assert before.run_id != after.run_id


def test_a_spec_survives_its_file_and_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"stage": {stage}}')
    files = {"config": str(tmp_path / "ds.json")}
    whole = base("train.py", "{config}", "{stage}", files=files, stage=2, work=["stage"], steps=20)
    (spec,) = load(tmp_path, base=whole)
    assert RunSpec.from_dict(spec.to_dict()) == spec
    (again,) = load(tmp_path, base=recipe.fields(spec))
    assert again.run_id == spec.run_id


def test_a_command_of_somebody_else_needs_permission(tmp_path: Path) -> None:
    (spec,) = load(tmp_path, base=base("python", "evil.py"))
    (found,) = foreign.settings_of(spec)
    assert (found.name, found.value) == ("command", "python evil.py")
    assert foreign.stripped(spec, [])[0].script is None
    assert foreign.stripped(spec, ["command"])[0] == spec


@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["torchrun", "--nproc_per_node=4", "train.py"], 4),
        (["accelerate", "launch", "--num_processes", "2", "train.py", "--num_processes", "9"], 2),
        (["torchrun", "--nproc-per-node", "gpu", "train.py"], 8),
        (["python", "train.py", "--num_gpus", "4"], 1),
    ],
)
def test_processes_are_read_from_known_launchers(command: list[str], count: int) -> None:
    assert processes_of(command, {}, 8) == count


def test_commands_that_begin_with_the_script_are_started_by_the_launcher() -> None:
    assert not Script(command=("{script}",), parameters={"script": "a.py"}).starts_ranks
    assert not Script(command=("-m", "lab.train")).starts_ranks
    assert Script(command=("python", "train.py")).starts_ranks
    assert fill("{flag}", {"flag": True}) == "true"
    assert dataclasses.replace(Script(command=("-m", "lab.train"))).title == "lab.train"


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", "hf_abcdefghijklmnop"],
        ["--wandb_api_key=0123456789abcdef"],
        ["--wandb_key", "0123456789abcdef0123456789abcdef01234567"],
        ["--hf_token", "{value}"],
        ["--url", "https://user:pass@example.org/x"],
    ],
)
def test_a_command_with_a_secret_is_refused_without_repeating_it(tmp_path: Path, words: list[str]) -> None:
    more = {"value": "plainsecretvalue1"} if "{value}" in words else {}
    with pytest.raises(RequestError, match="looks like a secret") as caught:
        load(tmp_path, base=base("train.py", *words, **more))
    assert not any(part in str(caught.value) for part in ("hf_abc", "0123456789", "plainsecret", "pass@"))


def test_options_that_only_sound_like_a_secret_are_accepted(tmp_path: Path) -> None:
    words = (
        "--pad_token <pad> --eos_token endoftext --image_key image --tokenizer gpt2 --max-tokens 100000 --key_dim 128"
    )
    (spec,) = load(tmp_path, base=base("train.py", *words.split()))
    assert spec.script is not None
    assert spec.script.command[1:] == tuple(words.split())


def test_a_config_file_with_a_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text("push: true\nhub_token: hf_abcdefghijklmnop\n")
    with pytest.raises(RequestError, match=r"files: hub.yaml: got 'text that looks like a secret'") as caught:
        load(tmp_path, base=base("train.py", "{c}", files={"c": str(tmp_path / "hub.yaml")}))
    assert "hf_abc" not in str(caught.value)


def test_a_device_or_a_pipe_is_no_config_file(tmp_path: Path) -> None:
    """They have no size, and never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe")):
        with pytest.raises(RequestError, match=r"files\.c: got .* expected a file of at most 1 MiB"):
            load(tmp_path, base=base("train.py", "{c}", files={"c": path}))


@pytest.mark.parametrize("name", ["../run.sh", "/etc/passwd", "..", "", "a\nb", "a/b"])
def test_a_stored_config_file_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    """`paceline recipe` writes the files of a capsule by these names."""
    (tmp_path / "ds.json").write_text("{}")
    (spec,) = load(tmp_path, base=base("train.py", "{c}", files={"c": str(tmp_path / "ds.json")}))
    stored = spec.to_dict()
    stored["script"]["files"]["c"]["name"] = name
    with pytest.raises(RequestError, match="expected the name of a file without a directory"):
        RunSpec.from_dict(stored)


@pytest.mark.parametrize(
    ("field", "value"),
    [("command", []), ("command", [1]), ("parameters", {"lr": [1]}), ("work", ["lr"]), ("work", [{}])],
)
def test_a_stored_script_of_other_types_is_refused(tmp_path: Path, field: str, value: object) -> None:
    stored = load(tmp_path, base=base("train.py"))[0].to_dict()
    stored["script"][field] = value
    with pytest.raises(RequestError):
        RunSpec.from_dict(stored)
    with pytest.raises(RequestError, match="contents: got"):
        RunSpec.from_dict(load(tmp_path, base=base("train.py"))[0].to_dict() | {"contents": ["x"]})
