from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.campaign.live.progress import title
from paceline.errors import RequestError
from paceline.experiment import expansion, plugins, reading, recipe
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, WarmUp
from paceline.host import machine
from paceline.training.data.corpus import is_packed


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Write an experiment and load it; every test states only what it is about."""

    def load(content: dict[str, Any] | str, settings: Sequence[str] = (), **more: Any) -> list[RunSpec]:
        path = tmp_path / "experiment.yaml"
        if isinstance(content, dict):
            base = {"model": "tiny", "device": "cpu", "processes": 2, **content.get("base", {})}
            content = yaml.safe_dump({"name": "test", **content, "base": base})
        path.write_text(content)
        return expansion.load(str(path), settings, **more)

    return load


def axis(specs: Sequence[RunSpec], name: str) -> list[Any]:
    return [spec.axes()[name] for spec in specs]


def refused(load: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        load(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- expansion ---


def test_a_matrix_is_the_product_of_its_axes(file: Any) -> None:
    specs = file({"matrix": {"strategy": ["ddp", "fsdp2"], "micro_batch": [1, 2, 4]}})
    found = {(str(s.strategy), s.training.micro_batch) for s in specs}
    assert found == {(a, b) for a in ("ddp", "fsdp2") for b in (1, 2, 4)}


def test_no_matrix_is_one_cell(file: Any) -> None:
    assert len(file({})) == 1


def test_a_list_of_matrices_is_their_union_without_duplicates(file: Any) -> None:
    specs = file({"matrix": [{"strategy": ["ddp", "fsdp2"]}, {"strategy": ["ddp"], "processes": [1, 2]}]})
    assert len(specs) == 3, "ddp on 2 processes stands in both"
    assert len({s.cell for s in specs}) == 3


def test_repeats_give_runs_of_one_cell(file: Any) -> None:
    specs = file({"matrix": {"strategy": ["ddp", "fsdp2", "zero"]}, "repeats": 4})
    assert len(specs) == 12
    assert len({s.cell for s in specs}) == 3
    assert len({s.run_id for s in specs}) == 12


def test_excluded_points_are_left_out(file: Any, golden: object) -> None:
    rules = [{"strategy": "fsdp2", "micro_batch": [2, 4]}]
    specs = file({"matrix": {"strategy": ["ddp", "fsdp2"], "micro_batch": [1, 2, 4]}, "exclude": rules})
    assert [(str(s.strategy), s.training.micro_batch) for s in specs].count(("fsdp2", 1)) == 1
    assert len(specs) == 4
    assert refused(file, {"matrix": {"strategy": ["ddp"]}, "exclude": [{"strategy": "ddp"}]}) == golden


def test_a_choice_may_be_a_mapping(file: Any) -> None:
    specs = file({"matrix": {"strategy": [{"name": "zero", "stage": 2}, "zero:stage=3"]}})
    assert sorted(axis(specs, "strategy")) == ["zero:stage=2", "zero:stage=3"]


def test_every_field_reaches_its_place(file: Any) -> None:
    base = {
        "precision": "bf16",
        "reduce_dtype": "bf16",
        "sequence_length": 17,
        "micro_batch": 3,
        "accumulation": 5,
        "checkpointing": "full",
        "compile": True,
        "bucket_mb": 2.5,
        "learning_rate": 0.5,
        "weight_decay": 0.0,
        "clip_norm": 2.0,
        "data": "file:path=x.bin",
        "steps": 7,
        "warmup": {"minimum": 2, "maximum": 3},
        "seed": 9,
        "reference_steps": 16,
        "timeout_s": 11.0,
        "stall_s": 12.0,
        "launcher": "local:threads=2",
        "strategy": "zero:stage=3",
        "workload": "pretrain",
    }
    (spec,) = file({"base": base})
    t = spec.training
    assert (t.precision.compute, t.precision.reduce) == ("bf16", "bf16")
    assert (t.sequence_length, t.micro_batch, t.accumulation) == (17, 3, 5)
    assert (t.checkpointing, t.compile, t.bucket_mb) == ("full", True, 2.5)
    assert (t.learning_rate, t.weight_decay, t.clip_norm, str(t.data)) == (0.5, 0.0, 2.0, "file:path=x.bin")
    assert (spec.steps, spec.seed, spec.reference_steps, spec.timeout_s, spec.stall_s) == (7, 9, 16, 11.0, 12.0)
    assert spec.warmup == WarmUp(minimum=2, maximum=3)
    assert (str(spec.launcher), str(spec.strategy), str(spec.model)) == ("local:threads=2", "zero:stage=3", "tiny")
    assert (spec.topology.device, spec.topology.world_size, spec.experiment) == ("cpu", 2, "test")


# --- settings ---


def test_a_setting_replaces_a_field_and_an_axis(file: Any) -> None:
    content = {"base": {"steps": 3}, "matrix": {"strategy": ["ddp", "fsdp2"], "micro_batch": [1, 2]}}
    assert axis(file(content, ["steps=9"]), "steps") == [9] * 4
    specs = file(content, ["strategy=zero:stage=1"])
    assert set(axis(specs, "strategy")) == {"zero:stage=1"}
    assert len(specs) == 2


def test_a_list_setting_makes_an_axis(file: Any) -> None:
    content = {"matrix": {"strategy": ["ddp"]}}
    assert sorted(axis(file(content, ["micro_batch=[1,2,4]"]), "micro_batch")) == [1, 2, 4]
    assert sorted(axis(file(content, ['strategy=["fsdp2","zero:stage=2"]']), "strategy")) == ["fsdp2", "zero:stage=2"]


def test_settings_of_groups_repeats_and_launcher(file: Any) -> None:
    specs = file({"base": {"warmup": {"maximum": 20}}}, ["warmup.minimum=3", "repeats=2"], launcher="local:threads=2")
    assert len(specs) == 2
    assert specs[0].warmup == WarmUp(minimum=3, maximum=20)
    assert str(specs[0].launcher) == "local:threads=2"


@pytest.mark.parametrize(
    "setting",
    [
        "steps",
        "=3",
        "stepz=3",
        "steps=many",
        "steps=1.5",
        "compile=1",
        "compile=fastest",
        "compile='default:scope=layer'",
        "steps=0",
        "repeats=0",
        "repeats=x",
        "steps.stage=2",
        "warmup.minimun=2",
        "micro_batch=[]",
        "device=tpu",
        "precision=fp8",
        "processes=doubling",
    ],
)
def test_a_wrong_setting_is_one_sentence(file: Any, setting: str, golden: object) -> None:
    assert refused(file, {"matrix": {"strategy": ["ddp"]}}, [setting]) == golden


@pytest.mark.parametrize(
    "content",
    [
        "name: [",
        "- 1",
        "base: {}",
        "name: a b",
        "name: attempts",
        "name: schedules",
        "name: x\ncolour: 1",
        "name: x\nbase: {colour: 1}",
        "name: x\nmatrix: {strategy: ddp}",
        "name: x\nrepeats: 0",
        "name: x\ndevices: {cpu: {name: y}}",
        "name: x\ndevices: {tpu: {}}",
        "name: x\nbase: {steps: '3'}",
    ],
)
def test_a_wrong_file_is_one_sentence(file: Any, content: str, golden: object) -> None:
    assert refused(file, content, ["device=cpu"]) == golden


def test_an_unknown_experiment_names_the_presets(golden: object) -> None:
    sentence = refused(expansion.load, "quikc")
    assert sentence == golden
    assert "quikc" in sentence
    assert all(name in sentence for name in reading.presets())


# --- this machine ---


def test_devices_overlay_what_they_name(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        "base": {"device": "auto", "steps": 5, "seed": 7},
        "matrix": {"strategy": ["ddp"]},
        "devices": {
            "cpu": {"base": {"steps": 6}},
            "cuda": {"base": {"steps": 8}, "matrix": {"strategy": ["fsdp2", "zero"]}, "repeats": 2},
        },
    }
    monkeypatch.setattr(machine, "device_kind", lambda: "cpu")
    (spec,) = file(content)
    assert (spec.steps, spec.seed, spec.topology.device) == (6, 7, "cpu")
    monkeypatch.setattr(machine, "device_kind", lambda: "cuda")
    monkeypatch.setattr(machine, "device_count", lambda: 4)
    specs = file(content, ["processes=all"])
    assert len(specs) == 4
    assert {(s.steps, s.seed, s.topology.device, s.topology.world_size) for s in specs} == {(8, 7, "cuda", 4)}
    assert file(content, ["device=cpu"])[0].steps == 6, "a setting wins over what the machine has"


@pytest.mark.parametrize(
    ("devices", "wanted"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8])]
)
def test_processes_double_up_to_the_devices(file: Any, monkeypatch: Any, devices: int, wanted: list[int]) -> None:
    monkeypatch.setattr(machine, "device_count", lambda: devices)
    specs = file({"base": {"device": "cuda"}, "matrix": {"processes": "doubling"}})
    assert sorted(axis(specs, "world_size")) == wanted


def test_all_processes_are_the_cores_this_process_may_use(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    (spec,) = file({"base": {"processes": "all"}})
    assert spec.topology.world_size == 3


@pytest.mark.parametrize(("devices", "cells"), [(1, 12), (2, 36)])
def test_long_splits_sequences_only_where_there_are_several_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: int, cells: int
) -> None:
    """Rules of `exclude` see how many processes `all` is."""
    monkeypatch.setattr(machine, "device_kind", lambda: "cuda")
    monkeypatch.setattr(machine, "device_count", lambda: devices)
    specs = expansion.load("long")
    assert len(specs) == cells
    assert len({(s.workload.name, s.work) for s in specs}) == 12, "equal work at each length"


# --- global batch ---


def test_the_global_batch_decides_the_accumulation(file: Any) -> None:
    specs = file({"base": {"global_batch": 8}, "matrix": {"processes": [1, 2, 4], "micro_batch": [1, 2]}})
    assert {(s.topology.world_size, s.training.micro_batch): s.training.accumulation for s in specs} == {
        (1, 1): 8,
        (1, 2): 4,
        (2, 1): 4,
        (2, 2): 2,
        (4, 1): 2,
        (4, 2): 1,
    }
    assert len({s.work for s in specs}) == 1


def test_a_global_batch_that_cannot_be_is_refused(file: Any, golden: object) -> None:
    text = refused(file, {"base": {"global_batch": 8, "micro_batch": 3}})
    assert text == golden
    assert "micro_batch" in text
    assert refused(file, {"base": {"global_batch": 8, "accumulation": 3}}) == golden
    assert file({"base": {"global_batch": 8, "accumulation": 4}})[0].training.accumulation == 4
    assert "global_batch: got 0" in refused(file, {"base": {"global_batch": 0}})


# --- order ---


def test_two_cells_alternate_as_abba(file: Any) -> None:
    specs = file({"matrix": {"strategy": ["ddp", "fsdp2"]}, "repeats": 4})
    assert axis(specs, "strategy") == ["ddp", "fsdp2", "fsdp2", "ddp", "ddp", "fsdp2", "fsdp2", "ddp"]
    assert [s.repeat for s in specs] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rounds_are_shuffled_with_the_recorded_seed(file: Any) -> None:
    content = {"matrix": {"micro_batch": [1, 2, 3, 4, 5, 6]}, "repeats": 3}
    first, again = (axis(file({**content, "order_seed": 5}), "micro_batch") for _ in range(2))
    other = axis(file({**content, "order_seed": 6}), "micro_batch")
    assert first == again != other
    rounds = [first[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(turn) == [1, 2, 3, 4, 5, 6] for turn in rounds), "every round holds every cell once"
    assert rounds[0] != rounds[1]
    shuffle, expected = random.Random(5), [1, 2, 3, 4, 5, 6]
    shuffle.shuffle(expected)
    assert rounds[0] == expected


# --- presets ---


TWO = "[http://node-a:8000, http://node-b:8000]"


@pytest.mark.parametrize("name", reading.presets())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_preset_loads_and_is_understood(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what only its user can give: a file, or the addresses of nodes."""
    from paceline.campaign.run.references import references_of, unsupported

    monkeypatch.setattr(machine, "device_count", lambda: 8)
    (tmp_path / "own.json").write_text('[{"input": "an article", "output": "a summary"}]')
    own = {"inference-summaries": f"data.path={tmp_path / 'own.json'}", "inference-nodes": f"engine.urls={TWO}"}
    specs = expansion.load(name, [f"device={device}", *([own[name]] if name in own else [])])
    assert specs
    assert {s.experiment for s in specs} == {name}
    absent = {s.workload.name for s in specs} - set(plugins.names("workloads"))
    if absent:
        pytest.skip(f"workloads that are not installed: {', '.join(sorted(absent))}")
    assert [unsupported(s) for s in specs] == [None] * len(specs)
    assert set(references_of(specs)) == {s.work for s in specs if s.is_certified and not s.script}
    assert reading.presets()[name]


