"""Readings as lines and tables, recorded whole, summed up; and scraped by a real Prometheus."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import http.client
import io
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from paceline.campaign.live import metrics_endpoint, monitor
from paceline.errors import RequestError
from paceline.host import gauges
from paceline.host.gauges import DeviceSample, HostSample, Snapshot
from paceline.results import campaign_file, store
from paceline.wording import MISSING

if TYPE_CHECKING:
    from conftest import FakeNvml

Make = Callable[..., Any]
PATIENCE_S = 30.0


def snapshot(at_s: float = 1000.0, use: float | None = 0.5, reasons: tuple[str, ...] | None = ()) -> Snapshot:
    host = HostSample(at_s=at_s, cpu_ratio=0.25, memory_used_bytes=2**30, load=1.5, cores_ratio=(0.5, 0.0))
    device = DeviceSample(
        at_s=at_s,
        device=0,
        utilisation_ratio=use,
        memory_used_bytes=8 * 2**30,
        power_w=None,
        temperature_c=61.0,
        sm_clock_hz=1.98e9,
        throttle_reasons=reasons,
        energy_j=at_s * 100,
    )
    return Snapshot(host=host, devices=(device,))


# --- lines, tables, summary ---


def test_lines_say_what_is_known_and_mark_what_is_not(golden: object) -> None:
    tally = monitor.Tally()
    tally.add(snapshot(990.0))
    tally.add(snapshot(reasons=("software power cap",)))
    host, gpu = monitor.snapshot_lines(snapshot(reasons=("software power cap",)), tally)
    assert host == golden
    assert f"{MISSING}" in host
    assert "25 %" in host
    assert "1.0" in host
    assert "1.5" in host
    text = gpu.strip()
    assert text == golden
    assert f"{MISSING}" in text
    assert "50 %" in text
    assert "8.0" in text
    assert "61" in text
    assert "SM" in text
    assert "1980" in text
    assert "1.00" in text


def test_cores_are_shown_where_there_is_no_gpu(golden: object) -> None:
    host = snapshot().host
    lines = monitor.snapshot_lines(Snapshot(host=host, devices=()), monitor.Tally())
    text = lines[1].strip()
    assert text == golden
    assert "50" in text
    assert monitor.cores_text([0.0] * 16 + [1.0]) == "▁" * 16 + "█"


def test_processors_that_count_their_energy_tell_it_since_the_start(golden: object) -> None:
    tally, host = monitor.Tally(), snapshot().host
    for energy_j in (0.0, 250.0):
        reading = Snapshot(host=dataclasses.replace(host, energy_j=energy_j), devices=())
        tally.add(reading)
    text = monitor.snapshot_lines(reading, tally)[0]
    assert text == golden
    assert "250" in text
    text = list(tally.lines())[1]
    assert text == golden
    assert "1.5" in text
    assert "250" in text
    assert "paceline_host_energy_joules_total 250" in metrics_endpoint.page_text(reading)


def test_a_terminal_gets_tables(fake_nvml: FakeNvml) -> None:
    from rich.console import Console

    tally = monitor.Tally()
    tally.add(gauges.read())
    shown = Console(width=160, record=True, file=io.StringIO())
    shown.print(monitor.screen(gauges.read(), tally))
    table = shown.export_text()
    assert "memory clock" in table
    assert "3201 MHz" in table
    assert "hardware thermal slowdown" in table


def test_the_summary_has_minimum_median_maximum_throttling_and_energy(golden: object) -> None:
    tally = monitor.Tally()
    for number, (use, reasons) in enumerate(((0.1, ()), (0.9, ("software power cap",)), (0.2, ()), (None, None))):
        tally.add(snapshot(1000.0 + number, use, reasons))
    head, host, gpu = tally.lines()
    assert head == golden
    once = monitor.Tally()
    once.add(snapshot())
    assert next(once.lines()) == golden
    assert host == golden
    assert "25" in host
    assert "25 %" in host
    assert "1.0" in host
    assert gpu == golden
    assert "10" in gpu
    assert "20" in gpu
    assert "90 %" in gpu
    assert " W" not in gpu, "a gauge that never spoke is not told of"
    assert "33" in gpu
    assert "300" in gpu


# --- the record ---


def test_readings_are_appended_and_each_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gauges.jsonl"
    for at_s in (1.0, 2.0):
        with monitor.Recording(path) as record:
            record.add(snapshot(at_s))
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            assert rows[-1]["host"]["at_s"] == at_s, "flushed before the file is closed"
    assert [row["devices"][0]["power_w"] for row in rows] == [None, None]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "gauges.jsonl"
    path.write_text('{"host": {"at')
    with monitor.Recording(path) as record:
        record.add(snapshot(2.0))
    assert json.loads(path.read_text().splitlines()[1])["host"]["at_s"] == 2.0


def test_a_table_has_one_heading_and_a_row_per_source(tmp_path: Path) -> None:
    path = tmp_path / "gauges.csv"
    for _ in range(2):
        with monitor.Recording(path) as record:
            record.add(snapshot())
    rows = list(csv.DictReader(path.open()))
    assert [row["source"] for row in rows] == ["host", "gpu 0"] * 2
    assert (rows[0]["cores_ratio"], rows[0]["power_w"]) == ("0.500 0.000", "")
    assert (rows[1]["throttle_reasons"], rows[1]["energy_j"]) == ("none", "100000.0")


@pytest.mark.parametrize(("name", "content"), [("x.txt", None), ("x.csv", "a,b\n1,2\n"), ("no/folder/x.csv", None)])
def test_a_file_that_is_not_ours_to_append_to_is_refused(
    name: str, content: str | None, tmp_path: Path, golden: object
) -> None:
    path = tmp_path / name
    if content:
        path.write_text(content)
    with pytest.raises(RequestError) as caught:
        monitor.Recording(path)
    assert str(caught.value) == golden
    assert "--record" in str(caught.value)
    assert (path.read_text() if content else None) == content


def test_a_killed_monitor_leaves_whole_lines_and_an_interrupted_one_its_summary(
    tmp_path: Path, environment: Any
) -> None:
    path = tmp_path / "gauges.jsonl"
    command = [sys.executable, "-m", "paceline.cli", "monitor", "--interval", "0.1", "--record", str(path)]
    for end, code in ((signal.SIGKILL, -9), (signal.SIGINT, 0)):
        before = path.read_text().count("\n") if path.exists() else 0
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        wait_for(lambda before=before: path.exists() and path.read_text().count("\n") >= before + 2)
        process.send_signal(end)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code
    assert "minimum / median / maximum" in said
    assert all(json.loads(line)["host"]["at_s"] > 0 for line in path.read_text().splitlines())


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)
    return found


# --- the endpoint ---


def ask(address: str, path: str = "/metrics", host: str | None = None) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_metrics_are_served_and_nothing_else() -> None:
    with metrics_endpoint.serving(
        "127.0.0.1:0", lambda: metrics_endpoint.page_text(snapshot(reasons=("x",)), ())
    ) as address:
        status, kind, text = ask(address)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert 'paceline_gpu_utilisation_ratio{gpu="0"} 0.5\n' in text
        assert 'paceline_gpu_energy_joules_total{gpu="0"} 100000\n' in text
        assert 'paceline_gpu_throttled{gpu="0",reason="x"} 1\n' in text
        assert "paceline_gpu_power_watts" not in text, "missing is no sample"
        assert ask(address, "/etc/passwd")[0] == 404
        assert ask(address, host="evil.example")[0] == 421, "a page of another site, by DNS rebinding"
    with pytest.raises(OSError, match="refused"):
        ask(address)


def test_an_address_that_others_can_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:9109"):
        with (
            pytest.raises(RequestError, match="PACELINE_METRICS_TOKEN"),
            metrics_endpoint.serving(address, lambda: "paceline_x 1\n"),
        ):
            pytest.fail("it serves without a token")
    monkeypatch.setenv("PACELINE_METRICS_TOKEN", "made-up")
    with metrics_endpoint.serving("0.0.0.0:0", lambda: "paceline_x 1\n") as address:
        port = address.rpartition(":")[2]
        for given, status in ((None, 401), ("Bearer other", 401), ("Basic made-up", 401), ("Bearer made-up", 200)):
            connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics", headers={"Authorization": given} if given else {})
                answer = connection.getresponse()
                assert answer.status == status
                assert (b"paceline_x" in answer.read()) == (status == 200)


def test_a_head_request_is_answered_without_a_body() -> None:
    with metrics_endpoint.serving("127.0.0.1:0", lambda: "paceline_x 1\n") as address:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("HEAD", "/metrics")
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Content-Length"], answer.read()) == (200, "13", b"")


def test_a_client_that_goes_away_is_no_news_and_a_defect_is(capfd: pytest.CaptureFixture[str]) -> None:
    asked, gone = threading.Event(), threading.Event()

    def page() -> str:
        asked.set()
        gone.wait(PATIENCE_S)
        return "x" * 10_000_000

    with metrics_endpoint.serving("127.0.0.1:0", page) as address:
        client = socket.create_connection(metrics_endpoint.parse_address(address), timeout=PATIENCE_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert asked.wait(PATIENCE_S)
        client.close()
        gone.set()
        assert ask(address)[0] == 200
        assert wait_for(lambda: not [t for t in threading.enumerate() if "process_request" in t.name])
    assert capfd.readouterr().err == ""
    with metrics_endpoint.serving("127.0.0.1:0", lambda: str(1 // 0)) as address:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(address)
        assert wait_for(lambda: "ZeroDivisionError" in capfd.readouterr().err)


def test_an_address_that_is_taken_or_none_is_one_sentence(golden: object) -> None:
    for wrong in ("9109", "host", "a:b", "127.0.0.1:99999", "http://x:1"):
        with pytest.raises(RequestError) as caught:
            metrics_endpoint.parse_address(wrong)
        assert str(caught.value) == golden
        assert "HOST" in str(caught.value)
        assert "PORT" in str(caught.value)
    assert metrics_endpoint.parse_address("[::1]:9109") == ("::1", 9109)
    with (
        metrics_endpoint.serving("127.0.0.1:0", str) as address,
        pytest.raises(RequestError) as caught,
        metrics_endpoint.serving(address, str),
    ):
        raise AssertionError("must not be served twice")
    assert str(caught.value) == golden


def test_a_campaign_under_way_is_on_the_page(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    under_way(tmp_path, make_spec, make_run)
    text = metrics_endpoint.page_text(None, campaign_file.read_views(tmp_path), tmp_path)
    assert 'paceline_campaign_runs_planned{experiment="test"} 2\n' in text
    assert 'paceline_campaign_runs_ended{experiment="test",status="oom"} 1\n' in text
    assert 'paceline_campaign_running{experiment="test"} 1\n' in text
    assert re.search(r'paceline_run_step\{experiment="test",run="fsdp2-\S+",cell="\w+",title="fsdp2 .*"\} 3\n', text)
    assert "paceline_run_loss" not in text, "no loss was recorded yet"


def test_two_campaigns_of_one_name_stay_apart(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    for folder in ("monday", "tuesday"):
        under_way(tmp_path / folder, make_spec, make_run)
    text = metrics_endpoint.page_text(None, campaign_file.read_views(tmp_path), tmp_path)
    assert 'paceline_campaign_runs_ended{experiment="monday/test",status="oom"} 1\n' in text
    assert 'paceline_campaign_runs_ended{experiment="tuesday/test",status="oom"} 1\n' in text
    assert text.count("paceline_run_step{") == 2
    inside = tmp_path / "monday" / "test"
    assert 'running{experiment="test"}' in metrics_endpoint.page_text(None, campaign_file.read_views(inside), inside)


def under_way(out: Path, make_spec: Make, make_run: Make) -> None:
    from paceline.results.records import Status

    first, second = make_spec("ddp"), make_spec("fsdp2")
    make_run(out, first, Status.OOM, "out of memory")
    campaign_file.write_plan(out / "test", [first, second])
    store.ProgressFile(store.create(out, second), 0).mark(3, "forward")


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A real Prometheus that scrapes `target` every second, on a free port, with its data in `folder`."""
    config = folder / "prometheus.yml"
    job = (
        f"scrape_configs:\n- job_name: paceline\n  scrape_interval: 1s\n  static_configs: [{{targets: ['{target}']}}]\n"
    )
    config.write_text(job)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield address
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    text = urllib.parse.urlencode({"query": expression})
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/api/v1/query?{text}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found
    return []


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_the_live_endpoint(
    tmp_path: Path, make_spec: Make, make_run: Make, golden: object
) -> None:
    out = tmp_path / "results"
    under_way(out, make_spec, make_run)
    page = metrics_endpoint.page_text(snapshot(time.time()), campaign_file.read_views(out), out)
    with metrics_endpoint.serving("127.0.0.1:0", lambda: page) as target, prometheus(tmp_path, target) as address:
        (step,) = wait_for(lambda: query(address, "paceline_run_step"))
        assert step["value"][1] == "3"
        assert step["metric"]["title"] == golden
        assert "fsdp2" in step["metric"]["title"]
        assert "x2" in step["metric"]["title"]
        (planned,) = query(address, "paceline_campaign_runs_planned - on(experiment) paceline_campaign_runs_ended")
        assert planned["value"][1] == "1"
        assert query(address, "up")[0]["value"][1] == "1"
        assert query(address, "paceline_gpu_utilisation_ratio")[0]["value"][1] == "0.5"


def test_monitor_serves_from_the_command_line(tmp_path: Path, environment: Any) -> None:
    command = [sys.executable, "-m", "paceline.cli", "monitor", "--interval", "0.1", "--serve", "127.0.0.1:0"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("http://").removesuffix("/metrics")
        assert wait_for(lambda: "paceline_host_cpu_ratio" in ask(address)[2])
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said.splitlines()[0].endswith("minimum / median / maximum:")) == (0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--count", "0"],
        ["--record", "x.txt"],
        ["--serve", "nowhere"],
        ["--out", "absent"],
        ["--out", "."],
    ],
)
def test_a_wrong_request_is_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert cli.main(["monitor", *arguments]) == 2
    assert capsys.readouterr().err == golden
