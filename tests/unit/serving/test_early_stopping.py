"""Early stopping by the published table."""

from __future__ import annotations

import pytest

from paceline.serving import early_stopping

P99 = {0: 459, 1: 662, 2: 838, 5: 1307, 10: 2010, 20: 3304, 50: 6898, 100: 12571}
P90 = {0: 44, 1: 64, 5: 127, 10: 197}


@pytest.mark.parametrize(("late", "needed"), P99.items())
def test_requests_needed_at_the_99th_percentile(late: int, needed: int) -> None:
    assert early_stopping.requests_needed(late, 0.99) == needed


@pytest.mark.parametrize(("late", "needed"), P90.items())
def test_requests_needed_at_the_90th_percentile(late: int, needed: int) -> None:
    assert early_stopping.requests_needed(late, 0.90) == needed


def test_of_13368_requests_107_may_be_late() -> None:
    assert early_stopping.late_allowed(13368, 0.99) == 107


def test_too_few_requests_tell_nothing() -> None:
    assert early_stopping.late_allowed(458, 0.99) is None
    assert early_stopping.late_allowed(459, 0.99) == 0
    assert early_stopping.verdict_of(458, 0, 0.99) is early_stopping.Verdict.TOO_FEW
    assert early_stopping.verdict_of(0, 0, 0.99) is early_stopping.Verdict.TOO_FEW
