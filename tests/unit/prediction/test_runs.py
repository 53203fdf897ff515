"""Paceline's runs as setups and anchors, predictions that are stored and scored, forecasts of campaigns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.analysis.training import predicted
from paceline.campaign.run import forecast
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.prediction import experiment_file, hardware, parameters, runs, scoring, stored
from paceline.prediction.predict import predict, setup_of
from paceline.prediction.step_time import columns, parts
from paceline.report.sections import sections
from paceline.results.records import CollectiveSample, KernelSample

GPT = {"model": "gpt2-124m", "precision": "bf16", "device": "cuda", "sequence_length": 1024, "micro_batch": 8}


@pytest.fixture
def record(make_spec: Any, make_record: Any, h200: Any) -> Any:
    spec = make_spec("zero:stage=3", world_size=4, accumulation=2, checkpointing="full", **GPT)
    return make_record(spec, [9.0, 9.0, *([0.5] * 28)], gpus=[h200] * 4, wire=())


def test_a_run_is_a_setup(record: Any) -> None:
    one = runs.setup_of_record(record)
    assert one is not None
    assert (one.gpu.name, one.gpus, one.shard, one.checkpointing) == ("h200", 4, "zero3", "full")
    assert one.tokens_per_step == record.spec.tokens_per_step


def test_deepspeed_adds_work_of_the_host_for_each_tensor(make_spec: Any) -> None:
    """gpt2-124m has 148 tensors: 0.2 ms each at stage 2. Stage 3 also waits where a short pass hides no gathering."""
    gpu, fit = hardware.accelerator("h200"), parameters.load()

    def host_ms(strategy: str, **more: int) -> float:
        one = runs.setup_of_spec(make_spec(strategy, world_size=1, **{**GPT, **more}), gpu)
        assert one is not None
        return 1e3 * float(parts(columns([one]), fit.values)["other"][0])

    assert host_ms("single") == host_ms("fsdp2") == 0
    assert host_ms("zero:stage=2") == pytest.approx(148 * 0.2)
    short, long = (host_ms("zero:stage=3", micro_batch=n) for n in (8, 512))
    assert long == pytest.approx(148 * 0.125)
    assert short > long + 100
    one = setup_of("gpt2-124m", "h200", 8, software="paceline", shard="zero2")
    assert one.software.host_update_s > 0
    assert setup_of("gpt2-124m", "h200", 8, software="paceline", shard="zero3").software.host_update_s == 0


def test_stages_of_deepspeed_on_one_gpu_are_different_predictions(make_spec: Any) -> None:
    gpu = hardware.accelerator("h200")
    found = [runs.setup_of_spec(make_spec(name, world_size=1, **GPT), gpu) for name in ("ddp", "fsdp2", "zero:stage=2")]
    first, second, deepspeed = (stored.key(one) for one in found if one is not None)
    assert first == second != deepspeed


def test_a_mesh_is_a_setup_and_a_setup_is_a_mesh(make_spec: Any) -> None:
    gpu = hardware.accelerator("h200")
    spec = make_spec("mesh:tp=2,pp=2,shard=2", world_size=8, accumulation=4, **GPT)
    one = runs.setup_of_spec(spec, gpu)
    assert one is not None
    assert (one.tp, one.pp, one.dp, one.shard, one.micro_batches) == (2, 2, 2, "zero3", 4)
    assert one.global_batch == spec.global_batch
    assert experiment_file.strategy(one) == "mesh:tp=2,pp=2,shard=2"
    interleaved = runs.setup_of_spec(make_spec("mesh:pp=2,schedule=interleaved-1f1b", world_size=4, **GPT), gpu)
    assert interleaved is not None
    assert experiment_file.strategy(interleaved) == "mesh:pp=2,schedule=interleaved-1f1b,virtual=2"
    assert stored.key(one) != stored.key(interleaved)


def test_the_measured_step_is_the_median_of_the_second_half(record: Any) -> None:
    one = runs.measured(record)
    assert one is not None
    assert one.step_s == 0.5
    assert [anchor.step_s for anchor in runs.anchors([record, record])] == [pytest.approx(0.5)]


def test_runs_on_cpu_or_in_fp32_are_no_anchors(make_spec: Any, make_record: Any, h200: Any) -> None:
    assert runs.measured(make_record(make_spec("ddp"))) is None
    assert runs.measured(make_record(make_spec("ddp", **{**GPT, "precision": "fp32"}), gpus=[h200])) is None


@pytest.mark.parametrize("workload", ["memory", "script"])
def test_runs_that_do_not_time_a_prescribed_step_are_no_anchors(
    workload: str, make_spec: Any, make_record: Any, h200: Any
) -> None:
    """A run that watches memory takes a few steps; a script's batch is not that of the specification."""
    spec = replace(make_spec("single", **GPT), workload=Choice(workload))
    assert runs.measured(make_record(spec, [0.5] * 30, gpus=[h200])) is None


