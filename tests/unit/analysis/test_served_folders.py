"""`paceline compare`, `history` and `report` on served runs as they leave folders: exit codes, the gate, the page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from answered_records import build_answer, build_record, build_replica, build_spec, one_by_one

from paceline import cli, store
from paceline.records import Outcome, RunRecord, Status
from paceline.serving import ClientSample

COUNT = 120


def write(out: Path, records: Iterable[RunRecord], started_at: float) -> Path:
    """Records as run folders below `out`, a minute apart."""
    for number, record in enumerate(records):
        run_dir = store.create(out, record.spec)
        samples = (*record.requests, *record.clients, *record.stages, *record.replicas, *record.answers)
        (run_dir / "samples-0.jsonl").write_text("".join(map(store.sample_line, samples)))
        start = started_at + 60 * number
        ended = {"rank": 0, "host": "node-a", "pid": 1, "started_at": start, "ended_at": start + 50}
        store.write_outcome(run_dir, Outcome(status=record.status, error=None, **ended))
        store.write_json(run_dir / "machine-node-a.json", {"host": "node-a", "driver": "580"})
        store.seal(run_dir, record.status, record.error, start, start + 50)
    return out


def client(**more: Any) -> ClientSample:
    lags = dict.fromkeys(("schedule_lag_p50_ns", "schedule_lag_p99_ns", "read_lag_p50_ns", "read_lag_p99_ns"), 1e4)
    usual = {"requests": COUNT, "reads": 5, "cpu_s": 0.1, "wall_s": 10.0, "most_in_flight": 1, "waited_for_cap": 0}
    usual |= {"clock_doubt_ns": 1, "clock_drift_ns": 0, "plan": "x", **lags}
    return ClientSample(rank=0, shard=0, **{**usual, **more})


Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Answers that take about so long, from a server at the port of the day."""

    def make(name: str, seconds: float, day: int = 0, **more: Any) -> Path:
        asked = one_by_one(lambda n, at: seconds * (1 + 0.1 * ((n * 7 + day) % 11 - 5) / 5), COUNT)
        record = build_record(build_spec(f"openai:url=http://127.0.0.1:{8000 + day}"), asked, clients=(client(),))
        return write(tmp_path / name, [dataclasses.replace(record, **more)], 1.7e9 + 86400 * day)

    return make


def test_the_gate_fails_on_a_slower_server_and_passes_an_equal_one(folder: Folder, capsys: Any) -> None:
    a, slow, same = folder("a", 0.1), folder("slow", 0.13, day=1), folder("same", 0.1, day=2)
    assert cli.main(["compare", str(a), str(slow), "--fail-on-regression", "10"]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("Output tokens/s: B is 23")
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("paceline: regression beyond 10 %: inference, tiny, 1 process")
    assert cli.main(["compare", str(a), str(same), "--fail-on-regression", "1"]) == 0
    assert "B and A tie" in capsys.readouterr().out


def test_a_run_whose_client_was_the_bottleneck_is_not_ranked(folder: Folder, capsys: Any) -> None:
    a, b = folder("a", 0.1), folder("b", 0.05, day=1, clients=(client(cpu_s=9.5),))
    assert cli.main(["compare", str(a), str(b)]) == 2
    assert "client: used 95% of a core (at most 80%)" in capsys.readouterr().err


def test_history_counts_served_launches_and_says_which_it_left_out(folder: Folder, tmp_path: Path, capsys: Any) -> None:
    for day in range(3):
        folder(f"day-{day}", 0.1, day=0, status=Status.OK)
    folder("day-3", 0.1, clients=(client(cpu_s=9.5),))
    assert cli.main(["history", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {series["metric"] for series in told["histories"]} >= {"output_tokens_per_s", "tpot_p50_s"}
    assert list(told["dropped"].values()) == [1]


def test_every_format_of_a_report_holds_what_stands_beside_speed(folder: Folder, capsys: Any) -> None:
    answers = [build_answer(r, n, "x" if r == 1 else "right") for r in range(3) for n in range(2)]
    replicas = tuple(build_replica(r, f"node-{r}") for r in range(3))
    made = folder("a", 0.1, answers=tuple(answers), replicas=replicas)
    assert cli.main(["report", str(made), "--price", "2", "--busy-hours", "12"]) == 0
    assert "Suspect: replica 1 (node-1) answered 2 of 2" in " ".join(capsys.readouterr().out.split())
    found = json.loads((made / "report.json").read_text())
    assert found["accuracy"][0]["replicas"][1]["agreement"] == "differs"
    assert found["served_costs"][0]["busy_hours"] == 12
    for name in ("report.md", "report.html"):
        text = (made / name).read_text()
        assert "Cost of served tokens" in text
        assert "Answers by replica" in text
    assert "reserved_usd_per_output_mtok" in (made / "metrics.csv").read_text()
