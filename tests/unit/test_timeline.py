from __future__ import annotations

from types import SimpleNamespace

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


class Event:
    """What torch's profiler hands over."""

    def __init__(self, name: str, device: str, begin: float, end: float) -> None:
        self.name, self.device_type = name, f"DeviceType.{device}"
        self.time_range = SimpleNamespace(start=begin * 1e6, end=end * 1e6)


def test_waiting_on_the_host_is_not_compute_on_the_device() -> None:
    profile = Profile("cuda", HostClock())
    for event in (
        Event("cudaDeviceSynchronize", "CPU", 0.0, 10.0),
        Event("gemm", "CUDA", 0.0, 1.0),
        Event("ncclDevKernel_AllReduce", "CUDA", 0.5, 3.0),
        Event("Memcpy HtoD (Pinned -> Device)", "CUDA", 3.0, 3.25),
        Event("Memcpy HtoD (Pinned -> Device)", "CUDA", 3.5, 3.6),
    ):
        profile._sort(event)
    sample = profile.sample(0, 1, batches=1, batch_bytes=100)
    assert sample.exposed_s == pytest.approx(2.0)
    assert (sample.h2d_s, sample.h2d_bytes) == (pytest.approx(0.25), 100)
    assert profile.sample(0, 1, batches=3, batch_bytes=100).h2d_s is None
