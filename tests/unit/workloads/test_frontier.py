"""The search for the largest micro batch: right whatever the guess, short when the guess is good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.records import ComponentSample, RunRecord, Status
from paceline.workloads import frontier

GIB = 2**30


def spec(micro_batch: int = 1, **options: Any) -> RunSpec:
    return RunSpec(
        experiment="test",
        workload=Choice("frontier", options),
        model=Choice("tiny"),
        topology=Topology(device="cpu"),
        training=Training(sequence_length=64, micro_batch=micro_batch),
        strategy=Choice("single"),
        steps=3,
    )


def record(asked: RunSpec, status: Status, peaks: dict[int, int] | None = None) -> RunRecord:
    def sample(component: str, source: str, size: int, micro_batch: int) -> ComponentSample:
        return ComponentSample(rank=0, component=component, source=source, bytes=size, micro_batch=micro_batch)

    told = [sample("peak", "predicted", size, micro_batch) for micro_batch, size in (peaks or {}).items()]
    samples = (sample("capacity", "held", GIB, 1), *told)
    return RunRecord(spec=asked, status=status, error=None, started_at=0.0, ended_at=1.0, path="", components=samples)


def search(limit: int, guess: int | None, most: int = 1024) -> list[int]:
    """Probes of a machine on which `limit` is the largest micro batch that fits."""
    ended: dict[int, Status] = {1: Status.OK if limit >= 1 else Status.OOM}
    while (wanted := frontier.next_probe(ended, guess, most)) is not None:
        assert wanted not in ended
        assert 1 <= wanted <= most
        ended[wanted] = Status.OK if wanted <= limit else Status.OOM
    return list(ended)


@pytest.mark.parametrize("guess", [None, 0, 1, 2, 50, 64, 100, 1024])
def test_the_bracket_closes_around_the_limit(guess: int | None) -> None:
    for limit in (0, 1, 2, 3, 7, 63, 64, 100, 1023, 1024, 5000):
        tried = search(limit, guess)
        assert min(limit, 1024) in (0, *tried), limit
        assert limit + 1 in tried or limit >= 1024, limit
        assert len(tried) <= 22, limit


@pytest.mark.parametrize(("off", "most"), [(0, 3), (1, 3), (-1, 6), (3, 8), (-3, 8)])
def test_a_good_guess_needs_few_probes(off: int, most: int) -> None:
    assert len(search(64, 64 + off)) <= most


def test_the_first_guess_is_what_the_first_probe_predicted() -> None:
    asked = spec(most=64)
    following = frontier.follow(asked, [record(asked, Status.OK, {1: GIB // 4, 2: GIB // 2})])
    assert following == replace(asked, training=replace(asked.training, micro_batch=4))


def test_without_a_prediction_the_micro_batch_doubles() -> None:
    asked = spec()
    done = [record(asked, Status.OK)]
    for expected in (2, 4):
        following = frontier.follow(asked, done)
        assert following is not None
        assert following.training.micro_batch == expected
        done.append(record(following, Status.OK))


@pytest.mark.parametrize("status", [Status.FAILED, Status.TIMEOUT, Status.HANG, Status.UNSUPPORTED, Status.INVALID])
def test_a_probe_that_says_nothing_about_memory_ends_the_search(status: Status) -> None:
    assert frontier.follow(spec(), [record(spec(), status)]) is None


def test_not_even_one_fits() -> None:
    assert frontier.follow(spec(), [record(spec(), Status.OOM, {1: 2 * GIB, 2: 3 * GIB})]) is None


@pytest.mark.parametrize(
    "options",
    [
        {"most": 0},
        {"limit_gib": -1},
        {"limit_gib": "much"},
        {"least": 1},
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        frontier.check(spec(**options))
    assert str(caught.value) == golden


def test_a_first_probe_beyond_the_last_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        frontier.check(spec(micro_batch=8, most=4))
    assert str(caught.value) == golden
    assert "frontier.most" in str(caught.value)
