"""Served runs from their records to the verdict, the tables and the sentences of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from served_records import CLIENT, S, in_turns, record, replica, request, stage

from paceline.analysis import report as reports
from paceline.analysis.findings import Report
from paceline.analysis.findings.served import LOADGEN_LABEL, NOT_KEPT, UNDECIDED, Rule
from paceline.analysis.served import measurements
from paceline.analysis.served.loads import gather
from paceline.analysis.served.verdicts import verdict_of
from paceline.report.answer import answer, grounds
from paceline.report.exporters import csv, html, markdown
from paceline.report.exporters import json as json_exporter
from paceline.report.sections import served_tables
from paceline.report.tables import served
from paceline.results.records import RunRecord
from paceline.results.served_samples import AnswerSample, ClientSample, RequestSample

TWO = (replica(0), replica(1))


def build(*records: RunRecord) -> Report:
    return reports.build(records, "served")


def cells(report: Report, title: str) -> list[list[str]]:
    table = next(table for table in served_tables(report) if table.title.startswith(title))
    return [[cell.text for cell in row] for row in table.rows]


def timed(count: int, late: int = 0) -> list[RequestSample]:
    """One a second; late ones have their first token after 3 s."""
    slow: dict[str, Any] = {"first_ns": 3 * S, "last_ns": 3 * S}
    return [request(n, **(slow if n < late else {})) for n in range(count)]


# --- does it count ---


def test_a_result_that_keeps_its_limits_is_valid() -> None:
    (verdict,) = build(record(timed(662, 1), scenario="server", rate_per_s=1.0)).served
    assert (verdict.verdict, verdict.late, verdict.allowed, verdict.requests) == ("VALID", 1, 1, 662)
    assert verdict.label is None
    assert verdict.rules == ()


def test_a_model_without_a_known_shape_is_measured_and_said_to_be_one(golden: object) -> None:
    found = record(timed(7))
    (outcome,) = found.outcomes
    assert outcome.evidence is not None
    told = replace(outcome.evidence, settings={**outcome.evidence.settings, "shape": "not known"})
    report = build(replace(found, outcomes=(replace(outcome, evidence=told),)))
    assert report.notes == golden
    assert any(m.metric == "ttft_p50_s" and m.value is not None for m in report.measurements)
    assert not any("shape" in note for note in build(found).notes)


@pytest.mark.parametrize(
    ("listed", "answered", "shown"),
    [
        ("mock", (), "mock"),
        ("mock", ("other-7b",), "other-7b"),
        ("tiny", ("other-7b",), "other-7b"),
        ("tiny", (), "tiny"),
        ("org/Tiny", ("/models/TINY/",), "tiny"),
    ],
)
def test_a_model_has_the_name_that_its_server_gives_it(listed: str, answered: tuple[str, ...], shown: str) -> None:
    """The experiment requested tiny. What answers say counts more than the list of the server."""
    report = build(record(timed(7), replicas=(replica(0, model=listed, answered_as=answered),)))
    rate = next(m for m in report.measurements if m.metric == "output_tokens_per_s")
    assert rate.axes["model"] == report.runs[0].axes["model"] == shown
    assert rate.axes.get("requested_model") == (None if shown == "tiny" else "tiny")
    (table,) = served.tables(report)
    assert table.title == f"Served model: {shown}" + ("" if shown == "tiny" else " (requested: tiny)")
    warning = f"Warning: the server says that it serves {shown}, not the requested tiny."
    assert (warning in table.notes) == (shown != "tiny")
    named = f" tokens/s with {shown}" + (", not the requested tiny (" if shown != "tiny" else " (")
    assert named in served.sentence(report)
    notes = [note for note in report.notes if note.startswith(f"the server says that it serves {shown}, but")]
    assert len(notes) == (shown != "tiny")
    assert f",{shown}," in csv.text(report)


def test_the_headroom_of_the_worst_launch_is_below_the_table() -> None:
    rooms = [("client headroom: good (a)", "good"), ("client headroom: tight (b): use 2", "tight")]
    launches = [
        record(timed(7), repeat=n, stages=[stage(planned=7, headroom=text, headroom_grade=grade)])
        for n, (text, grade) in enumerate(rooms)
    ]
    report = build(*launches)
    assert [(v.headroom, v.headroom_grade) for v in report.served] == [rooms[1]]
    assert "Before the load, client headroom: tight (b): use 2." in served.tables(report)[0].notes
    (older,) = build(record(timed(7), stages=[stage(planned=7)])).served
    assert (older.headroom, older.headroom_grade) == (None, None)


def test_launches_of_one_cell_with_different_models_are_noticed() -> None:
    launches = [
        record(timed(7), repeat=n, replicas=(replica(0, answered_as=(name,)),)) for n, name in enumerate(("a", "b"))
    ]
    assert any("the served model changed between launches of one cell (a | b)" in n for n in build(*launches).notes)


def test_a_server_that_counts_prompts_differently_is_reported(golden: object) -> None:
    ids = [request(0, sent_ids=64), request(1, sent_ids=10), request(2, sent_ids=64, error="reset")]
    (note,) = [note for note in build(record(ids)).notes if "token ids" in note]
    assert note == golden
    assert "10" in note
    assert "64" in note
    as_text = [request(0), request(1, prompt_tokens=None, sent_ids=64)]
    assert not any("token ids" in note for note in build(record(as_text)).notes)


@pytest.mark.parametrize(
    ("found", "word", "reasons"),
    [
        (
            record(timed(662, 2), scenario="server", rate_per_s=1.0),
            "INVALID",
            ("2 of 662 requests were late or failed; 1 allowed",),
        ),
        (record(timed(2), least_s=1.0), "INVALID", ("it lasted 0.1 s; at least 1 s were requested",)),
        (
            record(timed(2), clients=(replace(CLIENT, cpu_s=0.9),)),
            "INVALID(client)",
            ("client: used 90% of a core (at most 80%)",),
        ),
        (record([request(0), request(0)]), "INVALID", ("requests 0 were answered more than once",)),
    ],
)
def test_a_result_that_does_not_count_says_why(found: RunRecord, word: str, reasons: tuple[str, ...]) -> None:
    report = build(found)
    (verdict,) = report.served
    assert (verdict.verdict, verdict.reasons) == (word, reasons)
    assert f"{word}: {reasons[0].removeprefix('client: ')}" in answer(report)[0]


@pytest.mark.parametrize("scenario", ["offline", "server"])
def test_requests_that_the_client_had_no_files_for_are_the_clients(scenario: str, golden: object) -> None:
    """They are no late answers of the server, with limits or without."""
    asked = [*timed(459), *(request(459 + n, error="client") for n in range(9))]
    (verdict,) = build(record(asked, scenario=scenario, rate_per_s=1.0)).served
    assert verdict.verdict == "INVALID(client)"
    assert verdict.reasons == golden
    none = [request(n, error="client") for n in range(459)]
    (verdict,) = build(record(none, scenario=scenario, rate_per_s=1.0)).served
    assert verdict.verdict == "INVALID(client)"


def test_a_load_without_limits_counts_its_failures() -> None:
    asked = [request(n, error="http_500" if n else None) for n in range(100)]
    (verdict,) = build(record(asked)).served
    assert (verdict.verdict, verdict.reasons) == ("INVALID", ("99 of 100 requests failed (http_500 99 times)",))


def test_many_loads_of_one_launch_do_not_look_at_each_others_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client says against itself takes as many looks at requests for 2 loads as for 40 of as many in all."""
    looked_at: list[int] = []
    plain = measurements.client_facts

    def counted(clients: Sequence[ClientSample], requests: Sequence[RequestSample], is_open: bool) -> Any:
        looked_at.append(len(requests))
        return plain(clients, requests, is_open)

    monkeypatch.setattr(measurements, "client_facts", counted)
    looks = []
    for loads in (2, 40):
        requests = [request(n, stage=n % loads) for n in range(80)]
        stages = [stage(n, concurrency=n + 1, planned=80 // loads) for n in range(loads)]
        clients = [replace(CLIENT, stage=n) for n in range(loads)]
        build(record(requests, stages=stages, clients=clients, scenario="sweep", loads="1+2"))
        looks.append(sum(looked_at))
        looked_at.clear()
    assert looks[0] == looks[1] > 0


def test_a_failed_accuracy_of_the_whole_set_is_a_reason() -> None:
    (load,) = gather([record(timed(2))])
    failed = Rule(name="accuracy", asked="of the whole set", seen="FAILED, 13,368 scored", outcome=NOT_KEPT)
    found = verdict_of(load, failed)
    assert (found.verdict, found.reasons) == ("INVALID", ("accuracy of the whole set: FAILED, 13,368 scored",))
    assert verdict_of(load, replace(failed, outcome=UNDECIDED)).is_valid


def test_an_unreliable_launch_is_left_out_and_named(golden: object) -> None:
    doubted = record(timed(2), repeat=1, clients=(replace(CLIENT, cpu_s=0.9),))
    (verdict,) = build(record(timed(2)), doubted).served
    assert verdict.is_valid
    assert len(verdict.runs) == 1
    assert verdict.left_out == golden


def test_each_load_of_a_sweep_has_a_row_and_a_verdict(golden: object) -> None:
    stages = [stage(n, scenario="server", rate_per_s=rate) for n, rate in enumerate((2.0, 1.0))]
    asked = [replace(r, stage=0) for r in timed(459, 50)] + [replace(r, stage=1) for r in timed(459)]
    report = build(record(asked, stages=stages, scenario="search", rate_per_s=1.0))
    rows = cells(report, "Served model")
    assert [row[:2] for row in rows] == [["search, 1/s", "VALID"], ["search, 2/s", "INVALID"]]
    assert answer(report)[0] == golden


def test_a_search_in_which_no_rate_failed_gives_a_lower_bound(golden: object) -> None:
    """The load whose client was late is the last one: its doubt is no part of the answer."""
    late = replace(CLIENT, schedule_lag_p99_ns=5e6, stage=1)
    stages = [stage(n, scenario="server", rate_per_s=rate) for n, rate in enumerate((8.0, 16.0))]
    asked = [replace(r, stage=0) for r in timed(459)] + [replace(r, stage=1) for r in timed(459)]
    found = record(asked, stages=stages, clients=(CLIENT, late), scenario="search", rate_per_s=8.0)
    first = answer(build(found))[0]
    assert first == golden
    assert "459" in first
    assert "client" not in first


# --- rules ---


def test_a_run_by_rules_shows_them_everywhere() -> None:
    report = build(record(timed(3), least_s=600.0))
    (verdict,) = report.served
    assert verdict.label == LOADGEN_LABEL
    assert "3 answered" in [row[2] for row in cells(report, LOADGEN_LABEL)]
    for text in (markdown.text(report), html.text(report), " ".join(answer(report)) + grounds(report)):
        assert LOADGEN_LABEL in text
    assert json.dumps(json_exporter.document(report))


def test_no_other_run_carries_the_name() -> None:
    report = build(record(timed(3)))
    assert "MLPerf" not in markdown.text(report) + html.text(report)


# --- replicas ---


def both(repeats: int = 2) -> list[RunRecord]:
    """Static: 12 s for 12 requests; dynamic: 8 s; a tenth of a percent between launches."""
    found = []
    for n in range(repeats):
        fast, slow = 1 + n / 1000, 2 + n / 500
        static = [*in_turns(0, 6, fast), *in_turns(1, 6, slow, first=6)]
        dynamic = [*in_turns(0, 8, fast), *in_turns(1, 4, slow, first=8)]
        found.append(record(static, n, replicas=TWO, full_set=120))
        found.append(record(dynamic, n, replicas=TWO, full_set=120, partition="dynamic"))
    return found


def test_the_answer_comes_first(golden: object) -> None:
    report = build(*both())
    first, second = answer(report)
    assert first == golden
    assert "15.0" in first
    assert "1.50" in first
    assert second == golden
    assert "1.50" in second
    text = grounds(report)
    assert text == golden
    assert "120" in text


def test_a_replica_asked_alone_is_not_the_answer(golden: object) -> None:
    """Alone it serves 20 tokens/s, more than both do together: still the answer is about both."""
    stages = [stage(n, scenario="offline", replica=n) for n in (0, 1)]
    asked = [r for n in (0, 1) for r in in_turns(n, 4, 0.5, stage=n)]
    report = build(record(asked, stages=stages, replicas=TWO, partition="paired"), both(1)[1])
    text = answer(report)[0]
    assert text == golden
    assert "15.0" in text


def test_the_answer_says_under_how_much_load_the_best_one_was_alone(golden: object) -> None:
    alone = [stage(n, scenario="offline", replica=n, concurrency=4) for n in (0, 1)]
    asked = [r for n in (0, 1) for r in in_turns(n, 4, 0.5, stage=n)]
    together = replace(both(1)[1], stages=(stage(0, scenario="offline", concurrency=8),))
    paired = record(asked, stages=alone, replicas=TWO, partition="paired", full_set=120)
    report = build(paired, together)
    words = "0.750 times the best one alone with its share of the 8 in flight"
    assert words in answer(report)[0]
    assert report.fleets[0].text == golden
    assert "0.75" in report.fleets[0].text


def test_a_rate_of_a_replica_says_over_which_time_it_is() -> None:
    """A replica that ends early has two: over its own time, and over that of the whole load."""
    asked = [*in_turns(0, 4, 1.0), *in_turns(1, 4, 2.0, first=4)]
    told = [AnswerSample(rank=0, replica=n, sample=0, tokens=1, text="x") for n in (0, 1)]
    report = build(replace(record(asked, replicas=TWO), answers=tuple(told)))
    rates = {}
    for table in served_tables(report):
        for place, column in enumerate(column.heading for column in table.columns):
            if table.title.startswith(("Replicas", "Answers by")) and column.startswith("output"):
                rates[column] = table.rows[0][place].text
    assert rates == {"output in its own time, tokens/s": "10.0", "output over the whole load, tokens/s": "5.00"}


def test_tables_of_replicas_gain_and_the_whole_set(golden: object) -> None:
    report = build(*both())
    static = cells(report, "Replicas (offline, static")
    assert [row[:3] for row in static] == [
        ["0 node-0", "12", "10.0"],
        ["1 node-1", "12", "5.00"],
        ["together", "24", "9.995"],
    ]
    assert [row[5] for row in static] == ["50", "100", "\u2013"]
    ((load, verdict, _),) = cells(report, "Gain of the dynamic partition")
    assert load == "offline"
    assert verdict.endswith("% faster")
    assert {row[0] for row in cells(report, "Time for the whole set")} == golden


def test_of_a_sweep_the_replicas_of_the_load_that_served_most_are_shown(golden: object) -> None:
    def asked(number: int, seconds: float) -> list[RequestSample]:
        return [*in_turns(0, 3, seconds, stage=number), *in_turns(1, 3, seconds, first=3, stage=number)]

    stages = [stage(number, concurrency=number + 2) for number in (0, 1)]
    report = build(record([*asked(0, 1.0), *asked(1, 0.5)], stages=stages, replicas=TWO, scenario="sweep"))
    assert len(report.fleets) == 2
    titles = [table.title for table in served_tables(report)]
    assert titles == golden


def test_tables_of_replicas_are_named_by_what_differs() -> None:
    asked = [*in_turns(0, 6, 1.0), *in_turns(1, 6, 2.0, first=6)]
    report = build(*(record(asked, replicas=TWO, api=api) for api in ("completions", "chat")))
    titles = [table.title for table in served_tables(report) if table.title.startswith("Replicas")]
    assert titles == [f"Replicas (offline, static partition, api {api})" for api in ("completions", "chat")]


def test_measurements_over_replicas_have_different_axes() -> None:
    report = build(record([*in_turns(0, 6, 1.0), *in_turns(1, 6, 2.0, first=6)], replicas=TWO))
    rates = {m.axes["host"]: m.value for m in report.measurements if m.metric == "replica_output_tokens_per_s"}
    assert rates == {"node-0": pytest.approx(10), "node-1": pytest.approx(5)}
    assert {m.metric: m.value for m in report.measurements}["straggler_ratio"] == pytest.approx(0.5)


def test_the_answer_names_a_replica_that_died(golden: object) -> None:
    asked = [*in_turns(0, 11, 1.0), *in_turns(1, 1, 2.0, first=11)]
    lost = (replica(0), replica(1, died_ns=3 * S, reassigned=5))
    report = build(record(asked, replicas=lost))
    text = answer(report)[1]
    assert text == golden
    assert "3.0" in text
    text = cells(report, "Replicas")[1][-1]
    assert text == golden
    assert "3.0" in text


# --- records that hold little ---


@pytest.mark.parametrize("scenario", ["offline", "server", "single_stream", "concurrency", "sweep", "search"])
@pytest.mark.parametrize("change", ["refused", "silent", "timeless"])
def test_what_is_missing_breaks_no_report(scenario: str, change: str) -> None:
    """Nothing sent; answers without a token; answers without the times of their tokens."""
    nothing: dict[str, Any] = dict.fromkeys(("first_byte_ns", "first_ns", "last_ns", "tokens"))
    nothing |= {"pieces": 0, "token_ns": ()}
    changes: dict[str, dict[str, Any]] = {
        "refused": {**nothing, "sent_ns": None, "ended_ns": None, "prompt_tokens": None, "error": "refused"},
        "silent": nothing,
        "timeless": {"token_ns": ()},
    }
    asked = [request(n, replica=n % 2, **changes[change]) for n in range(4)]
    told = {"scenario": scenario, "rate_per_s": 1.0, "concurrency": 2, "least_s": 600.0, "full_set": 10}
    report = build(record(asked, stages=(stage(planned=4),), replicas=TWO, **told))
    (verdict,) = report.served
    assert not verdict.is_valid
    assert verdict.failed == (4 if change == "refused" else 0)
    assert markdown.text(report)
    assert json.dumps(json_exporter.document(report), allow_nan=False)
