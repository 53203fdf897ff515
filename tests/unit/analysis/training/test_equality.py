"""How equal the work of foreign scripts is: honest runs keep their level, each cheat loses it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from training_records import build_record, build_spec, build_steps

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.folders import compare_experiments
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import CERTIFIED, CONSISTENT, DIFFERENT, Certificate
from paceline.analysis.report import build
from paceline.analysis.training.certificate import certify_all
from paceline.analysis.training.certificate.observed import observe
from paceline.analysis.training.equality import grade_between
from paceline.experiment.script import Script
from paceline.host.prices import Price
from paceline.report.answer import answer
from paceline.report.charts import money, training
from paceline.report.exporters.csv import cells_text
from paceline.report.summary import headline, light
from paceline.report.tables import comparison, cost
from paceline.report.tables.table import CROSS, certification, certified_sentence, ranking
from paceline.report.text.cells import groups
from paceline.report.tiles import tiles
from paceline.results.records import RunRecord

GROUP = {"class": "AdamW", "lr": 0.1, "betas[0]": 0.9, "elements": 10}
EVIDENCE: Mapping[str, Any] = {
    "parameters": 10,
    "init_digests": {"w": "10:00000000000000aa"},
    "final_digests": {"w": "10:00000000000000bb"},
    "groups": [GROUP],
    "dtypes": {"compute": "fp32", "parameters": "fp32"},
    "flags": {"float32_matmul_precision": "highest", "fp32 products": "ieee"},
    "settings": {"loss": "output", "data": "tokens", "rates": "30:abc", "frozen_parameters": 0, "sample": "token ids"},
}


def run(
    strategy: str = "ddp", repeat: int = 0, at: float = 0.0, steps: Callable[..., Any] | None = None, **more: Any
) -> RunRecord:
    """A run of `train.py --strategy STRATEGY` on two ranks. more: evidence; code, seconds and off of the steps."""
    code, seconds, off = more.pop("code", "v1"), more.pop("seconds", 1.0), more.pop("off", 0.0)
    script = Script(command=("train.py", "--strategy", "{strategy}"), parameters={"strategy": strategy}, code=code)
    spec = replace(build_spec(None, 2, workload="script", repeat=repeat), script=script)
    samples = build_steps(spec, seconds, off=off)
    record = build_record(spec, seconds, {**EVIDENCE, **more}, steps=steps(samples) if steps else samples)
    return replace(record, started_at=at, ended_at=at + 1)


def judged(*records: RunRecord) -> list[Certificate]:
    found = certify_all(records)
    return [found[record.spec.run_id] for record in records]


def test_equal_runs_of_two_strategies_are_certified() -> None:
    first, second = judged(run("ddp"), run("fsdp", at=1.0, off=5e-5))
    assert (first.level, second.level) == (CERTIFIED, CERTIFIED)
    assert second.reference == first.run
    assert second.valid
    assert not second.differs


def test_a_run_alone_is_compared_with_nothing() -> None:
    (alone,) = judged(run("ddp", init_digests={}))
    assert alone.level_text == "nothing to compare with (not observed: initial weights, trained tensors)"


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([run("ddp")], "1 run, with nothing to compare its work with"),
        ([run("ddp"), run("fsdp", at=1.0)], "2 of 2 runs certified"),
        ([run("ddp"), run("fsdp", at=1.0, parameters=9)], "1 of 2 runs different, 1 with no equal run"),
        (
            [run("ddp", parameters=9), run("fsdp", at=1.0), run("zero3", at=2.0)],
            "2 of 3 runs certified, 1 different",
        ),
        ([run("ddp"), run("zero3", at=1.0, init_digests={})], "1 of 2 runs certified, 1 consistent"),
    ],
)
def test_a_report_does_not_call_other_work_certified(records: list[RunRecord], text: str) -> None:
    report = build(records, title="")
    assert text in light(report).text
    assert text in certified_sentence(report)
    table = certification(report)
    assert table is not None
    different = sum(bool(c.differs) for c in report.certificates)
    assert sum(row[1].text.startswith(CROSS) for row in table.rows) == different


@pytest.mark.parametrize(
    ("data", "rate", "energy"),
    [
        ("tokens", "tokens/s", "J/token"),
        ("samples", "samples/s", "J/sample"),
        ("unseen", "micro-batches/s", "J/micro-batch"),
    ],
)
def test_a_rate_says_what_was_counted(data: str, rate: str, energy: str) -> None:
    more = {"settings": {**EVIDENCE["settings"], "data": data}}
    report = build([run("ddp", **more), run("fsdp", at=1.0, seconds=2.0, **more)], title="")
    units = {m.metric: m.unit for m in report.measurements}
    assert (units["tokens_per_s"], units["joules_per_token"]) == (rate, energy)
    (table,) = ranking(report)
    assert rate in [column.heading for column in table.columns]
    (chart,) = training.throughput(report)
    assert chart.y.unit == rate


@pytest.mark.parametrize(
    ("data", "noun", "amount"),
    [
        ("tokens", "token", "billion tokens"),
        ("samples", "sample", "1000 samples"),
        ("unseen", "micro-batch", "1000 micro-batches"),
    ],
)
def test_a_cost_is_of_what_was_counted(data: str, noun: str, amount: str) -> None:
    more = {"settings": {**EVIDENCE["settings"], "data": data}}
    price = Price(name="rented", usd_per_gpu_hour=3.6, source="a test", date="2026-01")
    runs = [run("ddp", **more), run("fsdp", at=1.0, seconds=2.0, **more)]
    report = build(runs, title="", costing=Costing((price,), train_tokens=1000))
    rate = next(m.value for m in report.measurements if m.metric == "tokens_per_s")
    ddp = next(c for c in report.costs if c.axes["strategy"] == "ddp")
    assert rate is not None
    # One of 2 devices costs 3.6 USD per hour: 0.002 USD per second.
    assert ddp.usd_per_mtok.value == pytest.approx(0.002 * 1e6 / rate)
    assert (ddp.counted, ddp.usd_per_mtok.unit, ddp.amount[0]) == (noun, f"USD/M{noun}", amount)
    assert (ddp.train_cost_usd is None) == (noun != "token")
    assert any(note.startswith("--train-tokens: a script") for note in report.notes) == (noun != "token")
    (table,) = cost.tables(report)
    headings = [column.heading for column in table.columns]
    assert headings[2] == ("cost, USD/Btoken" if noun == "token" else f"cost, USD per {amount}")
    assert len(headings) == (7 if noun == "token" else 3)
    assert "None" not in str(table)
    (chart,) = money.cost(report)
    assert chart.y.unit == f"USD per {amount}"
    assert {tile.unit for tile in tiles(report) if tile.name == "Cost"} == {f"USD per {amount}"}


def test_commands_of_one_script_are_named_by_what_follows_it() -> None:
    def with_width(at: float, *words: str) -> RunRecord:
        record = run(at=at, parameters=at + 10)
        script = Script(command=("python", "lab/train.py", *words), code="v1")
        return replace(record, spec=replace(record.spec, strategy=None, script=script))

    (group,) = groups(build([with_width(0.0), with_width(1.0, "--width", "32")], title=""))
    assert group.title == "tiny, 2 processes"
    assert sorted(row.label for row in group.rows) == ["--width 32", "train.py"]
    # Other steps: a table for each, which names the rest of the command.
    short = with_width(1.0, "--width", "32")
    short = replace(short, spec=replace(short.spec, steps=short.spec.steps - 1))
    found = groups(build([with_width(0.0, "--width", "8"), short], title=""))
    named = {group.title.partition("processes, ")[2].partition(", steps")[0]: group.rows[0].label for group in found}
    assert named == {"--width 8": "train.py", "--width 32": "train.py"}


def test_values_of_one_parameter_are_ranked_in_one_table() -> None:
    """The title of a script may name the parameter; another parameter makes a table of its own."""

    def named(framework: str, settings: str, at: float, seconds: float = 1.0) -> RunRecord:
        record = run(at=at, seconds=seconds)
        parameters = {"framework": framework, "settings": settings}
        command = ("-m", "loops.{framework}", "--settings", "{settings}")
        script = Script(command=command, parameters=parameters, code="v1")
        return replace(record, spec=replace(record.spec, script=script))

    names = ["plain", "trainer", "trl"]
    chosen = [(name, settings) for settings in ("default", "best") for name in names]
    report = build([named(*each, at=float(n), seconds=n + 1) for n, each in enumerate(chosen)], title="")
    labels = {group.title: [row.label for row in group.rows] for group in groups(report)}
    assert labels == {
        f"tiny, 2 processes, settings {settings}": [f"framework {name}" for name in names]
        for settings in ("default", "best")
    }


def test_a_script_that_runs_to_its_end_has_no_number_of_steps() -> None:
    spec = run("ddp").spec
    assert spec.axes()["steps"] == spec.steps
    assert "steps" not in replace(spec, steps=0).axes()


def test_another_version_of_the_script_is_a_difference() -> None:
    (found,) = fingerprint.differences([run("ddp")], [run("ddp", code="v2", at=1.0)])
    assert (found.path, found.first, found.second) == ("code of the script", "v1", "v2")
    assert not fingerprint.differences([run("ddp")], [run("ddp", at=1.0)])


def test_sharded_weights_add_up_to_whole_ones() -> None:
    sharded = run("fsdp", at=1.0)
    parts = ["10:00000000000000a0+", "10:000000000000000a+"]
    outcomes = [
        replace(o, evidence=replace(o.evidence, init_digests={"w": part}, final_digests=None))
        for o, part in zip(sharded.outcomes, parts, strict=True)
        if o.evidence
    ]
    _, second = judged(run("ddp"), replace(sharded, outcomes=tuple(outcomes)))
    assert second.level == CERTIFIED


def test_what_cannot_be_observed_is_named() -> None:
    _, second = judged(run("ddp"), run("zero3", at=1.0, init_digests={}))
    assert second.level == CONSISTENT
    assert second.grade == "consistent (not compared: initial weights, trained tensors)"


@pytest.mark.parametrize(
    ("cheat", "what"),
    [
        ({"off": 0.01}, "losses: 5.05 instead of 5 at step 0"),
        ({"parameters": 9}, "parameters: 9 instead of 10"),
        ({"init_digests": {"w": "10:00000000000000ab"}}, "initial weights: 1 of 1 tensors"),
        ({"init_digests": {"w": "10:00000000000000aa", "b": "9:00"}}, "initial weights: 1 of 2 tensors"),
        ({"groups": [{**GROUP, "lr": 0.2}]}, "optimizer: lr 0.2 instead of 0.1"),
        ({"groups": [GROUP, {**GROUP, "class": "SGD"}]}, "optimizer: class SGD instead of AdamW"),
        ({"final_digests": EVIDENCE["init_digests"]}, "trained tensors: 0 instead of 1"),
        (
            {"steps": lambda samples: tuple(replace(s, grad_norm=s.grad_norm * 1.01) for s in samples)},
            "gradient norms: 2.02 instead of 2 at step 0",
        ),
        (
            {"settings": {**EVIDENCE["settings"], "sample": "16x12"}},
            "shape of a sample: 16x12 instead of token ids",
        ),
        ({"dtypes": {"compute": "bf16"}}, "compute dtype: bf16 instead of fp32"),
        ({"flags": {"fp32 products": "tf32"}}, "precision of fp32: fp32 products tf32 instead of ieee"),
        ({"steps": lambda samples: samples[:-2]}, "updates: 29 instead of 30"),
        (
            {"steps": lambda samples: tuple(replace(s, updates=int(s.step != 3)) for s in samples)},
            "updates: 29 instead of 30",
        ),
        (
            {"steps": lambda samples: tuple(replace(s, tokens=s.tokens // 2) for s in samples)},
            "tokens per step: 256 instead of 512 at step 0",
        ),
        (
            {"settings": {**EVIDENCE["settings"], "data": "unseen"}},
            "tokens per step: seen in one of them only; `paceline.track.batch` shows those of compiled code",
        ),
        (
            {"steps": lambda samples: tuple(replace(s, data_digest=7) for s in samples)},
            "data: other samples at step 0",
        ),
        ({"settings": {**EVIDENCE["settings"], "rates": "30:abd"}}, "optimizer: another schedule of learning rates"),
    ],
)
def test_less_work_is_different_and_never_ranked(cheat: dict[str, Any], what: str) -> None:
    records = [run(s, n, at=10.0 * n + (s == "fast"), **(cheat | {"seconds": 0.5} if s == "fast" else {}))
               for s in ("ddp", "fast") for n in range(3)]  # fmt: skip
    cheater = judged(*records)[3]
    assert what in cheater.differs
    assert cheater.level_text is not None
    assert cheater.level_text.startswith(DIFFERENT)
    assert cheater.valid
    report = build(records, title="")
    assert not report.comparisons
    assert not report.recommendations
    assert len({m.cell for m in report.measurements}) == 2
    assert answer(report)[0].startswith("No recommendation: these 2 configurations did different work")


def test_a_skipped_step_without_a_norm_leaves_those_of_the_others() -> None:
    """Of gradients that overflow in fp16, the norm may be no number."""

    def skipped(factor: float) -> Callable[..., Any]:
        return lambda samples: tuple(
            replace(s, updates=0, grad_norm=None) if s.step == 2 else replace(s, grad_norm=s.grad_norm * factor)
            for s in samples
        )

    base, same, other = judged(
        *(run(n, at=at, steps=skipped(f)) for at, (n, f) in enumerate((("a", 1), ("b", 1), ("c", 1.1))))
    )
    assert (base.level, same.level) == (CERTIFIED, CERTIFIED)
    assert other.differs == ("gradient norms: 2.2 instead of 2 at step 0",)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_rounding_grows_slowly_and_a_late_mistake_jumps(compute: str) -> None:
    least, growth = (1e-4, 1e-5) if compute == "fp32" else (1e-2, 1e-3)
    dtypes = {"compute": compute, "parameters": "fp32"}

    def deviating(by: Callable[[int], float]) -> Callable[..., Any]:
        return lambda samples: tuple(replace(s, loss=s.loss * (1 + by(s.step))) for s in samples)

    base, rounded, late = judged(
        run("ddp", dtypes=dtypes),
        run("rounded", at=1.0, dtypes=dtypes, steps=deviating(lambda step: 0.9 * growth * step)),
        run("late", at=2.0, dtypes=dtypes, steps=deviating(lambda step: 1.5 * least * (step >= 25))),
    )
    assert base.level == rounded.level == CERTIFIED
    (what,) = late.differs
    assert what.startswith("losses: ")
    assert what.endswith(" at step 25")


def test_a_frozen_tensor_is_missing_among_the_weights() -> None:
    whole = {"w": "10:00000000000000aa", "b": "9:00", "c": "9:00"}
    _, frozen = judged(run("ddp", init_digests=whole), run("frozen", at=1.0, init_digests={k: whole[k] for k in "wb"}))
    assert "initial weights: 1 of 3 tensors are missing" in frozen.differs


def test_groups_are_compared_in_both_directions_and_by_size() -> None:
    """Weight decay on every weight, or on other weights, is another optimizer, although each group is known."""
    some, none = {**GROUP, "elements": 4, "weight_decay": 0.1}, {**GROUP, "elements": 6, "weight_decay": 0.0}
    base, all_decayed, other = judged(
        run("ddp", groups=[some, none]),
        run("all", at=1.0, groups=[{**some, "elements": 10}]),
        run("other", at=2.0, groups=[{**some, "elements": 5}, {**none, "elements": 5}]),
    )
    assert base.level == CERTIFIED
    assert all_decayed.differs == ("optimizer: elements 10 instead of 4",)
    assert other.differs == ("optimizer: elements 5 instead of 4",)
    _, lost = judged(run("ddp", groups=[some, none]), run("sharded", at=1.0, groups=[{**some, "elements": 2}]))
    _, split = judged(
        run("ddp", groups=[some, none]),
        run("trainer", at=1.0, groups=[{**some, "elements": 3}, none, {**some, "elements": 1}]),
    )
    assert split.level == CERTIFIED
    assert lost.differs == ("optimizer: a group is missing (weight_decay 0.0 instead of 0.1)",)


def test_a_script_without_a_seed_is_consistent_at_best() -> None:
    """Its launches have other weights, data and losses each time, which says nothing about the strategies."""
    records = [
        run(s, n, at=10.0 * n, off=0.02 * n, init_digests={"w": f"10:{number:016x}"})
        for number, (s, n) in enumerate((s, n) for s in ("ddp", "fsdp") for n in range(2))
    ]
    found = judged(*records)
    assert {c.level for c in found} == {CONSISTENT}
    assert not any(c.differs for c in found)
    assert "initial weights, losses" in str(found[1].grade)


def test_kinds_of_work_are_compared_among_themselves() -> None:
    """Two batch sizes with two strategies each: strategies are ranked within a batch size, never across."""
    half: Callable[..., Any] = lambda samples: tuple(replace(s, tokens=s.tokens // 2) for s in samples)  # noqa: E731
    records = [run("ddp"), run("fsdp", at=1.0), run("ddp", 1, at=2.0, steps=half), run("fsdp", 1, at=3.0, steps=half)]
    found = judged(*records)
    assert [c.work == found[0].work for c in found] == [True, True, False, False]
    assert found[3].reference == found[2].run


def test_what_most_runs_did_is_the_baseline() -> None:
    """Runs start in random order: one with a mistake that is the first must not make all others different."""
    strange, *others = judged(run("ddp", parameters=9), run("fsdp", at=1.0), run("zero3", at=2.0))
    assert strange.differs == ("parameters: 9 instead of 10",)
    assert [c.differs for c in others] == [(), ()]
    assert others[1].reference == others[0].run
    assert len({strange.work, *(c.work for c in others)}) == 2


def test_cells_of_other_work_come_last() -> None:
    fastest = run("ddp", parameters=9, seconds=0.5)
    (group,) = groups(build([fastest, run("fsdp", at=1.0), run("zero3", at=2.0, seconds=2.0)], title=""))
    assert [row.label for row in group.rows] == ["fsdp", "zero3", "ddp"]


def test_the_headline_names_no_cell_of_other_work() -> None:
    fastest = run("ddp", parameters=9, seconds=0.5)
    report = build([fastest, run("fsdp", at=1.0), run("zero3", at=2.0, seconds=2.0)], title="")
    assert headline(report).endswith("(fsdp); one launch each, so no verdict")


def test_verdicts_say_the_level() -> None:
    times = {"ddp": 1.0, "fsdp": 2.0}
    records = [
        run(s, n, at=10.0 * n, seconds=[x * (1 + 0.001 * ((k + n) % 3)) for k in range(30)])
        for s, x in times.items()
        for n in range(3)
    ]
    report = build(records, title="")
    speed = next(c for c in report.comparisons if c.metric == "tokens_per_s")
    assert (speed.label, speed.verdict, speed.level) == ("ddp", "better", CERTIFIED)
    assert speed.ratio == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"steps": lambda samples: tuple(replace(s, loss=float("nan")) for s in samples)}, "not a number at step 0"),
        ({"steps": lambda samples: samples[:-1]}, "29 on rank 1"),
        ({"steps": lambda samples: tuple(replace(s, updates=0) for s in samples)}, "none of them updated the weights"),
    ],
)
def test_unsound_runs_are_invalid(broken: dict[str, Any], reason: str) -> None:
    (found,) = judged(run(**broken))
    assert not found.valid
    assert reason in found.reasons[0]


def test_ranks_that_never_reduced_are_invalid() -> None:
    record = run()
    other = replace(record.outcomes[1], evidence=replace(record.outcomes[1].evidence, final_digests={"w": "10:cc"}))  # type: ignore[arg-type]
    (found,) = judged(replace(record, outcomes=(record.outcomes[0], other)))
    assert "ranks ended with different weights" in found.reasons[0]


def test_launches_of_older_code_do_not_count() -> None:
    old, new = judged(run(code="v1"), run(repeat=1, at=5.0, code="v2"))
    assert not old.valid
    assert new.valid


def test_a_comparison_with_other_work_says_so_first() -> None:
    before, after = ([run(repeat=n, at=n, **more) for n in range(2)] for more in ({}, {"parameters": 9, "code": "v2"}))
    text = comparison.sentence(compare_experiments(before, after))
    assert text.startswith("B did other work than A, so there is no verdict")
    assert "slower" not in text
    assert "code of the script" in text
    assert "v1 -> v2" not in text
    same = [run("fsdp", repeat=n, at=10.0 + n) for n in range(2)]
    text = comparison.sentence(compare_experiments([*before, *same], [*after, *same]))
    assert text.startswith("B did other work than A in 1 of 2 cells, so there is no verdict on these")


def test_rates_of_two_units_have_columns_of_their_own() -> None:
    samples = {**EVIDENCE["settings"], "data": "samples", "sample": "16"}
    records = [run("ddp"), run("fsdp", at=1.0, settings=samples)]
    first, second = csv.DictReader(io.StringIO(cells_text(build(records, title=""))))
    assert first["tokens_per_s [tokens/s]"]
    assert second["tokens_per_s [samples/s]"]
    assert not first["tokens_per_s [samples/s]"]
    assert not second["tokens_per_s [tokens/s]"]


def test_two_versions_are_graded_against_each_other() -> None:
    before = [observe(run(repeat=n, at=n)) for n in range(2)]
    assert grade_between(before, [observe(run(repeat=n, code="v2")) for n in range(2)]).level == CERTIFIED
    slower = grade_between(before, [observe(run(repeat=n, code="v2", off=0.1)) for n in range(2)])
    assert slower.level == DIFFERENT


def test_the_level_is_beside_each_row_although_all_rows_have_the_same() -> None:
    (table,) = ranking(build([run(s, n, at=10.0 * n) for s in ("ddp", "fsdp") for n in range(2)], title=""))
    level = [column.name for column in table.columns].index("equal work")
    assert [row[level].text for row in table.rows] == ["certified, 2 runs"] * 2
