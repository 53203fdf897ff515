"""What served tokens cost, in money and energy, on rates worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from answered_records import build_record, build_replica, build_spec, build_stage, in_stages, one_by_one

from paceline.analysis.cost import served
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Measurement
from paceline.analysis.report import build
from paceline.cli.results import hours
from paceline.errors import RequestError
from paceline.host.prices import Price
from paceline.report.tables import served_cost as present
from paceline.results.records import GaugeSample, RunRecord

OWN = Price(name="own", usd_per_gpu_hour=3.6)


def run(**more: Any) -> RunRecord:
    """50 output tokens and 150 prompt tokens a second, by two replicas of one device each."""
    record = build_record(build_spec(), one_by_one(0.1))
    return dataclasses.replace(record, **{"replicas": (build_replica(0, "a"), build_replica(1, "b")), **more})


def costs(records: list[RunRecord], **costing: Any) -> Any:
    (found,) = served.analyse(records, Costing((OWN,), **costing))
    return found


def test_cost_on_both_bases_by_hand(golden: object) -> None:
    """7.2 USD an hour for 180,000 output tokens: 40 USD a million; per token a quarter; reserved 24/8 times as much."""
    found = costs([run()])
    assert found.usd_per_hour == pytest.approx(7.2)
    assert found.usd_per_output_mtok.value == pytest.approx(40)
    assert found.usd_per_mtok.value == pytest.approx(10)
    assert found.reserved_usd_per_output_mtok.value == pytest.approx(120)
    assert found.reserved_usd_per_mtok.value == pytest.approx(30)
    assert found.reserved_usd_per_mtok.note == golden
    assert "24" in found.reserved_usd_per_mtok.note
    assert costs([run()], busy_hours=24.0).reserved_usd_per_mtok.value == pytest.approx(10)


def test_a_server_that_does_not_count_prompts_has_a_cost_per_output_token_only() -> None:
    record = run()
    untold = tuple(dataclasses.replace(q, prompt_tokens=None) for q in record.requests)
    found = costs([dataclasses.replace(record, requests=untold)])
    assert found.usd_per_mtok is None
    assert found.usd_per_output_mtok.value == pytest.approx(40)


def test_of_a_sweep_the_load_at_its_limits_is_priced(golden: object) -> None:
    """Answers of 0.1 s keep a first token within 50 ms (20 ms), those of 0.5 s do not (100 ms)."""
    parts = [one_by_one(0.2, 50), one_by_one(0.1, 50, 10.0), one_by_one(0.5, 50, 15.0)]
    record = in_stages(build_spec(ttft_limit_s=0.05), parts, concurrency=[1, 2, 4])
    found = costs([record])
    assert found.load == "concurrency 2"
    assert found.is_kept is True
    (table,) = present.tables(build([record], "test", costing=Costing((OWN,))))
    assert table.rows[0][1].text == "concurrency 2"
    assert table.rows[0][2].text == golden
    assert found.usd_per_output_mtok.value == pytest.approx(20)


def test_gpus_that_are_shared_and_endpoints_elsewhere_have_no_listed_price(golden: object) -> None:
    assert served.analyse([run()], Costing()) == ()
    report = build([run()], "test", costing=Costing((dataclasses.replace(OWN, gpu="NVIDIA H200"),)))
    assert report.notes == golden


def test_replicas_that_took_turns_have_no_cost(golden: object) -> None:
    record = in_stages(build_spec(partition="paired"), [one_by_one(0.1), one_by_one(0.1, 100, 10.0)], replica=[0, 1])
    report = build([record], "test", costing=Costing((OWN,)))
    assert report.served_costs == ()
    assert report.notes == golden


def test_the_table_states_its_assumptions(golden: object) -> None:
    report = build([run()], "test", costing=Costing((OWN,), busy_hours=6.0))
    (table,) = present.tables(report)
    assert table.notes == golden
    assert any("--busy-hours" in note for note in table.notes)
    assert {m.metric for m in report.measurements} >= set(served.METRICS)


@pytest.mark.parametrize("text", ["0", "25", "many", "nan"])
def test_hours_that_no_day_has_are_refused(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        hours(text)
    assert str(caught.value) == golden
    assert "--busy-hours" in str(caught.value)


# --- energy ---


def powered(engine: str = "vllm", watts: tuple[float, ...] = (300.0, 100.0), **more: Any) -> RunRecord:
    """10 s of load on as many hosts as powers are given, one GPU each, read twice a second."""
    record = build_record(build_spec(engine, device="cuda"), one_by_one(0.1), stages=(build_stage(0, 0.0, 10.0),))
    gauges = tuple(
        GaugeSample(rank=n, host=f"node-{n}", device=0, at_s=1e6 - 2 + 0.5 * i, power_w=power)
        for n, power in enumerate(watts)
        for i in range(29)
    )
    replicas = (build_replica(0, "node-0"), build_replica(1, "node-1"))
    return dataclasses.replace(record, **{"gauges": gauges, "replicas": replicas, **more})


def joules(record: RunRecord) -> Measurement:
    (found,) = served.energies([record])
    return found


def test_joules_of_all_hosts_over_the_tokens_of_the_load(golden: object) -> None:
    """400 W for 10 s over 500 tokens."""
    found = joules(powered())
    assert found.value == pytest.approx(8.0)
    assert found.note == golden
    (table,) = present.tables(build([powered()], "test"))
    assert table.rows[0][1].text == "8.00"


def test_joules_are_of_all_gpus_that_a_replica_is_cut_over() -> None:
    """300 W and 100 W on one host for 10 s over 500 tokens."""
    record = powered("vllm:tensor_parallel=2")
    here = tuple(dataclasses.replace(s, host="node-0", rank=0, device=s.rank) for s in record.gauges)
    cut = (build_replica(0, "node-0", tensor_parallel=2, devices=2),)
    assert joules(dataclasses.replace(record, gauges=here, replicas=cut)).value == pytest.approx(8.0)
    one = tuple(s for s in here if s.device == 0)
    assert joules(dataclasses.replace(record, gauges=one, replicas=cut)).note == "energy: 1 of 2 GPUs were read"


@pytest.mark.parametrize(
    "record",
    [
        powered("openai:url=http://x"),
        powered(watts=(300.0,)),
        powered(gauges=()),
        powered(stages=()),
    ],
)
def test_unknown_energy_is_none_with_its_reason(record: RunRecord, golden: object) -> None:
    assert joules(record).value is None
    assert joules(record).note == golden
