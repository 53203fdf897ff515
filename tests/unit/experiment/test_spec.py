from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, WarmUp

Make = Callable[..., RunSpec]


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("ddp", "ddp", {}),
        ("zero:stage=2,overlap=false", "zero", {"stage": 2, "overlap": False}),
        ("x:ratio=0.5,word=abc,none=null", "x", {"ratio": 0.5, "word": "abc", "none": None}),
        ("file:path=/data/a-b.bin,pad=0", "file", {"path": "/data/a-b.bin", "pad": 0}),
        ("my.module:key=1", "my.module", {"key": 1}),
    ],
)
def test_a_choice_reads_back_what_it_writes(text: str, name: str, options: dict[str, Any]) -> None:
    choice = Choice.parse(text)
    assert (choice.name, dict(choice.options)) == (name, options)
    assert str(choice) == text
    assert Choice.parse(str(choice)) == choice


def test_a_choice_forgives_spaces_and_empty_parts() -> None:
    assert Choice.parse(" zero : stage = 2 ,") == Choice("zero", {"stage": 2})


@pytest.mark.parametrize(
    "options",
    [
        {"a": [1, 2], "b": "x"},
        {"hosts": [{"host": "a,b", "port": 22}], "n": 1},
        {"quoted": {"k": 'he said "x, y"'}},
        {"partition": "a,b", "tag": "1.0", "nodelist": "g[1-4,7]", "word": "null"},
        {"path": '/d/5"disk/t.bin', "pad": 0},
        {"path": "/d/[a/t.bin", "pad": 0},
        {"path": "a,\\", "pad": 0},
        {"path": " spaced ", "closing": "]", "empty": "", "escaped": '\\"', "pad": 0},
    ],
)
def test_nested_options_survive_their_text(options: dict[str, Any]) -> None:
    assert Choice.parse(str(Choice("x", options))).options == options


