"""The real LoadGen over a server of known law: its settings, its verdict, its logs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.requests import request

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.serving.client import mlcommons
from paceline.serving.client.mlcommons import Terms, drive, read_back
from paceline.serving.client.schedule import Target
from paceline.serving.mock import MockReplica

Start = Callable[..., MockReplica]
installed = pytest.mark.skipif(not mlcommons.is_installed(), reason="the package mlcommons-loadgen is not installed")


def terms(**more: Any) -> Terms:
    values = {"scenario": "server", "samples": 8, "requests": 30, "seed": 7, "rate_per_s": 300.0, "least_s": 0.0}
    values |= {"expected_per_s": 100.0, "ttft_s": 2.0, "tpot_s": 0.1, "cap": None, "timeout_s": 20.0}
    return Terms(**{**values, **more})


def driven(replicas: list[MockReplica], folder: Path, **more: Any) -> Any:
    asked = terms(**more)
    targets = [Target(host="127.0.0.1", port=each.port) for each in replicas]
    return drive(asked, [[request(4)] * len(targets)] * asked.samples, targets, folder)


@installed
def test_server_below_459_requests_is_invalid_by_its_own_rule(replica: Start, tmp_path: Path) -> None:
    told = driven([replica(), replica()], tmp_path)
    assert (told.verdict, told.asked, dict(told.errors)) == ("INVALID", 30, {})
    assert "429 more queries" in told.reasons[0]
    assert told.settings["target_qps"] == 300
    assert 0 < told.cpu_ratio < 1
    assert [told.settings[name] for name in terms().seeds] == [7, 8, 9]
    assert told.numbers["query_count"] == 30
    assert told.numbers["first_token_99.00_percentile_latency_ns"] >= 5e6
    assert told.numbers["completed_tokens_per_second"] > 0
    assert {path.name for path in tmp_path.iterdir()} >= set(mlcommons.LOGS)


@installed
@pytest.mark.parametrize(("scenario", "requests"), [("offline", 24), ("single_stream", 64)])
def test_other_scenarios(replica: Start, tmp_path: Path, scenario: str, requests: int) -> None:
    told = driven([replica()], tmp_path, scenario=scenario, requests=requests, cap=4)
    assert (told.verdict, told.asked, told.reasons) == ("VALID", requests, ())


def test_no_replica_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(mlcommons, "is_installed", lambda: True)
    with pytest.raises(UnsupportedError) as caught:
        driven([], tmp_path)
    assert str(caught.value) == golden
    assert "LoadGen" in str(caught.value)


@installed
def test_requests_that_fail_end_the_test_and_are_counted(replica: Start, tmp_path: Path) -> None:
    told = driven([replica(mode="fail")], tmp_path)
    assert told.errors == {"http_500": 15}


@installed
def test_a_process_that_dies_is_a_sentence(replica: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        sys.exit(3)

    monkeypatch.setattr(mlcommons, "settings_of", dies)
    with pytest.raises(UnsupportedError, match="LoadGen's process ended with code 3"):
        driven([replica()], tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(mlcommons, "is_installed", lambda: False)
    with pytest.raises(MissingPackageError) as caught:
        driven([], tmp_path)
    assert str(caught.value) == golden
    assert str(caught.value) == golden


def log(tmp_path: Path, entries: dict[str, Any], tail: str = "") -> Path:
    path = tmp_path / "detail.txt"
    lines = [f":::MLLOG {json.dumps({'key': key, 'value': value})}" for key, value in entries.items()]
    path.write_text("\n".join(lines) + tail)
    return path


def test_its_log_is_read_as_it_is(tmp_path: Path, golden: object) -> None:
    entries = {"loadgen_version": "6.0.17 @ NA", "result_validity": "INVALID", "result_perf_constraints_met": False}
    entries |= {"early_stopping_met": True, "result_query_count": 5, "result_completed_tokens_per_second": 12.5}
    told = read_back(log(tmp_path, entries, "\nno line of it\n:::MLLOG {cut"))
    assert (told.version, told.verdict) == ("6.0.17", "INVALID")
    assert told.reasons == golden
    assert told.numbers == {"query_count": 5.0, "completed_tokens_per_second": 12.5}


def test_a_log_without_a_verdict_is_a_sentence(tmp_path: Path, golden: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_back(log(tmp_path, {"result_query_count": 5}))
    assert str(caught.value) == golden
    assert "LoadGen" in str(caught.value)
