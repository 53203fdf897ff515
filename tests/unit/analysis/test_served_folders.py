"""`paceline compare`, `history` and `report` on served runs as they leave folders: exit codes, the gate, the page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from answered_records import (
    build_answer,
    build_record,
    build_replica,
    build_request,
    build_spec,
    in_stages,
    one_by_one,
)

from paceline import cli
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status
from paceline.results.served_samples import ClientSample

COUNT = 460


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
    """Answers that take about so long, from a server at the port of the day; launches differ by 0.2 %."""

    def make(name: str, seconds: float, day: int = 0, repeats: int = 1, **more: Any) -> Path:
        records = []
        for repeat in range(repeats):
            level = seconds * (1 + 0.002 * (repeat - 1))
            asked = one_by_one(lambda n, at, level=level: level * (1 + 0.1 * ((n * 7 + day) % 11 - 5) / 5), COUNT)
            spec = build_spec(f"openai:url=http://127.0.0.1:{8000 + day}", repeat)
            records.append(dataclasses.replace(build_record(spec, asked, clients=(client(),)), **more))
        return write(tmp_path / name, records, 1.7e9 + 86400 * day)

    return make


def test_the_gate_fails_on_a_slower_server_and_passes_an_equal_one(folder: Folder, capsys: Any, golden: object) -> None:
    a, slow, same = (
        folder("a", 0.1, repeats=3),
        folder("slow", 0.13, day=1, repeats=3),
        folder("same", 0.1, day=2, repeats=3),
    )
    assert cli.main(["compare", str(a), str(slow), "--fail-on-regression", "10"]) == 1
    shown = capsys.readouterr()
    assert shown.out == golden
    assert "23" in shown.out
    assert shown.err.count("\n") == 1
    assert shown.err == golden
    assert "10 %" in shown.err
    assert cli.main(["compare", str(a), str(same), "--fail-on-regression", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out == golden
    assert shown.err == golden


def test_one_launch_of_a_server_has_a_ratio_and_does_not_pass_the_gate(
    folder: Folder, capsys: Any, golden: object
) -> None:
    a, slow = folder("a", 0.1), folder("slow", 0.13, day=1)
    assert cli.main(["compare", str(a), str(slow), "--fail-on-regression", "10"]) == 3
    shown = capsys.readouterr()
    assert shown.out == golden
    assert shown.err == golden


def test_a_rate_that_arrives_as_scheduled_says_nothing_about_latencies(
    tmp_path: Path, capsys: Any, golden: object
) -> None:
    """50 requests a second: tokens a second stay what was asked for, so only latencies can show a regression. Those of
    B differ by half from launch to launch."""

    def scheduled(name: str, day: int, *ttft_s: float) -> str:
        records = []
        for repeat, first_s in enumerate(ttft_s):
            asked = [
                build_request(
                    n,
                    n / 50,
                    1.0,
                    first_ns=round((n / 50 + first_s) * 1e9),
                    last_ns=round((n / 50 + 2 * first_s) * 1e9),
                )
                for n in range(460)
            ]
            spec = build_spec(repeat=repeat, scenario="constant", concurrency=None, rate_per_s=50.0)
            records.append(build_record(spec, asked, clients=(client(),)))
        return str(write(tmp_path / name, records, 1.7e9 + 86400 * day))

    a, wild = scheduled("a", 0, 0.1, 0.1001, 0.1002), scheduled("wild", 1, 0.1, 0.15, 0.2)
    assert cli.main(["compare", a, wild, "--fail-on-regression", "5"]) == 3
    shown = capsys.readouterr()
    assert shown.out == golden
    assert shown.err == golden
    late = scheduled("late", 1, 0.3, 0.3003, 0.3006)
    assert cli.main(["compare", a, late, "--fail-on-regression", "5"]) == 1
    assert cli.main(["compare", late, a, "--fail-on-regression", "5"]) == 0


def test_a_run_whose_client_was_the_bottleneck_is_not_ranked(folder: Folder, capsys: Any, golden: object) -> None:
    a, b = folder("a", 0.1), folder("b", 0.05, day=1, clients=(client(cpu_s=9.5),))
    assert cli.main(["compare", str(a), str(b)]) == 2
    text = capsys.readouterr().err
    assert text == golden
    assert "95" in text
    assert "80" in text


@pytest.mark.parametrize(
    ("doubted", "error", "limits", "code"),
    [
        ((), None, {}, 0),
        ((1,), None, {}, 1),
        ((0, 1), None, {}, 1),
        ((), "http_429", {}, 1),
        ((), "http_429", {"ttft_limit_s": 5.0}, 0),
    ],
)
def test_a_requested_load_that_is_rejected_fails_the_command(
    tmp_path: Path,
    capsys: Any,
    doubted: tuple[int, ...],
    error: str | None,
    limits: dict[str, float],
    code: int,
    golden: object,
) -> None:
    """So that a schedule takes no such run for a good one; limits that were not kept are an answer."""
    first, second = one_by_one(0.1, 20), one_by_one(0.1, 20, start_s=3.0)
    second[-1] = dataclasses.replace(second[-1], error=error)
    spec = build_spec(scenario="sweep", loads="1+2", concurrency=None, **limits)
    clients = tuple(client(stage=n, cpu_s=9.5 if n in doubted else 0.1) for n in (0, 1))
    swept = dataclasses.replace(in_stages(spec, (first, second), concurrency=(1, 2)), clients=clients)
    out = write(tmp_path / "swept", [swept], 1.7e9)
    assert cli.main(["report", str(out), "--format", "json"]) == code
    assert capsys.readouterr().out == golden


def test_history_counts_served_launches_and_says_which_it_left_out(folder: Folder, tmp_path: Path, capsys: Any) -> None:
    for day in range(3):
        folder(f"day-{day}", 0.1, day=0, status=Status.OK)
    folder("day-3", 0.1, clients=(client(cpu_s=9.5),))
    assert cli.main(["history", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {series["metric"] for series in told["histories"]} >= {"output_tokens_per_s", "tpot_p50_s"}
    assert list(told["dropped"].values()) == [1]


def test_every_format_of_a_report_has_the_metrics_beside_speed(folder: Folder, capsys: Any) -> None:
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


# --- sweeps and searches ---

ENOUGH = 459


def searched(tmp_path: Path, name: str, *loads: tuple[float, int], day: int = 0, repeats: int = 3) -> Path:
    """Searches whose loads are each a rate, and how many of its requests had their first token after 2.4 s."""
    parts = [
        [build_request(n, 1000 * k + n / rate, 12.0 if n < late else 0.1) for n in range(ENOUGH)]
        for k, (rate, late) in enumerate(loads)
    ]
    rates = [rate for rate, _ in loads]
    stages = {"scenario": ["server"] * len(loads), "concurrency": [None] * len(loads)}
    specs = [build_spec(repeat=n, scenario="search", concurrency=None, rate_per_s=4.0) for n in range(repeats)]
    records = [in_stages(s, parts, rate_per_s=rates, planned=[ENOUGH] * len(loads), **stages) for s in specs]
    return write(tmp_path / name, records, 1.7e9 + 86400 * day)


def test_the_gate_follows_what_a_search_found(tmp_path: Path, capsys: Any, golden: object) -> None:
    a = searched(tmp_path, "a", (4, 0), (8, 0), (8.4, 100))
    fell = searched(tmp_path, "fell", (4, 0), (6, 0), (6.3, 100), day=1)
    assert cli.main(["compare", str(a), str(fell), "--fail-on-regression", "10"]) == 1
    shown = capsys.readouterr()
    assert shown.out == golden
    assert "25.0 %" in shown.out
    assert "lower" in shown.out
    assert shown.err == golden
    assert "max_rate_per_s" in shown.err
    assert "25.0 %" in shown.err
    assert "lower" in shown.err
    assert cli.main(["compare", str(a), str(fell), "--fail-on-regression", "30"]) == 0
    assert capsys.readouterr().err == golden


def test_a_search_that_found_nearly_the_same_is_inconclusive(tmp_path: Path, capsys: Any, golden: object) -> None:
    a = searched(tmp_path, "a", (4, 0), (8, 0), (8.4, 100))
    near = searched(tmp_path, "near", (4, 0), (7.8, 0), (8.2, 100), day=1)
    assert cli.main(["compare", str(a), str(near), "--fail-on-regression", "5"]) == 3
    shown = capsys.readouterr()
    assert shown.out == golden
    assert shown.err == golden


def test_one_search_on_a_side_has_no_verdict(tmp_path: Path, capsys: Any, golden: object) -> None:
    """Its bracket does not cover what the next search would find."""
    a = searched(tmp_path, "a", (4, 0), (8, 0), (8.4, 100))
    once = searched(tmp_path, "once", (4, 0), (6, 0), (6.3, 100), day=1, repeats=1)
    assert cli.main(["compare", str(a), str(once), "--fail-on-regression", "50"]) == 3
    shown = capsys.readouterr()
    assert shown.out == golden
    assert shown.err == golden


def test_a_search_that_finds_nothing_any_more_is_a_regression(tmp_path: Path, capsys: Any, golden: object) -> None:
    a = searched(tmp_path, "a", (4, 0), (8, 0), (8.4, 100))
    nothing = searched(tmp_path, "nothing", (4, 100), (2, 100), day=1)
    assert cli.main(["compare", str(a), str(nothing), "--fail-on-regression", "10"]) == 1
    text = capsys.readouterr().err
    assert text == golden
    assert "459" in text
    assert "100" in text
    assert cli.main(["compare", str(nothing), str(a)]) == 2
    assert capsys.readouterr().err == golden


def test_a_search_in_which_nothing_failed_has_no_verdict(tmp_path: Path, capsys: Any, golden: object) -> None:
    a = searched(tmp_path, "a", (4, 0), (8, 0), (8.4, 100))
    cut = searched(tmp_path, "cut", (4, 0), day=1)
    assert cli.main(["compare", str(a), str(cut), "--fail-on-regression", "10"]) == 3
    assert capsys.readouterr().err == golden


def test_history_follows_each_load_of_a_sweep_and_what_a_search_found(tmp_path: Path, capsys: Any) -> None:
    for day in range(2):
        searched(tmp_path, f"search-{day}", (4, 0), (8 - day, 0), (9, 100), day=day, repeats=1)
        parts = [one_by_one(0.1 * (day + 1), COUNT), one_by_one(0.2, COUNT, 100.0)]
        swept = in_stages(build_spec(scenario="sweep", concurrency=2), parts, concurrency=[1, 2], planned=[COUNT] * 2)
        write(tmp_path / f"sweep-{day}", [swept], 1.7e9 + 86400 * day)
    searched(tmp_path, "nothing", (4, 100), day=3, repeats=1)
    assert cli.main(["history", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {(s["metric"], s["axes"].get("concurrency")): [p["value"] for p in s["points"]] for s in told["histories"]}
    assert found["max_rate_per_s", None] == [8, 7]
    assert found["output_tokens_per_s", 1] == pytest.approx([50, 25])
    assert found["output_tokens_per_s", 2] == pytest.approx([25, 25])
    assert {s["label"].rpartition(", ")[2] for s in told["histories"]} >= {"concurrency 1", "concurrency 2"}
    assert told["dropped"] == {"the search found no rate within its limits": 1}
