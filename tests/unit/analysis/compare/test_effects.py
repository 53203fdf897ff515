"""Cells made from known effects: what a design must find, must bound, and must not claim."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.analysis.compare import effects
from paceline.analysis.findings import DesignOutcome, Effect
from paceline.analysis.findings.compare import ALIASED, FASTER, LESS, NO_EFFECT, OPEN, SLOWER
from paceline.analysis.statistics.intervals import student_t
from paceline.analysis.statistics.verdict import EQUAL_WITHIN
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.experiment.choices import Choice
from paceline.experiment.factorial import FACTORIAL, FRACTIONAL, ONE_AT_A_TIME, Design, Level, generators
from paceline.results.records import RunRecord
from paceline.wording import percent_up

Builder = Callable[..., Any]
RATE = 10_000.0
BASELINE: dict[str, Level] = {"checkpointing": "none", "compile": False, "micro_batch": 2, "bucket_mb": 25.0}
LEVELS: dict[str, tuple[Level, ...]] = {
    "checkpointing": ("full",),
    "compile": (True,),
    "micro_batch": (4,),
    "bucket_mb": (50.0,),
}


def planned(kind: str, *factors: str, **more: Any) -> Design:
    """Of the named factors, all where none is named."""
    names = factors or tuple(BASELINE)
    usual: dict[str, Any] = {
        "baseline": {name: BASELINE[name] for name in names},
        "levels": {name: LEVELS[name] for name in names},
        "generators": generators(names) if kind == FRACTIONAL else {},
    }
    return Design(kind=kind, **usual | more)


@pytest.fixture
def outcome(make_cell: Builder) -> Callable[..., DesignOutcome]:
    """Runs of every point; true holds the factor by which each change, or pair of changes, multiplies the rate."""

    def make(
        design: Design,
        true: Mapping[tuple[str, ...], float],
        memory: Mapping[str, float] | None = None,
        spread: float = 0.002,
        without: Callable[[Mapping[str, Level]], bool] = lambda point: False,
        **more: Any,
    ) -> DesignOutcome:
        records: list[RunRecord] = []
        for point in (*design.points(), *design.combined_points().values()):
            changed = {name for name, level in point.items() if level != design.baseline[name]}
            rate = RATE * math.prod(factor for names, factor in true.items() if set(names) <= changed)
            size = 2**30 * math.prod(f for name, f in (memory or {}).items() if name in changed)
            tokens = 64 * 2 * int(point.get("micro_batch") or 2)
            cell = {"world_size": 1, "strategy": "single", "steps": 10, "design": design, **point, **more}
            if not without(point):
                records += make_cell(tokens / rate, spread=spread, record={"memory_bytes": size}, **cell)
        cells = metrics.gather(open_window(record) for record in records)
        (found,) = effects.analyse(cells, records, ())
        return found

    return make


def named(found: DesignOutcome, start: str) -> Effect:
    (effect,) = [e for e in found.effects if e.name.startswith(start)]
    return effect


def speed(effect: Effect) -> Any:
    return effect.response("tokens_per_s")


# --- one factor at a time ---


def test_known_effects_are_recovered_and_ranked(outcome: Builder, golden: object) -> None:
    true = {("checkpointing",): 0.75, ("compile",): 1.3, ("micro_batch",): 1.05}
    found = outcome(planned(ONE_AT_A_TIME), true, memory={"checkpointing": 0.5})
    order = [effect.factors[0] for effect in found.effects]
    assert order == ["checkpointing", "compile", "micro_batch", "bucket_mb"]
    for (factor,), ratio in true.items():
        response = speed(named(found, factor.replace("_", " ")))
        assert response.low < ratio < response.high
        assert response.verdict == (FASTER if ratio > 1 else SLOWER)
        assert abs(ratio - 1) > response.detectable_ratio
    less = named(found, "checkpointing").response("peak_memory_bytes")
    assert less is not None
    assert (less.verdict, less.ratio) == (LESS, pytest.approx(0.5, rel=0.01))
    assert named(found, "compile").name == golden


def test_a_null_effect_is_said_to_be_none_with_its_bound(outcome: Builder, golden: object) -> None:
    response = speed(named(outcome(planned(ONE_AT_A_TIME), {("compile",): 1.3}), "bucket mb"))
    assert response.verdict == NO_EFFECT
    assert response.low < 1 < response.high
    assert max(response.high, 1 / response.low) - 1 < response.bound_ratio < EQUAL_WITHIN, "corrected for four effects"
    assert response.text == golden
    assert f"{percent_up(response.bound_ratio)}" in response.text
    assert "25.0" in response.text
    assert "50.0" in response.text


def test_noise_that_could_hide_an_effect_leaves_it_open(outcome: Builder) -> None:
    response = speed(named(outcome(planned(ONE_AT_A_TIME), {}, spread=0.2), "compile"))
    assert response.verdict == OPEN
    assert response.bound_ratio > EQUAL_WITHIN
    assert "inconclusive" in response.text


def test_memory_that_is_equal_in_every_launch_has_no_effect(outcome: Builder) -> None:
    found = outcome(planned(ONE_AT_A_TIME, "compile"), {})
    response = named(found, "compile").response("peak_memory_bytes")
    assert response is not None
    assert response.verdict == NO_EFFECT


def test_one_launch_says_so_and_claims_nothing_about_memory(outcome: Builder, golden: object) -> None:
    found = outcome(planned(ONE_AT_A_TIME, "compile"), {}, memory={"compile": 2.0}, repeats=1)
    response = named(found, "compile").response("peak_memory_bytes")
    assert response is not None
    assert (response.verdict, response.low) == (OPEN, None)
    assert found.notes == golden
    quick = speed(named(found, "compile"))
    assert quick.low is not None
    assert (quick.verdict, quick.text) == (OPEN, golden)


def test_one_at_a_time_claims_no_interaction_and_says_so(outcome: Builder, golden: object) -> None:
    found = outcome(planned(ONE_AT_A_TIME), {})
    assert {effect.kind for effect in found.effects} == {"factor"}
    assert found.notes == golden


def test_multiplicity_is_stated(outcome: Builder, golden: object) -> None:
    (note,) = [n for n in outcome(planned(ONE_AT_A_TIME), {}).notes if "judged" in n]
    assert note == golden


def test_null_effects_are_judged_together(outcome: Builder) -> None:
    """All launches of a design share their spread, and every effect is one of as many chances to be wrong."""
    found = outcome(planned(FACTORIAL, "checkpointing", "compile", "bucket_mb"), {}, spread=0.01)
    assert len(found.effects) == 6
    for effect in found.effects:
        response = speed(effect)
        assert response.verdict in (NO_EFFECT, OPEN)
        # 8 cells of 3 launches leave 16 degrees of freedom.
        alone, together = student_t(16), student_t(16, 0.025 / 6)
        assert math.log1p(response.bound_ratio) == pytest.approx(
            abs(math.log(response.ratio)) + together / alone * math.log(response.high / response.ratio), rel=1e-6
        )


def test_a_factor_of_three_levels_has_two_effects(outcome: Builder, golden: object) -> None:
    design = planned(ONE_AT_A_TIME, levels={"bucket_mb": (50.0, 100.0)}, baseline={"bucket_mb": 25.0})
    names = {effect.name for effect in outcome(design, {}).effects}
    assert names == golden


def test_a_combined_point_is_judged_against_the_baseline_and_against_its_parts(outcome: Builder) -> None:
    combined = {"full with batch 4": {"checkpointing": "full", "micro_batch": 4}}
    design = planned(ONE_AT_A_TIME, "checkpointing", combined=combined)
    design = dataclasses.replace(design, baseline={**design.baseline, "micro_batch": 2})
    found = outcome(design, {("checkpointing",): 0.8, ("micro_batch",): 1.5})
    assert speed(named(found, "full with batch 4")).ratio == pytest.approx(1.2, rel=0.02)
    apart = named(found, "micro batch 2 \u2192 4, at checkpointing full")
    assert speed(apart).ratio == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize(("factor", "outcomes"), [("compile", 2), ("micro_batch", 1)])
def test_accumulation_makes_a_design_of_its_own_unless_it_follows_a_factor(
    factor: str, outcomes: int, make_cell: Builder
) -> None:
    """Equal designs at accumulation 1 and 8 are two; with the micro batch as a factor it may differ within one."""
    design = planned(ONE_AT_A_TIME, factor)
    alike: dict[str, Any] = {"world_size": 1, "strategy": "single", "steps": 10, "design": design}
    records: list[RunRecord] = []
    for point in design.points():
        counts = (1, 8) if factor == "compile" else (4 // int(point["micro_batch"] or 1),)
        for accumulation in counts:
            records += make_cell(0.01 * accumulation, accumulation=accumulation, **alike, **point)
    found = effects.analyse(metrics.gather(open_window(record) for record in records), records, ())
    assert len(found) == outcomes
    assert all(len(one.effects) == 1 and not one.left_out for one in found)


@pytest.mark.parametrize(
    ("others", "outcomes"),
    [
        (({"telemetry_hz": 2.0}, {"telemetry_hz": 0.0}), 1),
        (({"max_restarts": 0}, {"max_restarts": 3}), 1),
        (({"launcher": Choice("slurm", {"time": 10})}, {"launcher": Choice("slurm", {"time": 60})}), 1),
        (({"launcher": Choice("slurm", {"qos": "a"})}, {"launcher": Choice("slurm", {"qos": "b"})}), 2),
        (({"contents": {"data": "a1"}}, {"contents": {"data": "b2"}}), 2),
    ],
)
def test_what_makes_no_cell_makes_no_design(
    others: tuple[dict[str, Any], dict[str, Any]], outcomes: int, make_cell: Builder
) -> None:
    design = planned(ONE_AT_A_TIME, "compile")
    alike: dict[str, Any] = {"world_size": 1, "strategy": "single", "steps": 10, "design": design}
    points = zip(design.points(), others, strict=True)
    records = [r for point, other in points for r in make_cell(0.01, **alike, **point, **other)]
    found = effects.analyse(metrics.gather(open_window(record) for record in records), records, ())
    assert len(found) == outcomes
    assert sum(len(one.left_out) for one in found) == (0 if outcomes == 1 else 2)


# --- factorial ---


def test_an_interaction_is_found_and_absent_ones_are_bounded(outcome: Builder, golden: object) -> None:
    true = {("checkpointing",): 0.8, ("compile",): 1.2, ("checkpointing", "compile"): 1.15}
    found = outcome(planned(FACTORIAL, "checkpointing", "compile", "bucket_mb"), true)
    response = speed(named(found, "checkpointing \u00d7 compile"))
    assert response.low < 1.15 < response.high
    assert response.verdict == FASTER
    assert speed(named(found, "checkpointing \u00d7 bucket mb")).verdict == NO_EFFECT
    assert speed(named(found, "compile \u00d7 bucket mb")).text == golden
    main = named(found, "checkpointing none")
    assert main.pairs == 4
    assert speed(main).ratio == pytest.approx(0.8 * math.sqrt(1.15), rel=0.01), "averaged over compile"


def test_a_factorial_narrows_what_repeats_alone_would_leave_wide(outcome: Builder) -> None:
    one = speed(named(outcome(planned(ONE_AT_A_TIME), {}, spread=0.02), "compile"))
    whole = speed(named(outcome(planned(FACTORIAL), {}, spread=0.02), "compile off"))
    assert whole.bound_ratio < one.bound_ratio


def test_points_without_a_valid_run_are_named_and_their_pairs_left_out(outcome: Builder, golden: object) -> None:
    def lost(point: Mapping[str, Level]) -> bool:
        return point == {"checkpointing": "full", "compile": True}

    found = outcome(planned(FACTORIAL, "checkpointing", "compile"), {("compile",): 1.2}, without=lost)
    assert [left.name for left in found.left_out] == golden
    assert found.left_out[0].status == "not run"
    assert named(found, "compile").pairs == 1
    assert not [e for e in found.effects if e.kind == "interaction"]


# --- fractions ---


def test_an_aliased_interaction_is_not_claimed(outcome: Builder, golden: object) -> None:
    true = {("checkpointing",): 0.7, ("compile", "micro_batch"): 1.2}
    found = outcome(planned(FRACTIONAL), true)
    assert found.resolution == 4
    assert speed(named(found, "checkpointing none")).ratio == pytest.approx(0.7, rel=0.01)
    chains = [e for e in found.effects if e.kind == "interaction"]
    assert len(chains) == 3, "six pairs of four factors share three columns"
    assert all(speed(e).verdict == ALIASED for e in chains)
    (chain,) = [e for e in chains if "compile \u00d7 micro batch" in (e.name, *e.aliases)]
    assert chain.aliases == ("compile \u00d7 micro batch",)
    assert chain.name == golden
    assert speed(chain).ratio == pytest.approx(1.2, rel=0.01)
    assert speed(chain).text == golden


def test_resolution_three_names_the_alias_of_every_main_effect(outcome: Builder, golden: object) -> None:
    found = outcome(planned(FRACTIONAL, "checkpointing", "compile", "bucket_mb"), {("compile",): 1.2})
    assert found.resolution == 3
    main = named(found, "compile")
    assert main.aliases == golden
    assert speed(main).text == golden
    assert not [e for e in found.effects if e.kind == "interaction"]


def test_resolution_five_claims_interactions(outcome: Builder) -> None:
    factors = {**BASELINE, "sequence_length": 64}
    levels = {**LEVELS, "sequence_length": (64 * 2,)}
    design = planned(FRACTIONAL, baseline=factors, levels=levels, generators=generators(tuple(factors)))
    assert design.resolution == 5
    found = outcome(design, {("checkpointing", "compile"): 1.2, ("sequence_length",): 1.0 / 2})
    response = speed(named(found, "checkpointing \u00d7 compile"))
    assert (response.verdict, response.ratio) == (FASTER, pytest.approx(1.2, rel=0.01))


def test_a_fraction_with_a_hole_gives_no_effect_and_says_why(outcome: Builder, golden: object) -> None:
    def lost(point: Mapping[str, Level]) -> bool:
        return all(point[name] == level for name, level in BASELINE.items())

    found = outcome(planned(FRACTIONAL), {}, without=lost)
    assert found.effects == ()
    assert found.baseline is None
    assert found.notes == golden


# --- false alarms ---


def test_chance_alone_seldom_passes_for_an_effect(outcome: Builder) -> None:
    """48 changes that do nothing, three launches each: more than 3 false verdicts would be beyond chance."""
    false = 0
    for seed in range(12):
        found = outcome(planned(ONE_AT_A_TIME), {}, spread=0.02, seed=seed)
        false += sum(speed(e).verdict in (FASTER, SLOWER) for e in found.effects)
    assert false <= 3
