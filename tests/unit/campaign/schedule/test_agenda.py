"""The schedules of a results folder: definitions, history, what was missed."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.live import status
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule.cron import Cron
from paceline.errors import RequestError

NOW = datetime(2026, 11, 16, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def schedule_of(**more: Any) -> agenda.Schedule:
    usual: dict[str, Any] = {
        "name": "nightly",
        "cron": Cron("0 19 * * *", "Asia/Seoul"),
        "backend": "crontab",
        "experiment": "quick",
        "source": "quick",
        "added_at": (NOW - 4 * DAY).timestamp(),
        "directory": "/",
    }
    return agenda.Schedule(**usual | more)


def began(out: Path, due: datetime, **end: Any) -> None:
    name = due.strftime("%Y-%m-%d")
    agenda.record(out, "nightly", "began", name, at=due.timestamp() + 2, due_at=due.timestamp())
    if end:
        agenda.record(out, "nightly", "ended", name, at=due.timestamp() + 60, exit_code=0, **end)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    agenda.write(tmp_path, schedule_of())
    return tmp_path


def at(day: int) -> datetime:
    return datetime(2026, 11, day, 10, tzinfo=UTC)


def test_a_schedule_is_read_as_it_was_written(out: Path) -> None:
    full = schedule_of(
        name="all", settings=("model=tiny",), headers={"Authorization": "HOOK_AUTH"}, webhook="HOOK", place={"a": 1}
    )
    agenda.write(out, full)
    assert agenda.read(out, "all") == full
    assert agenda.names(out) == ["all", "nightly"]


@pytest.mark.parametrize("name", ["", "a b", "../x", "A", "a'b", "x$(id)", "a\nb", "-a", "a" * 41])
def test_hostile_names_are_refused(name: str, out: Path, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        schedule_of(name=name)
    assert str(caught.value) == golden
    assert "40" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        agenda.read(out, name)
    assert str(caught.value) == golden


def test_an_address_given_for_a_variable_is_refused_and_not_repeated(golden: object) -> None:
    with pytest.raises(RequestError) as refused:
        schedule_of(webhook="https://hooks.example/T0/secret")
    assert str(refused.value) == golden
    assert "secret" not in str(refused.value).replace("is a secret", "")


def test_times_that_nobody_served_are_missed(out: Path) -> None:
    """Added on the 12th at 12:00 UTC, so 13, 14, 15 and 16 were due."""
    began(out, at(13), outcome="ok")
    agenda.record(out, "nightly", "skipped", "s", at=at(15).timestamp(), due_at=at(15).timestamp(), sentence="busy")
    view = agenda.view(out, "nightly", NOW)
    assert view.missed == (at(14), at(16))
    assert view.next == at(17)


def test_a_time_is_not_missed_while_its_start_may_still_come(out: Path) -> None:
    schedule = schedule_of(added_at=(at(16) - DAY).timestamp() + 1)
    assert agenda.missed(schedule, (), at(16) + agenda.GRACE - timedelta(seconds=1)) == []
    assert agenda.missed(schedule, (), at(16) + agenda.GRACE) == [at(16)]


def test_missed_times_are_looked_for_within_limits() -> None:
    minutely = schedule_of(cron=Cron("* * * * *", "UTC"), added_at=0.0)
    assert len(agenda.missed(minutely, (), NOW)) <= 24 * 60
    daily = schedule_of(added_at=0.0)
    assert len(agenda.missed(daily, (), NOW)) == agenda.HORIZON_DAYS


@pytest.mark.parametrize(
    ("now", "within", "expected"),
    [
        (at(16), 60, at(16)),
        (at(16) - timedelta(seconds=0.5), 60, at(16)),
        (at(16) + timedelta(seconds=61), 60, None),
        (at(16) + DAY - timedelta(seconds=2), 7 * 86400, at(16)),
        (at(12) - timedelta(hours=1), 7 * 86400, None),
    ],
)
def test_a_start_serves_the_last_time_or_none(now: datetime, within: int, expected: datetime | None) -> None:
    assert agenda.due_time(schedule_of(), (), now, timedelta(seconds=within)) == expected


def test_a_time_is_served_once(out: Path) -> None:
    began(out, at(16))
    assert agenda.due_time(schedule_of(), agenda.occasions(out, "nightly"), at(16), timedelta(hours=1)) is None


def test_an_unfinished_job_counts_as_running_only_while_its_lock_is_taken(out: Path) -> None:
    began(out, at(14))
    began(out, at(15))
    with agenda.exclusive(out, "nightly") as alone:
        assert alone
        assert [o.outcome for o in agenda.occasions(out, "nightly")] == ["interrupted", "running"]
        with agenda.exclusive(out, "nightly") as second:
            assert not second
    assert [o.outcome for o in agenda.occasions(out, "nightly")] == ["interrupted", "interrupted"]


def test_a_damaged_history_costs_only_the_damaged_lines(out: Path) -> None:
    began(out, at(13), outcome="ok", sentence="a\x1b[31mb")
    with (agenda.folder_of(out, "nightly") / agenda.HISTORY).open("a") as file:
        file.write('[1]\n{"event": "began"}\n{"event": "ended", "occasion": "x"}\n{"event": "beg')
    (found,) = agenda.occasions(out, "nightly")
    assert (found.outcome, found.sentence) == ("ok", "a\ufffd[31mb")
    began(out, at(14), outcome="failed")
    assert [o.outcome for o in agenda.occasions(out, "nightly")] == ["ok", "failed"], "the cut line spoils no other"


def test_a_schedule_that_cannot_be_read_is_named_and_hides_no_other(out: Path) -> None:
    broken = agenda.folder_of(out, "broken")
    broken.mkdir()
    (broken / agenda.DEFINITION).write_text(json.dumps({"name": "broken", "cron": {"expression": "x"}}))
    views, unreadable = agenda.views(out, NOW)
    assert [view.schedule.name for view in views] == ["nightly"]
    assert len(unreadable) == 1
    assert "broken" in unreadable[0]


def test_on_a_cluster_the_history_is_elsewhere(out: Path, golden: object) -> None:
    agenda.write(out, schedule_of(backend="kubernetes", place={"claim": "bench"}))
    assert agenda.view(out, "nightly", NOW).missed is None
    lines, _ = status.folder_lines(out)
    assert lines == golden


def test_status_lists_what_ran_what_was_skipped_and_what_was_missed(out: Path) -> None:
    agenda.write(out, schedule_of(added_at=(datetime.now(UTC) - 3 * DAY).timestamp()))
    cron = schedule_of().cron
    first, second, *_ = cron.between(datetime.now(UTC) - 3 * DAY, datetime.now(UTC) - agenda.GRACE)
    began(out, first, outcome="regression", sentence="12 % slower")
    agenda.record(out, "nightly", "notified", first.strftime("%Y-%m-%d"), at=1.0, sentence="the webhook answered 200")
    agenda.record(
        out, "nightly", "skipped", "s", at=second.timestamp(), due_at=second.timestamp(), sentence="skipped: busy"
    )
    text = "\n".join(status.folder_lines(out)[0])
    assert "regression; 58 s; 12 % slower; the webhook answered 200" in text
    assert "  skipped " in text
    assert "busy" in text


def test_a_history_that_nobody_wrote_is_left_out(tmp_path: Path) -> None:
    folder = agenda.folder_of(tmp_path, "nightly")
    folder.mkdir(parents=True)
    agenda.record(tmp_path, "nightly", "began", "good", at=2e9, due_at=2e9)
    for number, wrong in enumerate(({"at": True}, {"at": 1e300}, {"due_at": [1]}, {"due_at": 10**400}, {"at": "now"})):
        agenda.record(tmp_path, "nightly", "began", f"bad {number}", **{"at": 2e9, "due_at": 2e9} | wrong)
    assert [occasion.id for occasion in agenda.occasions(tmp_path, "nightly")] == ["good"]
    (folder / agenda.HISTORY).unlink()
    os.mkfifo(folder / agenda.HISTORY)
    assert agenda.occasions(tmp_path, "nightly") == []
