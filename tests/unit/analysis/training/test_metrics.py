from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.analysis.findings import Measurement
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window, step_table
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.factorial import Design
from paceline.experiment.proof import Proof
from paceline.experiment.serving import Serving
from paceline.experiment.spec import NO_CELL, Tuning
from paceline.models import arithmetic
from paceline.results.records import RunRecord

Builder = Callable[..., Any]
MiB = 2**20


def measured(*records: RunRecord) -> dict[str, Measurement]:
    (cell,) = metrics.gather(map(open_window, records))
    return {m.metric: m for m in cell.measurements}


def test_one_second_steps_give_the_exact_tokens_per_s(make_spec: Builder, make_record: Builder) -> None:
    """Test (1) of method.md: 2 ranks x 2 micro batches x 2 sequences x 64 tokens = 512 tokens in 1 s."""
    found = measured(make_record(make_spec(), 1.0))
    assert found["tokens_per_s"].value == pytest.approx(512)
    assert found["tokens_per_s_per_gpu"].value == pytest.approx(256)
    assert found["samples_per_s"].value == pytest.approx(8)
    assert found["step_time_s"].value == pytest.approx(1.0)
    assert (found["tokens_per_s"].low, found["tokens_per_s"].high) == pytest.approx((512, 512))
    assert (found["step_time_s"].n, found["step_time_s"].launches) == (29, 1)


def test_a_step_takes_as_long_as_its_slowest_rank(
    make_spec: Builder, make_record: Builder, make_steps: Builder
) -> None:
    """Error 9: rank 0 alone would say 1 s."""
    spec = make_spec()
    samples = tuple(dataclasses.replace(s, duration_s=1.0 + s.rank) for s in make_steps(spec))
    assert measured(make_record(spec, steps=samples))["step_time_s"].value == pytest.approx(2.0)


def test_throughput_is_a_ratio_of_sums(make_spec: Builder, make_record: Builder) -> None:
    seconds = [1.0] + [1.0, 3.0] * 10
    found = measured(make_record(make_spec(steps=21), seconds))
    assert found["tokens_per_s"].value == pytest.approx(512 * 20 / 40)


def test_repeats_are_pooled_and_named(make_spec: Builder, make_record: Builder) -> None:
    """Error 9: the mean of one launch is not the result."""
    records = [make_record(make_spec(repeat=i), float(i + 1)) for i in range(3)]
    found = measured(*records)["step_time_s"]
    assert found.value == pytest.approx(2.0)
    assert (found.launches, found.n) == (3, 87)
    assert found.runs == tuple(r.spec.run_id for r in records)
    assert found.low is not None
    assert found.low < 1.3


def test_one_launch_says_that_launches_were_not_repeated(
    make_spec: Builder, make_record: Builder, golden: object
) -> None:
    assert measured(make_record(make_spec()))["tokens_per_s"].note == golden


def test_outliers_are_tagged_kept_and_shown_both_ways(make_spec: Builder, make_record: Builder, golden: object) -> None:
    seconds = [1.0, *(1.0 + 0.001 * (i % 5) for i in range(28)), 11.0]
    window = open_window(make_record(make_spec(), seconds))
    assert window.outliers == 1
    found = measured(window.record)["step_time_s"]
    assert found.value == pytest.approx(sum(seconds[1:]) / 29)
    assert found.note == golden
    assert "29" in found.note
    assert "1.002" in found.note


def test_warm_up_steps_are_outside(make_spec: Builder, make_record: Builder) -> None:
    found = measured(make_record(make_spec(), [100.0] + [1.0] * 29))
    assert found["step_time_s"].value == pytest.approx(1.0)
    assert found["loss_first"].value == pytest.approx(5.0)


def test_run_shorter_than_its_warm_up_measures_nothing(make_spec: Builder, make_record: Builder) -> None:
    assert metrics.gather([open_window(make_record(make_spec(steps=1)))]) == []


