"""Why steps differ, on profiles whose every number is known."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from statistics import stdev
from typing import Any

import pytest

from paceline.analysis.compare import step_differences
from paceline.analysis.compare.cells import compare_cells
from paceline.analysis.findings import StepDifference
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import ExposureSample, RunRecord, TraceSample

Builder = Callable[..., Any]

# For the same global batch.
ACCUMULATION = {"mesh:dp=2,tp=2": 4, "mesh:pp=4": 8}
PRODUCTS = {"products_s": 0.3, "attention_s": 0.1, "dequantisation_s": 0.0, "elementwise_s": 0.2, "copies_s": 0.0}


def trace(rank: int, exposed_s: float, gap_s: float = 0.0, steps: int = 2, **of_class: float | None) -> TraceSample:
    """Per step, 0.6 s of compute unless classes say otherwise."""
    classes: Mapping[str, float | None] = PRODUCTS | of_class
    compute = sum(value or 0.0 for value in classes.values())
    return TraceSample(
        rank=rank,
        steps=steps,
        wall_s=steps * (compute + exposed_s + gap_s),
        compute_s=steps * compute,
        communication_s=steps * exposed_s,
        exposed_s=steps * exposed_s,
        **{name: None if value is None else steps * value for name, value in classes.items()},
    )


def exposure(rank: int, dimension: str, exposed_s: float) -> ExposureSample:
    return ExposureSample(
        rank=rank, steps=1, dimension=dimension, wall_s=9.0, communication_s=exposed_s, exposed_s=exposed_s
    )


def explained(*groups: list[RunRecord]) -> tuple[StepDifference, ...]:
    cells = metrics.gather(open_window(record) for group in groups for record in group)
    return step_differences.analyse(compare_cells(cells))


def differences(found: StepDifference) -> dict[str, float]:
    return {term.name: round(term.difference_s, 6) for term in found.terms}


@pytest.fixture
def make(make_cell: Builder) -> Builder:
    """A cell of four processes with this profile in every launch."""

    def made(mean_s: float, strategy: str, repeats: int = 3, **more: Any) -> list[RunRecord]:
        record = {name: more.pop(name) for name in ("traces", "exposures") if name in more}
        more |= {"accumulation": ACCUMULATION.get(strategy, 2), "world_size": 4, "record": record}
        cell: list[RunRecord] = make_cell(mean_s, repeats, strategy=strategy, **more)
        return cell

    return made


@pytest.fixture
def replicas(make: Builder) -> list[RunRecord]:
    found: list[RunRecord] = make(
        0.7,
        "mesh:dp=4",
        traces=tuple(trace(rank, 0.1) for rank in range(4)),
        exposures=tuple(exposure(rank, "replicate", 0.2) for rank in range(4)),
    )
    return found


def tensor(make: Builder, mean_s: float = 1.1, repeats: int = 3) -> list[RunRecord]:
    """0.4 s of it is exposed, three quarters of that over the tensor parallel dimension."""
    exposures = (exposure(rank, name, s) for rank in range(4) for name, s in (("tp", 0.6), ("replicate", 0.2)))
    found: list[RunRecord] = make(
        mean_s,
        "mesh:dp=2,tp=2",
        repeats,
        traces=tuple(trace(rank, 0.4, elementwise_s=0.28) for rank in range(4)),
        exposures=tuple(exposures),
    )
    return found


def test_terms_add_up_to_the_difference(make: Builder, replicas: list[RunRecord], golden: object) -> None:
    (found,) = explained(replicas, tensor(make))
    assert differences(found) == {
        "exposed communication (tensor parallel)": 0.3,
        "other operations": 0.08,
        "matrix products": 0,
        "attention": 0,
        "dequantisation": 0,
        "copies": 0,
        "uneven compute of the ranks": 0,
        "exposed communication (replicas)": 0,
        "host gaps": 0,
    }
    assert found.profiled_s == pytest.approx(0.38)
    assert found.difference_s == pytest.approx(0.4, abs=0.01)
    assert found.profiled_s + found.unexplained_s == pytest.approx(found.step_s - found.other_step_s)
    assert found.is_explained
    assert (found.label, found.other_label, found.verdict) == ("mesh:dp=2,tp=2", "mesh:dp=4", "worse")
    assert len(found.runs) == 6
    assert found.text == golden


def test_one_launch_has_no_verdict(make: Builder, replicas: list[RunRecord], golden: object) -> None:
    (found,) = explained(replicas[:1], tensor(make, repeats=1))
    assert (found.verdict, found.launches, found.is_explained) == ("inconclusive", (1, 1), True)
    assert found.text == golden


def test_scattered_launches_are_inconclusive(make: Builder, golden: object) -> None:
    a = make(1.0, "mesh:dp=4", spread=0.2)
    (found,) = explained(a, make(1.08, "mesh:dp=2,tp=2", spread=0.2))
    assert (found.verdict, found.is_explained) == ("inconclusive", False)
    assert found.difference_s < found.noise_s
    assert found.text == golden


def test_the_scatter_is_that_of_so_few_steps(make: Builder, replicas: list[RunRecord]) -> None:
    """Steps scatter by 0.2 %: launches of two profiled steps each, and launches among each other."""
    (once,) = explained(replicas[:1], tensor(make, repeats=1))
    assert once.noise_s == pytest.approx(1.96 * 0.002 * ((0.7**2 + 1.1**2) / 2) ** 0.5, rel=0.3)
    (found,) = explained(replicas, tensor(make))
    means = [[open_window(record).seconds.mean() for record in group] for group in (replicas, tensor(make))]
    launches = sum(stdev(each) ** 2 / 3 for each in means)
    within = 0.002**2 * (0.7**2 + 1.1**2) / 6
    assert found.noise_s == pytest.approx(2.776 * (launches + within) ** 0.5, rel=0.2)


@pytest.mark.parametrize(("mean_s", "says"), [(1.6, "42 % of that"), (0.85, r"2\.[56] times as much")])
def test_terms_of_another_size_explain_nothing(
    make: Builder, replicas: list[RunRecord], mean_s: float, says: str
) -> None:
    """The profiled steps differ by 0.38 s, the measured ones by 0.9 s or 0.15 s."""
    (found,) = explained(replicas, tensor(make, mean_s))
    assert not found.is_explained
    end = rf"The profiled steps differ by 380 ms, {says}: the difference is not explained\.$"
    assert re.search(end, found.text)


def test_a_profile_that_says_the_opposite(make: Builder, replicas: list[RunRecord], golden: object) -> None:
    shorter = tuple(trace(rank, 0.05) for rank in range(4))
    (found,) = explained(replicas, make(1.1, "mesh:dp=2,tp=2", traces=shorter))
    assert found.profiled_s == pytest.approx(-0.05)
    assert not found.is_explained
    assert found.text == golden


def test_terms_within_the_scatter_are_no_cause(make: Builder) -> None:
    """All terms together are the difference, and each is less than steps scatter."""
    spread = {"repeats": 1, "spread": 0.1}
    longer = trace(0, 0.22, 0.13, products_s=0.42, attention_s=0.22)
    a = make(0.7, "mesh:dp=4", traces=tuple(trace(rank, 0.1) for rank in range(4)), **spread)
    b = make(
        1.19, "mesh:dp=2,tp=2", traces=tuple(dataclasses.replace(longer, rank=rank) for rank in range(4)), **spread
    )
    (found,) = explained(a, b)
    assert found.profiled_s == pytest.approx(0.49)
    assert max(term.difference_s for term in found.terms) < found.noise_s < found.difference_s
    assert not found.is_explained
    assert "but no term is beyond the scatter of so few steps" in found.text


def test_a_small_term_beyond_the_scatter_is_no_cause_of_the_whole(make: Builder, replicas: list[RunRecord]) -> None:
    """Of 0.4 s, four terms have 0.12, 0.1, 0.1 and 0.08 s; only the first is beyond the scatter."""
    spread = {"repeats": 1, "spread": 0.055}
    longer = trace(0, 0.18, 0.12, products_s=0.4, attention_s=0.2)
    a = make(0.7, "mesh:dp=4", traces=tuple(trace(rank, 0.1) for rank in range(4)), **spread)
    b = make(1.1, "mesh:dp=2,tp=2", traces=tuple(dataclasses.replace(longer, rank=rank) for rank in range(4)), **spread)
    (found,) = explained(a, b)
    assert found.terms[1].difference_s < found.noise_s < found.terms[0].difference_s
    assert not found.is_explained
    assert "are less than half of it: the difference is not explained." in found.text


def test_the_rank_that_computes_most_and_what_it_computes_beyond_the_mean(make: Builder) -> None:
    """Ranks compute 0.6, 0.6, 0.6 and 1.0 s; the others wait for the last one, which exposes 0.1 s."""
    uneven = (*(trace(rank, 0.5) for rank in range(3)), trace(3, 0.1, products_s=0.7))
    (record,) = make(1.1, "mesh:pp=4", 1, traces=uneven, exposures=(exposure(3, "pp", 2.0), exposure(0, "pp", 8.0)))
    terms = step_differences.profiled_terms(record)
    assert terms == pytest.approx(
        {
            "matrix products": 0.4,
            "attention": 0.1,
            "dequantisation": 0.0,
            "copies": 0.0,
            "other operations": 0.2,
            "uneven compute of the ranks": 0.3,
            "pipeline bubble and messages": 0.1,
            "host gaps": 0.0,
        }
    )
    assert sum(terms.values()) == pytest.approx(uneven[3].wall_s / 2)
    part = dataclasses.replace(record, traces=record.traces[:3])
    assert step_differences.profiled_terms(part) == {}, "one of four ranks was not profiled"


def test_what_one_side_does_not_divide_is_not_divided(make: Builder, replicas: list[RunRecord]) -> None:
    """DDP has no dimensions, and an older record no classes."""
    undivided = dict.fromkeys(PRODUCTS)
    old = tuple(dataclasses.replace(trace(rank, 0.5), **undivided) for rank in range(4))
    (found,) = explained(replicas, make(1.1, "ddp", traces=old))
    assert differences(found) == {
        "exposed communication": 0.4,
        "compute": 0,
        "uneven compute of the ranks": 0,
        "host gaps": 0,
    }


def test_recomputation_is_a_term_where_checkpointing_differs(make: Builder) -> None:
    """Full checkpointing computes the blocks again: what the FLOPs say is apart from the products."""
    plain = make(0.7, "ddp", traces=tuple(trace(rank, 0.1) for rank in range(4)))
    longer = tuple(trace(rank, 0.1, products_s=0.375, attention_s=0.125) for rank in range(4))
    again = make(0.8, "ddp", traces=longer, checkpointing="full")
    (found,) = explained(plain, again)
    (cell,) = metrics.gather(map(open_window, again))
    share = 1 - metrics.flops_per_token(cell) / metrics.flops_per_token(cell, recomputed=True)
    found_terms = differences(found)
    assert 0.1 < share < 0.3
    assert found_terms["recomputation"] == pytest.approx(0.5 * share, abs=1e-6)
    assert found_terms["matrix products"] == pytest.approx(0.375 * (1 - share) - 0.3, abs=1e-6)
    assert found.profiled_s == pytest.approx(0.1)


def test_equal_steps_and_cells_without_a_profile_are_not_explained(make: Builder) -> None:
    assert explained(make(1.0, "ddp"), make(1.001, "fsdp2")) == ()
    assert explained(make(1.0, "ddp"), make(1.3, "fsdp2", traces=())) == ()


def test_each_cell_is_compared_with_the_fastest(make: Builder, replicas: list[RunRecord]) -> None:
    found = explained(make(1.4, "mesh:pp=4"), tensor(make), replicas)
    assert [(each.label, each.other_label) for each in found] == [
        ("mesh:dp=2,tp=2", "mesh:dp=4"),
        ("mesh:pp=4", "mesh:dp=4"),
    ]
