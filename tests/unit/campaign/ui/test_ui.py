"""`paceline ui` over real sockets: pages of a directory, hostile names, and the requests that it refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from paceline.campaign.live import local_server
from paceline.campaign.live.local_server import is_own_host
from paceline.campaign.ui import server
from paceline.campaign.ui.library import Library
from paceline.campaign.ui.routes import App
from paceline.campaign.ui.server import serving
from paceline.errors import RequestError
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample, Status

EVIL = "<img src=x onerror=alert(1)>"
SECRET = "the text of somebody's key"


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., Any], make_run: Callable[..., Path]
) -> Path:
    """Two finished campaigns, one of them with a hostile name, and one that runs: its controller is this process."""
    root = tmp_path_factory.mktemp("ui") / "results"
    for repeat in range(2):
        make_run(root, make_spec(repeat=repeat))
    make_run(root, make_spec(repeat=2), Status.FAILED, f"rank 0: {EVIL}")
    run_dir = make_run(root, make_spec(experiment="renamed"))
    (run_dir / "log.txt").write_text(f"[rank 0] {EVIL}\n[rank 1] quiet\n\x1b[31mred\n")
    outside = root.parent / "secret.txt"
    outside.write_text(SECRET)
    linked = make_run(root, make_spec(experiment="renamed", repeat=1), None)
    (linked / "log.txt").symlink_to(outside)
    (root / "renamed").rename(root / EVIL)
    spec = make_spec(experiment="now")
    (root / "elsewhere").symlink_to(root.parent)
    folder = store.create(root, spec)
    campaign_file.write_plan(folder.parent, [spec])
    store.ProgressFile(folder, 0).mark(2, "forward")
    return root


@pytest.fixture(scope="module")
def address(results: Path) -> Iterator[str]:
    with serving(App(Library(results)), "127.0.0.1:0") as url:
        yield urlsplit(url).netloc


def ask(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.msg


def body(address: str, path: str) -> str:
    status, text, _ = ask(address, path)
    assert status == 200, (status, text)
    return text


def test_campaigns_are_listed_with_their_state(address: str) -> None:
    page = body(address, "/")
    assert "2 ok, 1 failed" in page or "1 failed, 2 ok" in page
    assert "/campaign/now/live" in page
    assert page.index("<b>now</b>") < page.index("<b>test</b>")
    assert "elsewhere" not in page


def test_runs_are_searched_and_filtered(address: str) -> None:
    assert "6 runs" in body(address, "/runs")
    assert "1 of 6 runs" in body(address, "/runs?status=failed")
    assert "1 of 6 runs" in body(address, "/runs?q=onerror+failed")
    assert "3 of 6 runs" in body(address, "/runs?campaign=test&q=tiny")
    assert "1 of 6 runs" in body(address, "/runs?status=running")
    assert "No run matches" in body(address, "/runs?q=nothing+like+this")
    assert "3 runs" in body(address, "/campaign/test")


def test_report_comparison_and_history_are_the_pages_of_the_verbs(address: str) -> None:
    report = body(address, "/campaign/test/report")
    for part in ('class="bar"', 'class="headline"', 'id="ranking"', 'class="tiles"'):
        assert part in report
    assert body(address, "/campaign/test/headline").strip()
    status, compared, _ = ask(address, f"/compare?tick=test&tick={quote(quote(EVIL, safe=''), safe='')}")
    assert status == 422
    assert "the first folder has no valid run" in compared  # the runs have no reference
    assert "History of" in body(address, "/history?tick=test")
    assert ask(address, "/compare?tick=test")[0] == 422
    assert ask(address, "/compare?tick=test&tick=none")[0] == 404


def test_a_run_and_its_log_by_rank(address: str, results: Path) -> None:
    run = next(path.name for path in (results / "test").glob("*-r0-*"))
    assert f"{run}: ok" in body(address, f"/campaign/test/run/{run}")
    evil = f"/campaign/{quote(EVIL, safe='')}/run"
    name = next(path.name for path in (results / EVIL).iterdir() if (path / "status.json").exists())
    assert body(address, f"{evil}/{name}/log/text?rank=0") == f"[rank 0] {EVIL}\n"
    events = body(address, f"{evil}/{name}/log/events?rank=1")
    assert json.loads(events.split("data: ")[1].splitlines()[0]) == ["[rank 1] quiet"]
    assert "\x1b" not in body(address, f"{evil}/{name}/log/text")
    assert ask(address, f"{evil}/{name}/log?rank=7")[0] == 422
    assert ask(address, f"{evil}/{name}/log?rank=-1")[0] == 422


def test_hostile_names_stay_text(address: str) -> None:
    for path in ("/", "/runs", "/campaign/test", f"/campaign/{quote(EVIL, safe='')}", f"/runs?q={quote(EVIL)}"):
        page = body(address, path)
        assert EVIL not in page
        assert "&lt;img src=x" in page


@pytest.mark.parametrize(
    "path",
    [
        "/campaign/..",
        "/campaign/..%2f..",
        "/campaign/%2e%2e/report",
        "/campaign/elsewhere",
        "/campaign/elsewhere%2Fresults%2Ftest",
        "/campaign/test/run/..%2F..%2Fsecret.txt",
        "/campaign/test/run/.",
        "/assets/../server.py",
        "/assets/%2e%2e/server.py",
        "//etc/passwd",
        "/etc/passwd",
        "/campaign/%00",
    ],
)
def test_no_address_leads_out_of_the_directory(address: str, path: str) -> None:
    status, text, _ = ask(address, path)
    assert status == 404
    assert SECRET not in text


def test_a_log_that_is_a_link_to_elsewhere_is_refused(address: str, results: Path) -> None:
    name = next(path.name for path in (results / EVIL).iterdir() if not (path / "status.json").exists())
    for end in ("log", "log/text", "log/events"):
        status, text, _ = ask(address, f"/campaign/{quote(EVIL, safe='')}/run/{name}/{end}")
        assert status == 422
        assert SECRET not in text


def test_other_hosts_and_methods_are_refused(address: str) -> None:
    port = address.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "", "127.0.0.1.evil.example", "192.168.1.1", "a b"):
        assert ask(address, "/", Host=host)[0] == 421, host
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert ask(address, "/metrics", Host=host)[0] == 200, host
    for method in ("POST", "PUT", "DELETE"):
        assert ask(address, "/", method)[0] == 501


def test_what_is_no_address_is_refused_and_not_a_traceback(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("http://[/", "http://[x]/", "/?" + "a=1&" * 300):
        assert ask(address, path, Host=address)[0] == 400, path
    assert "Traceback" not in capfd.readouterr().err


def test_a_page_of_another_server_cannot_make_this_one_work(address: str) -> None:
    for site, mode, status in (
        ("cross-site", "no-cors", 403),
        ("same-site", "cors", 403),
        ("cross-site", "navigate", 200),
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
    ):
        assert ask(address, "/runs", Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)[0] == status, (site, mode)


def test_slow_and_many_connections_keep_no_browser_out(
    results: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The limit is on threads and on the time until the headers are complete, also if a byte comes now and then."""
    monkeypatch.setattr(local_server, "MOST_CONNECTIONS", 8)
    with serving(App(Library(results)), "127.0.0.1:0") as url, contextlib.ExitStack() as crowd:
        name, port = urlsplit(url).netloc.split(":")
        silent = [crowd.enter_context(socket.create_connection((name, int(port)), timeout=30)) for _ in range(40)]
        assert ask(f"{name}:{port}", "/assets/ui.js")[0] == 200
        assert silent[0].recv(1) == b"", "the oldest is closed"
        assert sum(thread.name.startswith("Thread-") for thread in threading.enumerate()) < 40
        monkeypatch.setattr(local_server, "HEAD_S", 0.2)
        slow = crowd.enter_context(socket.create_connection((name, int(port)), timeout=30))
        with contextlib.suppress(ConnectionError):
            for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 400:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail("it waits for headers forever")
    assert "Traceback" not in capfd.readouterr().err


