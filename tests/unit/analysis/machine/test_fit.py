from __future__ import annotations

import fabric_records as made
import numpy as np
import pytest

from paceline.analysis.machine import fabric
from paceline.analysis.machine.fabric import ALPHA_FIXED, line_through

SIZES = [2**k for k in range(3, 31)]
ALPHA, BETA = 20e-6, 12.5e9


def test_exact_data_give_exact_numbers() -> None:
    line = line_through(SIZES, [ALPHA + s / BETA for s in SIZES])
    assert line is not None
    assert line.alpha_s == pytest.approx(ALPHA, rel=1e-9)
    assert line.beta_bytes_per_s == pytest.approx(BETA, rel=1e-9)
    assert line.residual_ratio < 1e-9
    assert not line.is_fixed


def test_noisy_data_give_them_within_a_few_percent() -> None:
    errors = []
    for seed in range(50):
        noise = 1 + 0.05 * np.random.default_rng(seed).standard_normal(len(SIZES))
        line = line_through(SIZES, [(ALPHA + s / BETA) * x for s, x in zip(SIZES, noise, strict=True)])
        assert line is not None
        assert 0.02 < line.residual_ratio < 0.1
        errors += [abs(line.alpha_s / ALPHA - 1), abs(line.beta_bytes_per_s / BETA - 1)]
    assert np.median(errors) < 0.02
    assert max(errors) < 0.1


def test_relative_weights_keep_the_latency_that_plain_squares_lose() -> None:
    """1 % of noise at 1 GiB is a hundred latencies: unweighted least squares misses alpha by far."""
    noise = 1 + 0.01 * np.random.default_rng(3).standard_normal(len(SIZES))
    t = np.array([(ALPHA + s / BETA) * x for s, x in zip(SIZES, noise, strict=True)])
    line = line_through(SIZES, list(t))
    plain = np.polyfit(SIZES, t, 1)[1]
    assert line is not None
    assert line.alpha_s == pytest.approx(ALPHA, rel=0.05)
    assert abs(plain / ALPHA - 1) > 0.5


def test_a_negative_start_is_fixed_at_zero_with_a_note() -> None:
    """Time that grows faster than size would need a negative alpha."""
    samples = made.sweep(lambda s: (s / 1e9) ** 1.3, [2**k for k in range(20, 28)])
    (fit,) = fabric.analyse([made.build_record(samples=samples)]).fits
    assert fit.alpha_s == 0
    assert fit.beta_bytes_per_s > 0
    assert fit.note == ALPHA_FIXED


def test_time_that_falls_with_size_has_no_fit_and_a_sentence(golden: object) -> None:
    """A wrong direction: dividing by beta would promise bandwidth without end."""
    found = fabric.analyse([made.build_record(samples=made.sweep(lambda s: 1e-3 / s, SIZES[:8]))])
    assert found.fits == ()
    assert found.notes == golden


def test_many_without_a_fit_are_counted(golden: object) -> None:
    samples = [s for dtype in ("a", "b", "c", "d") for s in made.sweep(lambda s: 1e-3 / s, SIZES[:8], dtype=dtype)]
    (note,) = fabric.analyse([made.build_record(samples=samples)]).notes
    assert note == golden
    assert "all_reduce" in note


def test_a_bandwidth_within_the_noise_is_not_reported() -> None:
    """Sizes that are all latency: a fit would promise hundreds of GB/s from 5 % of jitter."""
    found = fabric.analyse([made.build_record(samples=made.sweep(lambda s: ALPHA + s / BETA, SIZES[:8], noise=0.2))])
    assert found.fits == ()


def test_beta_is_the_bandwidth_of_the_wire_not_of_the_algorithm() -> None:
    """all_reduce of four ranks sends 1.5 bytes per byte: a fabric of 12.5 GB/s must read 12.5."""
    samples = made.sweep(lambda s: ALPHA + s * 1.5 / BETA)
    (fit,) = fabric.analyse([made.build_record(samples=samples)]).fits
    assert fit.beta_bytes_per_s == pytest.approx(BETA)
    assert (fit.operation, fit.dtype, fit.world_size, fit.in_place, fit.sizes) == ("all_reduce", "fp32", 4, False, 28)
    assert fit.runs == (made.build_spec().run_id,)


def test_fewer_than_four_sizes_are_no_line() -> None:
    for count, fits in ((3, 0), (4, 1)):
        samples = made.sweep(lambda s: ALPHA + s / BETA, SIZES[:count])
        assert len(fabric.analyse([made.build_record(samples=samples)]).fits) == fits


def test_place_dtype_and_operation_are_fitted_apart_and_barrier_not_at_all() -> None:
    samples = [
        *made.sweep(lambda s: ALPHA + s / BETA, SIZES),
        *made.sweep(lambda s: ALPHA + s / BETA, SIZES, in_place=True),
        *made.sweep(lambda s: ALPHA + s / BETA, SIZES, dtype="bf16"),
        *made.sweep(lambda s: ALPHA + s / BETA, SIZES, "broadcast"),
        *made.row(1e-6, "barrier", 0),
    ]
    found = fabric.analyse([made.build_record(samples=samples)]).fits
    assert [(f.operation, f.dtype, f.in_place) for f in found] == [
        ("all_reduce", "fp32", False),
        ("all_reduce", "fp32", True),
        ("all_reduce", "bf16", False),
        ("broadcast", "fp32", False),
    ]


def test_single_launches_are_fitted_where_batches_stand_beside_them() -> None:
    samples = [
        *made.sweep(lambda s: ALPHA + s * 1.5 / BETA, SIZES),
        *made.sweep(lambda s: 0.1 * ALPHA + s * 1.5 / BETA, SIZES[:10], mode="batch"),
    ]
    (fit,) = fabric.analyse([made.build_record(samples=samples)]).fits
    assert fit.alpha_s == pytest.approx(ALPHA)