def test_peak_memory_is_of_the_rank_with_most(make_spec: Builder, make_record: Builder) -> None:
    """Error 9: rank 0 has 100 MiB, rank 1 has 101."""
    cpu = measured(make_record(make_spec()))
    gpu = measured(make_record(make_spec(device="cuda")))
    assert cpu["peak_memory_bytes"].value == 104 * MiB
    assert "resident" in (cpu["peak_memory_bytes"].note or "")
    assert cpu["peak_memory_reserved_bytes"].value is None
    assert gpu["peak_memory_bytes"].value == 101 * MiB
    assert "allocator" in (gpu["peak_memory_bytes"].note or "")
    assert gpu["peak_memory_reserved_bytes"].value == 102 * MiB
    assert gpu["peak_memory_device_bytes"].value == 103 * MiB


def test_setup_memory_is_no_peak(make_spec: Builder, make_record: Builder) -> None:
    record = make_record(make_spec())
    early = tuple(dataclasses.replace(m, moment="setup") for m in record.memory)
    assert measured(dataclasses.replace(record, memory=early))["peak_memory_bytes"].value is None


def test_phases_and_exposed_communication(make_spec: Builder, make_record: Builder) -> None:
    found = measured(make_record(make_spec(), 2.0))
    assert found["backward_s"].value == pytest.approx(1.0)
    assert found["data_wait_s"].value == pytest.approx(0.02)
    assert found["comm_exposed_ratio"].value == pytest.approx(0.2 / 2.0)


def test_a_phase_one_rank_did_not_record_is_missing(
    make_spec: Builder, make_record: Builder, make_steps: Builder
) -> None:
    spec = make_spec()
    samples = tuple(dataclasses.replace(s, forward_s=None if s.rank else 0.5) for s in make_steps(spec))
    found = measured(make_record(spec, steps=samples, traces=(), wire=()))
    assert found["forward_s"].value is None
    assert found["comm_exposed_ratio"].value is None
    assert found["wire_bytes_per_step"].value is None
    assert found["h2d_bytes_per_s"].value is None


def test_counted_wire_bytes_stand_beside_the_formula(make_spec: Builder, make_record: Builder) -> None:
    """DDP, n = 2: 2 P r (n-1)/n = 4 P bytes in fp32; the counted all_reduce also carried one loss of 4 bytes."""
    found = measured(make_record(make_spec()))
    parameters = arithmetic.parameters(arithmetic.load(make_spec().model))
    assert found["wire_bytes_formula_per_step"].value == 4 * parameters
    assert found["wire_bytes_per_step"].value == 4 * parameters + 4


def test_unknown_collective_gives_no_wire_bytes(make_spec: Builder, make_record: Builder, golden: object) -> None:
    record = make_record(make_spec())
    strange = tuple(dataclasses.replace(w, operation="telepathy") for w in record.wire)
    found = measured(dataclasses.replace(record, wire=record.wire + strange))["wire_bytes_per_step"]
    assert found.value is None
    assert found.note == golden


def test_host_to_device_rate_is_measured_on_the_device_not_from_launch_gaps(
    make_spec: Builder, make_record: Builder, make_steps: Builder
) -> None:
    spec = make_spec(device="cuda")
    record = make_record(spec, steps=make_steps(spec, h2d_s=0.25, h2d_bytes=1000))
    traces = tuple(dataclasses.replace(t, h2d_s=0.001, h2d_bytes=4000) for t in record.traces)
    assert measured(dataclasses.replace(record, traces=traces))["h2d_bytes_per_s"].value == pytest.approx(4e6)
    assert measured(record)["h2d_bytes_per_s"].value is None