def test_answers_may_not_be_framed_sniffed_or_kept(address: str) -> None:
    _, _, headers = ask(address, "/")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in ask(address, "/campaign/test/report")[2]["Content-Security-Policy"]


def test_an_address_that_others_reach_needs_the_token(results: Path) -> None:
    with serving(App(Library(results)), "0.0.0.0:0") as url:
        parts = urlsplit(url)
        port = parts.port
        address = f"127.0.0.1:{port}"
        token = parts.query.removeprefix("token=")
        assert len(token) >= 32
        for path in ("/", "/metrics", "/assets/ui.js", "/campaign/now/live/events", f"/?token={token}x"):
            assert ask(address, path)[0] == 401, path
        assert ask(address, "/", Authorization="Bearer wrong")[0] == 401
        assert ask(address, "/", Cookie=f"paceline-{port}=wrong")[0] == 401
        assert ask(address, "/metrics", Authorization=f"Bearer {token}")[0] == 200
        status, _, headers = ask(address, f"//evil.example/runs?q=a&token={token}")
        assert (status, headers["Location"]) == (303, "/evil.example/runs?q=a")
        assert ask(address, f"/\\evil.example/?token={token}")[2]["Location"] == "/evil.example/"
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(address, "/runs", Cookie="a=" + "\\" * 20_000 + f"; {cookie}")[0] == 401
        assert "HttpOnly" in headers["Set-Cookie"]
        assert "SameSite=Strict" in headers["Set-Cookie"]
        assert ask(address, "/runs", Cookie=cookie)[0] == 200
        assert ask(address, "/", Host="evil.example", Cookie=cookie)[0] == 421


