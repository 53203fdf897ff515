"""An adversary: strategies and workloads with one planted mistake each are refused, and honest variations are not.

All runs train the same small model on two ranks, in fp32 and (all of them in `make test-all`) in bf16, and share one
reference for each precision. Where there is a GPU, they do so on it too: two NCCL ranks share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from adversary import approximated, honest, other_data, planted, ranks, routed, split
from paceline.analysis.findings import Certificate
from paceline.analysis.training.certificate import certify_all
from paceline.campaign.run.copies import supplement_of
from paceline.campaign.run.references import references_of
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.results import store
from paceline.results.records import Status

pytestmark = pytest.mark.slow

STEPS = 7
# No mistake of a layout or of a router begins late.
FEW_STEPS = 3
LOSS, NORM, GROUPS, MOVED = "loss trajectory", "gradient norm", "parameter groups", "weights moved"
# The check that must refuse each mistake; others may refuse it too.
REFUSED_BY = {
    "half_of_the_batch_late": LOSS,
    "shorter_sequences_late": LOSS,
    "stale_tokens": LOSS,
    "rolled_tokens_late": LOSS,
    "unshifted_labels": LOSS,
    "one_rank_repeats_its_batch": LOSS,
    "fewer_layers_late": LOSS,
    "a_little_dropout": LOSS,
    "no_causal_mask": LOSS,
    "no_reduction_late": "gradient norm on all ranks",
    "no_reduction_periodic": "gradient norm on all ranks",
    "one_tensor_never_reduced": "weights after the window",
    "stale_gradients_late": LOSS,
    "sum_instead_of_mean": NORM,
    "not_divided_by_accumulation": NORM,
    "last_micro_batch_only": NORM,
    "gradients_kept_late": NORM,
    "one_rank_scales_its_loss": NORM,
    "sparse_gradients_periodic": NORM,
    "compressed_reduction": "reduction dtype on the wire",
    "frozen_bias": MOVED,
    "one_tensor_stops_late": MOVED,
    "a_master_weight_stays": MOVED,
    "another_eps_for_vectors": GROUPS,
    "no_decay_for_vectors": GROUPS,
    "a_tensor_without_optimizer": GROUPS,
    "learning_rate_halved_late": GROUPS,
    "other_betas": GROUPS,
    "decay_added_to_gradients": "optimizer",
    "two_updates_periodic": "optimizer steps",
    "skipped_updates_periodic": LOSS,
    "rate_of_one_step": GROUPS,
    "moments_lost_late": LOSS,
    "moments_in_16_bit": "matrix products",
    "lost_clipping": "gradient clipping",
    "clipped_per_rank": LOSS,
    "fast_products_late": "precision switches",
    "autocast_to_another_dtype": "matrix products",
    "operands_in_8_bit": "matrix products",
    "weights_rounded_late": "matrix products",
    "merged_micro_batches": "micro batches per step",
    "no_checkpointing": "activation checkpointing",
    "checkpoints_half_of_the_layers": "activation checkpointing",
    "one_rank_drifts_late": "weights after the window",
    "averaged_weights_late": LOSS,
    "other_initial_weights": "initial weights",
}
REFUSED_SPLIT = {
    "norms_not_summed": "weights after the window",
    "other_samples_on_one_rank": LOSS,
    "norm_of_own_stage": "gradient norm on all ranks",
    "tied_weights_apart": NORM,
    "last_micro_batch_dropped": LOSS,
    "positions_of_the_first_rank": LOSS,
    "mean_over_parts_of_a_sequence": NORM,
}
REFUSED_ROUTED = {
    "capacity": "tokens of experts",
    "fewer_choices": "router decisions",
    "third_instead_of_second": "router decisions",
    "weights_not_scaled": "router decisions",
    "neighbours_of_the_chosen": "router decisions",
    "noisy_scores": "router decisions",
    "no_auxiliary_loss": LOSS,
    "gradients_of_experts_summed": NORM,
}
REFUSED_APPROXIMATED = {
    "ranks_drift": "weights after the window",
    "one_tensor_averaged": "approximation",
    "never_averaged": "approximation",
    "dropout_behind_signs": "loss of the first step",
}
# With an average after the last of STEPS.
APPROXIMATED = ("compressed:method=signsgd", "compressed:method=localsgd,every=7")
ROUTED = ("mesh:ep=2",)
# On a GPU only: on CPUs, tests/end_to_end/test_layouts.py has these and more.
SPLIT = ("mesh:tp=2", "mesh:pp=2", "mesh:cp=2")
CHECKPOINTED = ("no_checkpointing", "checkpoints_half_of_the_layers")
# Not a mistake in bf16 training, where rounding to bf16 is what the experiment asks for.
ONLY_FP32 = ("moments_in_16_bit",)
HONEST = {
    **{f"adversary.honest:variation={name}": {} for name in honest.VARIATIONS},
    "ddp": {},
    "fsdp2": {},
    "zero:stage=2": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_mb": 0.01},
    "large buckets": {"bucket_mb": 100.0},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
}
# What `make test` runs on CPUs: in fp32 one mistake for each check, two for the weights, other sums of gradients, other
# orders of tensors, and settings; in bf16 one mistake for each check that compares rounded values, and another sum.
# tests/end_to_end/test_equal_work.py certifies the strategies themselves. `make test-all` runs all.
SUMS = tuple(f"adversary.honest:variation={name}" for name in ("reduced_by_hand", "scattered_and_gathered"))
ORDERS = tuple(f"adversary.honest:variation={name}" for name in ("two_equal_groups", "tensors_in_another_order"))


# What these compare is rounded, and in bf16 tolerances are wider; the others compare what was declared or counted.
ROUNDED = (LOSS, NORM, "gradient norm on all ranks", "weights after the window", MOVED, "matrix products")
ROUNDED += ("reduction dtype on the wire",)
# In layouts and in routing: what the mistakes above do not show.
IN_SPLIT = ("weights after the window", "gradient norm on all ranks", NORM)
IN_ROUTED = ("tokens of experts", "router decisions", NORM)


def few(precision: str) -> set[str]:
    if precision == "bf16":
        return {SUMS[0], *first_of(REFUSED_BY, ROUNDED, without=ONLY_FP32)}
    chosen = {*SUMS, *ORDERS, "ddp", *list(other_data.MISTAKES)[:1], *ROUTED, *SETTINGS} - {"large buckets"}
    chosen |= first_of(REFUSED_BY, REFUSED_BY.values()) | {"one_rank_drifts_late", "one_tensor_stops_late"}
    chosen |= first_of(REFUSED_APPROXIMATED, REFUSED_APPROXIMATED.values()) | set(APPROXIMATED)
    return chosen | first_of(REFUSED_SPLIT, IN_SPLIT) | first_of(REFUSED_ROUTED, IN_ROUTED)


def first_of(refused: Mapping[str, str], checks: Iterable[str], without: Sequence[str] = ()) -> set[str]:
    """The first mistake that each of these checks must refuse."""
    names = [name for name in refused if name not in without]
    return {next(name for name in names if refused[name] == check) for check in checks}


# A processor without bf16 products multiplies one pair of numbers after the other.
WIDTHS = {"cpu": 16, "cuda": 32}
LAUNCHERS = {"cpu": "local", "cuda": "local:shared_gpu=true"}
without_gpu = pytest.mark.skipif(machine.device_count() == 0, reason="no CUDA device")
JUDGED = [
    pytest.param(("cpu", "fp32"), id="cpu-fp32"),
    pytest.param(("cpu", "bf16"), id="cpu-bf16"),
    pytest.param(("cuda", "fp32"), id="cuda-fp32", marks=without_gpu),
    pytest.param(("cuda", "bf16"), id="cuda-bf16", marks=without_gpu),
]


def cases(device: str, precision: str, make: Callable[..., RunSpec]) -> dict[str, RunSpec]:
    common: dict[str, Any] = {
        "device": device,
        "launcher": LAUNCHERS[device],
        "model": f"tiny:layers=2,hidden={WIDTHS[device]},vocab=64",
        "sequence_length": 8,
        "micro_batch": 2,
        "accumulation": 2,
        "steps": STEPS,
        "precision": f"{precision}/fp32",
        "learning_rate": 1e-3,
        "clip_norm": 0.25,
        "timeout_s": 600.0,
        "telemetry_hz": 0.0,
    }
    found = {}
    for name in planted.MISTAKES:
        how = {"checkpointing": "full"} if name in CHECKPOINTED else {}
        if precision == "fp32" or name not in ONLY_FP32:
            found[name] = make(f"adversary.planted:mistake={name}", **common | how)
    for name in other_data.MISTAKES:
        found[name] = make("ddp", **common, workload=f"adversary.other_data:mistake={name}")
    # Layouts with one replica, which has the samples of two. Splitting every operation is slow on a CPU.
    whole = common | {"micro_batch": 4, "steps": FEW_STEPS}
    if precision == "fp32" or device == "cuda":
        found |= {name: make(f"adversary.split:mistake={name}", **whole) for name in split.MISTAKES}
        mixed = common | {"model": f"tiny-moe:hidden={WIDTHS[device]},ffn=16,vocab=64", "steps": FEW_STEPS}
        found |= {name: make(f"adversary.routed:mistake={name}", **mixed) for name in routed.MISTAKES}
        found |= {name: make(name, **mixed) for name in ROUTED}
        names = (f"adversary.approximated:mistake={name}" for name in approximated.MISTAKES)
        found |= dict(zip(approximated.MISTAKES, (make(name, **common) for name in names), strict=True))
        found |= {name: make(name, **common) for name in APPROXIMATED}
    if device == "cuda":
        found |= {name: make(name, **whole) for name in SPLIT}
    found |= {name: make(name, **common | settings) for name, settings in HONEST.items()}
    found |= {name: make("ddp", **common | settings) for name, settings in SETTINGS.items()}
    is_whole = EXHAUSTIVE or device == "cuda"
    return found if is_whole else {name: spec for name, spec in found.items() if name in few(precision)}


def launches(specs: dict[str, RunSpec], device: str) -> list[list[RunSpec]]:
    """The runs of each launch. On GPUs, where a crash of NCCL ends its ranks, each kind of layout has its own."""
    if device == "cpu":
        return [list(specs.values())]
    kinds: dict[str, list[RunSpec]] = {}
    for spec in specs.values():
        name = spec.strategy.name if spec.strategy else ""
        kinds.setdefault(name if name in ("adversary.split", "adversary.routed", "mesh") else "", []).append(spec)
    return list(kinds.values())


@pytest.fixture(scope="session", params=JUDGED)
def judged(
    request: pytest.FixtureRequest,
    make_spec: Callable[..., RunSpec],
    tmp_path_factory: pytest.TempPathFactory,
    environment: Callable[..., dict[str, str]],
    nursery: None,
) -> tuple[dict[str, RunSpec], dict[str, Certificate], dict[str, Certificate]]:
    """The runs, their certificates, and those that a campaign reaches after a narrow refusal: with more copies."""
    out: Path = tmp_path_factory.mktemp("-".join(("adversary", *request.param)))
    specs = cases(*request.param, make_spec)
    references = [dataclasses.replace(spec, experiment="test") for spec in references_of(list(specs.values())).values()]
    records = ranks.run_all(out, [store.create(out, spec) for spec in references], environment())
    supplements = [
        supplement
        for spec, record in zip(references, records, strict=True)
        if spec.workload.options["variants"] != 1 and (supplement := supplement_of(spec, [record]))
    ]
    for group in (*([supplements] if supplements else []), *launches(specs, request.param[0])):
        records += ranks.run_all(out, [store.create(out, spec) for spec in group], environment())
    broken = [f"{r.spec.run_id}: {r.error}" for r in records if r.status is not Status.OK]
    assert not broken, broken
    return specs, certify_all([record for record in records if not record.is_supplement]), certify_all(records)


def test_every_mistake_is_refused_by_the_right_check(judged: Any) -> None:
    """Also with all copies of the reference, which allow the largest deviations."""
    specs, _, certificates = judged
    expected = {**REFUSED_BY, **REFUSED_SPLIT, **REFUSED_ROUTED, **REFUSED_APPROXIMATED}
    expected |= dict.fromkeys(other_data.MISTAKES, "data")
    wrong = []
    for name, check in expected.items():
        if name in specs:
            certificate = certificates[specs[name].run_id]
            failed = [c.name for c in certificate.checks if not c.ok]
            if check not in failed:
                wrong.append(f"{name}: refused by {failed}, not by {check!r}")
    assert not wrong, "\n".join(wrong)


def test_honest_variations_are_certified_at_every_step(judged: Any) -> None:
    specs, certificates, _ = judged
    for name in (name for name in (*HONEST, *SETTINGS, *SPLIT, *ROUTED, *APPROXIMATED) if name in specs):
        certificate = certificates[specs[name].run_id]
        assert certificate.reasons == (), name
        assert certificate.compared_steps == certificate.steps == specs[name].steps, name


def test_there_are_enough_of_both() -> None:
    assert set(REFUSED_BY) == set(planted.MISTAKES)
    assert set(REFUSED_SPLIT) == set(split.MISTAKES)
    assert set(REFUSED_ROUTED) == set(routed.MISTAKES)
    assert set(REFUSED_APPROXIMATED) == set(approximated.MISTAKES)
    assert len(REFUSED_BY) + len(other_data.MISTAKES) >= 30
    assert len(HONEST) + len(SETTINGS) >= 10