def test_sweeps_observe_network_and_level(make_spec: Any, make_record: Any, h200: Any) -> None:
    size, kernel = 2**30, 2 * 8192**3
    collective = CollectiveSample(
        rank=0, operation="all_reduce", dtype="fp32", size_bytes=size, count=size // 4, group_size=8, in_place=True,
        mode="single", batch=1, durations_s=(0.01,), wrong=0,
    )  # fmt: skip
    product = KernelSample(
        rank=0, kernel="matmul", dtype="bf16", label="x", variant="", flops=kernel, moved_bytes=None,
        durations_s=(kernel / 700e12,),
    )  # fmt: skip
    spec = make_spec("ddp", world_size=8, **GPT)
    found = runs.observations([make_record(spec, gpus=[h200] * 8, collectives=(collective,), kernels=(product,))])
    assert [one.offset for one in found] == ["link", "level"]
    # 1.75 GiB on the wire in 10 ms is 188 GB/s, less than expected of NVLink 4: slower links.
    assert found[0].value > 0.1
    assert found[1].value == pytest.approx(0.0, abs=0.1)
    between = replace(spec, topology=replace(spec.topology, nodes=2))
    (seen,) = runs.observations([make_record(between, gpus=[h200] * 8, collectives=(collective,))])
    assert seen.offset == "network"


def test_a_stored_prediction_is_found_again_by_its_run(tmp_path: Path, record: Any) -> None:
    setup = runs.setup_of_record(record)
    assert setup is not None
    row = stored.to_dict(predict([setup])[0], tokens=1e9, usd_per_gpu_hour=2.0)
    assert row["usd"]["value"] == pytest.approx(row["days"]["value"] * 24 * 4 * 2.0)
    assert row["step_time_s"]["low"] < row["step_time_s"]["value"] < row["step_time_s"]["high"]
    stored.append(tmp_path, [row], made_at=50.0)
    stored.append(tmp_path, [{**row, "step_time_s": {"value": 9, "low": 8, "high": 10}}], made_at=60.0)
    found = scoring.score_runs(stored.read(tmp_path), [record])
    assert len(found.pairs) == 1
    assert found.pairs[0].stored
    assert found.pairs[0].predicted_s == row["step_time_s"]["value"]  # the oldest one, made before looking
    assert not scoring.score_runs(stored.read(tmp_path), [replace(record, started_at=40.0)]).pairs[0].stored


def test_a_run_on_a_cpu_is_scored_by_what_was_stored_before_it(
    tmp_path: Path, make_spec: Any, make_record: Any
) -> None:
    """Its rates are those of one machine: without a stored prediction or such a machine it is left out."""
    spec = make_spec("ddp", world_size=2, model="tiny", precision="fp32", device="cpu", sequence_length=64)
    record = make_record(spec, [0.5] * 20, gpus=[])
    machine = replace(hardware.accelerator("a10"), name=hardware.CPU, gpu=hardware.CPU)
    setup = runs.setup_of_record(record, machine)
    assert setup is not None
    row = stored.to_dict(predict([setup])[0])
    stored.append(tmp_path, [row], made_at=50.0)
    (pair,) = scoring.score_runs(stored.read(tmp_path), [record]).pairs
    assert (pair.stored, pair.predicted_s) == (True, row["step_time_s"]["value"])
    assert predicted.beside(stored.read(tmp_path), [record])[0].predicted_s == row["step_time_s"]["value"]
    assert not scoring.score_runs([], [record]).pairs
    (now,) = scoring.score_runs([], [record], machine).pairs
    assert (now.stored, now.predicted_s) == (False, row["step_time_s"]["value"])


def test_a_compiled_run_has_a_prediction_of_its_own(make_spec: Any) -> None:
    gpu = hardware.accelerator("h200")
    setups = [runs.setup_of_spec(make_spec("ddp", **GPT, compile=compiled), gpu) for compiled in (False, True)]
    assert len({stored.key(one) for one in setups if one is not None}) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    for number, line in enumerate(("nonsense", '{"key": "a"}', "[1]", '{"key": 1, "step_time_s": 2}')):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / stored.FILE).write_text(f"{line}\n", encoding="utf-8")
        with pytest.raises(RequestError, match="line 1"):
            stored.read(tmp_path / str(number))


def test_the_report_shows_predicted_beside_measured(record: Any) -> None:
    setup = runs.setup_of_record(record)
    assert setup is not None
    row = stored.to_dict(predict([setup])[0])
    # A prediction made after the run started does not count.
    late = build([record], "x", predictions=[{**row, "made_at": 1e9}])
    assert late.predictions == ()
    found = predicted.beside([{**row, "made_at": 50.0}], [record])
    assert [one.measured_s for one in found] == [0.5]
    report = replace(build([record], "x"), predictions=found)
    names = [section.name for section in sections(report)]
    assert "predictions" in names


def test_a_forecast_counts_start_and_steps(make_spec: Any) -> None:
    spec = make_spec("ddp", world_size=2, **GPT)
    one, = forecast.forecast([spec], hardware.accelerator("h200"))  # fmt: skip
    assert one.seconds == pytest.approx(forecast.START_S + 30 * one.prediction.step_s)
    assert one.low_s < one.seconds < one.high_s
    assert one.usd(3.6) == pytest.approx(one.seconds / 3600 * 2 * 3.6)
    assert forecast.forecast([make_spec("ddp")], hardware.accelerator("h200")) == []


def test_a_stored_line_is_plain_json(record: Any) -> None:
    setup = runs.setup_of_record(record)
    assert setup is not None
    assert json.loads(json.dumps(stored.to_dict(predict([setup])[0])))["gpu"] == "h200"


def test_attention_of_our_program_is_cudnn_on_hopper(make_spec: Any) -> None:
    spec = make_spec("ddp", world_size=2, **GPT)
    for name, same in (("h200", False), ("a100", True)):
        one = runs.setup_of_spec(spec, hardware.accelerator(name))
        assert one is not None
        other = one.replaced(software=replace(one.software, cudnn_attention=False))
        ours, plain = predict([one, other])
        assert (ours.parts["attention"] == plain.parts["attention"]) is same
