"""Components from five numbers, and the line through predicted peaks: worked out by hand."""

from __future__ import annotations

import pytest

from paceline.results.memory_components import COMPONENTS, OwnedBytes, components, largest_fitting, predicted_peaks
from paceline.results.records import ComponentSample

MOMENTS: dict[str, int | None] = {"begin": 130, "forward": 190, "backward": 170, "update": 130}


def test_components_add_up_to_the_peak_where_all_are_there_at_once() -> None:
    found = components(MOMENTS, 300, OwnedBytes(parameters=40, optimizer=80, gradients=40))
    assert found == {
        "parameters": 40,
        "optimizer": 80,
        "gradients": 40,
        "communication": 10,
        "activations": 60,
        "other": 70,
        "peak": 300,
    }


def test_buckets_that_stand_between_steps_are_gradients_not_communication() -> None:
    moments = {"begin": 170, "forward": 230, "backward": 170, "update": 170}
    found = components(moments, 300, OwnedBytes(parameters=40, optimizer=80, gradients=40, standing_gradients=40))
    assert (found["gradients"], found["communication"]) == (40, 10)


def test_nothing_is_negative_where_gradients_replace_activations() -> None:
    assert components(MOMENTS, 200, OwnedBytes(parameters=40, optimizer=80, gradients=40))["other"] == 0


@pytest.mark.parametrize("missing", ["begin", "forward", "backward"])
def test_an_unseen_moment_leaves_components_unknown_but_the_peak_known(missing: str) -> None:
    found = components({**MOMENTS, missing: None}, 300, OwnedBytes(parameters=40, optimizer=80))
    assert found == {**dict.fromkeys(COMPONENTS), "peak": 300}


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(99, 0), (110, 1), (119, 1), (120, 2), (155, 5), (10_000, 64)],
)
def test_the_largest_that_fits_on_a_straight_line(capacity: int, expected: int) -> None:
    assert largest_fitting({1: 110, 2: 120}, capacity, most=64) == expected


def test_the_two_points_around_the_capacity_decide() -> None:
    """Another moment of the step takes over between 4 and 8: the line of the smaller ones would be wrong."""
    peaks = {1: 100, 2: 101, 4: 103, 8: 203}
    assert largest_fitting(peaks, 153, most=64) == 6
    assert largest_fitting(peaks, 303, most=64) == 12


def test_one_point_makes_no_line() -> None:
    assert largest_fitting({1: 100}, 1000, most=8) is None


def test_a_peak_that_does_not_grow_fits_or_does_not() -> None:
    assert largest_fitting({1: 100, 2: 100}, 100, most=8) == 8
    assert largest_fitting({1: 100, 2: 100}, 99, most=8) == 0


def test_only_predicted_peaks_are_read() -> None:
    def sample(component: str, source: str, micro_batch: int) -> ComponentSample:
        return ComponentSample(rank=0, component=component, source=source, bytes=7, micro_batch=micro_batch)

    samples = [sample("peak", "predicted", 1), sample("parameters", "predicted", 2), sample("peak", "held", 3)]
    assert predicted_peaks(samples) == {1: 7}
