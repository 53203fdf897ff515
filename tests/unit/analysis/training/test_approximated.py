"""Certificates of strategies that declare other arithmetic: what such a run must still prove, on known numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from training_records import build_record, build_reference, build_spec, build_steps

from paceline.analysis.findings import Certificate
from paceline.analysis.training.certificate import certify
from paceline.results.records import RoutingSample, RunRecord

STEPS = 12
ROUND, LOCAL = "compressed:method=bf16", "compressed:method=localsgd,every=4"
LOSS, WEIGHTS, NORMS = "loss of the first step", "weights after the window", "gradient norm on all ranks"
# tiny has 457,728 weights. bf16 sends 2 bytes of each twice, LocalSGD 4 bytes twice in every fourth step; two ranks
# send half of that.
BYTES = {ROUND: 2 * 457_728, LOCAL: 457_728}


def run_of(strategy: str = ROUND, **more: Any) -> RunRecord:
    """Equal to the reference in the first step, and 5 % off after it."""
    spec = build_spec(strategy, 2, **{"steps": STEPS, **more})
    steps = [s for s in build_steps(spec, off=0.05) if s.step] + [s for s in build_steps(spec) if not s.step]
    evidence = {"final_digests": {"head": "a"}, "movements": {"head": 1.0}}
    record = build_record(spec, steps=tuple(sorted(steps, key=lambda s: (s.step, s.rank))), evidence=evidence)
    (wire,) = [w for w in record.wire if w.rank == 0 and w.dtype == "fp32"]
    payload = BYTES.get(strategy, BYTES[ROUND])
    counted = [dataclasses.replace(wire, rank=rank, payload_bytes=payload) for rank in (0, 1)]
    return dataclasses.replace(record, wire=tuple(counted))


def changed_steps(record: RunRecord, change: Callable[[Any], bool], **changes: Any) -> RunRecord:
    steps = tuple(dataclasses.replace(s, **changes) if change(s) else s for s in record.steps)
    return dataclasses.replace(record, steps=steps)


def changed_evidence(record: RunRecord, rank: int, **changes: Any) -> RunRecord:
    outcomes = list(record.outcomes)
    own = outcomes[rank]
    assert own.evidence is not None
    outcomes[rank] = dataclasses.replace(own, evidence=dataclasses.replace(own.evidence, **changes))
    return dataclasses.replace(record, outcomes=tuple(outcomes))


def judged(record: RunRecord) -> Certificate:
    return certify(record, build_reference(record.spec, steps=STEPS), [])


def failed(record: RunRecord) -> dict[str, str]:
    return {check.name: check.observed for check in judged(record).checks if not check.ok}


def names(record: RunRecord) -> set[str]:
    return {check.name for check in judged(record).checks}


@pytest.mark.parametrize("strategy", [ROUND, LOCAL])
def test_its_own_loss_after_the_first_update_is_accepted(strategy: str) -> None:
    assert failed(run_of(strategy)) == {}


def test_the_loss_of_the_first_step_is_the_reference_s() -> None:
    wrong = changed_steps(run_of(), lambda s: s.step == 0, loss=5.001)
    assert failed(wrong) == {LOSS: "0.0002 at step 0"}
    expected = next(check.expected for check in judged(wrong).checks if check.name == LOSS)
    assert expected.startswith("within 0.0001 of the reference, relative, because nothing was updated yet")


def test_weights_gathered_in_8_bit_have_another_loss() -> None:
    """`qgz` quantises gradients only."""
    fp16 = {"precision": "fp16/fp16", "device": "cuda"}
    assert LOSS not in names(run_of("zero:stage=3,qwz=true", **fp16))
    assert LOSS in names(run_of("zero:stage=3,qgz=true", **fp16))


def test_ranks_whose_weights_drift_apart_are_refused() -> None:
    drifted = changed_evidence(run_of(), 1, final_digests={"head": "b"})
    assert failed(drifted) == {WEIGHTS: "1 tensors differ on rank 1, first head"}
    other = changed_steps(run_of(), lambda s: s.step == 7 and s.rank == 1, grad_norm=1.0)
    assert NORMS in failed(other)


def test_averaged_weights_are_equal_after_the_last_average() -> None:
    """Between two averages every rank has its own weights and norms."""
    ends_between = changed_evidence(run_of(LOCAL, steps=10), 1, final_digests={"head": "b"})
    assert not {WEIGHTS, NORMS} & names(ends_between)
    assert list(failed(changed_evidence(run_of(LOCAL), 1, final_digests={"head": "b"}))) == [WEIGHTS]


def test_a_tensor_that_never_changes_is_refused() -> None:
    assert failed(changed_evidence(run_of(), 0, movements={"head": 0.0})) == {"weights moved": "head did not change"}


@pytest.mark.parametrize("strategy", [ROUND, LOCAL])
def test_bytes_are_those_of_the_formula(strategy: str) -> None:
    record = run_of(strategy)
    half = tuple(dataclasses.replace(w, payload_bytes=w.payload_bytes // 2) for w in record.wire)
    (observed,) = failed(dataclasses.replace(record, wire=half)).values()
    sizes = (f"{BYTES[strategy] // 2:,} bytes sent per step on rank {rank}" for rank in (0, 1))
    assert observed == "; ".join(sizes)


def test_routers_decide_as_the_reference_until_the_first_update() -> None:
    def routed(record: RunRecord, since: int) -> RunRecord:
        first = {True: (16, 48, 64, 64), False: (32, 32, 64, 64)}
        samples = [
            RoutingSample(
                rank=0,
                step=step,
                layers=(0, 1),
                assigned=(*first[step >= since], 64, 64, 32, 32) * 2,
                positions=(1, 1, 1, 1) * 2,
                computed=(1, 1, 1, 1) * 2,
                weights=(64.0,) * 8,
                balances=(2.0, 2.0),
            )
            for step in range(STEPS)
        ]
        return dataclasses.replace(record, routings=tuple(samples))

    run = run_of(model="tiny-moe")
    reference = routed(build_reference(run.spec, steps=STEPS), STEPS)
    for since, expected in ((1, True), (0, False)):
        checks = certify(routed(run, since), reference, []).checks
        assert next(c.ok for c in checks if c.name == "router decisions") is expected
