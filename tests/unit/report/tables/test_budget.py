"""A fine-tune of N samples by hand: one process takes 4 samples of 64 tokens in a step of 1 s, so 4 samples/s."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.cli.results import sample_count
from paceline.errors import RequestError
from paceline.experiment.spec import Topology
from paceline.host.prices import ON_DEMAND, SPOT, Price
from paceline.report.charts import charts
from paceline.report.exporters import markdown, plots
from paceline.report.tables import budget

Builder = Callable[..., Any]
FIRM = Price(name="firm", usd_per_gpu_hour=0.60, kind=ON_DEMAND, source="a test", date="2026-01")
SPOTTED = Price(name="spotted", usd_per_gpu_hour=0.18, kind=SPOT, source="a test", date="2026-01")
# Weak scaling over nodes of one process each: a step of every node takes so long.
SECONDS = {1: 1.0, 2: 1.25, 4: 1.6}
COUNT = 14_400


@pytest.fixture
def report(make_spec: Builder, make_record: Builder, make_reference: Builder) -> Report:
    records = []
    for nodes, seconds in SECONDS.items():
        for repeat in range(3):
            spec = make_spec("ddp", 1, repeat=repeat)
            spec = dataclasses.replace(spec, topology=Topology(device="cpu", nodes=nodes))
            records.append(make_record(spec, seconds))
    references = {r.spec.work: make_reference(r.spec) for r in records}
    costing = Costing((FIRM, SPOTTED), train_samples=COUNT)
    return build([*references.values(), *records], "test", costing=costing)


def test_time_and_cost_at_each_measured_number_of_nodes(report: Report) -> None:
    """14,400 samples at 4 samples/s are an hour; nodes share it as far as they scale, and all of them are paid."""
    found = {o.lead.axes["nodes"]: o for o in budget.offers(report)}
    assert set(found) == set(SECONDS), "no other number of nodes"
    for nodes, seconds in SECONDS.items():
        offer = found[nodes]
        assert offer.lead.samples_time_s is not None
        assert offer.lead.samples_cost_usd is not None
        assert offer.spot is not None
        assert offer.spot.samples_cost_usd is not None
        hours = seconds / nodes
        assert offer.lead.samples_time_s.value == pytest.approx(3600 * hours)
        assert offer.lead.samples_cost_usd.value == pytest.approx(0.60 * nodes * hours)
        assert offer.spot.samples_cost_usd.value == pytest.approx(0.18 * nodes * hours)
        assert offer.lead.tokens_per_sample == pytest.approx(64)
        per_1k = offer.lead.usd_per_1k_samples.value
        assert per_1k == pytest.approx(0.60 * seconds * 1000 / COUNT), "it never falls with the nodes"


def test_the_table_states_efficiency_prices_and_what_is_not_in_it(report: Report, golden: object) -> None:
    (table,) = budget.tables(report)
    assert table.title == golden
    assert "14.4" in table.title
    assert "64" in table.title
    assert [row[1].text for row in table.rows] == ["1", "2", "4"]
    headings = [column.heading for column in table.columns]
    shown = [float(row[headings.index("efficiency, %")].text) for row in table.rows]
    assert shown == pytest.approx([100, 80, 62.5])
    assert table.notes == golden
    assert any("0.6" in note for note in table.notes)
    assert any("GPU-hour" in note for note in table.notes)
    assert any("2026-01" in note for note in table.notes)
    assert "14.4K samples of 64 tokens" in markdown.text(report)


def test_samples_of_other_lengths_have_a_table_of_their_own(
    make_spec: Builder, make_record: Builder, make_reference: Builder, golden: object
) -> None:
    specs = [make_spec("ddp", 1), make_spec("ddp", 1, sequence_length=128)]
    records = [*map(make_reference, specs), *map(make_record, specs)]
    found = build(records, "test", costing=Costing((FIRM,), train_samples=1000))
    assert [table.title.split(",")[0] for table in budget.tables(found)] == golden


def test_cost_against_time_is_drawn_for_every_node_count_and_price(report: Report) -> None:
    chart = next(c for c in charts(report) if c.name == "budget")
    assert len(chart.points) == 2 * len(SECONDS)
    assert {s.name: s.dashed for s in chart.series} == {"ddp, tiny": False, "ddp, tiny, spot": True}
    firm = [p for p in chart.points if not p.series.endswith("spot")]
    assert [p.x for p in firm] == pytest.approx([1.0, 0.625, 0.4])
    assert [p.y for p in firm] == pytest.approx([0.60, 0.75, 0.96])
    assert plots.image(report, "budget", "png").startswith(b"\x89PNG")


def test_nothing_is_stated_that_nobody_asked_for(
    make_spec: Builder, make_record: Builder, make_reference: Builder
) -> None:
    spec = make_spec("ddp", 1)
    found = build([make_reference(spec), make_record(spec)], "test", costing=Costing((FIRM,)))
    assert found.costs
    assert not budget.tables(found)
    assert "budget" not in [chart.name for chart in charts(found)]
    asked = build([make_reference(spec), make_record(spec)], "test", costing=Costing(None, train_samples=10))
    assert any(note.startswith("--train-samples: no price is known for cpu") for note in asked.notes)


@pytest.mark.parametrize(("text", "count"), [("10000", 10_000), ("50K", 50_000), ("1.5M", 1_500_000)])
def test_a_number_of_samples(text: str, count: int) -> None:
    assert sample_count(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_wrong_number_of_samples_is_one_sentence(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        sample_count(text)
    assert str(caught.value) == golden
    assert "--train-samples" in str(caught.value)