def test_rates_divide_by_wall_time_not_by_the_sum_of_maxima(
    make_spec: Builder, make_record: Builder, make_steps: Builder
) -> None:
    """Ranks late in turns: each step's maximum is 1.5 s, but every rank's clock ran 1.25 s per step."""
    spec = make_spec(device="cpu", world_size=2)
    late = [dataclasses.replace(s, duration_s=1.5 if (s.step + s.rank) % 2 else 1.0) for s in make_steps(spec)]
    found = measured(make_record(spec, steps=late))
    assert found["step_time_s"].value == pytest.approx(1.5)
    assert found["tokens_per_s"].value == pytest.approx(spec.tokens_per_step / 1.25, rel=0.02)


class TestUtilisation:
    def test_mfu_by_hand(
        self, make_spec: Builder, make_record: Builder, h200: Mapping[str, Any], golden: object
    ) -> None:
        """tiny: 2 layers, h 128, V 256, s 64: N_mm = 2 * 12 h^2 + h V; causal attention 2 (s+1) 2 h per token."""
        spec = make_spec(device="cuda", precision="bf16", checkpointing="full")
        found = measured(make_record(spec, 1.0, gpus=[h200]))
        n_mm = 2 * 12 * 128**2 + 128 * 256
        causal, full = 2 * 65 * 2 * 128, 2 * 128 * 2 * 128
        per_gpu = 256 / 989e12
        assert found["mfu_ratio"].value == pytest.approx(3 * (2 * n_mm + causal) * per_gpu)
        assert found["mfu_full_attention_ratio"].value == pytest.approx(3 * (2 * n_mm + full) * per_gpu)
        again = 2 * 2 * 12 * 128**2 + causal
        assert found["hfu_ratio"].value == pytest.approx((3 * (2 * n_mm + causal) + again) * per_gpu)
        assert "causal" in (found["mfu_ratio"].note or "")
        assert found["mfu_ratio"].note == golden
        assert "989" in found["mfu_ratio"].note
        assert "bf16" in found["mfu_ratio"].note
        assert "NVIDIA" in found["mfu_ratio"].note

    @pytest.mark.parametrize(
        "gpus",
        [
            [],
            [{"name": "Novel", "peak_flops": None}],
            [{"name": "Novel", "peak_flops": {"fp16": 1e12}}],
            [{"name": "Novel", "peak_flops": {"bf16": 1e12}}, {"name": "Other", "peak_flops": {"bf16": 2e12}}],
        ],
    )
    def test_unknown_peak_is_none_with_a_reason(
        self, make_spec: Builder, make_record: Builder, gpus: list[Mapping[str, Any]]
    ) -> None:
        found = measured(make_record(make_spec(device="cuda", precision="bf16"), gpus=gpus))["mfu_ratio"]
        assert found.value is None
        assert "peak" in (found.note or "")

    def test_cpu_has_no_mfu(self, make_spec: Builder, make_record: Builder) -> None:
        assert measured(make_record(make_spec()))["mfu_ratio"].value is None

    def test_shared_gpu_has_no_mfu(
        self, make_spec: Builder, make_record: Builder, h200: Mapping[str, Any], golden: object
    ) -> None:
        spec = make_spec(device="cuda", precision="bf16")
        found = measured(make_record(spec, gpus=[h200], evidence={"settings": {"shared_gpu": True}}))
        assert found["mfu_ratio"].value is None
        assert found["tokens_per_s"].note == golden


def test_per_token_rates_do_not_reward_shorter_samples(make_spec: Builder, make_record: Builder) -> None:
    """Error 10: 512-token samples come twice as fast as 1024-token ones and are no faster per token."""
    short = measured(make_record(make_spec(sequence_length=512), 1.058))
    long = measured(make_record(make_spec(sequence_length=1024), 2.0))
    assert short["samples_per_s"].value / long["samples_per_s"].value == pytest.approx(2 / 1.058)
    assert short["tokens_per_s"].value / long["tokens_per_s"].value == pytest.approx(1 / 1.058)


