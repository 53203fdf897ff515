"""The two sentences as records make them: whoever wins, whatever is left out, and the same from disk."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.analysis.compare.recommend import by_cost
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Recommendation, Report
from paceline.analysis.report import build
from paceline.experiment.spec import WarmUp
from paceline.host.prices import Price
from paceline.report import recommendation_lines
from paceline.report.answer import answer, grounds, headline
from paceline.report.tables import table, verdicts
from paceline.report.text import cells as standing
from paceline.results import store
from paceline.results.records import RunRecord, Status

Builder = Callable[..., Any]


@pytest.fixture
def campaign(make_cell: Builder, make_reference: Builder) -> Builder:
    """Strategies with their step times, and the reference of them all."""

    def make(*others: RunRecord, **seconds: float) -> list[RunRecord]:
        names = {"zero1": "zero:stage=1", "zero3": "zero:stage=3"}
        cells = [make_cell(s, strategy=names.get(name, name)) for name, s in seconds.items()]
        return [make_reference(cells[0][0].spec), *(r for cell in cells for r in cell), *others]

    return make


def ended(spec: Any, status: Status, error: str = "it ended so") -> RunRecord:
    return RunRecord(spec=spec, status=status, error=error, started_at=1.0, ended_at=2.0, path="")


def said(report: Report) -> str:
    return " ".join((*answer(report), grounds(report), *recommendation_lines(report)))


def test_the_winner_its_margin_and_the_place(campaign: Builder, golden: object) -> None:
    first, _ = answer(build(campaign(fsdp2=1.0, zero3=1.34), "test"))
    assert first == golden
    assert first.startswith("fsdp2")
    assert "is 34 % faster than zero:stage=3" in first
    assert "zero:stage=3" in first


def test_data_in_which_the_expected_winner_loses_say_the_opposite(campaign: Builder, golden: object) -> None:
    text = answer(build(campaign(ddp=1.0, fsdp2=1.2), "test"))[0]
    assert text == golden
    assert text.startswith("ddp")
    text = answer(build(campaign(ddp=1.2, fsdp2=1.0), "test"))[0]
    assert text == golden
    assert text.startswith("fsdp2")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.OOM, "zero:stage=3 does not fit."),
        (Status.FAILED, "zero:stage=3 failed."),
        (Status.TIMEOUT, "zero:stage=3 ran out of time."),
        (Status.UNSUPPORTED, "zero:stage=3 is not supported here."),
    ],
)
def test_the_second_sentence_says_what_was_left_out(
    status: Status, words: str, campaign: Builder, make_spec: Builder
) -> None:
    report = build(campaign(ended(make_spec("zero:stage=3"), status), ddp=1.0, fsdp2=1.2), "test")
    assert answer(report)[1] == words
    (left,) = report.recommendations[0].left_out
    assert (left.name, left.status, left.reason, len(left.runs)) == ("zero:stage=3", status, "it ended so", 1)


def test_an_invalid_cell_is_left_out_however_fast(campaign: Builder, make_cell: Builder, golden: object) -> None:
    wrong = [
        dataclasses.replace(r, steps=tuple(dataclasses.replace(s, updates=4) for s in r.steps))
        for r in make_cell(0.5, strategy="zero:stage=3")
    ]
    first, second = answer(build(campaign(*wrong, ddp=1.0, fsdp2=1.2), "test"))
    assert first == golden
    assert first.startswith("ddp")
    assert second == golden
    assert second.startswith("zero:stage=3")


def test_what_failed_elsewhere_was_not_left_out_of_this_group(campaign: Builder, make_spec: Builder) -> None:
    alone = ended(make_spec("zero:stage=3", world_size=1), Status.OOM)
    assert "does not fit" not in " ".join(answer(build(campaign(alone, ddp=1.0, fsdp2=1.2), "test")))


def test_with_nothing_left_out_the_second_sentence_is_about_memory(
    campaign: Builder, make_cell: Builder, golden: object
) -> None:
    lean = make_cell(1.2, strategy="fsdp2", record={"memory_bytes": 40 * 2**20})
    _, second = answer(build(campaign(*lean, ddp=1.0), "test"))
    assert second == golden
    assert second.startswith("fsdp2")
    assert "58 % less" in second
    assert "ddp" in second


def test_else_about_what_holds_the_winner_back(campaign: Builder, golden: object) -> None:
    report = build(campaign(ddp=1.0, fsdp2=1.2), "test")
    assert {b.kind for b in report.bottlenecks} == {"undecided"}
    assert answer(report)[1] == "", "no headline is made of what nobody knows"
    decided = tuple(dataclasses.replace(b, kind="network", share_ratio=0.61) for b in report.bottlenecks)
    _, second = answer(dataclasses.replace(report, bottlenecks=decided))
    assert second == golden
    assert second.startswith("ddp")
    assert "61" in second


def test_equal_strategies_are_called_equal(campaign: Builder, golden: object) -> None:
    first, _ = answer(build(campaign(ddp=1.0, fsdp2=1.002), "test"))
    assert first == golden
    first, _ = answer(build(campaign(ddp=1.0, fsdp2=1.002, zero1=1.4), "test"))
    assert first == golden
    assert "zero:stage=1" in first


def test_one_launch_is_a_number_and_no_verdict(make_cell: Builder, make_reference: Builder, golden: object) -> None:
    cells = [make_cell(s, 1, strategy=name) for name, s in {"ddp": 1.0, "fsdp2": 2.0}.items()]
    report = build([make_reference(cells[0][0].spec), *(r for cell in cells for r in cell)], "test")
    first, _ = answer(report)
    assert first == golden
    assert "repeats=3" in first
    assert not re.search(r"faster|times as", said(report))


def test_noise_says_what_it_could_have_shown_and_how_many_launches_would(
    make_cell: Builder, make_reference: Builder, golden: object
) -> None:
    cells = [make_cell(s, strategy=name, spread=0.05) for name, s in {"ddp": 1.0, "fsdp2": 1.02}.items()]
    report = build([make_reference(cells[0][0].spec), *(r for cell in cells for r in cell)], "test")
    (pair,) = [c for c in report.comparisons if c.metric == "tokens_per_s"]
    first, _ = answer(report)
    assert first == golden
    assert f"about {pair.launches_needed} launches of each" in first
    # By the square root of the number of launches alone it would be 61: more launches also know their spread better.
    assert 20 < pair.launches_needed < 3 * (pair.detectable_ratio / 0.02) ** 2


def test_no_claim_without_a_comparison(campaign: Builder, make_spec: Builder, golden: object) -> None:
    report = build(campaign(ended(make_spec("ddp"), Status.OOM), fsdp2=1.0), "test")
    assert report.comparisons == report.recommendations == ()
    found = answer(report)
    assert found[0] == table.NO_ANSWER
    assert found[1] == golden
    assert "fsdp2" in found[1]
    assert "ddp" in found[1]
    assert not re.search(r"faster|times as|better|choose", said(report))


def test_the_recommendation_with_the_most_runs_answers(campaign: Builder, make_cell: Builder, golden: object) -> None:
    compiled = make_cell(0.9, strategy="ddp", compile=True)
    report = build(campaign(*compiled, ddp=1.0, fsdp2=1.2, zero1=1.4), "test")
    found = headline(report)
    assert found is not None
    assert len(found.runs) == 9
    assert {r.metric for r in report.recommendations if len(r.runs) == 6} >= {"tokens_per_s"}
    text = answer(report)[0]
    assert text == golden
    assert text.startswith("ddp")


def test_a_recommendation_cites_every_run_and_names_what_never_varied(campaign: Builder, golden: object) -> None:
    report = build(campaign(ddp=1.0, fsdp2=1.2), "test")
    first = report.recommendations[0]
    assert set(first.runs) == {r.run for r in report.runs if not r.is_reference}
    assert first.not_measured == golden
    (reasons, cited) = verdicts.details(report)
    assert len(reasons.rows) == len(report.bottlenecks) == 2
    assert all(run in cited.rows[0][4].text for run in first.runs)
    assert recommendation_lines(report) == golden


def test_an_axis_that_varied_is_not_called_unmeasured(campaign: Builder, make_cell: Builder) -> None:
    more = make_cell(0.9, strategy="ddp", compile=True)
    report = build(campaign(*more, ddp=1.0, fsdp2=1.2), "test")
    assert all("compilation" not in text for r in report.recommendations for text in r.not_measured)


def test_the_text_from_disk_is_the_text_from_memory(campaign: Builder, tmp_path: Path) -> None:
    """Test (10) of method.md: whoever reads the stored samples again reads the same sentences."""
    records = campaign(ddp=1.0, fsdp2=1.2, zero1=1.4)
    for record in records:
        keep(record, tmp_path)
    again, skipped = store.read_runs(tmp_path)
    assert (len(again), skipped) == (len(records), [])
    kept, built = build(again, "test"), build(records, "test")
    assert said(kept) == said(built)
    assert (kept.recommendations, kept.bottlenecks) == (built.recommendations, built.bottlenecks)


def keep(record: RunRecord, out: Path) -> None:
    run_dir = store.create(out, record.spec)
    for rank in range(record.spec.topology.world_size):
        samples = (*record.steps, *record.memory, *record.wire, *record.traces)
        lines = [store.sample_line(s) for s in samples if s.rank == rank]
        (run_dir / f"samples-{rank}.jsonl").write_text("".join(lines))
    for outcome in record.outcomes:
        store.write_outcome(run_dir, outcome)
    for i, machine in enumerate(record.machines):
        store.write_json(run_dir / f"machine-{i}.json", machine)
    store.seal(run_dir, record.status, record.error, record.started_at, record.ended_at)


def test_runs_without_a_step_beyond_their_warm_up_are_no_success(
    make_spec: Builder,
    make_record: Builder,
    make_reference: Builder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    golden: object,
) -> None:
    spec = make_spec("ddp", steps=6, warmup=WarmUp(minimum=6, maximum=6))
    for record in (make_reference(spec), make_record(spec)):
        keep(record, tmp_path)
    assert cli.main(["report", str(tmp_path / "test"), "--format", "json"]) == 1
    assert " ".join(capsys.readouterr().out.split()) == golden


@pytest.mark.parametrize(
    ("machine", "second", "rest"),
    [
        ("Another claims 5 tokens/s.", "Measured: ddp (tiny, 2 processes).", "Another claims 5 tokens/s."),
        ("Suspect: GPU 3.", "Suspect: GPU 3.", "Measured: ddp (tiny, 2 processes)."),
    ],
)
def test_measurements_come_before_claims_and_the_machine_but_after_a_fault(
    machine: str, second: str, rest: str, campaign: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.report.answer.MACHINE_SENTENCES", (lambda report: machine,))
    report = build(campaign(ddp=1.0), "test")
    assert answer(report) == (table.NO_ANSWER, second)
    assert grounds(report) == rest


# --- cost ---


FIRM = Price(name="rented", usd_per_gpu_hour=2.0, kind="on demand")
SPARE = Price(name="spare", usd_per_gpu_hour=0.5, kind="spot")


def cheapest(records: list[RunRecord], *prices: Price) -> Recommendation:
    report = build(records, "test", costing=Costing(prices))
    (found,) = (r for r in report.recommendations if r.category == "lowest cost")
    assert found.because == report.recommendations[0].because
    return found


def test_at_one_price_cost_is_throughput_in_other_words(campaign: Builder, golden: object) -> None:
    found = cheapest(campaign(ddp=1.0, fsdp2=1.2), FIRM)
    assert found.choose == ("ddp",)
    assert found.text == golden
    assert "costs 17 % less" in found.text


def test_cost_is_quoted_at_the_price_that_leads_the_table_and_names_it(campaign: Builder) -> None:
    found = cheapest(campaign(ddp=1.0, fsdp2=1.2), SPARE, FIRM)
    # 2 processes at 2 USD/h, 512 tokens in 1 s and in 1.2 s: 2,170 and 2,604 USD, known to about 0.1 %.
    said = re.search(r"That is (\S+) against (\S+) USD per billion tokens at rented \(on demand\)\.$", found.text)
    assert said is not None
    assert [float(usd.replace(",", "")) for usd in said.groups()] == pytest.approx([2170, 2604], rel=0.005)
    assert all(len(usd) > 4 for usd in said.groups()), "rounded by the interval, not to three digits"


def test_equal_costs_name_all_of_them(campaign: Builder, golden: object) -> None:
    found = cheapest(campaign(**{"ddp": 1.0, "fsdp2": 1.002, "zero:stage=3": 1.4}), FIRM)
    assert len(found.choose) == 2
    assert found.text == golden
    assert f"{' and '.join(found.choose)}" in found.text


def test_at_two_prices_or_none_nothing_is_said_about_cost(campaign: Builder) -> None:
    report = build(campaign(ddp=1.0, fsdp2=1.2), "test", costing=Costing((FIRM,)))
    dearer = dataclasses.replace(report.costs[0], price=dataclasses.replace(FIRM, usd_per_gpu_hour=3.0))
    assert by_cost(dataclasses.replace(report, costs=())) == ()
    assert by_cost(dataclasses.replace(report, costs=(dearer, *report.costs[1:]))) == ()


def test_equal_memory_names_all_of_them(make_cell: Builder, make_reference: Builder, golden: object) -> None:
    seconds = {"ddp": 1.0, "fsdp2": 1.2, "zero:stage=3": 1.4}
    cells = [
        make_cell(s, strategy=name, record={"memory_bytes": (100 if name == "ddp" else 40) * 2**20})
        for name, s in seconds.items()
    ]
    report = build([make_reference(cells[0][0].spec), *(r for cell in cells for r in cell)], "test")
    second = answer(report)[1]
    assert second == golden


@pytest.fixture
def two_kinds(make_cell: Builder, make_reference: Builder) -> list[RunRecord]:
    """Strategies on two kinds of GPU, nothing else telling the groups apart; only the first holds a lean one."""
    seconds = {"ddp": ("A100", 1.0, 80), "fsdp2": ("A100", 1.2, 40)}
    seconds |= {f"zero:stage={stage}": ("H200", 0.3 + stage / 10, 80) for stage in (1, 2, 3)}
    cells = [
        make_cell(s, strategy=name, device="cuda", record={"gpus": [{"name": gpu}], "memory_bytes": mib * 2**20})
        for name, (gpu, s, mib) in seconds.items()
    ]
    reference = make_reference(cells[0][0].spec, gpus=[{"name": "A100"}])
    return [reference, *(r for cell in cells for r in cell)]


def test_groups_on_two_kinds_of_device_have_different_names(two_kinds: list[RunRecord], golden: object) -> None:
    report = build(two_kinds, "test")
    first, second = answer(report)
    assert first == golden
    assert first.startswith("zero:stage=1")
    assert "zero:stage=2" in first
    assert "H200" in first
    assert "fsdp2" not in second
    lines = recommendation_lines(report)
    assert [line for line in lines if line.endswith(("A100", "H200"))] == [
        f"tiny, 2 GPUs, fp32, sequence 64, global batch 8, {gpu}" for gpu in ("A100", "H200")
    ]


def test_numbers_beside_the_answer_are_of_its_group_even_if_titles_agree(two_kinds: list[RunRecord]) -> None:
    report = build(two_kinds, "test")
    alike = tuple(dataclasses.replace(r, group="the same words") for r in report.recommendations)
    same = dataclasses.replace(report, recommendations=alike)
    assert "fsdp2" not in answer(same)[1]
    assert recommendation_lines(same).count("the same words") == 2


def test_a_failure_on_another_kind_of_device_is_not_left_out_of_this_group(
    two_kinds: list[RunRecord], make_spec: Builder
) -> None:
    machine = {"host": "b", "gpus": [{"name": "H200"}]}
    lost = dataclasses.replace(ended(make_spec("fsdp2:x=1", device="cuda"), Status.OOM), machines=(machine,))
    found = {r.group[-4:]: r.left_out for r in build([*two_kinds, lost], "test").recommendations}
    assert (found["A100"], [left.name for left in found["H200"]]) == ((), ["fsdp2:x=1"])


def test_cells_on_two_kinds_of_device_are_ranked_apart(two_kinds: list[RunRecord]) -> None:
    report = build(two_kinds, "test")
    assert {run.device_name for run in report.runs} == {"A100", "H200"}
    found = {group.axes["device_name"]: group for group in standing.groups(report)}
    ranks = {name: [(row.rank, row.label) for row in group.rows] for name, group in found.items()}
    assert ranks == {"A100": [("1", "ddp"), ("2", "fsdp2")], "H200": [(str(i), f"zero:stage={i}") for i in (1, 2, 3)]}
    assert all(name in group.title for name, group in found.items() if isinstance(name, str))


def test_else_about_the_last(campaign: Builder, golden: object) -> None:
    report = build(campaign(**{"ddp": 1.0, "fsdp2": 1.2, "zero:stage=3": 2.0}), "test")
    first, second = answer(report)
    assert first == golden
    assert first.startswith("ddp")
    assert "20 % faster" in first
    assert second == golden
    assert second.startswith("ddp")
    assert "zero:stage=3" in second


def test_a_report_of_failures_says_that_nothing_was_measured(campaign: Builder, make_spec: Builder) -> None:
    runs = [ended(make_spec(name), status) for name, status in (("ddp", Status.FAILED), ("fsdp2", Status.UNSUPPORTED))]
    found = answer(build(runs, "test"))
    assert found[0] == "Nothing was measured: 1 run failed and 1 run is not supported here."
    assert answer(build(runs[1:], "test"))[0] == table.NO_ANSWER
    assert answer(build(campaign(*runs, ddp=1.0), "test"))[0] == table.NO_ANSWER
