"""Cost by hand: 8 sequences of 64 tokens in a step of 1 s on 2 devices are 512 tokens/s and 8 samples/s."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from paceline.analysis.cost import training
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Cost, Report
from paceline.analysis.report import build
from paceline.host.prices import SPOT, Price, chosen
from paceline.report import brief_group
from paceline.report.charts import charts
from paceline.report.tables import cost as shown
from paceline.report.tables.budget import samples_name
from paceline.report.tiles import tiles
from paceline.results.records import RunRecord
from paceline.wording import TIMES

Builder = Callable[..., Any]
HOURLY = Price(name="hourly", usd_per_gpu_hour=3.6, source="a test", date="2026-01")
SPOTTED = Price(name="spotted", usd_per_gpu_hour=0.9, kind=SPOT, source="a test", date="2026-01")


def reported(groups: Sequence[Sequence[RunRecord]], make_reference: Builder, costing: Costing | None = None) -> Report:
    records = [record for group in groups for record in group]
    works = {record.spec.work: record.spec for record in records}
    return build([*map(make_reference, works.values()), *records], "test", costing=costing)


def test_tokens_per_usd_times_usd_per_token_is_one() -> None:
    for usd, devices, rate in ((0.18, 1, 3.0), (1.5, 4, 18147.0), (14.0, 512, 2.5e7)):
        per_token = training.usd_per_mtok(usd, devices, rate) / 1e6
        assert training.tokens_per_usd(usd, devices, rate) * per_token == pytest.approx(1, rel=1e-12)


def test_the_published_table_by_hand() -> None:
    """18,147 tokens/s on 4 GPUs at 1.50 USD are 65,329,200 tokens for 6 USD: not 3,025 for one."""
    assert training.tokens_per_usd(1.5, 4, 18147) == pytest.approx(10_888_200)
    assert training.usd_per_mtok(1.5, 4, 18147) == pytest.approx(0.0918425, rel=1e-5)


def only(report: Report) -> Cost:
    (found,) = report.costs
    return found


def test_known_numbers_with_an_own_price(
    make_spec: Builder, make_record: Builder, make_reference: Builder, golden: object
) -> None:
    """2 * 3.6 USD buy 3600 * 512 tokens and 3600 * 8 samples."""
    runs = [make_record(make_spec("ddp"))]
    found = only(reported([runs], make_reference, Costing((HOURLY,), 1_843_200)))
    assert found.usd_per_hour == pytest.approx(7.2)
    assert found.tokens_per_usd.value == pytest.approx(256_000)
    assert found.usd_per_mtok.value == pytest.approx(3.90625)
    assert found.usd_per_1k_samples.value == pytest.approx(0.25)
    assert found.train_time_s is not None
    assert found.train_time_s.value == pytest.approx(3600)
    assert found.train_cost_usd is not None
    assert found.train_cost_usd.value == pytest.approx(7.2)
    assert found.usd_per_1k_samples.note == golden
    assert "64" in found.usd_per_1k_samples.note


def test_intervals_are_those_of_the_throughput(make_cell: Builder, make_reference: Builder) -> None:
    report = reported([make_cell(1.0, strategy="ddp", spread=0.02)], make_reference, Costing((HOURLY,)))
    rate = next(m for m in report.measurements if m.metric == "tokens_per_s")
    found = only(report)
    assert rate.low is not None
    assert rate.high is not None
    assert rate.low < rate.high
    assert found.usd_per_mtok.low == pytest.approx(training.usd_per_mtok(3.6, 2, rate.high))
    assert found.usd_per_mtok.high == pytest.approx(training.usd_per_mtok(3.6, 2, rate.low))
    assert found.tokens_per_usd.low == pytest.approx(training.tokens_per_usd(3.6, 2, rate.low))


def test_measurements_name_their_price_and_where_it_comes_from(
    make_cell: Builder, make_reference: Builder, golden: object
) -> None:
    costing = Costing((HOURLY, SPOTTED), 10**9, 10**6)
    report = reported([make_cell(1.0, strategy="ddp")], make_reference, costing)
    priced = [m for m in report.measurements if m.metric == "usd_per_mtok"]
    assert {(m.axes["price"], m.axes["price_kind"]) for m in priced} == {("hourly", "as given"), ("spotted", "spot")}
    assert {m.note for m in priced} == golden
    assert {m.metric for m in report.measurements} >= set(training.METRICS)
    times = [m for m in report.measurements if m.metric == "train_time_s"]
    assert len(times) == 1, "no price changes the time"
    assert "price" not in times[0].axes


def on_gpu(make_cell: Builder, gpu: dict[str, Any], **more: Any) -> list[RunRecord]:
    found: list[RunRecord] = make_cell(1.0, device="cuda", precision="bf16/fp32", record={"gpus": [gpu] * 2}, **more)
    return found


def priced_as(make_cell: Builder, make_reference: Builder, gpu: dict[str, Any], **more: Any) -> list[str]:
    return [c.price.name for c in reported([on_gpu(make_cell, gpu, **more)], make_reference).costs]


def test_without_a_request_only_a_known_gpu_has_a_price(
    make_cell: Builder, make_reference: Builder, h200: dict[str, Any]
) -> None:
    known = priced_as(make_cell, make_reference, h200)
    assert known
    assert all(name.endswith("h200") for name in known)
    assert not priced_as(make_cell, make_reference, {"name": "NVIDIA H900"})
    assert not priced_as(make_cell, make_reference, {**h200, "mig": True}), "a slice is not the GPU"
    assert not reported([make_cell(1.0)], make_reference).costs, "a CPU"


def test_a_slice_without_a_price_is_called_so(
    make_cell: Builder, make_reference: Builder, h200: dict[str, Any], golden: object
) -> None:
    runs = on_gpu(make_cell, {**h200, "mig": True})
    report = reported([runs], make_reference, Costing(train_tokens=10**9))
    assert report.notes == golden
    assert any(f"{h200['name']}" in note for note in report.notes)
    assert any("MIG" in note for note in report.notes)


def test_a_shared_gpu_has_no_cost(
    make_cell: Builder, make_reference: Builder, h200: dict[str, Any], golden: object
) -> None:
    shared = {"settings": {"shared_gpu": True}}
    runs = make_cell(1.0, device="cuda", precision="bf16/fp32", record={"gpus": [h200], "evidence": shared})
    report = reported([runs], make_reference, Costing((HOURLY,)))
    assert not report.costs
    assert report.notes == golden


def test_costs_that_were_asked_for_are_shown_without_verbose(make_cell: Builder, make_reference: Builder) -> None:
    def printed(price: Price, *, with_cost: bool) -> str:
        console = Console(file=io.StringIO(), width=120)
        report = reported([make_cell(1.0)], make_reference, Costing((price,)))
        console.print(brief_group(report, with_cost=with_cost))
        return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]

    assert "Cost at hourly" in printed(HOURLY, with_cost=True)
    assert "Cost at hourly" not in printed(HOURLY, with_cost=False)
    other = dataclasses.replace(HOURLY, gpu="A10")
    assert "--price: hourly (A10) applies to none of the measured cells (cpu)" in printed(other, with_cost=True)


def test_a_price_from_the_command_line_is_the_given_price(make_cell: Builder, make_reference: Builder) -> None:
    (own,) = chosen("2.5")
    report = reported([make_cell(1.0)], make_reference, Costing((own,)))
    assert shown.tables(report)[0].title == "Cost at the given price"
    assert [tile.note for tile in tiles(report) if tile.name == "Cost"] == ["at the given price"]
    listed = dataclasses.replace(HOURLY, kind=SPOT)
    assert (HOURLY.title, listed.title) == ("hourly", "hourly, spot")


def test_samples_of_unknown_length_have_no_length_in_their_name() -> None:
    assert samples_name({"sequence_length": 512, "data": "alpaca"}) == "samples of 512 tokens, alpaca"
    assert samples_name({"sequence_length": None, "data": None}) == "samples"


def test_a_price_of_another_gpu_is_not_used_and_the_report_says_so(
    make_cell: Builder, make_reference: Builder, h200: dict[str, Any]
) -> None:
    a10 = dataclasses.replace(HOURLY, gpu="A10")
    report = reported([on_gpu(make_cell, h200)], make_reference, Costing((a10,)))
    assert not report.costs
    assert "--price: hourly (A10) applies to none of the measured cells (NVIDIA H200), so there is no cost" in (
        report.notes
    )
    asked = reported([make_cell(1.0)], make_reference, Costing(None, 10**9))
    assert any(note.startswith("--train-tokens: no price is known for cpu") for note in asked.notes)


# --- savings ---


def test_the_winner_saves_what_its_comparison_says(make_cell: Builder, make_reference: Builder, golden: object) -> None:
    groups = [make_cell(1.25, strategy="ddp"), make_cell(1.0, strategy="fsdp2"), make_cell(1.4, strategy="zero")]
    report = reported(groups, make_reference, Costing((HOURLY,), 10**9))
    (saving,) = report.savings
    assert (saving.label, saving.other_label) == ("fsdp2", "ddp")
    assert saving.saved_ratio == pytest.approx(0.2, abs=0.01)
    assert saving.low < saving.saved_ratio < saving.high
    costs = {c.axes["strategy"]: c.usd_per_mtok.value or 0 for c in report.costs}
    assert saving.saved_ratio == pytest.approx(1 - costs["fsdp2"] / costs["ddp"])
    (sentence,) = shown.sentences(report)
    assert sentence.startswith("fsdp2 saves ")
    assert sentence == golden
    assert "GPU-hour" in sentence


def test_where_the_expected_winner_loses_the_sentence_is_the_opposite(
    make_cell: Builder, make_reference: Builder, golden: object
) -> None:
    groups = [make_cell(1.0, strategy="ddp"), make_cell(1.25, strategy="fsdp2")]
    (sentence,) = shown.sentences(reported(groups, make_reference, Costing((HOURLY,))))
    assert sentence == golden
    assert "against fsdp2" in sentence


def test_equal_cells_save_nothing(make_cell: Builder, make_reference: Builder) -> None:
    groups = [make_cell(1.0, strategy="ddp"), make_cell(1.002, strategy="fsdp2")]
    report = reported(groups, make_reference, Costing((HOURLY,)))
    assert len(report.costs) == 2
    assert not report.savings
    assert not shown.sentences(report)


def test_equal_leaders_are_both_named(make_cell: Builder, make_reference: Builder, golden: object) -> None:
    groups = [make_cell(1.0, strategy="ddp"), make_cell(1.001, strategy="fsdp2"), make_cell(1.4, strategy="zero")]
    report = reported(groups, make_reference, Costing((HOURLY,)))
    (saving,) = report.savings
    assert {saving.label, *saving.tied} == {"ddp", "fsdp2"}
    text = shown.sentences(report)[0]
    assert text == golden
    assert f"{saving.label}" in text
    assert f"{saving.tied[0]}" in text


def test_without_a_price_nothing_is_said_to_be_saved(make_cell: Builder, make_reference: Builder) -> None:
    report = reported([make_cell(1.0, strategy="ddp"), make_cell(1.25, strategy="fsdp2")], make_reference)
    assert report.comparisons
    assert not report.savings


# --- tables ---


def test_on_demand_is_shown_beside_spot_and_other_prices_are_one_factor(
    make_cell: Builder, make_reference: Builder, golden: object
) -> None:
    dear = dataclasses.replace(HOURLY, name="dear", usd_per_gpu_hour=7.2, kind="on demand")
    lead = dataclasses.replace(HOURLY, kind="on demand")
    costing = Costing((dear, lead, SPOTTED), 2 * 10**9)
    first, every = shown.tables(reported([make_cell(1.0, strategy="ddp")], make_reference, costing))
    assert first.title == golden
    headings = [column.heading for column in first.columns]
    assert headings[2:4] == golden
    assert headings[-3:] == golden
    (row,) = first.rows
    on_demand, spot = (float(row[i].text.replace(",", "")) for i in (2, 3))
    assert on_demand / spot == pytest.approx(4, rel=0.01)
    text = row[headings.index("1000 samples, USD")].detail
    assert text == golden
    assert "64" in text
    assert first.notes == golden
    assert any("2026-01" in note for note in first.notes)
    factors = {cells[0].text: cells[3].text.removesuffix(TIMES) for cells in every.rows}
    assert factors == {"spotted": "0.250", "hourly": "1.00", "dear": "2.00"}


def test_no_cost_no_table(make_cell: Builder, make_reference: Builder) -> None:
    assert shown.tables(reported([make_cell(1.0)], make_reference)) == ()


def test_the_page_draws_spot_under_the_other_price(make_cell: Builder, make_reference: Builder, golden: object) -> None:
    runs = make_cell(1.0, repeats=3, strategy="ddp")
    report = reported([runs], make_reference, Costing((HOURLY, SPOTTED)))
    (chart,) = [c for c in charts(report) if c.name == "cost"]
    firm, spot = chart.points
    assert (firm.faint, spot.faint) == (False, True)
    assert spot.y == pytest.approx(firm.y / 4)
    assert firm.detail == golden
    assert "3.6" in firm.detail
    assert "GPU-hour" in firm.detail
