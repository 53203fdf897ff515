"""The command of a user's script as a template over the matrix."""

from __future__ import annotations

import dataclasses
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
