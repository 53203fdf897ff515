"""The share of the client's ceiling that a load used, from records whose busiest second is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from served_records import CLIENT, MS, S, record, request, stage

from paceline.analysis import report as reports
from paceline.analysis.findings import Report
from paceline.analysis.findings.served import CeilingUse
from paceline.analysis.served.token_times import busiest_second
from paceline.experiment.choices import Choice
from paceline.report.answer import answer, grounds
from paceline.report.exporters import csv, html, markdown
from paceline.results.records import RunRecord
from paceline.results.served_samples import CeilingSample

MEASURED = 1_763_300_000.0  # 2025-11-16
WHOLE = ", counting complete answers"


def ceiling(events_per_s: float, processes: int = 1, streams: int = 100) -> CeilingSample:
    return CeilingSample(
        rank=0, processes=processes, events_per_s=events_per_s, streams=streams, measured_at_s=MEASURED
    )


def asked(*ceilings: CeilingSample, clients: int = 1, **more: Any) -> RunRecord:
    """Eight answers of four events within 132 ms of a load that lasts 2 s: 32 events in the busiest second."""
    known = tuple(replace(CLIENT, shard=shard) for shard in range(clients))
    answers = [request(n, ended_ns=2 * S) for n in range(8)]
    return replace(record(answers, clients=known, **more), client_ceilings=ceilings)


def built(*records: RunRecord) -> Report:
    return reports.build(records, "served")


def use_of(*records: RunRecord) -> CeilingUse:
    (verdict,) = built(*records).served
    assert verdict.ceiling is not None
    return verdict.ceiling


def test_the_busiest_second_is_counted_over_all_answers() -> None:
    early = [request(n) for n in range(3)]
    late = [request(n, first_ns=2 * S + n * 300 * MS, token_ns=(200 * MS,) * 3) for n in range(3, 8)]
    # Of the late ones, from 2.9 s on: first tokens at 2.9, 3.2, 3.5, 3.8, 4.1, each with three more 0.2 s apart.
    moments = [2_900 + 300 * n + 200 * k for n in range(5) for k in range(4)]
    most = max(sum(begin <= each < begin + 1000 for each in moments) for begin in moments)
    assert busiest_second(late) == most
    assert busiest_second([*early, *late]) == max(most, 12)
    assert busiest_second([request(0, pieces=0, first_ns=None)]) is None


def test_a_load_of_less_than_a_second_is_known_by_all_of_its_time() -> None:
    """32 events in 140 ms."""
    found = replace(asked(ceiling(1000.0)), requests=tuple(request(n) for n in range(8)))
    assert use_of(found).events_per_s == pytest.approx(32 / 0.14)


def test_the_share_is_shown_with_the_ceiling_and_its_date(golden: object) -> None:
    use = use_of(asked(ceiling(320.0)))
    assert (use.events_per_s, use.ratio, use.is_near) == (32.0, pytest.approx(0.1), False)
    assert use.text == golden
    assert f"{WHOLE}" in use.text
    assert "10 %" in use.text
    assert "320" in use.text
    assert "100" in use.text
    text = use_of(asked(ceiling(25_441.0))).text
    assert text == golden
    assert "1 %" in text
    assert "25,441" in text


def test_requests_that_failed_on_their_way_are_named_and_not_counted(golden: object) -> None:
    """Whether or not some of their events were kept: a failed request is not told whole."""
    found = asked(ceiling(320.0))
    broken = [request(n, error="in_stream", ended_ns=2 * S) for n in (8, 9)]
    use = use_of(replace(found, requests=(*found.requests, *broken)))
    assert use.ratio == pytest.approx(0.1)
    assert use.text == golden
    assert f"{WHOLE}" in use.text
    assert "2025-11-16" in use.text


def test_the_launch_that_came_nearest_counts() -> None:
    use = use_of(asked(ceiling(320.0)), asked(ceiling(64.0), repeat=1), asked(repeat=2))
    assert use.ratio == pytest.approx(0.5)


def test_more_streams_than_the_ceiling_was_measured_over_are_named(golden: object) -> None:
    text = use_of(replace(asked(ceiling(320.0)), clients=(replace(CLIENT, most_in_flight=150),))).text
    assert text == golden
    assert "100" in text
    assert "150" in text


@pytest.mark.parametrize(
    "found",
    [
        asked(),
        asked(ceiling(320.0), clients=2),
        asked(ceiling(0.0)),
    ],
)
def test_a_ceiling_that_is_not_known_says_what_to_do(found: RunRecord, golden: object) -> None:
    use = use_of(found)
    assert (use.ratio, use.events_per_s) == (None, 32.0)
    assert use.text == golden


def test_an_encrypted_load_has_no_such_ceiling(golden: object) -> None:
    found = asked(ceiling(320.0))
    spec = replace(found.spec, engine=Choice("openai", {"urls": ["http://a", "https://b"]}))
    text = use_of(replace(found, spec=spec)).text
    assert text == golden
    assert "TLS" in text


def test_each_load_is_compared_with_the_ceiling_of_its_client() -> None:
    """A sweep: one process for one request in flight, two for more."""
    requests = [request(n, stage=n // 4, ended_ns=2 * S) for n in range(8)]
    stages = [stage(n, concurrency=n + 1, planned=4) for n in range(2)]
    clients = [replace(CLIENT, stage=0), *(replace(CLIENT, stage=1, shard=n) for n in range(2))]
    found = record(requests, stages=stages, clients=clients, scenario="sweep", loads="1+2")
    found = replace(found, client_ceilings=(ceiling(160.0), ceiling(32.0, processes=2)))
    ratios = [v.ceiling.ratio for v in built(found).served if v.ceiling]
    assert ratios == pytest.approx([0.1, 0.5])


# --- where a reader finds it ---


def test_every_format_of_the_report_has_the_share() -> None:
    report = built(asked(ceiling(320.0)))
    sentence = f"10 % of the client ceiling (320 events/s over 100 streams, measured 2025-11-16){WHOLE}"
    assert f"The client used {sentence}" in markdown.text(report)
    assert sentence in html.text(report)
    (line,) = (line for line in csv.text(report).splitlines() if "client_ceiling_ratio" in line)
    assert ",0.1," in line
    assert "measured 2025-11-16" in line
    assert "A load used" not in " ".join((*answer(report), grounds(report)))


def test_near_the_ceiling_a_reader_is_warned_and_the_result_still_counts() -> None:
    report = built(asked(ceiling(36.0)))
    (verdict,) = report.served
    assert verdict.is_valid
    assert verdict.ceiling is not None
    assert verdict.ceiling.is_near
    warning = "A load used 89 % of the client ceiling"
    assert warning in " ".join((*answer(report), grounds(report)))
    assert warning in markdown.text(report)
    assert "beyond it the client itself would be what is measured" in html.text(report)
    assert not any(v.ceiling and v.ceiling.is_near for v in built(asked(ceiling(40.0))).served)
