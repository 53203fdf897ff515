from __future__ import annotations

import pytest

from paceline.measure import HostClock
from paceline.timeline import Profile, Span, covered_s


@pytest.mark.parametrize(
    ("spans", "covered"),
    [
        ([], 0.0),
        ([(1.0, 2.0)], 1.0),
        ([(0.0, 1.0), (2.0, 4.0)], 3.0),
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(0.0, 10.0), (2.0, 3.0), (4.0, 5.0)], 10.0),
        ([(3.0, 4.0), (0.0, 1.0), (0.5, 3.5)], 4.0),
        ([(1.0, 1.0)], 0.0),
        ([(0.0, 1.0), (0.0, 1.0)], 1.0),
    ],
)
def test_the_union_of_spans_by_hand(spans: list[Span], covered: float) -> None:
    assert covered_s(spans) == pytest.approx(covered)


@pytest.mark.parametrize(
    ("compute", "communication", "exposed"),
    [
        ([(0.0, 4.0)], [(1.0, 2.0)], 0.0),
        ([(0.0, 1.0)], [(1.0, 3.0)], 2.0),
        ([(0.0, 2.0), (3.0, 4.0)], [(1.0, 5.0)], 2.0),
        ([], [(0.0, 1.0), (0.5, 2.0)], 2.0),
        ([(0.0, 1.0)], [], 0.0),
    ],
)
def test_exposed_is_communication_while_nothing_computes(
    compute: list[Span], communication: list[Span], exposed: float
) -> None:
    profile = Profile("cpu", HostClock())
    profile.compute, profile.communication, profile.wall_s = compute, communication, 5.0
    sample = profile.sample(rank=1, steps=2)
    assert sample.exposed_s == pytest.approx(exposed)
    assert sample.compute_s == pytest.approx(covered_s(compute))
    assert sample.communication_s == pytest.approx(covered_s(communication))
    assert sample.exposed_s <= sample.communication_s
    assert (sample.rank, sample.steps, sample.wall_s) == (1, 2, 5.0)


def test_a_real_profile_sees_compute() -> None:
    import torch

    profile = Profile("cpu", HostClock())
    with profile.recording():
        torch.ones(64, 64) @ torch.ones(64, 64)
    sample = profile.sample(0, 1)
    assert 0 < sample.compute_s <= sample.wall_s * 1.5
    assert sample.communication_s == sample.exposed_s == 0
