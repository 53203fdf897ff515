"""One campaign of every strategy at two processes, and at one: equal work proved, and every byte explained.

All runs have the same global batch: two processes with accumulation 2 and micro batch 2, one process with accumulation
1 and micro batch 8. So they share one reference, and accumulation is shown to be accumulation for every strategy.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from paceline.models import arithmetic
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

ZERO_3 = "zero:stage=3"
ZERO_3_GATHERS_TWICE = "zero:stage=3,persistence_threshold=0,max_live_parameters=0,max_reuse_distance=0"
STRATEGIES = ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", ZERO_3)
SYNCS_ALWAYS = "fsdp2:sync_every_micro_batch=true"
OFFLOADED = "zero:stage=3,offload=cpu,prefetch_bucket=1000"
MORE = (OFFLOADED, "ddp:gradient_as_bucket_view=false", "ddp:find_unused_parameters=true") if EXHAUSTIVE else ()
VARIANTS = (SYNCS_ALWAYS, ZERO_3_GATHERS_TWICE, *MORE)
# It does not accumulate.
STATIC = "ddp:static_graph=true"
# tests/adversary has both kinds with DDP, tests/end_to_end/test_memory_runs.py the first with FSDP2.
CHECKPOINTED = {"ddp": "selective", "fsdp2": "full"} if EXHAUSTIVE else {}
# Those that one process has, too: torch's and DeepSpeed's.
ALONE = STRATEGIES if EXHAUSTIVE else ("ddp", ZERO_3)
# One of each library; a profile takes a third of a run. tests/end_to_end/test_warm_ranks.py has one of DDP.
PROFILED = (*STRATEGIES, *VARIANTS) if EXHAUSTIVE else ("fsdp2", ZERO_3)
STEPS = 4
TOKENS_PER_STEP = 8 * 32


@pytest.fixture(scope="module")
def equal(campaign: Callable[..., Any]) -> Any:
    matrix = [
        {"strategy": [*STRATEGIES, *VARIANTS]},
        {"strategy": list(ALONE), "processes": [1], "micro_batch": [8]},
        {"strategy": [STATIC], "micro_batch": [4]},
        *({"strategy": [name], "checkpointing": [how]} for name, how in CHECKPOINTED.items()),
    ]
    return campaign("equal", matrix, profiled=PROFILED, micro_batch=2)


def runs(equal: Any) -> list[RunRecord]:
    return [record for record in equal.records if not record.is_reference]


def losses(record: RunRecord) -> list[float]:
    """The mean over ranks, which hold equally many tokens, at every step."""
    by_step: dict[int, list[float]] = {}
    for sample in record.steps:
        by_step.setdefault(sample.step, []).append(sample.loss)
    return [sum(values) / len(values) for _, values in sorted(by_step.items())]


def test_every_run_is_ok_and_valid(equal: Any) -> None:
    assert equal.code == 0, equal.stdout + equal.stderr
    assert len(runs(equal)) == len(STRATEGIES) + len(VARIANTS) + len(ALONE) + 1 + len(CHECKPOINTED)
    assert {record.status for record in equal.records} == {"ok"}
    certificates = equal.report["certificates"]
    assert len(certificates) == len(runs(equal))
    for certificate in certificates:
        assert all(check["ok"] for check in certificate["checks"])
        assert len(certificate["checks"]) >= 12
    assert len({record.spec.work for record in equal.records}) == 1, "one reference serves them all"


def test_the_files_of_the_report_are_there(equal: Any) -> None:
    names = {path.name for path in equal.directory.iterdir()}
    assert {"report.html", "report.md", "metrics.csv", "report.json"} <= names
    assert "<html" in (equal.directory / "report.html").read_text()
    for strategy in STRATEGIES:
        assert strategy in (equal.directory / "report.md").read_text()
    assert equal.report["schema"] == 1
    metrics = {m["metric"] for m in equal.report["measurements"]}
    assert {"tokens_per_s", "step_time_s", "peak_memory_bytes", "wire_bytes_per_step", "comm_exposed_ratio"} <= metrics


def test_every_run_has_gauges_around_its_steps(equal: Any) -> None:
    for record in equal.records:
        assert {(s.rank, s.device) for s in record.gauges} == {(0, None)}, record.spec.run_id
        assert all(s.memory_used_bytes for s in record.gauges)
    record = equal.record("ddp", world_size=2, checkpointing="none")
    began = record.evidence.window_began_at_s
    own = sum(step.duration_s for step in record.steps if step.rank == 0)
    times = [sample.at_s for sample in record.gauges]
    assert min(times) < began < began + own < max(times)
    energy = [m for m in equal.report["measurements"] if m["metric"] == "joules_per_token"]
    assert len(energy) == len(runs(equal))
    assert all(m["value"] is not None or m["note"].startswith("energy: ") for m in energy)


def test_losses_follow_the_reference(equal: Any) -> None:
    reference = losses(equal.record(None))
    assert len(reference) == STEPS
    for record in runs(equal):
        assert losses(record) == pytest.approx(reference, rel=1e-4), record.spec.run_id


@pytest.mark.parametrize("strategy", ALONE)
def test_accumulating_two_of_two_equals_one_of_all(equal: Any, strategy: str) -> None:
    """Method, section 6 (5), the partition over processes included."""
    two = equal.record(strategy, world_size=2, checkpointing="none")
    one = equal.record(strategy, world_size=1)
    assert {s.micro_batches for s in two.steps} == {2}
    assert {s.micro_batches for s in one.steps} == {1}
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for record in (two, one):
        ranks = record.spec.topology.world_size
        assert sum(s.updates for s in record.steps) == STEPS * ranks
        tokens: Counter[int] = Counter()
        digests: Counter[int] = Counter()
        for sample in record.steps:
            tokens[sample.step] += sample.tokens
            digests[sample.step] += sample.data_digest
        assert set(tokens.values()) == {TOKENS_PER_STEP}
        assert [digests[s] % 2**64 for s in range(STEPS)] == [s.data_digest for s in sorted(one.steps, key=_step)]
    norms = {s.step: s.grad_norm for s in one.steps}
    assert [norms[s.step] for s in two.steps] == pytest.approx([s.grad_norm for s in two.steps], rel=1e-4)


def _step(sample: Any) -> int:
    return int(sample.step)


def test_all_start_from_the_same_weights(equal: Any) -> None:
    digests = {o.evidence.init_digest for record in equal.records for o in record.outcomes if o.evidence}
    assert len(digests) == 1
    counts = {o.evidence.parameters for record in equal.records for o in record.outcomes if o.evidence}
    assert counts == {arithmetic.parameters(arithmetic.load(equal.records[0].spec.model))}


@pytest.mark.parametrize("strategy", [*STRATEGIES, *VARIANTS])
def test_counted_wire_bytes_equal_the_formula(equal: Any, strategy: str) -> None:
    """Method, section 6 (6): exactly for gradients and weights; single numbers (a norm for each tensor) come on top."""
    record = equal.record(strategy, world_size=2, checkpointing="none")
    shape = arithmetic.load(record.spec.model)
    formula = arithmetic.wire_bytes(
        record.spec.strategy,
        arithmetic.parameters(shape),
        2,
        record.spec.training.accumulation,
        4,
        4,
        arithmetic.root_parameters(shape),
        arithmetic.tensor_sizes(shape),
    )
    scalars = 16 + 4 * len(arithmetic.tensor_sizes(shape))
    audited = {w.step for w in record.wire}
    assert len(audited) == 2
    for rank, step in itertools.product((0, 1), audited):
        mine = [w for w in record.wire if (w.rank, w.step) == (rank, step)]
        counted = sum(w.payload_bytes * arithmetic.wire_factor(w.operation, w.group_size) for w in mine)
        assert 0 <= counted - formula <= scalars, (counted, formula)
        assert {w.group_size for w in mine} == {2}
        assert all(w.dtype == "fp32" for w in mine if w.payload_bytes > scalars)


def test_the_formulas_by_hand(equal: Any) -> None:
    """The same numbers without `models.wire_bytes`: P parameters, G micro batches, 4 bytes, two ranks."""
    record = equal.record("ddp", world_size=2, checkpointing="none")
    whole = arithmetic.parameters(arithmetic.load(record.spec.model))
    g = 2

    def elements(strategy: str, operation: str) -> int:
        wire = equal.record(strategy, world_size=2, checkpointing="none").wire
        first = [w for w in wire if w.rank == 0 and w.step == min(w.step for w in wire)]
        return sum(w.payload_bytes for w in first if w.operation == operation and w.dtype == "fp32") // 4

    assert elements("ddp", "all_reduce") == whole
    assert elements("fsdp2", "reduce_scatter") == whole
    assert elements(SYNCS_ALWAYS, "reduce_scatter") == g * whole
    assert elements("zero:stage=1", "all_reduce") == whole + 1
    assert elements("zero:stage=1", "all_gather") == whole
    assert elements("zero:stage=2", "all_reduce") == g * whole + 1
    assert elements(ZERO_3_GATHERS_TWICE, "all_gather") == 2 * g * whole
    assert elements(ZERO_3_GATHERS_TWICE, "reduce_scatter") == g * whole
    assert elements(ZERO_3, "all_gather") == whole, "all tensors of this model are below the persistence threshold"


def test_one_process_sends_nothing(equal: Any) -> None:
    for strategy in ALONE:
        record = equal.record(strategy, world_size=1)
        assert sum(w.payload_bytes * arithmetic.wire_factor(w.operation, w.group_size) for w in record.wire) == 0


@pytest.mark.parametrize(("strategy", "how"), CHECKPOINTED.items())
def test_checkpointing_changes_nothing_but_memory(equal: Any, strategy: str, how: str) -> None:
    plain = equal.record(strategy, world_size=2, checkpointing="none")
    again = equal.record(strategy, world_size=2, checkpointing=how)
    assert losses(again) == pytest.approx(losses(plain), rel=1e-6)


def test_every_rank_recorded_phases_memory_and_time_line(equal: Any) -> None:
    for record in runs(equal):
        ranks = set(range(record.spec.topology.world_size))
        assert {s.rank for s in record.steps} == {m.rank for m in record.memory} == ranks
        assert {t.rank for t in record.traces} == (ranks if str(record.spec.strategy) in PROFILED else set())
        for s in record.steps:
            parts = [s.data_wait_s, s.forward_s, s.backward_s, s.optimizer_s]
            assert all(part is not None and part >= 0 for part in parts)
            assert sum(parts) <= s.duration_s + 1e-6, "phases lie inside their step"
            assert s.h2d_s is None, "there is no device to copy to"
        assert {m.moment for m in record.memory} == {"setup", "steps"}
        assert all(m.resident_bytes and m.allocated_bytes is None for m in record.memory)


def test_an_experiment_compared_with_itself_shows_no_difference(equal: Any, paceline: Any) -> None:
    done = paceline("compare", str(equal.directory), str(equal.directory))
    assert done.returncode == 0, done.stderr
    assert "better" not in done.stdout
    assert "worse" not in done.stdout
    shown = paceline("show", str(equal.record("ddp", world_size=1).path))
    assert shown.returncode == 0
    assert "loss trajectory" in shown.stdout