def test_quick_is_the_campaign_of_the_issue() -> None:
    specs = expansion.load("quick", ["device=cpu"])
    cells = {(str(s.strategy), s.topology.world_size) for s in specs}
    five = {(name, 2) for name in ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", "zero:stage=3")}
    assert cells == five | {("ddp", 1)}
    assert {s.repeat for s in specs} == {0, 1, 2}


def test_strategies_is_the_comparison_of_the_issue() -> None:
    spec = expansion.load("strategies", ["device=cpu"])[0]
    t = spec.training
    assert (t.sequence_length, t.micro_batch, t.accumulation, spec.steps, spec.seed) == (2048, 1, 4, 100, 42)
    assert (t.precision.compute, t.learning_rate, t.weight_decay, t.clip_norm) == ("bf16", 1e-4, 0.01, 1.0)


@pytest.mark.parametrize("name", ["strategies", "finetune", "finetune-quick"])
def test_presets_compile_and_pack_on_a_gpu_only(name: str) -> None:
    on_gpu, on_cpu = (expansion.load(name, [f"device={device}", "processes=1"]) for device in ("cuda", "cpu"))
    assert {spec.training.compile for spec in on_gpu} == {True}
    assert {spec.training.compile for spec in on_cpu} == {False}
    if name != "strategies":
        assert all(is_packed(spec.training.data) for spec in on_gpu)


def test_an_option_of_a_choice_is_set_in_every_cell(file: Any) -> None:
    specs = file({"matrix": {"strategy": ["ddp", "zero:stage=1"]}}, ["strategy.stage=2", "workload.iters=20"])
    assert sorted(str(spec.strategy) for spec in specs) == ["ddp:stage=2", "zero:stage=2"]
    assert {str(spec.workload) for spec in specs} == {"pretrain:iters=20"}


def test_a_workload_that_trains_nothing_has_no_strategy_and_no_axes_of_training(file: Any) -> None:
    (spec,) = file({"base": {"workload": "collectives"}, "matrix": {"micro_batch": [1, 2]}})
    assert spec.strategy is None
    assert "micro_batch" not in spec.axes()
    assert spec.axes()["model"] is None
    assert spec.run_id.startswith("collectives-")


# --- --benchmark, --warmup, --iters ---


@pytest.mark.parametrize(
    ("benchmark", "workloads"),
    [
        ("comm", {"collectives"}),
        ("training", {"pretrain"}),
        ("memory", {"memory"}),
        ("all", {"collectives", "pretrain", "memory"}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_suite_holds_every_benchmark_and_gives_each_alone(
    benchmark: str, workloads: set[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "device_count", lambda: 8)
    specs = expansion.load("suite", [f"device={device}"], benchmark=benchmark)
    assert {s.workload.name for s in specs} == workloads


def test_a_benchmark_that_leaves_no_cell_is_one_sentence(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        expansion.load("quick", ["device=cpu"], benchmark="comm")
    assert str(caught.value) == golden
    assert "--benchmark" in str(caught.value)
    assert "comm" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        expansion.load("quick", ["device=cpu"], benchmark="network")
    assert str(caught.value) == golden
    assert "network" in str(caught.value)


def test_counts_reach_the_workloads_that_have_iterations_only() -> None:
    specs = expansion.load("suite", ["device=cpu"], counts={"iters": 20, "warmup": 2})
    options = {s.workload.name: dict(s.workload.options) for s in specs}
    assert options["collectives"].items() >= {("iters", 20), ("warmup", 2)}
    assert "iters" not in options["pretrain"]
    assert "iters" not in options["memory"]


def test_counts_without_anything_to_count_are_one_sentence(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        expansion.load("quick", ["device=cpu"], counts={"iters": 20})
    assert str(caught.value) == golden
    assert "--iters" in str(caught.value)
    assert "20" in str(caught.value)


# --- designs ---

DESIGN: dict[str, Any] = {"factors": {"strategy": ["ddp", "fsdp2"], "micro_batch": [1, 2], "compile": [False, True]}}


def changes(specs: Sequence[RunSpec]) -> list[set[str]]:
    """What each cell changes of the baseline."""
    assert specs[0].design is not None
    baseline = specs[0].design.baseline
    return [{name for name, level in baseline.items() if recipe.setting(s, name) != level} for s in specs]


def test_one_factor_at_a_time_is_the_default(file: Any) -> None:
    specs = file({"design": DESIGN})
    assert sorted(map(len, changes(specs))) == [0, 1, 1, 1]
    (design,) = {repr(s.design) for s in specs}
    assert "one-at-a-time" in design


@pytest.mark.parametrize(("kind", "cells"), [("factorial", 8), ("fractional", 4)])
def test_the_command_line_chooses_the_kind(file: Any, kind: str, cells: int) -> None:
    specs = file({"design": DESIGN, "repeats": 2}, [f"design.kind={kind}"])
    assert len(specs) == 2 * cells
    assert len({s.cell for s in specs}) == cells


def test_a_list_setting_is_a_factor_and_a_plain_one_ends_it(file: Any) -> None:
    specs = file({"design": DESIGN}, ["bucket_mb=[null,1.0]", "compile=true"])
    assert specs[0].design is not None
    assert set(specs[0].design.levels) == {"strategy", "micro_batch", "bucket_mb"}
    assert {s.training.compile for s in specs} == {True}


def test_any_experiment_becomes_a_design_by_the_command_line(file: Any) -> None:
    specs = file({}, ["design.kind=factorial", "micro_batch=[1,2]", "compile=[false,true]"])
    assert len(specs) == 4
    assert all(s.design is not None for s in specs)


def test_a_design_is_no_part_of_any_identity_and_survives_its_file(file: Any) -> None:
    designed = {s.run_id: s for s in file({"design": {"factors": {"micro_batch": [1, 2]}}})}
    plain = {s.run_id: s for s in file({"matrix": {"micro_batch": [1, 2]}})}
    assert set(designed) == set(plain)
    assert {s.cell for s in designed.values()} == {s.cell for s in plain.values()}
    for spec in designed.values():
        assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_levels_are_recorded_as_the_specs_say_them(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    factors = {"processes": ["all", 2], "strategy": ["ddp", {"name": "zero", "stage": 2}]}
    design = file({"design": {"factors": factors}})[0].design
    assert (design.baseline["processes"], design.levels["processes"]) == (4, (2,))
    assert design.levels["strategy"] == ("zero:stage=2",)


def test_a_combined_point_is_a_cell_beside_the_factors(file: Any) -> None:
    combined = [{"name": "short and wide", "sequence_length": 32, "micro_batch": 4}]
    content = {"design": {"factors": {"sequence_length": [64, 32]}, "combined": combined}, "base": {"micro_batch": 2}}
    specs = file(content)
    assert sorted(map(sorted, changes(specs))) == [[], ["micro_batch", "sequence_length"], ["sequence_length"]]
    design = specs[0].design
    assert design.baseline == {"sequence_length": 64, "micro_batch": 2}
    assert design.combined == {"short and wide": {"sequence_length": 32, "micro_batch": 4}}
    assert len(file(content, ["micro_batch=1"])) == 2, "a point that changes a fixed field is left out"


def test_matrix_cells_stand_beside_a_design_and_exclusions_hold(file: Any) -> None:
    content = {"design": DESIGN, "matrix": {"workload": ["collectives"]}, "exclude": [{"compile": True}]}
    specs = file(content)
    assert [s.workload.name for s in specs].count("collectives") == 1
    assert not any(s.training.compile for s in specs)
    assert len(specs) == 4


@pytest.mark.parametrize(
    "design",
    [
        {"kind": "latin"},
        {},
        {"factors": {"steps": [1]}},
        {"factors": {"timeout_s": [1.0, 2.0]}},
        {"factors": {"telemetry_hz": [1.0, 2.0]}},
        {"factors": {"colour": [1, 2]}},
        {"factors": {"micro_batch": [2, 2]}},
        {"factors": {"rank": [8, 16]}},
        {"kind": "fractional", "factors": {"steps": [5, 6]}},
        {"kind": "fractional", "resolution": 5, **DESIGN},
        {**DESIGN, "combined": [{"name": "x"}]},
        {**DESIGN, "combined": [{"colour": 1}]},
        {"kind": "factorial", "colour": 1},
    ],
)
def test_a_wrong_design_is_one_sentence(file: Any, design: dict[str, Any], golden: object) -> None:
    assert refused(file, {"design": design}) == golden


def test_diagnose_is_the_suite_of_the_issue() -> None:
    specs = expansion.load("diagnose", ["device=cuda"])
    cells = {
        (t.micro_batch, t.sequence_length, s.tuning.rank, s.tuning.optimizer, t.precision.compute)
        for s in specs
        if (t := s.training) and s.tuning
    }
    paged = "paged_adamw_8bit"
    assert cells == {
        (4, 1024, 16, paged, "bf16"),
        (4, 1024, 16, "adamw", "bf16"),
        (4, 1024, 8, paged, "bf16"),
        (4, 512, 16, paged, "bf16"),
        (8, 512, 16, paged, "bf16"),
        (4, 1024, 16, paged, "fp16"),
    }
    assert {(s.workload.name, str(s.model), s.tuning.method) for s in specs if s.tuning} == {
        ("finetune", "mistral-7b", "qlora")
    }
    assert len(specs) == 18


@pytest.mark.parametrize("setting", ["method=lora", "rank=8", "optimizer=adamw"])
def test_a_setting_of_tuning_is_refused_where_nothing_is_tuned(setting: str, golden: object) -> None:
    """Who gives it would believe to have measured it."""
    name = setting.partition("=")[0]
    with pytest.raises(RequestError) as caught:
        expansion.load("quick", ["device=cpu", setting])
    assert str(caught.value) == golden
    assert f"{name}" in str(caught.value)
    assert expansion.load("finetune", ["device=cpu", setting])


def test_memory_is_that_of_fine_tuning_if_a_field_of_it_is_set() -> None:
    """`paceline plan memory --set method=qlora`, for the probes of the frontier too."""
    here = ["device=cpu"]
    assert {spec.tuning for spec in expansion.load("memory", here)} == {None}
    tuned = expansion.load("memory", [*here, "method=qlora", "rank=8"])
    assert {plugins.load("workloads", spec.workload.name).check(spec) for spec in tuned} == {None}
    assert {spec.workload.name for spec in tuned} == {"memory", "frontier"}
    assert {(spec.tuning.method, spec.tuning.rank) for spec in tuned if spec.tuning} == {("qlora", 8)}
    assert all(spec.tuning for spec in tuned)


def test_the_points_of_a_design_have_different_names_while_they_run(golden: object) -> None:
    titles = {title(spec) for spec in expansion.load("diagnose", ["device=cpu", "repeats=1"])}
    assert titles == golden


SERVED = """
name: served
base: {workload: inference, model: tiny-llama, engine: "openai:url=http://x", processes: 1, requests: 4}
matrix: {api: [completions, chat]}
"""


def test_the_api_is_an_axis(tmp_path: Path) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(SERVED)
    specs = expansion.load(str(path), ["device=cpu"])
    assert sorted(str(spec.axes()["api"]) for spec in specs) == ["chat", "completions"]
    assert len({spec.cell for spec in specs}) == 2


def test_what_an_experiment_leaves_out_about_serving_is_what_a_spec_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(SERVED.replace("completions, chat", "completions"))
    (spec,) = expansion.load(str(path), ["device=cpu"])
    assert spec.serving == Serving(requests=4)


def test_a_field_of_serving_is_refused_by_its_type(tmp_path: Path, golden: object) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(SERVED.replace("requests: 4", "requests: many"))
    with pytest.raises(RequestError) as caught:
        expansion.load(str(path), ["device=cpu"])
    assert str(caught.value) == golden
    assert "many" in str(caught.value)


def test_wrong_degrees_are_reported_before_the_batch_that_follows_from_them(file: Any) -> None:
    base = {"model": "tiny-llama", "processes": 4, "global_batch": 8, "strategy": "mesh:dp=3,tp=2"}
    (spec,) = file({"base": base})
    reason = plugins.load("strategies", "mesh").check(spec)
    assert reason == "the layout needs dp 3 x cp 1 x tp 2 x pp 1 = 6 processes, got 4"


def test_a_strategy_written_in_two_ways_is_one_cell(file: Any) -> None:
    (spec,) = file({"matrix": {"strategy": ["mesh:tp=2", "mesh:tp=2,sequence=true", "tp:schedule=1f1b"]}})
    assert str(spec.strategy) == "mesh:tp=2"
