"""Webhooks: what is sent, what is said of it, and that no secret is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.campaign.schedule import notification
from paceline.campaign.schedule.agenda import Schedule
from paceline.campaign.schedule.cron import Cron
from paceline.campaign.schedule.notification import Notice

NOTICE = Notice(
    name="nightly",
    outcome="regression",
    exit_code=1,
    report='/results/it\'s "x"/report.html',
    regression="ddp is 12 % slower",
    sentence="ddp is 12 % slower",
)


def schedule_of(**more: Any) -> Schedule:
    return Schedule(
        name="nightly",
        cron=Cron("0 19 * * *", "UTC"),
        backend="crontab",
        experiment="quick",
        source="quick",
        added_at=0.0,
        directory="/",
        **more,
    )


class Hook(BaseHTTPRequestHandler):
    received: list[tuple[dict[str, str], Any]]
    status = 204

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.received.append((dict(self.headers), body))
        self.send_response(self.status)
        if self.status // 100 == 3:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hook() -> Iterator[tuple[type[Hook], str]]:
    kind = type("FreshHook", (Hook,), {"received": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_address[1]}/T0/hunter2hunter2"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_webhook_gets_the_facts_and_the_headers(hook: tuple[type[Hook], str], golden: object) -> None:
    kind, address = hook
    schedule = schedule_of(webhook="HOOK", headers={"Authorization": "HOOK_AUTH"})
    environ = {"HOOK": address, "HOOK_AUTH": "Bearer abcdefgh"}
    assert notification.send(schedule, NOTICE, environ) == golden
    ((headers, body),) = kind.received
    assert headers["Authorization"] == "Bearer abcdefgh"
    assert body == {
        "name": "nightly",
        "outcome": "regression",
        "exit_code": 1,
        "report": '/results/it\'s "x"/report.html',
        "regression": "ddp is 12 % slower",
        "sentence": "ddp is 12 % slower",
    }


def test_a_refusal_is_reported_with_its_status_code(hook: tuple[type[Hook], str], golden: object) -> None:
    kind, address = hook
    kind.status = 500
    assert notification.send(schedule_of(webhook="HOOK"), NOTICE, {"HOOK": address}) == golden


@pytest.mark.parametrize("status", [301, 302, 303])
def test_headers_are_not_carried_elsewhere(hook: tuple[type[Hook], str], status: int, golden: object) -> None:
    kind, address = hook
    kind.status = status
    schedule = schedule_of(webhook="HOOK", headers={"Authorization": "HOOK_AUTH"})
    told = notification.send(schedule, NOTICE, {"HOOK": address, "HOOK_AUTH": "Bearer abcdefgh"})
    assert told == golden
    assert len(kind.received) == 1


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/hunter2",
        "file:///etc/hunter2",
        "hunter2",
        "http://[hunter2",
        "http://a b:x/hunter2",
        "",
    ],
)
def test_no_sentence_repeats_the_address(address: str, golden: object) -> None:
    (told,) = notification.send(schedule_of(webhook="HOOK"), NOTICE, {"HOOK": address})
    assert told == golden
    assert "hunter2" not in told


def test_a_header_with_a_line_break_is_no_second_header(hook: tuple[type[Hook], str]) -> None:
    kind, address = hook
    schedule = schedule_of(webhook="HOOK", headers={"X-A": "VALUE"})
    (told,) = notification.send(schedule, NOTICE, {"HOOK": address, "VALUE": "a\r\nX-Evil: 1"})
    assert "could not be reached" in told
    assert kind.received == []


def test_variables_of_a_file_are_read_without_a_shell() -> None:
    text = "# comment\nA=1\nexport B='two words'\nC=$(id)\nD=\"x\"y\nnot a line\n2X=1\nE=\n"
    assert notification.variables(text) == {"A": "1", "B": "two words", "C": "$(id)", "D": '"x"y', "E": ""}


def test_a_command_that_cannot_be_started_is_a_sentence(golden: object) -> None:
    (told,) = notification.send(
        Schedule(
            **{f: getattr(schedule_of(), f) for f in schedule_of().__slots__}
            | {"command": "true", "directory": "/nowhere"}
        ),
        NOTICE,
        {},
    )
    assert told == golden
