"""When a schedule is due, at known changes of the clock: Berlin has two a year, Seoul none."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from paceline.campaign.schedule.cron import Cron, wall
from paceline.errors import RequestError


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type]


def walls(cron: Cron, start: datetime, days: int) -> list[str]:
    return [wall(due, cron.zone) for due in cron.between(start, start + timedelta(days=days))]


def test_seoul_has_no_change_of_the_clock() -> None:
    daily = Cron("0 19 * * *", "Asia/Seoul")
    due = daily.between(utc(2026, 1, 1), utc(2026, 12, 31, 23))
    assert len(due) == 365
    assert {(moment.hour, moment.minute) for moment in due} == {(10, 0)}
    assert walls(daily, utc(2026, 11, 16), 1) == ["2026-11-16 19:00 KST"]


def test_a_time_in_the_gap_of_spring_is_due_right_after_it() -> None:
    """On 29 March 2026 the clock of Berlin goes from 02:00 to 03:00."""
    assert walls(Cron("30 2 * * *", "Europe/Berlin"), utc(2026, 3, 28), 3) == [
        "2026-03-28 02:30 CET",
        "2026-03-29 03:00 CEST",
        "2026-03-30 02:30 CEST",
    ]


def test_a_time_that_comes_twice_in_autumn_is_due_once() -> None:
    """On 25 October 2026 the clock of Berlin goes from 03:00 back to 02:00."""
    nightly = Cron("30 2 * * *", "Europe/Berlin")
    assert nightly.between(utc(2026, 10, 24, 12), utc(2026, 10, 26)) == [utc(2026, 10, 25, 0, 30)]
    # Asked within the second 02:xx, the next is tomorrow's: today's is past though its wall time is not.
    assert next(nightly.after(utc(2026, 10, 25, 1, 10))) == utc(2026, 10, 26, 1, 30)


def test_the_same_wall_time_is_another_moment_in_summer_and_winter() -> None:
    evening = Cron("0 19 * * *", "Europe/Berlin")
    assert next(evening.after(utc(2026, 7, 1))) == utc(2026, 7, 1, 17)
    assert next(evening.after(utc(2026, 12, 1))) == utc(2026, 12, 1, 18)


def test_every_half_hour_follows_the_clock_as_it_runs() -> None:
    """25 hours on the day with the hour that comes twice."""
    often = Cron("*/30 * * * *", "Europe/Berlin")
    start = datetime(2026, 10, 25, tzinfo=ZoneInfo("Europe/Berlin")).astimezone(UTC)
    assert len(often.between(start, start + timedelta(hours=25))) == 50


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (utc(2026, 3, 29, 0, 59), utc(2026, 3, 28, 1, 30)),
        (utc(2026, 3, 29, 1, 0), utc(2026, 3, 29, 1, 0)),
        (utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 0, 30)),
        (utc(2026, 10, 25, 1, 30), utc(2026, 10, 25, 0, 30)),
        (utc(2026, 10, 26, 1, 29), utc(2026, 10, 25, 0, 30)),
    ],
)
def test_the_last_due_moment_around_both_changes(now: datetime, expected: datetime) -> None:
    assert Cron("30 2 * * *", "Europe/Berlin").latest(now) == expected


def test_the_last_due_moment_of_a_rare_schedule() -> None:
    assert Cron("0 3 1 1 *", "UTC").latest(utc(2026, 11, 16)) == utc(2026, 1, 1, 3)


@pytest.mark.parametrize(
    ("expression", "zone"),
    [
        ("0 19 * *", "UTC"),
        ("0 0 19 * * *", "UTC"),
        ("61 * * * *", "UTC"),
        ("0 0 30 2 *", "UTC"),
        ("0 0 L * *", "UTC"),
        ("0 0 * * 5L", "UTC"),
        ("0 0 * * 5#2", "UTC"),
        ("0 0 */2 * MON", "UTC"),
        ("$(reboot) * * * *", "UTC"),
        ("0 19 * * *", "Asia/Soul"),
        ("0 19 * * *", "KST"),
        ("0 19 * * *", "../../etc/passwd"),
        ("0 19 * * *", ""),
    ],
)
def test_what_cannot_be_is_one_sentence(expression: str, zone: str, golden: object) -> None:
    with pytest.raises(RequestError) as refused:
        Cron(expression, zone)
    assert str(refused.value) == golden
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("zone", ["PST", "XST"])
def test_letters_that_many_or_no_zones_show_are_not_guessed_at(zone: str) -> None:
    with pytest.raises(RequestError) as refused:
        Cron("0 19 * * *", zone)
    assert "did you mean" not in str(refused.value)


def test_a_host_without_time_zones_gets_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr("paceline.campaign.schedule.cron._zones", frozenset)
    with pytest.raises(RequestError) as caught:
        Cron("0 19 * * *", "Asia/Seoul")
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ("0 19 * * *", "0 19 * * *"),
        ("*/15 8-10 * jan-mar MON-FRI", "0,15,30,45 8,9,10 * 1,2,3 1,2,3,4,5"),
        ("5/20 0 * * 7", "5,25,45 0 * * 0"),
        ("0 0 1,15 * SUN", "0 0 1,15 * 0"),
    ],
)
def test_the_expression_for_engines_means_the_same(expression: str, numbers: str) -> None:
    given, written = Cron(expression, "UTC"), Cron(numbers, "UTC")
    assert given.numbers == numbers
    span = (utc(2026, 1, 1), utc(2026, 2, 15))
    assert given.between(*span) == written.between(*span)


@pytest.mark.parametrize(
    ("zone", "host", "expression", "expected"),
    [
        ("Asia/Seoul", "UTC", "0 19 * * *", "0 10 * * *"),
        ("Asia/Seoul", "Asia/Seoul", "0 19 * * 1", "0 19 * * 1"),
        # Winter and summer; the command looks which of the two it is.
        ("Europe/Berlin", "UTC", "0 19 * * *", "0 17,18 * * *"),
        ("UTC", "America/New_York", "30 12 1 * *", "30 7,8 1 * *"),
        # 19:00 in Los Angeles is the next day in UTC: the day is left to the command.
        ("America/Los_Angeles", "UTC", "0 19 * * 5", "0 2,3 * * *"),
        ("Asia/Kolkata", "UTC", "15 6 * * *", "45 0 * * *"),
    ],
)
def test_a_host_in_another_zone_is_woken_at_every_time_it_may_be(
    zone: str, host: str, expression: str, expected: str
) -> None:
    cron = Cron(expression, zone)
    written = cron.on_host(ZoneInfo(host), utc(2026, 11, 16))
    assert written == expected
    woken = set(Cron(written, host).between(utc(2026, 11, 16), utc(2027, 11, 16)))
    assert set(cron.between(utc(2026, 11, 16), utc(2027, 11, 16))) <= woken


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    ("expression", "zone"),
    [("0 19 * * *", "Asia/Seoul"), ("*/20 9-17 * * 1-5", "Europe/Berlin"), ("30 4 1,15 * 1", "UTC")],
)
def test_systemd_reads_the_calendar_as_we_do(expression: str, zone: str) -> None:
    """The day-or-weekday of cron is two lines there: due when either is."""
    cron, start = Cron(expression, zone), utc(2026, 11, 16)
    found: set[str] = set()
    for line in cron.calendar():
        asked = ["systemd-analyze", "calendar", "--base-time=2026-11-16 00:00:00 UTC", "--iterations=12", line]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env={"TZ": "UTC", "LC_ALL": "C"})
        assert done.returncode == 0, done.stderr
        told = [row for row in done.stdout.splitlines() if "UTC" in row and ("elapse" in row or "Iter" in row)]
        found |= {" ".join(row.split()[-3:-1]) for row in told}
    wanted = [due.strftime("%Y-%m-%d %H:%M:%S") for due in cron.between(start, start + timedelta(days=60))]
    assert sorted(found)[:10] == wanted[:10]
