"""When a schedule is due: a cron expression read by the clock of one time zone.

Moments are datetimes in UTC throughout. Two wall times of one zone must not be compared: Python ignores the offset
between them, and at the end of summer time the same wall time comes twice.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property

from cronsim import CronSim, CronSimError

from paceline.errors import RequestError

ACCEPTED = "five fields (minute hour day month weekday), such as '0 19 * * *'"
# Last days and counted weekdays (L, LW, 5#2) are extensions that crontab and Kubernetes do not know.
_EXTENSION = re.compile(r"#|(^|[\s,])LW?($|[\s,/])|\dL", re.IGNORECASE)
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
# Offsets between two zones are looked up over all of a year, with both changes of the clock in it.
_YEAR = timedelta(days=370)
_GRAIN = timedelta(hours=3)
DAY_MINUTES = 24 * 60
_ABBREVIATION = re.compile(r"[A-Z]{2,5}")
MOST_MEANT = 3


@dataclass(frozen=True)
class Cron:
    """A cron expression in a time zone of the tz database; anything that two engines read differently is refused.

    A fixed time that a change of the clock leaves out is due right after the gap; one that comes twice is due at the
    first. Expressions with a star for minute or hour follow the clock as it runs. This is how Debian's cron does it.
    """

    expression: str
    timezone: str

    def __post_init__(self) -> None:
        _check_zone(self.timezone)
        fields = self.expression.split()
        if len(fields) != 5 or _EXTENSION.search(self.expression):
            raise RequestError(f"--cron: got {self.expression!r}, expected {ACCEPTED}.")
        try:
            next(CronSim(self.expression, datetime(2026, 1, 1)))
        except (CronSimError, StopIteration) as error:
            why = str(error) or "no such day comes"
            raise RequestError(f"--cron: {self.expression!r} was given ({why}); accepted is {ACCEPTED}") from None
        days = (fields[2], fields[4])
        if "*" not in days and any(field.startswith("*") for field in days):
            raise RequestError(
                f"--cron: {self.expression!r} was given; accepted is a step such as */2 for day or weekday only beside "
                "a plain * for the other, as engines disagree about what both mean together"
            )

    @property
    def zone(self) -> zoneinfo.ZoneInfo:
        return zoneinfo.ZoneInfo(self.timezone)

    # --- moments ---

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Every due moment later than this one, in order."""
        for wall in CronSim(self.expression, moment.astimezone(self.zone)):
            due = wall.astimezone(UTC)
            if due > moment:
                yield due

    def between(self, start: datetime, end: datetime) -> list[datetime]:
        """Due moments after `start`, up to and with `end`."""
        found = []
        for due in self.after(start):
            if due > end:
                break
            found.append(due)
        return found

    def latest(self, moment: datetime) -> datetime | None:
        """The last due moment up to and with this one."""
        backwards = CronSim(self.expression, moment.astimezone(self.zone), reverse=True)
        earlier = [wall.astimezone(UTC) for wall, _ in zip(backwards, range(2), strict=False)]
        # Backwards a gap of the clock is left otherwise than forwards, so the last stretch is walked forwards.
        start = min((*earlier, moment)) - timedelta(days=1)
        return max(self.between(start, moment), default=None)

    # --- the expression for engines ---

    @cached_property
    def _fields(self) -> tuple[frozenset[int], ...]:
        """Minutes, hours, days, months and weekdays (Sunday is 0), each as the set it stands for."""
        parsed = CronSim(self.expression, datetime(2026, 1, 1))
        weekdays = frozenset(int(day) % 7 for day in parsed.weekdays if isinstance(day, int))
        plain = (parsed.minutes, parsed.hours, parsed.days, parsed.months)
        return (*(frozenset(int(value) for value in values) for values in plain), weekdays)

    @property
    def per_day(self) -> int:
        """How often it is due on a day on which it is due."""
        return len(self._fields[0]) * len(self._fields[1])

    @property
    def numbers(self) -> str:
        """The same expression without names, steps or a seventh weekday: one that every engine reads alike."""
        return " ".join(_numbers(values, full) for values, full in zip(self._fields, _FULL, strict=True))

    def calendar(self) -> list[str]:
        """OnCalendar= lines of systemd, due when any of them is: where cron means day or weekday, they are two."""
        minutes, hours, days, months, weekdays = self._fields
        clock = f"{_numbers(hours, 24, 2)}:{_numbers(minutes, 60, 2)}:00 {self.timezone}"
        month, by_day = _numbers(months, 12, 2), f"{_numbers(days, 31, 2)}"
        names = ",".join(_WEEKDAYS[day] for day in sorted(weekdays))
        if len(weekdays) == 7:
            return [f"*-{month}-{by_day} {clock}"]
        if len(days) == 31:
            return [f"{names} *-{month}-* {clock}"]
        return [f"*-{month}-{by_day} {clock}", f"{names} *-{month}-* {clock}"]

    def on_host(self, host: tzinfo, now: datetime) -> str:
        """An expression by the clock of a host that is due at every moment this one is, and perhaps at more.

        A cron of another zone cannot say "19:00 in Seoul" where either zone changes its clock: this names every wall
        time of the host that it ever is, and whoever is called looks whether it is due.
        """
        minutes, hours, *dates = self._fields
        shifts = _shifts(self.zone, host, now)
        wanted = {hour * 60 + minute - shift for hour in hours for minute in minutes for shift in shifts}
        same_day = all(0 <= minute < DAY_MINUTES for minute in wanted)
        clock = (
            frozenset(minute % 60 for minute in wanted),
            frozenset(minute // 60 % 24 for minute in wanted),
        )
        texts = [_numbers(values, full) for values, full in zip((*clock, *dates), _FULL, strict=True)]
        return " ".join(texts if same_day else [*texts[:2], "*", "*", "*"])


_FULL = (60, 24, 31, 12, 7)


def _numbers(values: Collection[int], full: int, digits: int = 1) -> str:
    return "*" if len(values) == full else ",".join(f"{value:0{digits}d}" for value in sorted(values))


def _shifts(zone: tzinfo, host: tzinfo, now: datetime) -> set[int]:
    """By how many minutes the zone's clock is ahead of the host's, at all times of the coming year."""

    def ahead(moment: datetime) -> int:
        own, other = moment.astimezone(zone).utcoffset(), moment.astimezone(host).utcoffset()
        return round(((own or timedelta()) - (other or timedelta())).total_seconds() / 60)

    return {ahead(now + number * _GRAIN) for number in range(_YEAR // _GRAIN)}


def _check_zone(name: str) -> None:
    known = zoneinfo.available_timezones()
    if not known:
        raise RequestError("--timezone: this host has no time zone database: run `pip install tzdata`")
    if name not in known:
        close = (
            _abbreviated(name, known) if _ABBREVIATION.fullmatch(name) else difflib.get_close_matches(name, known, 1)
        )
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise RequestError(
            f"--timezone: {name!r} was given{hint}; accepted is a name of the tz database, such as Asia/Seoul or UTC"
        )


def _abbreviated(name: str, known: Collection[str]) -> list[str]:
    """Zones whose clocks show these letters; none where many do, and never letters that merely look alike."""
    year = datetime.now(UTC).year
    seasons = [datetime(year, month, 1, tzinfo=UTC) for month in (1, 7)]

    def shown(zone: str) -> set[str | None]:
        return {season.astimezone(zoneinfo.ZoneInfo(zone)).tzname() for season in seasons}

    found = sorted(zone for zone in known if "/" in zone and name in shown(zone))
    return found if len(found) <= MOST_MEANT else []


def wall(moment: datetime, zone: tzinfo) -> str:
    """`2026-11-16 19:00 KST`, as the schedule's people read it."""
    return moment.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")


def moment(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)
