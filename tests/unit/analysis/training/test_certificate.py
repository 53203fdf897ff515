"""The certificate bites: each test spoils one thing of a valid run and names the one check that must fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.training.certificate import certify, certify_all
from paceline.results.records import RunRecord, Status

Builder = Callable[..., Any]


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if not check.ok]


def named(certificate: Certificate, name: str) -> Check:
    return next(check for check in certificate.checks if check.name == name)


@pytest.fixture
def good(make_spec: Builder, make_record: Builder) -> RunRecord:
    return make_record(make_spec())  # type: ignore[no-any-return]


@pytest.fixture
def reference(good: RunRecord, make_reference: Builder) -> RunRecord:
    return make_reference(good.spec)  # type: ignore[no-any-return]


def with_steps(record: RunRecord, **changes: Any) -> RunRecord:
    return dataclasses.replace(record, steps=tuple(dataclasses.replace(s, **changes) for s in record.steps))


def with_evidence(record: RunRecord, rank: int | None = None, **changes: Any) -> RunRecord:
    outcomes = tuple(
        dataclasses.replace(o, evidence=dataclasses.replace(o.evidence, **changes))
        if o.evidence and rank in (None, o.rank)
        else o
        for o in record.outcomes
    )
    return dataclasses.replace(record, outcomes=outcomes)


def test_equal_work_passes_every_check(good: RunRecord, reference: RunRecord) -> None:
    found = certify(good, reference, [])
    assert found.reasons == ()
    assert found.valid
    assert found.reference == reference.spec.run_id
    assert len(found.checks) == 14


def test_other_world_size_and_micro_batch_pass_against_the_same_reference(
    reference: RunRecord, make_spec: Builder, make_record: Builder
) -> None:
    for split in ({"world_size": 4, "accumulation": 1}, {"world_size": 1, "micro_batch": 8, "accumulation": 1}):
        assert certify(make_record(make_spec(**split)), reference, []).reasons == ()


class TestReference:
    def test_missing(self, good: RunRecord) -> None:
        found = certify(good, None, [])
        assert failed(found) == ["reference"]
        assert found.reference is None

    def test_failed_with_its_own_error(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        broken = dataclasses.replace(reference, status=Status.OOM, error="out of memory on rank 0")
        found = certify(good, broken, [])
        assert failed(found) == ["reference"]
        assert named(found, "reference").observed == golden


class TestStart:
    def test_another_init(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        found = certify(with_evidence(good, init_digest="beef"), reference, [])
        assert failed(found) == ["initial weights"]
        assert found.reasons[0] == golden

    def test_another_init_on_one_rank_only(self, good: RunRecord, reference: RunRecord) -> None:
        """Error 8: ranks had different initial weights."""
        found = certify(with_evidence(good, rank=1, init_digest="beef"), reference, [])
        assert failed(found) == ["initial weights"]

    def test_names_the_parameter(self, good: RunRecord, reference: RunRecord) -> None:
        told = with_evidence(reference, init_digests={"head": "a", "norm": "b"})
        other = with_evidence(good, init_digest="beef", init_digests={"head": "a", "norm": "c"})
        assert "norm" in named(certify(other, told, []), "initial weights").observed

    def test_rank_without_evidence(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        silent = dataclasses.replace(good, outcomes=good.outcomes[:1])
        assert named(certify(silent, reference, []), "initial weights").observed == golden

    def test_other_parameter_count(self, good: RunRecord, reference: RunRecord) -> None:
        """Error 7: "117M" was 236 M."""
        assert good.evidence is not None
        twice = with_evidence(good, parameters=2 * good.evidence.parameters)
        assert failed(certify(twice, reference, [])) == ["parameters"]

    def test_parameter_count_against_the_configuration(self, good: RunRecord, reference: RunRecord) -> None:
        wrong = [with_evidence(r, parameters=500_000) for r in (good, reference)]
        assert failed(certify(wrong[0], wrong[1], [])) == ["parameters"]


class TestData:
    def test_other_data(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        spoiled = tuple(dataclasses.replace(s, data_digest=s.data_digest + (s.step == 3)) for s in good.steps)
        found = certify(dataclasses.replace(good, steps=spoiled), reference, [])
        assert failed(found) == ["data"]
        assert found.reasons[0] == golden

    def test_ranks_training_on_identical_data(self, good: RunRecord, reference: RunRecord) -> None:
        """Error 8: every rank reads rank 0's share."""
        first = {s.step: s.data_digest for s in good.steps if s.rank == 0}
        same = tuple(dataclasses.replace(s, data_digest=first[s.step]) for s in good.steps)
        assert failed(certify(dataclasses.replace(good, steps=same), reference, [])) == ["data"]

    def test_after_the_reference_ends_the_majority_decides(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        spoiled = tuple(dataclasses.replace(s, data_digest=s.data_digest + (s.step == 25)) for s in good.steps)
        wrong = dataclasses.replace(good, steps=spoiled)
        others = [make_record(make_spec("fsdp2", repeat=i)) for i in range(2)]
        assert failed(certify(wrong, reference, others)) == ["data"]
        assert certify(others[0], reference, [wrong, others[1]]).valid

    def test_padding_counted_as_tokens(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        found = certify(with_steps(good, tokens=300), reference, [])
        assert "tokens per optimizer step" in failed(found)
        text = named(found, "tokens per optimizer step").observed
        assert text == golden
        assert "600" in text

    def test_padded_data_is_held_against_the_reference_count(self, good: RunRecord, reference: RunRecord) -> None:
        padded = with_steps(reference, tokens=200)
        assert certify(with_steps(good, tokens=100), padded, []).valid
        assert failed(certify(with_steps(good, tokens=110), padded, [])) == ["tokens per optimizer step"]


class TestAmountOfWork:
    def test_skipped_accumulation(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        """Error 1: four optimizer steps where one was asked."""
        found = certify(with_steps(good, updates=4), reference, [])
        assert failed(found) == ["optimizer steps"]
        assert found.reasons[0] == golden
        assert "30" in found.reasons[0]

    def test_fewer_micro_batches(self, good: RunRecord, reference: RunRecord) -> None:
        assert failed(certify(with_steps(good, micro_batches=1), reference, [])) == ["micro batches per step"]

    def test_missing_steps_of_one_rank(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        short = tuple(s for s in good.steps if not (s.rank == 1 and s.step == 29))
        found = certify(dataclasses.replace(good, steps=short), reference, [])
        text = named(found, "optimizer steps").observed
        assert text == golden
        assert "29" in text

    def test_step_skipped_in_fp16_like_the_reference(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder
    ) -> None:
        run = make_record(make_spec(precision="fp16"))
        reference = make_reference(run.spec)
        skipping = [
            dataclasses.replace(r, steps=tuple(dataclasses.replace(s, updates=int(s.step > 0)) for s in r.steps))
            for r in (run, reference)
        ]
        assert certify(skipping[0], skipping[1], []).valid
        assert failed(certify(skipping[0], reference, [])) == ["optimizer steps"]


class TestArithmetic:
    @pytest.mark.parametrize("key", ["compute", "gradient", "gradient_reduction", "optimizer_state", "master_weights"])
    def test_each_dtype(self, good: RunRecord, reference: RunRecord, key: str, golden: object) -> None:
        assert good.evidence is not None
        found = certify(with_evidence(good, dtypes={**good.evidence.dtypes, key: "bf16"}), reference, [])
        assert failed(found) == ["dtypes"]
        assert found.reasons[0] == golden
        assert f"{key}" in found.reasons[0]
        assert "bf16" in found.reasons[0]

    def test_dtype_known_only_from_the_reference(self, good: RunRecord, reference: RunRecord) -> None:
        assert good.evidence is not None
        found = certify(with_evidence(good, dtypes={**good.evidence.dtypes, "parameters": "bf16"}), reference, [])
        assert failed(found) == ["dtypes"]

    def test_dtype_not_observed(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        found = certify(with_evidence(good, dtypes={}), reference, [])
        assert named(found, "dtypes").observed == golden

    def test_gradients_crossed_in_bf16_where_fp32_was_declared(
        self, good: RunRecord, reference: RunRecord, make_wire: Builder, golden: object
    ) -> None:
        assert good.evidence is not None
        lying = dataclasses.replace(good, wire=make_wire(good.spec, good.evidence.parameters, "bf16"))
        found = certify(lying, reference, [])
        assert failed(found) == ["reduction dtype on the wire"]
        assert found.reasons[0] == golden
        assert "bf16" in found.reasons[0]

    def test_scalars_reduced_in_fp32_do_not_count(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder
    ) -> None:
        run = make_record(make_spec(precision="bf16/bf16"))
        assert {w.dtype for w in run.wire} == {"bf16", "fp32"}
        assert certify(run, make_reference(run.spec), []).valid

    def test_gradients_that_were_never_reduced(self, good: RunRecord, reference: RunRecord) -> None:
        found = certify(dataclasses.replace(good, wire=()), reference, [])
        assert failed(found) == ["reduction dtype on the wire"]

    def test_other_optimizer(self, good: RunRecord, reference: RunRecord) -> None:
        assert good.evidence is not None
        found = certify(with_evidence(good, optimizer={**good.evidence.optimizer, "lr": 3e-4}), reference, [])
        assert failed(found) == ["optimizer"]
        assert "lr 0.0003" in found.reasons[0]


class TestTrajectory:
    def spoil(self, record: RunRecord, **factors: float) -> RunRecord:
        return dataclasses.replace(
            record,
            steps=tuple(
                dataclasses.replace(s, **{k: getattr(s, k) * f for k, f in factors.items()}) for s in record.steps
            ),
        )

    def test_loss_beyond_the_fp32_tolerance(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        assert certify(self.spoil(good, loss=1 + 9e-5), reference, []).valid
        found = certify(self.spoil(good, loss=1 + 2e-4), reference, [])
        assert failed(found) == ["loss trajectory"]
        assert found.reasons[0] == golden
        assert "0.0002" in found.reasons[0]

    def test_gradient_norm_beyond_the_fp32_tolerance(self, good: RunRecord, reference: RunRecord) -> None:
        assert failed(certify(self.spoil(good, grad_norm=1 + 2e-4), reference, [])) == ["gradient norm"]

    def test_gradient_norm_of_any_rank(self, good: RunRecord, reference: RunRecord) -> None:
        steps = tuple(dataclasses.replace(s, grad_norm=(s.grad_norm or 0) * (1 + s.rank)) for s in good.steps)
        assert failed(certify(dataclasses.replace(good, steps=steps), reference, [])) == ["gradient norm"]

    def test_gradient_norm_never_observed(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        found = certify(with_steps(good, grad_norm=None), reference, [])
        assert failed(found) == ["gradient norm"]
        assert found.reasons[0] == golden

    def test_nan_loss(self, good: RunRecord, reference: RunRecord) -> None:
        steps = tuple(dataclasses.replace(s, loss=math.nan if s.step == 20 and s.rank else s.loss) for s in good.steps)
        found = certify(dataclasses.replace(good, steps=steps), reference, [])
        assert failed(found) == ["finite loss"]
        assert "step 20" in found.reasons[0]

    def test_nan_loss_within_the_reference_fails_both(self, good: RunRecord, reference: RunRecord) -> None:
        assert failed(certify(with_steps(good, loss=math.nan), reference, [])) == ["finite loss", "loss trajectory"]

    def test_bf16_tolerance_is_twice_the_spread_of_reseeded_references(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder, golden: object
    ) -> None:
        run = make_record(make_spec(precision="bf16"))
        reference = make_reference(run.spec, variants=(0.0, 0.002, -0.004))
        assert certify(self.spoil(run, loss=1.0079), reference, []).valid
        found = certify(self.spoil(run, loss=1.0081), reference, [])
        assert failed(found) == ["loss trajectory"]
        assert "within 0.008" in found.reasons[0]
        assert found.reasons[0] == golden
        assert "bf16" in found.reasons[0]
        assert "0.004" in found.reasons[0]

    def test_an_early_step_is_not_excused_by_a_later_spread(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder, golden: object
    ) -> None:
        run = make_record(make_spec(precision="bf16"))
        reference = make_reference(run.spec, variants=(0.0, 0.0))
        drifting = tuple(
            dataclasses.replace(s, loss=s.loss * 1.05) if s.variant and s.step >= 10 else s for s in reference.steps
        )
        reference = dataclasses.replace(reference, steps=drifting)

        def off_by_4_percent(at: int) -> RunRecord:
            steps = (dataclasses.replace(s, loss=s.loss * 1.04) if s.step == at else s for s in run.steps)
            return dataclasses.replace(run, steps=tuple(steps))

        assert certify(off_by_4_percent(12), reference, []).valid
        found = certify(off_by_4_percent(3), reference, [])
        assert failed(found) == ["loss trajectory"]
        assert found.reasons[0] == golden

    def test_bf16_floors(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder, golden: object
    ) -> None:
        run = make_record(make_spec(precision="bf16"))
        reference = make_reference(run.spec, variants=(0.0, 1e-6))
        assert certify(self.spoil(run, loss=1.0009, grad_norm=1.009), reference, []).valid
        found = certify(self.spoil(run, loss=1.0011, grad_norm=1.011), reference, [])
        assert failed(found) == ["loss trajectory", "gradient norm"]
        assert found.reasons[0] == golden
        assert "0.001" in found.reasons[0]


class TestSwitches:
    DEBUG = {"NCCL_DEBUG": "INFO"}  # noqa: RUF012

    def test_extra_switch(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        peer = make_record(make_spec("fsdp2"))
        watched = with_evidence(good, rank=1, switches=self.DEBUG)
        found = certify(watched, reference, [peer])
        assert failed(found) == ["debug switches"]
        assert "NCCL_DEBUG INFO" in found.reasons[0]
        assert certify(peer, reference, [watched]).valid

    def test_same_switch_in_every_run_of_the_group(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        peer = with_evidence(make_record(make_spec("fsdp2")), switches=self.DEBUG)
        assert certify(with_evidence(good, switches=self.DEBUG), reference, [peer]).valid


class TestCertifyAll:
    def test_each_work_has_its_own_reference(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        alone = make_record(make_spec(sequence_length=32))
        found = certify_all([good, reference, alone])
        assert found[good.spec.run_id].valid
        assert failed(found[alone.spec.run_id]) == ["reference"]
        assert set(found) == {good.spec.run_id, alone.spec.run_id}

    def test_an_ok_reference_wins_over_a_failed_one(self, good: RunRecord, reference: RunRecord) -> None:
        broken = dataclasses.replace(reference, status=Status.FAILED)
        for records in ([broken, reference, good], [reference, broken, good]):
            assert certify_all(records)[good.spec.run_id].valid

    def test_failed_runs_carry_no_certificate(self, good: RunRecord, reference: RunRecord) -> None:
        assert certify_all([reference, dataclasses.replace(good, status=Status.OOM)]) == {}
