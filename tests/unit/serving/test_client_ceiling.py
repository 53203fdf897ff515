"""The ceiling that a self-test found: kept for this host and this client alone, and read whatever the file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.results.served_samples import CeilingSample
from paceline.serving import client_ceiling


def ceiling(processes: int = 1, events_per_s: float = 25_441.0) -> CeilingSample:
    return CeilingSample(rank=0, processes=processes, events_per_s=events_per_s, streams=5115, measured_at_s=1.7e9)


def test_each_number_of_processes_has_its_own_and_the_last_one_counts(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    for found in (ceiling(2), ceiling(1), ceiling(2, 30_000.0)):
        client_ceiling.keep(found, environ)
    assert client_ceiling.known(environ) == [ceiling(1), ceiling(2, 30_000.0)]
    (kept,) = (tmp_path / "paceline").iterdir()
    text = kept.read_text()
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text


def test_another_host_or_another_client_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    client_ceiling.keep(ceiling(), environ)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "another-node")
        assert client_ceiling.known(environ) == []
    with monkeypatch.context() as fewer:
        fewer.setattr(client_ceiling, "usable_cores", lambda: 1_000_000)
        assert client_ceiling.known(environ) == []
    with monkeypatch.context() as later:
        later.setattr(client_ceiling, "client", lambda: "9.9.9-abc")
        assert client_ceiling.known(environ) == []
    assert client_ceiling.known(environ) == [ceiling()]


@pytest.mark.parametrize("named", ["", "state", "../state"])
def test_without_an_absolute_folder_it_lies_in_the_home(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = client_ceiling.keep(ceiling(), {"XDG_STATE_HOME": named})
    assert kept.parent == tmp_path / ".local" / "state" / "paceline"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 1}',
        '{"schema": 2, "ceilings": []}',
        '{"schema": 1, "ceilings": [{"processes": 1}]}',
        '{"schema": 1, "ceilings": 7}',
        '{"schema": 1, "ceilings": [{"processes": 0, "events_per_s": 5, "streams": 1, "measured_at_s": 1}]}',
        '{"schema": 1, "ceilings": [{"processes": 1, "events_per_s": NaN, "streams": 1, "measured_at_s": 1}]}',
        '{"schema": 1, "ceilings": [{"processes": Infinity, "events_per_s": 5, "streams": 1, "measured_at_s": 1}]}',
        f'{{"schema": 1, "ceilings": [{{"processes": 1, "events_per_s": 1{"0" * 400}, "streams": 1}}]}}',
        "[" * 100_000,
    ],
)
def test_an_invalid_ceiling_file_is_ignored(text: str, tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    client_ceiling.keep(ceiling(), environ).write_text(text)
    assert client_ceiling.known(environ) == []
    client_ceiling.keep(ceiling(), environ)
    assert client_ceiling.known(environ) == [ceiling()]


# --- the verb ---


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bool]]:
    """A climb whose rungs are known, in the place of a real one; empty it for a host that is too busy."""
    told = [(1000.0, True), (25_441.4, True), (30_000.0, False)]

    class Rung:
        text = "a rung"

        def __init__(self, events_per_s: float, is_valid: bool) -> None:
            self.events_per_s, self.is_valid, self.streams = events_per_s, is_valid, 5115

        def to_dict(self) -> dict[str, object]:
            return {"events_per_s": self.events_per_s, "valid": self.is_valid}

    monkeypatch.setattr("paceline.serving.selftest.climb", lambda *_: (Rung(*each) for each in told))
    return told


def test_the_self_test_keeps_its_highest_reliable_rate(
    climbed: list[tuple[float, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: object,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["selftest", "--shards", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (kept,) = client_ceiling.known()
    assert (kept.events_per_s, kept.streams, kept.processes) == (25_441.4, 5115, 2)
    assert told["ceiling"]["events_per_s"] == 25_441.4
    assert told["kept"] is True
    assert [each["valid"] for each in told["tries"]] == [True, True, False]
    assert main(["selftest"]) == 0
    text = capsys.readouterr().out
    assert text == golden
    assert "25,441" in text
    assert "5,115" in text
    assert [each.processes for each in client_ceiling.known()] == [1, 2]


def test_a_folder_that_takes_no_file_costs_the_measurement_nothing(
    climbed: list[tuple[float, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: object,
) -> None:
    (tmp_path / "paceline").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["selftest"]) == 0
    assert capsys.readouterr().out == golden
    climbed.clear()
    assert main(["selftest", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"ceiling": None, "kept": False, "tries": []}
