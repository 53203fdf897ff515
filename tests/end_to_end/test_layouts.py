"""Every layout of the strategy mesh on real processes: certified against one process, and every byte explained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from paceline.experiment.layout import layout_of
from paceline.models import parallel
from paceline.models.arithmetic import wire_factor
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

MORE = ("mesh:tp=2", "mesh:tp=2,sequence=false,loss_parallel=false", "mesh:cp=2,attention=ulysses")
TWO = ("mesh:pp=2", "mesh:cp=2", *(MORE if EXHAUSTIVE else ()))
SHARDED = ("mesh:shard=2,prefetch=2", "mesh:shard=4,reshard_to=2", "mesh:tp=2,shard=2,gather_once=true")
FOUR = (*(SHARDED if EXHAUSTIVE else ()), "mesh:tp=2,shard=2", "ddp")
EIGHT = ("mesh:tp=2,pp=2,shard=2",) if EXHAUSTIVE else ()
# Each operation of a layout is many of Python: as few micro batches as tell a sum from its parts.
STEPS = 3


@pytest.fixture(scope="module")
def layouts(campaign: Callable[..., Any]) -> Any:
    matrix = [
        {"strategy": list(TWO), "micro_batch": [4]},
        {"strategy": list(FOUR), "processes": [4]},
        *({"strategy": [strategy], "processes": [8]} for strategy in EIGHT),
    ]
    profiled = EXHAUSTIVE or ("mesh:tp=2,shard=2",)
    return campaign("layouts", matrix, profiled=profiled, model="tiny:hidden=64", micro_batch=2, steps=STEPS)


def runs(layouts: Any) -> list[RunRecord]:
    return [record for record in layouts.records if not record.is_reference]


def test_every_layout_is_certified(layouts: Any) -> None:
    assert layouts.code == 0, layouts.stdout + layouts.stderr
    assert len(runs(layouts)) == len(TWO) + len(FOUR) + len(EIGHT)
    assert len({record.spec.work for record in layouts.records}) == 1, "one reference serves them all"
    for certificate in layouts.report["certificates"]:
        failed = [(c["name"], c["observed"]) for c in certificate["checks"] if not c["ok"]]
        assert failed == [], certificate["run"]


def test_samples_are_counted_once(layouts: Any) -> None:
    for record in runs(layouts):
        layout = layout_of(record.spec)
        tokens: Counter[int] = Counter()
        for sample in record.steps:
            tokens[sample.step] += sample.tokens
            leader = layout.leader(sample.rank)
            assert sample.leader == (None if leader == sample.rank else leader)
        assert set(tokens.values()) == {8 * 32}, record.spec.run_id


@pytest.mark.parametrize("strategy", [*TWO, *FOUR[:-1], *EIGHT])
def test_bytes_of_every_dimension_match_their_formula(layouts: Any, strategy: str) -> None:
    record = layouts.record(strategy)
    layout = layout_of(record.spec)
    for rank in range(layout.world_size):
        predicted = parallel.sent_bytes(record.shape, layout, record.spec.training, rank)
        counted: Counter[str] = Counter()
        own = [w for w in record.wire if w.rank == rank and w.group_size > 1 and w.dimension]
        for w in own:
            counted[w.dimension] += w.payload_bytes * wire_factor(w.operation, w.group_size)
        steps = len({w.step for w in own})
        # The loss of a step is summed over cp and pp: some scalars.
        found = {dimension: size / steps for dimension, size in counted.items()}
        assert found == {k: pytest.approx(v, rel=1e-3, abs=64) for k, v in (predicted or {}).items()}, rank


def test_comparisons_cover_layouts_with_other_accumulations(layouts: Any) -> None:
    """Four processes: DDP has four replicas and tp=2 two, so they accumulate differently for the same global batch."""
    names = ("ddp", "mesh:tp=2,shard=2")
    assert {layouts.record(name).spec.training.accumulation for name in names} == {1, 2}
    texts = [json.dumps(recommendation) for recommendation in layouts.report["recommendations"]]
    assert any(all(name in text for name in names) for text in texts)


# --- mixtures of experts ---

# tests/adversary certifies experts beside replicas.
MORE_MIXED = ("mesh:ep=2,shard=4", "mesh:tp=2,pp=2", "mesh:tp=2,cp=2,sequence=false", "mesh:tp=2,shard=2")
MIXED = ("mesh:pp=2,ep=2", "mesh:tp=2,ep=2", *(MORE_MIXED if EXHAUSTIVE else ()))


@pytest.fixture(scope="module")
def mixtures(campaign: Callable[..., Any]) -> Any:
    matrix = [{"strategy": list(MIXED), "processes": [4]}]
    return campaign("mixtures", matrix, profiled=False, model="tiny-moe:hidden=32", micro_batch=2, steps=STEPS)


def test_experts_on_other_ranks_are_certified_with_every_choice(mixtures: Any) -> None:
    assert mixtures.code == 0, mixtures.stdout + mixtures.stderr
    for certificate in mixtures.report["certificates"]:
        checks = {check["name"]: check for check in certificate["checks"]}
        assert [(c["name"], c["observed"]) for c in checks.values() if not c["ok"]] == [], certificate["run"]
        assert "at most 0 other choices" in checks["router decisions"]["observed"]
        # Two layers, 8 sequences of 32 tokens with two choices each.
        assert checks["tokens of experts"]["observed"] == f"{2 * STEPS * 8 * 32 * 2:,} rows at {STEPS} steps"
    assert {row["experts"] for row in mixtures.report["routings"]} == {4}


@pytest.mark.parametrize("strategy", MIXED)
def test_bytes_of_experts_match_their_formula_over_all_ranks(mixtures: Any, strategy: str) -> None:
    """What one rank sends less because it computes fewer tokens, another one sends more."""
    record = mixtures.record(strategy)
    layout = layout_of(record.spec)
    predicted: Counter[str] = Counter()
    for rank in range(layout.world_size):
        predicted.update(parallel.sent_bytes(record.shape, layout, record.spec.training, rank) or {})
    counted: Counter[str] = Counter()
    for w in (w for w in record.wire if w.group_size > 1 and w.dimension):
        counted[w.dimension] += w.payload_bytes * wire_factor(w.operation, w.group_size)
    steps = len({w.step for w in record.wire})
    assert {k: v / steps for k, v in counted.items()} == {k: pytest.approx(v, rel=2e-3) for k, v in predicted.items()}