@pytest.mark.parametrize("text", ["", ":stage=1", "zero:stage", "zero:=2"])
def test_a_malformed_choice_is_one_sentence(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        Choice.parse(text)
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


WRONG: list[tuple[Callable[[], object], str, str]] = [
    (lambda: Topology(device="tpu"), "device: got 'tpu'", "cpu or cuda"),
    (lambda: Topology(device="cpu", nodes=0), "nodes: got 0", "a whole number from 1"),
    (lambda: Topology(device="cpu", processes_per_node=0), "processes: got 0", "a whole number from 1"),
    (lambda: Precision(compute="int8"), "precision: got 'int8'", "fp32, tf32, bf16, fp16, float8"),
    (lambda: Precision(compute="fp32", reduce="bf16"), "reduce_dtype: got 'bf16'", "fp32 with precision fp32"),
    (lambda: Precision(compute="bf16", reduce="fp16"), "reduce_dtype: got 'fp16'", "bf16 or fp32"),
    (lambda: WarmUp(minimum=0), "warmup.minimum: got 0", "from 1"),
    (lambda: WarmUp(minimum=9, maximum=8), "warmup.maximum: got 8", "at least warmup.minimum (9)"),
    (lambda: WarmUp(window=1), "warmup.window: got 1", "from 2"),
    (lambda: WarmUp(slope_ratio=1.0), "warmup.slope_ratio: got 1.0", "between 0 and 1"),
    (lambda: Training(sequence_length=0, micro_batch=1), "sequence_length: got 0", "from 1"),
    (lambda: Training(sequence_length=1, micro_batch=0), "micro_batch: got 0", "from 1"),
    (lambda: Training(sequence_length=1, micro_batch=1, accumulation=0), "accumulation: got 0", "from 1"),
    (
        lambda: Training(sequence_length=1, micro_batch=1, checkpointing="some"),
        "checkpointing: got 'some'",
        "selective",
    ),
    (lambda: Training(sequence_length=1, micro_batch=1, bucket_mb=0.0), "bucket_mb: got 0.0", "a positive number"),
    (lambda: Training(sequence_length=1, micro_batch=1, learning_rate=0.0), "learning_rate: got 0.0", "positive"),
    (lambda: Training(sequence_length=1, micro_batch=1, weight_decay=-1.0), "weight_decay: got -1.0", "from 0"),
    (lambda: Training(sequence_length=1, micro_batch=1, clip_norm=0.0), "clip_norm: got 0.0", "positive"),
]


@pytest.mark.parametrize(("make", "where", "accepted"), WRONG)
def test_a_broken_invariant_is_one_sentence(make: Callable[[], object], where: str, accepted: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    sentence = str(caught.value)
    assert where in sentence
    assert accepted in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("reference_steps", 0),
        ("timeout_s", 0.0),
        ("stall_s", -1.0),
        ("telemetry_hz", -1.0),
        ("telemetry_hz", 1000.0),
        ("experiment", "a/b"),
        ("experiment", ""),
    ],
)
def test_a_run_refuses_impossible_fields(make_spec: Make, field: str, value: object, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        make_spec(**{field: value})
    assert str(caught.value) == golden


def test_the_global_batch_counts_all_processes(make_spec: Make) -> None:
    spec = make_spec(processes=4, nodes=2, micro_batch=3, accumulation=5, sequence_length=16)
    assert spec.topology.world_size == 8
    assert spec.global_batch == 3 * 5 * 8
    assert spec.tokens_per_step == 3 * 5 * 8 * 16


def test_repeats_share_a_cell_and_have_run_ids_of_their_own(make_spec: Make) -> None:
    first, second = make_spec(repeat=0), make_spec(repeat=1)
    assert first.cell == second.cell
    assert first.run_id != second.run_id
    assert first.work == second.work


@pytest.mark.parametrize(
    "same",
    [{"experiment": "other"}, {"timeout_s": 1.0}, {"stall_s": 1.0}, {"reference_steps": 3}, {"telemetry_hz": 0.0}],
)
def test_a_cell_does_not_depend_on_names_and_limits(make_spec: Make, same: dict[str, Any]) -> None:
    assert make_spec(**same).cell == make_spec().cell


def test_how_often_gauges_are_read_makes_no_other_run(make_spec: Make) -> None:
    assert make_spec(telemetry_hz=0.0).run_id == make_spec().run_id


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "fsdp2"},
        {"strategy": "ddp:static_graph=true"},
        {"processes": 4},
        {"precision": "bf16"},
        {"micro_batch": 2},
        {"checkpointing": "full"},
        {"compile": True},
        {"bucket_mb": 10.0},
        {"seed": 1},
        {"steps": 5},
        {"launcher": "local:threads=2"},
    ],
)
def test_a_cell_depends_on_what_is_computed_and_how(make_spec: Make, changed: dict[str, Any]) -> None:
    assert make_spec(**changed).cell != make_spec().cell
    assert make_spec(**changed).run_id != make_spec().run_id


@pytest.mark.parametrize(
    "same",
    [
        {"strategy": "zero:stage=3"},
        {"processes": 1, "accumulation": 4},
        {"processes": 4, "accumulation": 1},
        {"micro_batch": 2, "accumulation": 1},
        {"checkpointing": "full"},
        {"compile": True},
        {"bucket_mb": 1.0},
        {"steps": 50},
        {"workload": "reference"},
    ],
)
def test_work_is_shared_by_whoever_must_follow_one_trajectory(make_spec: Make, same: dict[str, Any]) -> None:
    assert make_spec(**same).work == make_spec().work


@pytest.mark.parametrize(
    "changed",
    [
        {"processes": 4},
        {"seed": 7},
        {"precision": "bf16"},
        {"precision": "bf16/bf16"},
        {"sequence_length": 16},
        {"model": "tiny-llama"},
        {"learning_rate": 1e-3},
        {"clip_norm": 0.5},
        {"data": Choice("file", {"path": "x.bin"})},
    ],
)
def test_work_changes_with_model_data_and_arithmetic(make_spec: Make, changed: dict[str, Any]) -> None:
    assert make_spec(**changed).work != make_spec().work
    assert make_spec(precision="bf16").work != make_spec(precision="bf16/bf16").work