def test_global_loss_weighs_ranks_by_their_tokens(make_record: Builder, make_spec: Builder, make_step: Builder) -> None:
    """Over label tokens where they were counted; ranks may be missing, and without a trained token there is none."""
    steps = [
        make_step(rank=rank, step=step, loss=loss, tokens=tokens, label_tokens=labels)
        for rank, step, loss, tokens, labels in (
            *((0, 0, 1.0, 300, None), (1, 0, 4.0, 100, None)),
            *((0, 1, 1.0, 300, 10), (1, 1, 4.0, 100, 30), (2, 1, 9.0, 500, 0)),
            (0, 2, 5.0, 0, None),
        )
    ]
    losses = step_table(dataclasses.replace(make_record(make_spec(), 0.1), steps=steps)).losses
    assert losses.tolist()[:2] == [1.75, 3.25]
    assert math.isnan(losses[2])


CELLS: tuple[dict[str, Any], ...] = (
    {},
    {"launcher": Choice("slurm")},
    {"launcher": Choice("slurm", {"partition": "a"})},
    {"launcher": Choice("slurm", {"partition": "b"})},
    {"tuning": Tuning()},
    {"tuning": Tuning(rank=8)},
    {"contents": {"data": "a1"}},
    {"checkpoint_every": 5},
    {"strategy": None, "workload": "compute"},
    {"strategy": None, "workload": "inference", "serving": Serving(), "engine": Choice("openai", {"url": "a"})},
    {"strategy": None, "workload": "inference", "serving": Serving(), "engine": Choice("openai", {"url": "b"})},
)
NO_OTHER_CELL: dict[str, tuple[Any, Any]] = {
    "experiment": ("a", "b"),
    "timeout_s": (10.0, 20.0),
    "stall_s": (10.0, 20.0),
    "telemetry_hz": (0.0, 2.0),
    "max_restarts": (0, 2),
    "proof": (Proof(), Proof(mode="never")),
    "lineage": (None, "ab"),
    "declared": (None, {}),
    "repeat": (0, 1),
    "reference_steps": (5, 6),
    "design": (None, Design(kind="factorial", baseline={"seed": 1}, levels={"seed": (2,)})),
}


def test_fields_agree_just_where_cells_do(make_spec: Builder) -> None:
    """Cells are grouped by these fields: one that a cell does not know would keep equal runs apart."""
    assert set(NO_OTHER_CELL) == set(NO_CELL)
    specs = []
    for cell in CELLS:
        varied = [{name: value} for name, values in NO_OTHER_CELL.items() for value in values]
        specs += [make_spec(**cell | more) for more in varied]
        launcher = cell.get("launcher", Choice("local"))
        unmeasured = plugins.load("launchers", launcher.name).UNMEASURED if launcher.name != "local" else {}
        told = Choice(launcher.name, {**launcher.options, **dict.fromkeys(("patience_s", *unmeasured), 7)})
        specs.append(make_spec(**cell | {"launcher": told}))
        if engine := cell.get("engine"):
            specs.append(make_spec(**cell | {"engine": Choice(engine.name, {**engine.options, "ready_s": 7})}))
    known: dict[str, set[str]] = {}
    for spec in specs:
        known.setdefault(spec.cell, set()).add(json.dumps(metrics.flat(spec), sort_keys=True))
    assert len(known) == len(CELLS)
    assert all(len(told) == 1 for told in known.values())
    assert len(set.union(*known.values())) == len(CELLS)


def test_a_launcher_keeps_the_options_that_matter(make_spec: Builder) -> None:
    asked = Choice("slurm", {"partition": "a", "time": 10})
    assert metrics.flat(make_spec(launcher=asked))["launcher"] == {"name": "slurm", "options": {"partition": "a"}}


def test_every_metric_has_a_unit_and_a_direction() -> None:
    names = [m.name for m in metrics.METRICS]
    assert len(set(names)) == len(names)
    assert all(m.unit and m.better in ("higher", "lower") for m in metrics.METRICS)
