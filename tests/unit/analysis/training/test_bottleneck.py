"""Steps whose every share is known, one made for each verdict and for each that must stay open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.analysis.findings import Bottleneck, ShareOfStep
from paceline.analysis.report import build
from paceline.analysis.training import bottleneck
from paceline.experiment.spec import Tuning
from paceline.models import adapters, arithmetic
from paceline.results.machine_samples import KernelSample
from paceline.results.records import RunRecord, TraceSample

Builder = Callable[..., Any]
STEP_S = 1.0
SPEC: Mapping[str, Any] = {"strategy": "ddp", "device": "cuda", "precision": "bf16/fp32"}


def trace(
    compute_s: float, exposed_s: float = 0.0, rank: int = 0, h2d_s: float = 0.0, **classes_s: float
) -> TraceSample:
    """Seconds per step of a profile of two; with classes of kernels where some are given."""
    names = ("products", "attention", "dequantisation", "elementwise", "copies")
    told: Any = {f"{name}_s": 2 * classes_s.get(name, 0.0) for name in names} if classes_s else {}
    return TraceSample(
        rank=rank,
        steps=2,
        wall_s=2 * STEP_S,
        compute_s=2 * compute_s,
        communication_s=2 * exposed_s,
        exposed_s=2 * exposed_s,
        h2d_s=2 * h2d_s,
        **told,
    )


@pytest.fixture
def verdict(make_spec: Builder, make_record: Builder, make_steps: Builder, make_reference: Builder) -> Builder:
    """The verdict on ddp with steps of one second; products and optimizer are seconds at the ceilings, None: none."""

    def make(
        *traces: TraceSample,
        wait_s: float | None = 0.0,
        products_s: float | None = None,
        optimizer_s: float | None = None,
        repeats: int = 1,
        **more: Any,
    ) -> Bottleneck:
        gpus = [{"name": "NVIDIA H200"}]
        runs: list[RunRecord] = []
        for repeat in range(repeats):
            spec = make_spec(**{**SPEC, **more}, repeat=repeat)
            steps = make_steps(spec, STEP_S, data_wait_s=wait_s, optimizer_s=0.9)
            runs.append(as_tuned(make_record(spec, gpus=gpus, steps=steps, traces=traces)))
        first = runs[0]
        kernels = ceilings_of(first, products_s, optimizer_s)
        alone = make_spec(None, world_size=1, workload="compute", device=first.spec.topology.device)
        empty: dict[str, Any] = {"steps": (), "memory": (), "wire": (), "traces": ()}
        beside = [make_record(alone, gpus=gpus, kernels=kernels, **empty)] if kernels else []
        reference = as_tuned(make_reference(first.spec, variants=(0.0, 1e-4, 2e-4, 3e-4), gpus=gpus))
        report = build([reference, *runs, *beside], "test")
        assert report.bottlenecks, [c.reasons for c in report.certificates]
        (found,) = report.bottlenecks
        return found

    return make


def as_tuned(record: RunRecord) -> RunRecord:
    """With the evidence of a fine-tune, where the spec is one: adapters that learn over frozen weights in 4 bit."""
    tuning = record.spec.tuning
    if tuning is None:
        return record
    learned = adapters.trained_parameters(record.shape, tuning)
    held = {"parameters": "fp32", "frozen_weights": "nf4", "optimizer_state": "8bit"}
    outcomes = []
    for outcome in record.outcomes:
        assert outcome.evidence is not None
        dtypes = {**outcome.evidence.dtypes, **held}
        evidence = dataclasses.replace(outcome.evidence, parameters=learned, frozen_digest="77aa", dtypes=dtypes)
        outcomes.append(dataclasses.replace(outcome, evidence=evidence))
    steps = tuple(dataclasses.replace(step, label_tokens=step.tokens) for step in record.steps)
    wire = tuple(dataclasses.replace(sample, payload_bytes=4 * learned) for sample in record.wire)
    return dataclasses.replace(record, outcomes=tuple(outcomes), steps=steps, wire=wire)


def ceilings_of(record: RunRecord, products_s: float | None, optimizer_s: float | None) -> list[KernelSample]:
    """Kernels so fast that the products, and the optimizer, of one step need these seconds."""
    usual: dict[str, Any] = {"rank": 0, "label": "x", "variant": "", "durations_s": (1.0,) * 9, "size": 1, "wrong": 0}
    shape, world_size = record.shape, record.spec.topology.world_size
    tokens = record.spec.tokens_per_step / world_size
    flops = training_flops(record) * tokens
    found = []
    if products_s is not None:
        work = {"flops": round(flops / products_s), "moved_bytes": None}
        found.append(KernelSample(kernel="matmul", dtype="bf16", **usual | work))
    if optimizer_s is not None:
        moved = arithmetic.parameters(shape) * 28  # Adam: 24 B of fp32 state and a gradient of 4
        work = {"flops": None, "moved_bytes": round(moved / optimizer_s)}
        found.append(KernelSample(kernel="copy", dtype="bytes", **usual | work))
    return found


def training_flops(record: RunRecord) -> float:
    """Of one token, recomputed ones included."""
    training, shape, tuning = record.spec.training, record.shape, record.spec.tuning
    length, mode = training.sequence_length, training.checkpointing
    if tuning is None:
        return arithmetic.flops_per_token(shape, length) + arithmetic.recomputed_flops_per_token(shape, length, mode)
    keys = (length + 1) / 2
    again = adapters.recomputed_flops_per_token(shape, tuning, keys, mode)
    return adapters.flops_per_token(shape, tuning, keys) + again


def shares(found: Bottleneck) -> dict[str, ShareOfStep]:
    return {share.kind: share for share in found.evidence}


def test_compute(verdict: Builder, golden: object) -> None:
    found = verdict(trace(0.95), trace(0.95, rank=1), products_s=0.7, optimizer_s=0.1)
    assert (found.kind, found.missing) == ("compute", ())
    assert found.share_ratio == pytest.approx(0.7, rel=1e-3)
    assert shares(found)["compute"].high == pytest.approx(0.85, rel=1e-3)
    assert shares(found)["launch overhead"].share_ratio == pytest.approx(0.05)
    assert found.text == golden
    assert "70" in found.text
    assert "700" in found.text
    assert len(shares(found)["compute"].runs) == 2, "the run of the ceiling is cited too"


def test_full_checkpointing_counts_what_is_computed_again(verdict: Builder) -> None:
    found = verdict(trace(0.95), trace(0.95, rank=1), products_s=0.7, optimizer_s=0.1, checkpointing="full")
    assert found.share_ratio == pytest.approx(0.7, rel=1e-3)


def test_memory_bandwidth(verdict: Builder, golden: object) -> None:
    found = verdict(trace(1.0), trace(1.0, rank=1), products_s=0.2, optimizer_s=0.6)
    assert found.kind == "memory bandwidth"
    assert found.share_ratio == pytest.approx(0.6, rel=1e-3)
    assert found.text == golden


def test_a_sharded_optimizer_moves_its_part_only(verdict: Builder) -> None:
    found = verdict(trace(1.0), trace(1.0, rank=1), products_s=0.2, optimizer_s=0.6, strategy="fsdp2")
    assert shares(found)["memory bandwidth"].share_ratio == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("products_s", [0.3, None])
def test_network_needs_no_ceiling(products_s: float | None, verdict: Builder) -> None:
    found = verdict(trace(0.35, 0.6), trace(0.35, 0.6, rank=1), products_s=products_s)
    assert found.kind == "network"
    assert found.share_ratio == pytest.approx(0.6)
    assert bool(found.missing), "no copy was measured, which decides nothing here but is said"


def test_waiting_for_a_slow_rank_is_not_the_network(verdict: Builder) -> None:
    """Rank 1 computes all the time; rank 0 has 60 % exposed communication because it waits for it."""
    found = verdict(trace(0.35, 0.6), trace(0.95, 0.0, rank=1), products_s=0.7, optimizer_s=0.1)
    assert found.kind == "compute"
    assert shares(found)["network"].share_ratio == 0


def test_input(verdict: Builder) -> None:
    found = verdict(trace(0.3, h2d_s=0.1), trace(0.3, rank=1, h2d_s=0.1), wait_s=0.5)
    assert found.kind == "input"
    assert found.share_ratio == pytest.approx(0.6)


def test_a_wait_that_the_device_did_not_notice_is_no_bottleneck(verdict: Builder) -> None:
    found = verdict(trace(0.98), trace(0.98, rank=1), wait_s=0.9, products_s=0.7, optimizer_s=0.1)
    assert found.kind == "compute"
    assert shares(found)["input"].share_ratio == pytest.approx(0.02)


def test_launch_overhead(verdict: Builder) -> None:
    found = verdict(trace(0.3), trace(0.3, rank=1), wait_s=0.05)
    assert found.kind == "launch overhead"
    assert found.share_ratio == pytest.approx(0.65)


def test_shares_of_a_division_add_up_to_the_step(verdict: Builder) -> None:
    found = verdict(trace(0.5, 0.2), trace(0.5, 0.2, rank=1), wait_s=0.1, products_s=0.3, optimizer_s=0.1)
    known = sum(share.share_ratio or 0.0 for share in found.evidence)
    claimable = shares(found)["compute"].high - shares(found)["compute"].low
    assert known + claimable == pytest.approx(1)


def test_a_profile_longer_than_the_step_is_fitted_into_it(verdict: Builder) -> None:
    found = verdict(trace(1.0, 1.0), trace(1.0, 1.0, rank=1), products_s=0.1, optimizer_s=0.05)
    assert shares(found)["network"].share_ratio == pytest.approx(0.5)
    assert shares(found)["launch overhead"].share_ratio == pytest.approx(0)


def test_without_ceilings_kernels_stay_undecided_and_the_command_is_named(verdict: Builder, golden: object) -> None:
    found = verdict(trace(0.8), trace(0.8, rank=1))
    assert (found.kind, found.share_ratio) == ("undecided", None)
    assert found.missing == (bottleneck.NO_CEILINGS,)
    assert found.text == golden
    assert "`paceline run compute`" in found.text
    assert shares(found)["compute"].share_ratio is None


def test_kernels_that_neither_ceiling_explains_lie_between(verdict: Builder, golden: object) -> None:
    found = verdict(trace(1.0), trace(1.0, rank=1), products_s=0.4, optimizer_s=0.05)
    assert found.kind == "between compute and memory bandwidth"
    assert found.share_ratio is None
    assert found.text == golden
    assert "40" in found.text
    assert "95" in found.text


def test_shares_nearer_than_the_profile_can_tell_lie_between(verdict: Builder) -> None:
    found = verdict(trace(0.48, 0.49), trace(0.48, 0.49, rank=1), products_s=0.46, optimizer_s=0.01)
    assert found.kind == "between network and compute"


def test_launches_that_disagree_lie_between(
    make_spec: Builder, make_record: Builder, make_reference: Builder, verdict: Builder
) -> None:
    """Network takes 60 % of one launch and 20 % of the other; two launches support no verdict."""
    both = [make_record(make_spec(repeat=r, strategy="ddp"), STEP_S) for r in range(2)]
    profiles = ((0.3, 0.6), (0.7, 0.2))
    runs = [
        dataclasses.replace(run, traces=(trace(c, e), trace(c, e, rank=1)))
        for run, (c, e) in zip(both, profiles, strict=True)
    ]
    (found,) = build([make_reference(runs[0].spec), *runs], "test").bottlenecks
    assert found.kind == "undecided"
    assert (shares(found)["network"].low, shares(found)["network"].high) == (0, 1)


def test_without_a_profile_only_floors_decide(verdict: Builder) -> None:
    assert verdict(products_s=0.7, optimizer_s=0.1).kind == "compute"
    found = verdict(products_s=0.4, optimizer_s=0.1)
    assert found.kind == "undecided"
    assert found.missing == (bottleneck.NO_PROFILE,)
    assert shares(found)["network"].share_ratio is None


def test_a_wait_that_was_not_recorded_leaves_gaps_open(verdict: Builder, golden: object) -> None:
    found = verdict(trace(0.2), trace(0.2, rank=1), wait_s=None, products_s=0.1, optimizer_s=0.05)
    assert found.kind == "undecided"
    assert found.text == golden
    assert found.missing == golden


def test_one_process_has_no_network(verdict: Builder) -> None:
    found = verdict(trace(0.95), world_size=1, products_s=0.7, optimizer_s=0.1)
    assert (shares(found)["network"].share_ratio, shares(found)["network"].high) == (0, 0)


def test_the_same_data_give_the_same_words(verdict: Builder) -> None:
    assert verdict(trace(0.95), trace(0.95, rank=1)) == verdict(trace(0.95), trace(0.95, rank=1))


# --- kernels told apart ---

QLORA: Mapping[str, Any] = {"world_size": 1, "strategy": "single", "workload": "finetune", "tuning": Tuning()}


def test_dequantisation(verdict: Builder, golden: object) -> None:
    """Without any ceiling: half of the step is dequantisation, and nothing else can have as much."""
    classes = {"products": 0.25, "attention": 0.05, "dequantisation": 0.5, "elementwise": 0.1}
    found = verdict(trace(0.9, **classes), **QLORA)
    assert (found.kind, found.told_apart) == ("dequantisation", True)
    assert found.share_ratio == pytest.approx(0.5)
    assert found.text == golden
    assert "50" in found.text
    assert "500" in found.text
    assert shares(found)["memory bandwidth"].share_ratio == pytest.approx(0.1)
    assert shares(found)["memory bandwidth"].high == pytest.approx(0.4), "products may wait for memory too"
    assert found.missing == (bottleneck.NO_CEILINGS,), "which decides nothing here but is said"


def test_compute_of_a_fine_tune_counts_no_gradient_of_frozen_weights(verdict: Builder) -> None:
    classes = {"products": 0.7, "attention": 0.1, "dequantisation": 0.1, "elementwise": 0.05}
    found = verdict(trace(0.95, **classes), products_s=0.6, **QLORA)
    assert (found.kind, found.missing) == ("compute", ())
    assert found.share_ratio == pytest.approx(0.6, rel=1e-3)
    assert shares(found)["compute"].high == pytest.approx(0.8, rel=1e-3)


def test_memory_bandwidth_by_kernels_without_a_product(verdict: Builder, golden: object) -> None:
    """No ceiling is needed, and no copy was measured: their time is."""
    found = verdict(trace(0.95, products=0.2, elementwise=0.7, copies=0.05), trace(0.9, rank=1, products=0.2))
    assert found.kind == "memory bandwidth"
    assert found.share_ratio == pytest.approx(0.75)
    assert found.text == golden
    assert "dequantisation" not in shares(found), "nothing here is held in few bits"


@pytest.mark.parametrize(
    ("kind", "profile", "wait_s"),
    [
        ("launch overhead", trace(0.3, products=0.1, dequantisation=0.1, elementwise=0.1), 0.0),
        ("input", trace(0.3, products=0.1, dequantisation=0.1, elementwise=0.1), 0.6),
    ],
)
def test_gaps_with_known_kernels(kind: str, profile: TraceSample, wait_s: float, verdict: Builder) -> None:
    assert verdict(profile, wait_s=wait_s, **QLORA).kind == kind


def test_network_with_known_kernels(verdict: Builder) -> None:
    busy = {"products": 0.1, "dequantisation": 0.1, "elementwise": 0.1}
    both = {**QLORA, "world_size": 2, "strategy": "ddp"}
    found = verdict(trace(0.3, 0.6, **busy), trace(0.3, 0.6, rank=1, **busy), **both)
    assert found.kind == "network"


def test_products_far_from_their_ceiling_lie_between(verdict: Builder) -> None:
    found = verdict(trace(1.0, products=0.9, elementwise=0.1), world_size=1, products_s=0.3)
    assert found.kind == "between compute and memory bandwidth"


def test_shares_with_known_kernels_add_up_to_the_step(verdict: Builder) -> None:
    profile = trace(0.8, h2d_s=0.05, products=0.4, attention=0.1, dequantisation=0.15, elementwise=0.1, copies=0.05)
    found = verdict(profile, wait_s=0.1, products_s=0.3, **QLORA)
    known = sum(share.share_ratio or 0.0 for share in found.evidence)
    claimable = shares(found)["compute"].high - shares(found)["compute"].low
    assert known + claimable == pytest.approx(1)


def test_a_profile_of_old_leaves_dequantisation_open(verdict: Builder) -> None:
    found = verdict(trace(0.9), products_s=0.2, **QLORA)
    assert found.kind == "undecided"
    assert bottleneck.NO_CLASSES in found.missing
    assert shares(found)["dequantisation"].share_ratio is None
