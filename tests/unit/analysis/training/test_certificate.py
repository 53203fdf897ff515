"""The certificate bites: each test spoils one thing of a valid run and names the one check that must fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from training_records import build_supplement

from paceline.analysis.findings import Certificate, Check
from paceline.analysis.training.certificate import certify, certify_all
from paceline.results.records import OperationSample, RunRecord, Status

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
    assert {check.basis for check in found.checks} == {"observed", "counted", "declared"}
    assert (found.steps, found.compared_steps) == (30, 10), "one cell alone, after a reference of ten steps"


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

    def test_the_reference_computes_digests_of_later_steps(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        """No majority decides: a group of wrong runs does not refuse the right one."""
        sums = [sum(s.data_digest for s in good.steps if s.step == step) % 2**64 for step in range(10, 30)]
        knowing = with_evidence(reference, later_digests=sums)
        spoiled = tuple(dataclasses.replace(s, data_digest=s.data_digest + (s.step == 25)) for s in good.steps)
        wrong = [dataclasses.replace(make_record(make_spec("fsdp2", repeat=i)), steps=spoiled) for i in range(2)]
        assert failed(certify(wrong[0], knowing, [good, wrong[1]])) == ["data"]
        assert certify(good, knowing, wrong).valid

    def test_where_an_old_reference_is_silent_most_runs_decide(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        spoiled = tuple(dataclasses.replace(s, data_digest=s.data_digest + (s.step == 25)) for s in good.steps)
        wrong, others = (
            dataclasses.replace(good, steps=spoiled),
            [make_record(make_spec("fsdp2", repeat=i)) for i in (0, 1)],
        )
        found = certify(wrong, reference, others)
        assert failed(found) == ["data"]
        assert "other token ids than most of the group at step 25" in found.reasons[0]
        assert certify(others[0], reference, [wrong, others[1]]).valid
        assert failed(certify(others[0], reference, [wrong])) == ["data"], "one against one decides nothing"

    def test_padding_counted_as_tokens(self, good: RunRecord, reference: RunRecord, golden: object) -> None:
        found = certify(with_steps(good, tokens=300), reference, [])
        assert "tokens per optimizer step" in failed(found)
        text = named(found, "tokens per optimizer step").observed
        assert text == golden
        assert "600" in text

    def test_padded_data_is_compared_with_the_count_of_the_reference(
        self, good: RunRecord, reference: RunRecord
    ) -> None:
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

    def test_fp16_may_skip_a_step_whose_gradients_overflow(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder
    ) -> None:
        """After the reference too; a step that is skipped although its norm is finite is another matter."""
        run = make_record(make_spec(precision="fp16"))
        reference = make_reference(run.spec)

        def skipping(**changes: Any) -> RunRecord:
            steps = (dataclasses.replace(s, updates=0, **changes) if s.step == 20 else s for s in run.steps)
            return dataclasses.replace(run, steps=tuple(steps))

        assert certify(skipping(grad_norm=None), reference, []).valid
        assert failed(certify(skipping(), reference, [])) == ["optimizer steps"]


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
        assert failed(found) == ["reduction dtype on the wire", "gradients reduced"]
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
        assert failed(found) == ["reduction dtype on the wire", "gradients reduced"]

    def test_gradients_reduced_on_one_of_two_audited_steps(self, good: RunRecord, reference: RunRecord) -> None:
        again = tuple(
            dataclasses.replace(w, step=w.step + 1, payload_bytes=w.payload_bytes * 97 // 100) for w in good.wire
        )
        found = certify(dataclasses.replace(good, wire=(*good.wire, *again)), reference, [])
        assert failed(found) == ["gradients reduced"]
        assert f"at step {good.spec.steps + 1}" in found.reasons[0]

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
        found = failed(certify(dataclasses.replace(good, steps=steps), reference, []))
        assert found == ["gradient norm", "gradient norm on all ranks"]

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

    def test_a_step_with_a_limit_that_excuses_anything_was_not_compared(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder
    ) -> None:
        """References that differ only in rounding disagree by 30 % from step 4 on: training is unstable."""
        run = make_record(make_spec(precision="bf16"))
        reference = make_reference(run.spec, variants=(0.0, 0.0))
        unstable = tuple(
            dataclasses.replace(s, loss=s.loss * 1.3) if s.variant and s.step >= 4 else s for s in reference.steps
        )
        found = certify(run, dataclasses.replace(reference, steps=unstable), [])
        assert (found.valid, found.compared_steps, found.unstable_from) == (True, 4, 4)
        assert certify(run, reference, []).unstable_from is None

    def test_fp32_tolerance_grows_with_a_reseeded_reference(self, good: RunRecord, make_reference: Builder) -> None:
        drifting = make_reference(good.spec, variants=(0.0, 0.003))
        assert certify(self.spoil(good, loss=1.0059, grad_norm=1.0059), drifting, []).valid
        assert failed(certify(self.spoil(good, loss=1.0061), drifting, [])) == ["loss trajectory"]


class TestNarrowRefusals:
    """Three copies of the reference deviate by at most 0.001, so the limit is 0.002; five more by up to 0.003."""

    @pytest.fixture
    def run(self, make_spec: Builder, make_record: Builder) -> RunRecord:
        return make_record(make_spec(precision="bf16"))  # type: ignore[no-any-return]

    @pytest.fixture
    def three(self, run: RunRecord, make_reference: Builder) -> RunRecord:
        return make_reference(run.spec, variants=(0.0, 0.001, -0.0005, 0.0))  # type: ignore[no-any-return]

    @pytest.fixture
    def five(self, three: RunRecord) -> RunRecord:
        return build_supplement(three, (0.0, 0.0005, -0.003, 0.001, 0.002))

    def off(self, run: RunRecord, by: float) -> RunRecord:
        steps = (dataclasses.replace(s, loss=s.loss * (1 + by)) for s in run.steps)
        return dataclasses.replace(run, steps=tuple(steps))

    def test_a_deviation_slightly_beyond_three_copies_passes_with_eight(
        self, run: RunRecord, three: RunRecord, five: RunRecord
    ) -> None:
        slightly = self.off(run, 0.0022)
        found = certify(slightly, three, [])
        assert failed(found) == ["loss trajectory"]
        assert found.is_narrow
        assert found.failed[0].excess == pytest.approx(1.1)
        assert "2 x the spread so far of 3 re-seeded references" in found.reasons[0]
        settled = certify(slightly, three, [], [five])
        assert settled.valid
        assert not settled.is_narrow
        assert "of 8 re-seeded references in bf16, 0.003 at the last step" in named(settled, "loss trajectory").expected
        both = [certify_all(records)[run.spec.run_id] for records in ([three, five, slightly], [five, slightly, three])]
        assert both == [settled, settled]

    def test_far_beyond_is_never_narrow(self, run: RunRecord, three: RunRecord) -> None:
        assert certify(self.off(run, 0.0059), three, []).is_narrow
        assert failed(certify(self.off(run, 0.008), three, [])) == ["loss trajectory"]
        assert not certify(self.off(run, 0.008), three, []).is_narrow
        assert not certify(self.off(run, math.nan), three, []).is_narrow

    def test_another_failed_check_is_never_narrow(self, run: RunRecord, three: RunRecord) -> None:
        found = certify(with_evidence(self.off(run, 0.0022), init_digest="beef"), three, [])
        assert failed(found) == ["initial weights", "loss trajectory"]
        assert not found.is_narrow
        assert not certify(with_evidence(run, init_digest="beef"), three, []).is_narrow

    def test_a_fixed_limit_is_never_narrow(self, good: RunRecord, reference: RunRecord, five: RunRecord) -> None:
        slightly = self.off(good, 1.1e-4)
        found = certify(slightly, reference, [], [five])
        assert failed(found) == ["loss trajectory"]
        assert not found.is_narrow
        assert "fixed for fp32" in found.reasons[0]

    def test_copies_alone_are_no_reference(self, run: RunRecord, three: RunRecord, five: RunRecord) -> None:
        assert failed(certify(run, None, [], [five])) == ["reference"]
        broken = dataclasses.replace(five, status=Status.OOM)
        assert "of 3 re-seeded" in named(certify(run, three, [], [broken]), "loss trajectory").expected

    def test_copies_that_were_computed_twice_count_once(
        self, run: RunRecord, three: RunRecord, five: RunRecord
    ) -> None:
        found = certify(run, three, [], [five, dataclasses.replace(five, path="/results/elsewhere")])
        assert "of 8 re-seeded" in named(found, "loss trajectory").expected


class TestAfterTheReference:
    """The reference has 10 of 30 steps; then the cells of the group are compared with each other."""

    def off(self, record: RunRecord, by: float, since: int, field: str = "loss") -> RunRecord:
        steps = (
            dataclasses.replace(s, **{field: getattr(s, field) * (1 + by * (s.step >= since))}) for s in record.steps
        )
        return dataclasses.replace(record, steps=tuple(steps))

    @pytest.fixture
    def group(self, make_spec: Builder, make_record: Builder) -> list[RunRecord]:
        return [make_record(make_spec(name)) for name in ("fsdp2", "zero:stage=1", "zero:stage=2")]

    def test_a_cell_that_leaves_the_median_is_refused_and_the_others_are_not(
        self, good: RunRecord, reference: RunRecord, group: list[RunRecord]
    ) -> None:
        late = self.off(good, 2.5e-4, since=12)
        found = certify(late, reference, group)
        assert failed(found) == ["loss trajectory"]
        assert "of the median of 4 cells at step 12" in found.reasons[0]
        honest = certify(group[0], reference, [late, *group[1:]])
        assert honest.valid
        assert (honest.compared_steps, honest.steps) == (30, 30)

    def test_two_cells_that_differ_are_both_refused(
        self, good: RunRecord, reference: RunRecord, group: list[RunRecord]
    ) -> None:
        late = self.off(good, 2.5e-4, since=12)
        for run, peer in ((late, group[0]), (group[0], late)):
            assert "of the other cell at step" in certify(run, reference, [peer]).reasons[0]

    def test_repeats_of_one_cell_prove_nothing_to_each_other(
        self, good: RunRecord, reference: RunRecord, make_spec: Builder, make_record: Builder
    ) -> None:
        found = certify(good, reference, [make_record(make_spec(repeat=1))])
        assert found.valid
        assert found.compared_steps == 10

    def test_slow_growth_of_rounding_is_no_mistake(
        self, make_spec: Builder, make_record: Builder, make_reference: Builder, group: list[RunRecord]
    ) -> None:
        """Half more at each step, as compiled code drifts from the rest."""
        run = make_record(make_spec(compile=True))
        drifting = (dataclasses.replace(s, loss=s.loss * (1 + 1e-8 * 1.5**s.step)) for s in run.steps)
        run = dataclasses.replace(run, steps=tuple(drifting))
        assert certify(run, make_reference(run.spec), group).valid

    def test_a_norm_that_is_a_factor_off_is_refused(
        self, good: RunRecord, reference: RunRecord, group: list[RunRecord]
    ) -> None:
        assert failed(certify(self.off(good, 1.0, 12, "grad_norm"), reference, group)) == ["gradient norm"]
        assert certify(self.off(good, 0.05, 12, "grad_norm"), reference, group).valid


class TestObserved:
    """What a strategy declares is compared with what was seen in its process."""

    GROUP = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01, "first_step": 0, "steps": 10}  # noqa: RUF012

    def seen(self, record: RunRecord, rank: int | None = None, **changes: Any) -> RunRecord:
        return with_evidence(record, rank, **changes)

    def test_all_groups_have_the_hyper_parameters_of_the_reference(self, good: RunRecord, reference: RunRecord) -> None:
        assert good.evidence is not None
        count = good.evidence.parameters
        known = self.seen(reference, groups=[{**self.GROUP, "elements": count}])

        def refused(*groups: dict[str, Any]) -> list[str]:
            return failed(certify(self.seen(good, groups=list(groups)), known, []))

        parts = [{**self.GROUP, "elements": 1000}, {**self.GROUP, "elements": count - 1000}]
        assert refused(*parts) == []
        assert refused(parts[0], {**parts[1], "eps": 1e-6}) == ["parameter groups"]
        assert refused(parts[1]) == ["parameter groups"], "a thousand weights were never stepped"
        without = {k: v for k, v in parts[1].items() if k != "eps"}
        assert refused(parts[0], without) == ["parameter groups"]
        late = {**parts[0], "lr": 5e-5, "first_step": 7, "steps": 3, "elements": count}
        found = certify(self.seen(good, groups=[*parts, late]), known, [])
        assert "lr 5e-05" in found.reasons[0]
        assert "at 3 steps from step 7" in found.reasons[0]

    def test_shards_of_all_ranks_cover_the_weights_together(self, good: RunRecord, reference: RunRecord) -> None:
        assert good.evidence is not None
        half = good.evidence.parameters // 2
        known = self.seen(reference, groups=[{**self.GROUP, "elements": 2 * half}])
        shards = self.seen(good, groups=[{**self.GROUP, "elements": half}])
        assert good.evidence.parameters == 2 * half
        assert certify(shards, known, []).valid
        short = self.seen(shards, rank=1, groups=[{**self.GROUP, "elements": half - 64}])
        assert failed(certify(short, known, [])) == ["parameter groups"]

    def test_precision_switches(self, good: RunRecord, reference: RunRecord) -> None:
        known = self.seen(reference, flags={"float32_matmul_precision": "highest"})
        assert certify(self.seen(good, flags={"float32_matmul_precision": "highest"}), known, []).valid
        changed = {"float32_matmul_precision": "highest from step 0, high from step 10"}
        assert failed(certify(self.seen(good, rank=1, flags=changed), known, [])) == ["precision switches"]

    def test_ranks_that_end_with_other_weights(self, good: RunRecord, reference: RunRecord) -> None:
        same = self.seen(good, final_digests={"head": "a", "norm": "b"})
        assert certify(same, reference, []).valid
        found = certify(self.seen(same, rank=1, final_digests={"head": "a", "norm": "c"}), reference, [])
        assert failed(found) == ["weights after the window"]
        assert "1 tensors differ on rank 1, first norm" in found.reasons[0]

    @pytest.mark.parametrize("change", [0.0, 0.8e-3, 1.2e-3])
    def test_a_tensor_that_moved_too_little_or_too_much(
        self, good: RunRecord, change: float, make_reference: Builder
    ) -> None:
        known = self.seen(make_reference(good.spec, steps=30), movements={"head": 1e-3, "norm": 1e-3})
        assert certify(self.seen(good, movements={"head": 1e-3, "norm": 1.1e-3}), known, []).valid
        assert failed(certify(self.seen(good, movements={"head": 1e-3, "norm": change}), known, [])) == [
            "weights moved"
        ]


class TestAuditedSteps:
    """Operators of single steps after the window; the reference has one micro batch of 8 sequences."""

    def audited(self, record: RunRecord, **changes: Any) -> RunRecord:
        training, layers = record.spec.training, record.shape.layers
        n, passes = record.spec.topology.world_size, training.accumulation
        flops = changes.pop("flops", 8e9) / n
        counts: dict[str, tuple[str, int, float]] = {
            "product": ("fp32", 9, flops),
            "embedding": ("fp32", passes, passes * training.micro_batch * training.sequence_length),
            "attention": ("fp32", layers * passes, 1),
            "activation": ("fp32", layers * passes, 1),
            **changes,
        }
        samples = tuple(
            OperationSample(rank=r, step=31, operation=name, dtype=dtype, calls=calls, work=int(work))
            for r in range(n)
            for name, (dtype, calls, work) in counts.items()
        )
        return dataclasses.replace(record, operations=samples)

    def refused(self, good: RunRecord, reference: RunRecord, **changes: Any) -> list[str]:
        return failed(certify(self.audited(good, **changes), self.audited(reference), []))

    def test_equal_work_passes(self, good: RunRecord, reference: RunRecord) -> None:
        assert self.refused(good, reference) == []

    def test_other_products(self, good: RunRecord, reference: RunRecord) -> None:
        assert self.refused(good, reference, product=("bf16", 9, 4e9)) == ["matrix products"]
        assert self.refused(good, reference, flops=7.9e9) == ["matrix products"], "a layer less"
        assert self.refused(good, reference, cast=("float8_e4m3fn", 1, 1)) == ["matrix products"]
        assert self.refused(good, reference, cast=("float64", 1, 1)) == []

    def test_8_bit_products(self, make_spec: Builder, make_record: Builder, make_reference: Builder) -> None:
        """Seven of eight FLOPs in 8 bit, the head in bf16, whatever the declaration says."""
        mixed = {"product": ("float8_e4m3fn", 9, 3.5e9), "head": ("bf16", 3, 0.5e9)}
        spec = make_spec(precision="float8")

        def judged(record: RunRecord, counts: Any, known: Any) -> list[str]:
            runs = [self.audited(record, **counts), self.audited(make_reference(record.spec), **known)]
            heads = [dataclasses.replace(o, operation="product") for run in runs for o in run.operations]
            half = len(runs[0].operations)
            found = (heads[:half], heads[half:])
            both = [
                dataclasses.replace(
                    run,
                    operations=tuple(
                        new if old.operation == "head" else old for old, new in zip(run.operations, group, strict=True)
                    ),
                )
                for run, group in zip(runs, found, strict=True)
            ]
            return failed(certify(both[0], both[1], []))

        whole = {"product": ("float8_e4m3fn", 9, 7e9), "head": ("bf16", 3, 1e9)}
        plain = {"product": ("bf16", 12, 4e9)}
        assert judged(make_record(spec), mixed, whole) == []
        assert judged(make_record(spec), plain, whole) == ["matrix products"], "declares float8, multiplies in bf16"
        assert judged(make_record(spec), plain, {"product": ("bf16", 12, 8e9)}) == ["matrix products"], "both do"
        stale = {"narrow": ("float8_e4m3fn", 3, 96)}
        assert judged(make_record(spec), mixed | stale, whole) == ["matrix products"], "scales of other values"
        assert judged(make_record(spec), mixed | stale, whole | stale) == [], "so has the reference"
        sixteen = make_record(make_spec(precision="bf16"))
        assert judged(sixteen, mixed, {"product": ("bf16", 12, 8e9)}) == ["matrix products"], "declares bf16"

    @pytest.mark.parametrize(
        ("strategy", "of_model", "refused"),
        [("compressed:method=powersgd", 4e9, False), ("compressed:method=powersgd", 3.9e9, True), ("ddp", 4e9, True)],
    )
    def test_products_of_compression_are_not_the_models(
        self,
        make_spec: Builder,
        make_record: Builder,
        make_reference: Builder,
        strategy: str,
        of_model: float,
        refused: bool,
    ) -> None:
        """Those of PowerSGD are in fp32, the dtype of its gradients; they replace none of the model's in bf16."""
        record = make_record(make_spec(strategy, precision="bf16"))
        run = self.audited(record, product=("bf16", 9, of_model))
        own = [dataclasses.replace(o, dtype="fp32", work=int(1e9)) for o in run.operations if o.operation == "product"]
        known = self.audited(make_reference(record.spec), product=("bf16", 9, 8e9))
        found = certify(dataclasses.replace(run, operations=(*run.operations, *own)), known, [])
        assert ("matrix products" in failed(found)) == refused

    def test_merged_micro_batches(self, good: RunRecord, reference: RunRecord) -> None:
        assert self.refused(good, reference, embedding=("fp32", 1, 256)) == ["micro batches per step"]

    def test_checkpointing_is_counted(self, good: RunRecord, reference: RunRecord, make_record: Builder) -> None:
        spec = dataclasses.replace(good.spec, training=dataclasses.replace(good.spec.training, checkpointing="full"))
        layers = good.shape.layers
        assert self.refused(make_record(spec), reference) == ["activation checkpointing"]
        twice = dict.fromkeys(("attention", "activation"), ("fp32", 2 * layers * 2, 1))
        assert self.refused(make_record(spec), reference, **twice) == []

    @pytest.mark.parametrize(("squares", "valid"), [(1.0, True), (1.1, False)])
    def test_the_optimizer_is_given_clipped_gradients(
        self, good: RunRecord, reference: RunRecord, squares: float, valid: bool
    ) -> None:
        assert good.evidence is not None
        count = good.evidence.parameters
        for share in (1, 2):
            updates = tuple(
                OperationSample(
                    rank=r,
                    step=31,
                    operation="update",
                    dtype="fp32",
                    calls=1,
                    work=count // share,
                    squares=squares / share,
                )
                for r in range(2)
            )
            record = dataclasses.replace(self.audited(good), operations=(*self.audited(good).operations, *updates))
            found = failed(certify(record, self.audited(reference), []))
            assert found == ([] if valid else ["gradient clipping"]), share


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