def test_a_run_id_can_be_a_folder_name(make_spec: Make) -> None:
    spec = make_spec("zero:stage=3,overlap=false", model="tiny:layers=3")
    assert spec.run_id.startswith("zero-stage-3-overlap-false-tiny-2x-r0-")
    assert set(spec.run_id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_a_spec_survives_json(make_spec: Make) -> None:
    spec = make_spec(
        "zero:stage=2", precision="bf16/bf16", checkpointing="full", data=Choice("file", {"path": "x.npy", "pad": 0})
    )
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert (again.run_id, again.cell, again.work) == (spec.run_id, spec.cell, spec.work)
    assert RunSpec.from_dict(replace(spec, strategy=None).to_dict()).strategy is None


def test_hashes_do_not_depend_on_the_process(make_spec: Make) -> None:
    """Frozen: a change here would orphan every stored result. Change it only with the schema."""
    spec = make_spec("ddp")
    assert (spec.cell, spec.work) == (make_spec("ddp").cell, make_spec("ddp").work)
    assert len(spec.cell) == len(spec.work) == 16


def test_axes_are_flat(make_spec: Make) -> None:
    axes = make_spec("zero:stage=1").axes()
    assert axes["strategy"] == "zero:stage=1"
    assert axes["world_size"] == 2
    assert all(isinstance(value, str | int | float | bool | None) for value in axes.values())


def test_a_long_path_to_a_model_makes_a_short_run_id(make_spec: Callable[..., RunSpec]) -> None:
    deep = "/models/" + "x" * 300 + "/Mistral-7B/"
    spec = make_spec("ddp", model=deep)
    assert spec.run_id.startswith("ddp-mistral-7b-")
    assert len(make_spec("ddp", model="/" + "y" * 300).run_id) < 100


def test_how_long_to_wait_for_an_engine_makes_no_other_run(make_spec: Any) -> None:
    plain, patient, other = (
        make_spec(launcher=f"slurm:{options}") for options in ("gpus=1", "gpus=1,poll_s=9,pending_s=60", "gpus=2")
    )
    assert plain.run_id == patient.run_id
    assert plain.cell == patient.cell
    assert plain.run_id != other.run_id


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mesh:tp=2", "mesh:tp=2"),
        ("mesh:tp=2,sequence=true", "mesh:tp=2"),
        ("mesh:shard=2,tp=2,schedule=1f1b", "mesh:tp=2,shard=2"),
        ("tp:tp=2,loss_parallel=true", "mesh:tp=2"),
        ("mesh:tp=2,sequence=false", "mesh:tp=2,sequence=false"),
        ("ddp:static_graph=false", "ddp"),
        ("ddp:static_graph=true", "ddp:static_graph=true"),
        ("fsdp2:reshard_after_forward=true", "fsdp2"),
        ("zero", "zero:stage=1"),
        ("zero:overlap=true,stage=3", "zero:stage=3"),
        ("powersgd:rank=4", "compressed:method=powersgd"),
        ("compressed", "compressed:method=bf16"),
        ("diloco:outer_rate=1", "compressed:method=diloco,outer_rate=1.0"),
        # Refused where they are checked, in a sentence that names them.
        ("ddp:static_graph=0,other=1", "ddp:static_graph=0,other=1"),
    ],
)
def test_a_strategy_has_one_name(text: str, name: str) -> None:
    assert str(plugins.expanded("strategies", Choice.parse(text), 1, 4)) == name


def test_options_at_their_default_make_no_other_cell(make_spec: Make) -> None:
    short, spelled = make_spec("mesh:tp=2"), make_spec("mesh:sequence=true,tp=2")
    assert short.cell == spelled.cell
    assert short.axes() == spelled.axes()
    assert make_spec("zero").cell == make_spec("zero:stage=1").cell != make_spec("zero:stage=2").cell
    # A run that was stored with them keeps its id, which names its folder.
    assert RunSpec.from_dict(json.loads(json.dumps(spelled.to_dict()))).run_id == spelled.run_id
    assert spelled.strategy == Choice("mesh", {"sequence": True, "tp": 2})
