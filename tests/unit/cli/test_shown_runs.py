"""`paceline show` of a served run: what became of its requests and replicas, not steps that it never had."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from served_records import CLIENT, S, record, replica, request, stage

from paceline import cli
from paceline.analysis.findings import Certificate, LaunchTrust
from paceline.analysis.findings.training import Check
from paceline.analysis.served import verdicts
from paceline.report.tables.one_run import record_lines, served_lines
from paceline.results import store
from paceline.results.records import RunRecord, Status


def shown(found: RunRecord) -> list[str]:
    return list(served_lines(verdicts.loads_of_run(found), verdicts.replicas_of_run(found)))


def test_failures_are_listed_by_class_with_one_detail(golden: object) -> None:
    refused: dict[str, Any] = {"error": "http_429", "first_ns": None, "last_ns": None, "token_ns": (), "tokens": None}
    found = [request(0), request(1), request(2, **refused), request(3, **refused, detail="busy, Retry-After 1")]
    assert shown(record([*found, request(4, **{**refused, "error": "reset"})])) == golden


def test_loads_of_a_sweep_stand_beside_each_other(golden: object) -> None:
    loads = [stage(0, scenario="sweep", planned=1), stage(1, scenario="sweep", concurrency=2, planned=1)]
    found = shown(record([request(0), request(1, stage=1)], stages=loads, clients=(CLIENT,), scenario="sweep"))
    assert [line for line in found if "load" in line] == golden


def test_missed_limits_and_an_unreliable_client_are_shown(golden: object) -> None:
    slow = [request(n, first_ns=3 * S, last_ns=3 * S) for n in range(3)]
    found = shown(record(slow, scenario="server", rate_per_s=1.0))
    assert found[0] == golden
    assert "INVALID" in found[0]
    assert found[1] == golden
    assert "459" in found[1]


def test_a_replica_that_was_silent_is_named_with_its_times() -> None:
    replicas = (replica(0), replica(1, silent_ns=(3 * S, 5 * S, 8 * S), reassigned=2))
    text = "\n".join(shown(record([request(n) for n in range(3)], replicas=replicas)))
    silent = "silent from 3.0 s to 5.0 s, silent from 8.0 s to the end, 2 of its samples reassigned to others"
    assert f"replica 1 on node-1, model tiny: 0 requests, 0 failed, {silent}" in text


def test_a_replica_that_died_is_named(golden: object) -> None:
    replicas = (replica(0), replica(1, died_ns=3 * S, reassigned=2))
    assert shown(record([request(0), request(1, replica=1)], replicas=replicas))[-2:] == golden


def test_a_rank_that_asked_has_no_steps(golden: object) -> None:
    assert list(record_lines(record([request(0)]), None)) == golden
    assert not any("step" in line for line in record_lines(record([request(0)]), None))


def test_the_verb_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: object) -> None:
    made = record([request(0)], replicas=(replica(0),))
    run_dir = store.create(tmp_path, made.spec)
    (run_dir / "samples-0.jsonl").write_text("".join(map(store.sample_line, (*made.requests, *made.replicas))))
    store.write_outcome(run_dir, made.outcomes[0])
    store.seal(run_dir, Status.OK, None, 0.0, 1.0)
    assert cli.main(["show", str(run_dir)]) == 0
    told = capsys.readouterr().out
    assert told == golden
    assert "VALID" in told
    assert "node-0" in told


def test_the_raw_samples_of_a_sealed_run_are_printed_as_lines(
    tmp_path: Path, make_spec: Any, make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, make_spec("ddp", 2))
    written = [line for path in sorted(run_dir.glob("samples-*.jsonl")) for line in path.open()]
    record = store.read_run(run_dir)
    store.seal(run_dir, record.status, None, record.started_at, record.ended_at, steps=record.steps)
    assert not list(run_dir.glob("samples-[0-9].jsonl"))
    assert cli.main(["show", str(run_dir), "--samples"]) == 0
    assert capsys.readouterr().out.splitlines(keepends=True) == written


def test_the_first_line_names_what_below_it_is_not_ok() -> None:
    made = record([request(0)])
    light = LaunchTrust(level="red", reasons=("other processes used 1.9 of 2 cores",))
    check = Check(name="loss trajectory", ok=False, expected="3", observed="4", basis="observed")
    refused = Certificate(run=made.spec.run_id, cell="c", work="w", reference=None, checks=(check,))
    (load,) = verdicts.loads_of_run(made)
    invalid = dataclasses.replace(load, verdict="INVALID")
    first, *_ = record_lines(made, refused, light, [load, invalid])
    assert first.endswith(": ok, but not certified (loss trajectory), 1 of 2 loads not valid and trust is red")
    first, *_ = record_lines(made, None, None, [dataclasses.replace(load, verdict="VALID")])
    assert first.endswith(": ok")
