"""Seeded steps: whether a rank agrees with itself is judged before whether it agrees with others."""

from __future__ import annotations

import node_records as synthetic
import pytest

from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT
from paceline.analysis.machine import nodes
from paceline.results.machine_samples import TrajectorySample


def judged(*weights: str) -> nodes.Judged:
    """One word per rank, one letter per turn: which weights it ended with."""
    samples: list[TrajectorySample] = [
        synthetic.trajectory(rank, turn, weights=letter)
        for rank, word in enumerate(weights)
        for turn, letter in enumerate(word)
    ]
    return nodes.judge(synthetic.healthy(len(weights), trajectories=tuple(samples)))


@pytest.mark.parametrize(
    ("weights", "verdicts"),
    [
        (("xx", "yz"), [PASS, FAIL]),
        (("xx", "xy"), [PASS, FAIL]),
        (("xx", "yz", "uv"), [PASS, FAIL, FAIL]),
        (("xx", "xx", "yy", "xz"), [PASS, PASS, FAIL, FAIL]),
        (("xx", "yy", "xz"), [SUSPECT, SUSPECT, FAIL]),
        (("xx", "yy"), [SUSPECT, SUSPECT]),
        (("xx", "xx", "yy", "yy"), [SUSPECT] * 4),
        (("xx", "yy", "zz"), [SUSPECT] * 3),
        (("xy",), [SUSPECT]),
        (("xx",), [PASS]),
        (("xy", "xz"), [PASS, PASS]),
    ],
    ids=" ".join,
)
def test_a_rank_is_compared_with_itself_then_with_others(weights: tuple[str, ...], verdicts: list[str]) -> None:
    found = judged(*weights)
    assert [v.verdict for v in found.verdicts] == verdicts
    nobody_steady = len(weights) > 1 and all(len(set(word)) > 1 for word in weights)
    assert any("not deterministic here" in note for note in found.notes) == nobody_steady


def test_the_evidence_says_who_does_not_repeat_itself(golden: object) -> None:
    (evidence,) = judged("xx", "yz").verdicts[1].evidence
    assert evidence.text == golden


def test_a_rank_alone_that_does_not_repeat_itself_may_have_kernels_that_are_not_deterministic(golden: object) -> None:
    (evidence,) = judged("xy").verdicts[0].evidence
    assert evidence.text == golden


def test_a_split_without_majority_says_that_it_is_open(golden: object) -> None:
    texts = {e.text for v in judged("xx", "xx", "yy", "yy").verdicts for e in v.evidence}
    assert texts == golden