def test_names_of_this_machine_are_its_own() -> None:
    assert is_own_host("10.0.0.1:8501", "0.0.0.0")
    assert is_own_host("login-1:8501", "login-1")
    assert not is_own_host("10.0.0.1:8501", "127.0.0.1")
    assert not is_own_host("10.0.0.1.evil.example", "0.0.0.0")


def test_wrong_requests_are_one_sentence(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(RequestError, match="--listen: got 'here', expected HOST:PORT"),
        serving(App(Library(results)), "here"),
    ):
        pass
    monkeypatch.setenv(server.TOKEN, "short")
    with pytest.raises(RequestError, match="expected at least 16"), serving(App(Library(results)), "127.0.0.1:0"):
        pass


def test_metrics_name_the_running_campaign(address: str) -> None:
    assert 'paceline_campaign_running{experiment="now"} 1' in body(address, "/metrics")


def events_of(address: str, path: str, until: str) -> dict[str, Any]:
    """The newest event of each name, up to the first one called `until`."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    answer, found, name = connection.getresponse(), dict[str, Any](), ""
    assert answer.getheader("Content-Type") == "text/event-stream"
    while until not in found:
        word, _, rest = answer.readline().decode().rstrip("\n").partition(": ")
        if word == "event":
            name = rest
        elif word == "data":
            found[name] = json.loads(rest)
    connection.close()
    return found


def test_live_events_tell_run_nodes_and_what_ended(
    results: Path, make_step: Callable[..., Any], make_spec: Callable[..., Any]
) -> None:
    spec = make_spec(experiment="now")
    run_dir = results / "now" / spec.run_id
    (run_dir / "samples-0.jsonl").write_text(store.sample_line(make_step(step=1, loss=4.5)))
    gauges = [
        GaugeSample(rank=0, host=EVIL, at_s=1.0, cpu_ratio=0.5),
        GaugeSample(rank=0, host=EVIL, at_s=1.0, device=0, utilisation_ratio=0.93, power_w=612.4, temperature_c=61.0),
    ]
    (run_dir / "samples-gauges-0.jsonl").write_text("".join(map(store.sample_line, gauges)))
    with serving(App(Library(results)), "127.0.0.1:0") as url:
        address = urlsplit(url).netloc
        assert "/campaign/now/live/events" in body(address, "/campaign/now/live")
        found = events_of(address, "/campaign/now/live/events", "tick")
    assert found["layout"]["nodes"] == [[EVIL, 0, 1]]
    tick = found["tick"]
    assert (tick["run"], tick["step"], tick["steps"], tick["running"]) == (spec.run_id, 2, 4, True)
    assert (tick["cpu"], tick["utilisation"], tick["power"], tick["temperature"]) == ([50], [93], [612], [61])
    assert (tick["memory"], tick["throttle"]) == ([None], [None])
    assert found["steps"]["steps"] == [[1, 0.5, 4.5]]


def test_the_verb_serves_until_it_is_interrupted(results: Path, environment: Callable[..., dict[str, str]]) -> None:
    command = [sys.executable, "-m", "paceline.cli", "ui", str(results), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert "<b>test</b>" in body(urlsplit(url).netloc, "/")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0
