"""status.md and status.html: what they say, that nothing in them is code, and how seldom they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.live import status_page
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule.cron import Cron
from paceline.experiment.spec import RunSpec
from paceline.results import campaign_file

EVIL = "<script>alert(1)</script>"


def schedule_of(**more: Any) -> agenda.Schedule:
    usual: dict[str, Any] = {
        "name": "nightly",
        "cron": Cron("0 19 * * *", "Asia/Seoul"),
        "backend": "crontab",
        "experiment": "quick",
        "source": f"{EVIL}.yaml",
        "added_at": time.time() - 4 * 86400,
        "directory": "/",
    }
    return agenda.Schedule(**usual | more)


@pytest.fixture
def out(tmp_path: Path, make_spec: Callable[..., RunSpec], make_run: Callable[..., Path]) -> Path:
    """One ended experiment, one schedule with a run that went wrong and two or three times missed."""
    spec = make_spec()
    make_run(tmp_path, spec)
    campaign_file.write_plan(tmp_path / spec.experiment, [spec])
    (tmp_path / spec.experiment / "report.html").write_text("<p>")
    agenda.write(tmp_path, schedule_of())
    first, *_ = schedule_of().cron.between(datetime.now(UTC) - timedelta(days=4), datetime.now(UTC))
    agenda.record(tmp_path, "nightly", "began", "day", at=first.timestamp(), due_at=first.timestamp())
    end = {"outcome": "regression", "exit_code": 1, "sentence": f"{EVIL} | slower", "report": None}
    agenda.record(tmp_path, "nightly", "ended", "day", at=first.timestamp() + 90, **end)
    return tmp_path


class Links(HTMLParser):
    """Every link and element of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [str(value) for name, value in attributes if name == "href"]


def test_both_pages_say_what_ran_and_what_was_missed(out: Path) -> None:
    status_page.Page(out).write()
    for name in ("status.html", "status.md"):
        text = (out / name).read_text()
        assert "Nothing is running." in text
        assert "scheduled runs were missed." in text
        assert "The last run of nightly did not end ok." in text
        assert "Asia/Seoul" in text
        assert "1 min 30 s" in text


def test_names_and_sentences_stay_text(out: Path) -> None:
    status_page.Page(out).write()
    page = Links()
    page.feed((out / "status.html").read_text())
    assert "script" not in page.tags
    assert EVIL not in (out / "status.md").read_text()
    assert "default-src 'none'" in (out / "status.html").read_text()


@pytest.mark.parametrize("report", ["../../etc/passwd", "/etc/passwd", "javascript:alert(1)", "schedules/../../x"])
def test_no_history_makes_a_link_out_of_the_folder(report: str, out: Path) -> None:
    end = {"outcome": "ok", "exit_code": 0, "sentence": None, "report": report}
    agenda.record(out, "nightly", "ended", "day", at=time.time(), **end)
    status_page.Page(out).write()
    page = Links()
    page.feed((out / "status.html").read_text())
    assert report not in page.links
    assert not [link for link in page.links if ":" in link or link.startswith(("/", ".."))]


def test_a_report_inside_is_linked_whatever_its_name(out: Path) -> None:
    path = 'schedules/nightly/a+b "%"/report.html'
    end = {"outcome": "ok", "exit_code": 0, "sentence": None, "report": path}
    agenda.record(out, "nightly", "ended", "day", at=time.time(), **end)
    status_page.Page(out).write()
    page = Links()
    page.feed((out / "status.html").read_text())
    assert "schedules/nightly/a%2Bb%20%22%25%22/report.html" in page.links
    assert any(link.endswith("/report.html") and not link.startswith("schedules") for link in page.links)


def test_it_asks_again_by_itself_only_while_something_runs(
    out: Path, make_spec: Callable[..., RunSpec], make_run: Callable[..., Path]
) -> None:
    status_page.Page(out).write()
    assert 'http-equiv="refresh"' not in (out / "status.html").read_text()
    spec = make_spec()
    campaign_file.write_plan(out / spec.experiment, [spec, make_spec(repeat=1)])
    status_page.Page(out).write()
    text = (out / "status.html").read_text()
    assert 'http-equiv="refresh"' in text
    assert f"Running: {spec.experiment}." in text


def test_it_is_written_seldom_and_takes_a_small_share_of_the_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    written: list[float] = []
    monkeypatch.setattr(status_page.time, "monotonic", lambda: clock[0])

    def slow(path: Path) -> status_page.State:
        written.append(clock[0])
        clock[0] += 1.0
        raise OSError("the disk is full")

    monkeypatch.setattr(status_page, "read_state", slow)
    page = status_page.Page(out)
    for _ in range(600):
        page.refresh()
        clock[0] += 0.1
    assert len(written) == 3, "each takes 1 s of which no more than a twentieth may be taken"


def test_a_full_disk_costs_the_page_and_nothing_else(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: str) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status_page, "write_atomically", full)
    status_page.Page(out).write()
    assert not (out / "status.html").exists()


def test_yesterdays_scheduled_campaigns_are_not_listed_as_experiments(
    out: Path, make_spec: Callable[..., RunSpec], make_run: Callable[..., Path]
) -> None:
    make_run(agenda.folder_of(out, "nightly") / "day", make_spec())
    (table,) = [t for t in status_page.tables(status_page.read_state(out)) if t.title == "Experiments"]
    assert len(table.rows) == 1
