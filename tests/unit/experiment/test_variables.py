"""Variables of an experiment: axes, identity, what is refused, and that every launcher passes them on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.analysis.findings.cell_axes import axis_text, distinguishing_axes
from paceline.campaign.run.references import reference_of
from paceline.errors import InvalidRunError, RequestError
from paceline.experiment import expansion, recipe
from paceline.experiment.choices import Choice
from paceline.experiment.fields import Experiment
from paceline.experiment.plugins import load as load_plugin
from paceline.experiment.plugins import names
from paceline.experiment.spec import RunSpec
from paceline.workloads import worker

Make = Callable[..., RunSpec]
BASE = {"device": "cpu", "processes": 2, "precision": "fp32", "model": "tiny", "sequence_length": 32, "steps": 12}


@pytest.fixture
def expand(tmp_path: Path) -> Callable[..., list[RunSpec]]:
    def load(base: dict[str, Any], settings: Sequence[str] = (), **more: Any) -> list[RunSpec]:
        path = tmp_path / "e.yaml"
        path.write_text(yaml.safe_dump({"name": "e", "base": BASE | base, **more}))
        return expansion.load(str(path), settings)

    return load


def algorithms(specs: Sequence[RunSpec]) -> set[str | None]:
    return {spec.env.get("NCCL_ALGO") for spec in specs}


@pytest.mark.parametrize(
    ("base", "more", "settings"),
    [
        ({"env": {"NCCL_ALGO": ["Ring", "Tree"]}}, {}, ()),
        ({}, {"matrix": {"env.NCCL_ALGO": ["Ring", "Tree"]}}, ()),
        ({}, {"matrix": {"env": {"NCCL_ALGO": ["Ring", "Tree"]}}}, ()),
        ({}, {"matrix": {"env": [{"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}]}}, ()),
        ({}, {"matrix": [{"env.NCCL_ALGO": ["Ring"]}, {"env.NCCL_ALGO": ["Tree"]}]}, ()),
        ({"env": {"NCCL_ALGO": "NVLS"}}, {}, ("env.NCCL_ALGO=[Ring, Tree]",)),
        ({}, {"matrix": {"env.NCCL_ALGO": ["Ring", "Tree", "NVLS"]}, "exclude": [{"env.NCCL_ALGO": "NVLS"}]}, ()),
        ({}, {"devices": {"cpu": {"base": {"env": {"NCCL_ALGO": ["Ring", "Tree"]}}}}}, ()),
        ({}, {"design": {"factors": {"env.NCCL_ALGO": ["Ring", "Tree"]}}}, ()),
        ({}, {"design": {"factors": {"env": {"NCCL_ALGO": ["Ring", "Tree"]}}}}, ()),
    ],
)
def test_every_way_of_writing_an_axis_gives_its_cells(
    expand: Callable[..., list[RunSpec]], base: dict[str, Any], more: dict[str, Any], settings: Sequence[str]
) -> None:
    specs = expand(base, settings, **more)
    assert algorithms(specs) == {"Ring", "Tree"}
    assert len({spec.run_id for spec in specs}) == len(specs) == 2


def test_axes_of_variables_multiply_and_null_leaves_one_unset(expand: Callable[..., list[RunSpec]]) -> None:
    specs = expand({"env": {"NCCL_ALGO": [None, "Ring"], "NCCL_P2P_DISABLE": [0, True]}})
    found = {json.dumps(dict(spec.env)) for spec in specs}
    assert found == {
        '{"NCCL_P2P_DISABLE": "0"}',
        '{"NCCL_P2P_DISABLE": "true"}',
        '{"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "0"}',
        '{"NCCL_ALGO": "Ring", "NCCL_P2P_DISABLE": "true"}',
    }


def test_one_value_on_the_command_line_replaces_an_axis(expand: Callable[..., list[RunSpec]]) -> None:
    assert algorithms(expand({"env": {"NCCL_ALGO": ["Ring", "Tree"]}}, ["env.NCCL_ALGO=NVLS"])) == {"NVLS"}
    assert algorithms(expand({}, ["env.NCCL_ALGO=NVLS"], matrix={"env.NCCL_ALGO": ["Ring", "Tree"]})) == {"NVLS"}
    assert algorithms(expand({"env": {"NCCL_ALGO": "Ring"}}, ["env.NCCL_ALGO=null"])) == {None}


def test_identity_knows_variables_only_where_they_are_set(make_spec: Make) -> None:
    plain, ring = make_spec(), make_spec(env={"NCCL_ALGO": "Ring"})
    assert "env" not in plain.to_dict(), "spec.json of other runs stays as it was"
    assert plain.run_id == "ddp-tiny-2x-r0-fb97c345d7"
    assert plain.cell != ring.cell
    assert plain.run_id != ring.run_id
    assert plain.work == ring.work, "one reference for all of them"
    assert RunSpec.from_dict(json.loads(json.dumps(ring.to_dict()))) == ring
    assert RunSpec.from_dict(json.loads(json.dumps(plain.to_dict()))) == plain


def test_a_recreated_experiment_has_the_same_runs(expand: Callable[..., list[RunSpec]]) -> None:
    specs = expand({"env": {"NCCL_PROTO": "LL", "NCCL_ALGO": [None, "Ring", "Tree"]}})
    again = expansion.expand(Experiment.model_validate(recipe.recreate(specs)), {}, "cpu")
    assert {spec.run_id for spec in again} == {spec.run_id for spec in specs}


def test_names_of_cells_show_the_variables(make_spec: Make) -> None:
    specs = [make_spec(), make_spec(env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"})]
    axes = [spec.axes() for spec in specs]
    assert "env" not in axes[0]
    assert distinguishing_axes(axes) == ("model", "world_size", "env")
    assert axis_text("env", axes[1]) == "NCCL_ALGO=Ring NCCL_PROTO=LL"


@pytest.mark.parametrize(
    "env",
    [
        {"OMP_NUM_THREADS": 4},
        {"RANK": 1},
        {"MASTER_ADDR": "10.0.0.1"},
        {"PACELINE_NODES": 2},
        {"SLURM_JOB_ID": 2},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"PYTHONPATH": "/x"},
        {"HF_TOKEN": "x"},
        {"NCCL_DEBUG": "hf_abcdefghijklmnopqrstuvwxyz"},
        {"A-B": 1},
        {"A": "two\nlines"},
        {"A": "x" * 1025},
        {"A": {"b": 1}},
    ],
)
def test_a_refused_variable_is_one_sentence_without_its_secret(
    expand: Callable[..., list[RunSpec]], env: dict[str, Any], golden: object
) -> None:
    with pytest.raises(RequestError) as caught:
        expand({"env": env})
    assert str(caught.value) == golden
    assert "hf_abc" not in str(caught.value)


@pytest.mark.parametrize("env", [5, "NCCL_ALGO=Ring", [["Ring"]]])
def test_variables_that_are_no_mapping_are_one_sentence(expand: Callable[..., list[RunSpec]], env: Any) -> None:
    with pytest.raises(RequestError, match=r"^(env|e: env)"):
        expand({"env": env})


def test_a_variable_has_one_source(expand: Callable[..., list[RunSpec]]) -> None:
    for options in ({"env": {"NCCL_ALGO": "Tree"}}, {"nccl": {"ALGO": "Tree"}}):
        with pytest.raises(RequestError, match=r"env\.NCCL_ALGO: got it here and in the options of the launcher"):
            expand({"env": {"NCCL_ALGO": "Ring"}, "launcher": {"name": "kubernetes", "image": "x", **options}})


OPTIONS: dict[str, dict[str, Any]] = {
    "kubernetes": {"image": "paceline:1", "env": {"OTHER": "1"}},
    "slurm": {"env": {"OTHER": "1"}},
    "ray": {"env": {"OTHER": "1"}},
    "ssh": {"hosts": ["a", "b"], "env": {"OTHER": "1"}},
}


WRITTEN = {
    "here": "NCCL_ALGO=Ring",
    "kubernetes": "name: NCCL_ALGO",
    "local": "NCCL_ALGO=Ring",
    "ray": '"NCCL_ALGO": "Ring"',
    "slurm": "export NCCL_ALGO=Ring",
}


def test_every_launcher_is_tested() -> None:
    assert {*WRITTEN, "ssh"} == set(names("launchers"))


@pytest.mark.parametrize("launcher", WRITTEN)
def test_the_job_of_every_launcher_carries_the_variables(make_spec: Make, launcher: str, tmp_path: Path) -> None:
    spec = replace(make_spec(env={"NCCL_ALGO": "Ring"}), launcher=Choice(launcher, OPTIONS.get(launcher, {})))
    text = str(load_plugin("launchers", launcher).prepare(spec, tmp_path))
    assert WRITTEN[launcher] in text
    without = str(load_plugin("launchers", launcher).prepare(replace(spec, env={}), tmp_path))
    assert "NCCL_ALGO" not in without


def test_ssh_sends_the_variables_to_every_host(make_spec: Make) -> None:
    from paceline.experiment.plugins import parse_options
    from paceline.launchers import ssh

    spec = replace(make_spec(nodes=2, env={"NCCL_ALGO": "Ring"}), launcher=Choice("ssh", OPTIONS["ssh"]))
    chosen = parse_options(ssh.Options, spec.launcher)
    each = ssh._environments(spec, chosen, ["a", "b"], "attempt")
    assert [(env["NCCL_ALGO"], env["OTHER"]) for env in each] == [("Ring", "1")] * 2


def test_the_reference_runs_without_them(make_spec: Make) -> None:
    assert reference_of(make_spec(env={"NVIDIA_TF32_OVERRIDE": "1"})).env == {}


def test_a_rank_without_its_variables_refuses_to_measure(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(env={"NCCL_ALGO": "Ring"})
    for value, words in ((None, "is not set"), ("Tree", "has another value")):
        monkeypatch.delenv("NCCL_ALGO", raising=False)
        if value:
            monkeypatch.setenv("NCCL_ALGO", value)
        with pytest.raises(InvalidRunError, match=words):
            worker.check_variables(spec)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    worker.check_variables(spec)
