"""The certificate of fine-tuning bites: each test spoils one thing of a valid run and names the check that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.training.certificate import certify
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models.adapters import adapter_parameters
from paceline.models.arithmetic import load
from paceline.results.records import RunRecord, WireSample

Builder = Callable[..., Any]
SHAPE = load(Choice("tiny-llama"))
TUNING = Tuning(rank=4, optimizer="adamw")
ADAPTERS = adapter_parameters(SHAPE, TUNING.rank, TUNING.targets)
LEARNED = 40


@pytest.fixture
def tuned_spec(make_spec: Builder) -> Callable[..., RunSpec]:
    def build(strategy: str = "ddp", **more: Any) -> RunSpec:
        given: dict[str, Any] = {"workload": "finetune", "model": "tiny-llama", "tuning": TUNING, **more}
        return make_spec(strategy, **given)  # type: ignore[no-any-return]

    return build


@pytest.fixture
def tuned_run(make_record: Builder) -> Callable[..., RunRecord]:
    def build(spec: RunSpec, **more: Any) -> RunRecord:
        record: RunRecord = make_record(spec, evidence={"parameters": ADAPTERS, "frozen_digest": "77aa"})
        return as_tuned(record, LEARNED, **more)

    return build


@pytest.fixture
def reference_of(make_reference: Builder) -> Callable[..., RunRecord]:
    def build(spec: RunSpec, **more: Any) -> RunRecord:
        record: RunRecord = make_reference(spec, evidence={"parameters": ADAPTERS, "frozen_digest": "77aa"})
        return as_tuned(record, LEARNED * spec.topology.world_size, **more)

    return build


def as_tuned(record: RunRecord, learned: int, **dtypes: str) -> RunRecord:
    """With learned tokens, and adapters in fp32 over frozen weights in 4 bit."""
    steps = tuple(dataclasses.replace(s, label_tokens=learned) for s in record.steps)
    held = {"parameters": "fp32", "frozen_weights": "nf4", **dtypes}
    return with_evidence(dataclasses.replace(record, steps=steps), held)


def with_evidence(record: RunRecord, dtypes: dict[str, str], **changes: Any) -> RunRecord:
    outcomes = []
    for outcome in record.outcomes:
        assert outcome.evidence is not None
        evidence = dataclasses.replace(outcome.evidence, dtypes={**outcome.evidence.dtypes, **dtypes}, **changes)
        outcomes.append(dataclasses.replace(outcome, evidence=evidence))
    return dataclasses.replace(record, outcomes=tuple(outcomes))


def with_wire(record: RunRecord, **payload: int) -> RunRecord:
    samples = tuple(
        WireSample(rank=r, step=30, operation=operation, dtype="fp32", group_size=2, calls=1, payload_bytes=size)
        for r in range(2)
        for operation, size in payload.items()
    )
    return dataclasses.replace(record, wire=samples)


def failed(record: RunRecord, reference: RunRecord | None) -> list[str]:
    return [check.name for check in certify(record, reference, []).checks if not check.ok]


def test_equal_fine_tuning_passes(tuned_spec: Builder, tuned_run: Builder, reference_of: Builder) -> None:
    spec = tuned_spec()
    found = certify(tuned_run(spec), reference_of(spec), [])
    assert found.reasons == ()
    names = {check.name for check in found.checks}
    assert {"frozen weights", "learned tokens per step", "only adapters reduced"} <= names


def test_training_from_scratch_is_not_asked_about_adapters(make_spec: Builder, make_record: Builder) -> None:
    names = {check.name for check in certify(make_record(make_spec()), None, []).checks}
    assert not names & {"frozen weights", "learned tokens per step", "only adapters reduced"}


def test_other_frozen_weights(tuned_spec: Builder, tuned_run: Builder, reference_of: Builder) -> None:
    spec = tuned_spec()
    spoiled = with_evidence(tuned_run(spec), {}, frozen_digest="77ab")
    assert failed(spoiled, reference_of(spec)) == ["frozen weights"]
    missing = with_evidence(tuned_run(spec), {}, frozen_digest=None)
    assert failed(missing, reference_of(spec)) == ["frozen weights"]


def test_frozen_weights_that_were_never_quantised(
    tuned_spec: Builder, tuned_run: Builder, reference_of: Builder
) -> None:
    spec = tuned_spec()
    assert failed(tuned_run(spec, frozen_weights="bf16"), reference_of(spec)) == ["dtypes"]


def test_other_learned_tokens(tuned_spec: Builder, tuned_run: Builder, reference_of: Builder) -> None:
    spec = tuned_spec()
    record = tuned_run(spec)
    steps = tuple(dataclasses.replace(s, label_tokens=LEARNED + 1 if s.step == 3 else LEARNED) for s in record.steps)
    assert failed(dataclasses.replace(record, steps=steps), reference_of(spec)) == ["learned tokens per step"]


def test_a_whole_model_trained_in_place_of_adapters(
    tuned_spec: Builder, tuned_run: Builder, reference_of: Builder
) -> None:
    spec = tuned_spec()
    spoiled = with_evidence(tuned_run(spec), {}, parameters=361_088)
    assert "parameters" in failed(spoiled, reference_of(spec))


@pytest.mark.parametrize(
    ("strategy", "payload", "sound"),
    [
        ("ddp", {"all_reduce": ADAPTERS * 4}, True),
        ("ddp", {"all_reduce": ADAPTERS * 4 + 16}, True),
        ("ddp", {"all_reduce": ADAPTERS * 4 * 2}, False),
        ("ddp", {"all_reduce": 361_088 * 4}, False),
        ("ddp", {"all_gather": ADAPTERS * 4}, False),
        ("zero:stage=1", {"all_reduce": ADAPTERS * 4, "all_gather": ADAPTERS * 4}, True),
        ("zero:stage=2", {"all_reduce": ADAPTERS * 4 * 2}, True),
        ("zero:stage=2", {"all_reduce": ADAPTERS * 4}, False),
        ("fsdp2", {"reduce_scatter": ADAPTERS * 4, "all_gather": 4 * 361_088}, True),
        ("fsdp2:sync_every_micro_batch=true", {"reduce_scatter": ADAPTERS * 4 * 2}, True),
    ],
)
def test_reduced_bytes(
    strategy: str,
    payload: dict[str, int],
    sound: bool,
    tuned_spec: Builder,
    tuned_run: Builder,
    reference_of: Builder,
) -> None:
    spec = tuned_spec(strategy)
    found = failed(with_wire(tuned_run(spec), **payload), reference_of(spec))
    assert ("only adapters reduced" not in found) is sound


def test_fsdp2_reduces_the_padding_of_its_shards(
    tuned_spec: Builder, tuned_run: Builder, reference_of: Builder
) -> None:
    """Rank 16 on three processes, as counted; DDP pads nothing, so the same bytes are too many."""
    for strategy, sound in (("fsdp2", True), ("ddp", False)):
        spec = tuned_spec(strategy, world_size=3, tuning=dataclasses.replace(TUNING, rank=16))
        found = failed(with_wire(tuned_run(spec), reduce_scatter=123_648), reference_of(spec))
        assert ("only adapters reduced" not in found) is sound


def test_moments_of_8_bit_follow_the_reference(tuned_spec: Builder, tuned_run: Builder, reference_of: Builder) -> None:
    spec = tuned_spec(tuning=dataclasses.replace(TUNING, optimizer="adamw_8bit"))
    same = {"optimizer_state": "8bit"}
    assert failed(tuned_run(spec, **same), reference_of(spec, **same)) == []
    assert failed(tuned_run(spec), reference_of(spec, **same)) == ["dtypes"]
    plain = tuned_spec()
    assert "dtypes" in failed(tuned_run(plain, **same), reference_of(plain, **same))


def test_losses_weigh_learned_tokens(tuned_spec: Builder, tuned_run: Builder) -> None:
    from paceline.analysis.training.certificate.observed import observe

    record = tuned_run(tuned_spec())
    steps = tuple(
        dataclasses.replace(s, loss=2.0 if s.rank else 1.0, label_tokens=30 if s.rank else 10) for s in record.steps
    )
    assert observe(dataclasses.replace(record, steps=steps)).losses[0] == pytest.approx(1.75)


def test_adapters_that_never_learn(tuned_spec: Builder, tuned_run: Builder, reference_of: Builder) -> None:
    spec = tuned_spec()
    learned = with_evidence(tuned_run(spec), {}, unmoved=(), final_frozen_digest="77aa")
    assert failed(learned, reference_of(spec)) == []
    still = with_evidence(tuned_run(spec), {}, unmoved=("layers.0.q.lora_B",), final_frozen_digest="77aa")
    assert failed(still, reference_of(spec)) == ["weights moved"]
    spoiled = with_evidence(tuned_run(spec), {}, unmoved=(), final_frozen_digest="77ab")
    assert failed(spoiled, reference_of(spec)) == ["weights moved"]
