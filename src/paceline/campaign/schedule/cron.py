"""When a schedule is due: a cron expression in one time zone.

Moments are datetimes in UTC. Do not compare wall times of one zone: Python ignores the offset between them, and at the
end of summer time the same wall time occurs twice.
"""

from __future__ import annotations

import difflib
import re
import zoneinfo
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache, cached_property

from cronsim import CronSim, CronSimError

from paceline.errors import RequestError

ACCEPTED = "five fields (minute hour day month weekday), such as '0 19 * * *'"
# Last days and n-th weekdays (L, LW, 5#2) are extensions that crontab and Kubernetes do not support.
_EXTENSION = re.compile(r"#|(^|[\s,])LW?($|[\s,/])|\dL", re.IGNORECASE)
_WEEKDAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
# Offsets between two zones are sampled over a year, which includes both clock changes.
_YEAR = timedelta(days=370)
_GRAIN = timedelta(hours=3)
DAY_MINUTES = 24 * 60
_ABBREVIATION = re.compile(r"[A-Z]{2,5}")
MOST_MEANT = 3


@dataclass(frozen=True)
class Cron:
    """A cron expression in a time zone of the tz database; whatever two engines read differently is rejected.

    A fixed time that falls into a clock gap is due right after the gap; one that occurs twice is due the first time.
    Expressions with a star for minute or hour follow the clock. Debian's cron does the same.
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
            why = str(error) or "this date never occurs"
            raise RequestError(f"--cron: got {self.expression!r} ({why}), expected {ACCEPTED}.") from None
        days = (fields[2], fields[4])
        if "*" not in days and any(field.startswith("*") for field in days):
            raise RequestError(
                f"--cron: got {self.expression!r}, expected a step such as */2 for day or weekday only with a plain * "
                "for the other. Engines disagree about the combination."
            )

    @property
    def zone(self) -> zoneinfo.ZoneInfo:
        return zoneinfo.ZoneInfo(self.timezone)

    # --- moments ---

    def after(self, moment: datetime) -> Iterator[datetime]:
        """All due moments later than this one, in order."""
        for wall in CronSim(self.expression, moment.astimezone(self.zone)):
            due = wall.astimezone(UTC)
            if due > moment:
                yield due

    def between(self, start: datetime, end: datetime) -> list[datetime]:
        """Due moments after `start`, up to and including `end`."""
        moments = []
        for due in self.after(start):
            if due > end:
                break
            moments.append(due)
        return moments

    def latest(self, moment: datetime) -> datetime | None:
        """The last due moment up to and including this one."""
        backwards = CronSim(self.expression, moment.astimezone(self.zone), reverse=True)
        earlier = [wall.astimezone(UTC) for wall, _ in zip(backwards, range(2), strict=False)]
        # CronSim handles clock gaps differently when it walks backwards, so walk the last stretch forwards.
        start = min((*earlier, moment)) - timedelta(days=1)
        return max(self.between(start, moment), default=None)

    # --- the expression for engines ---

    @cached_property
    def _fields(self) -> tuple[frozenset[int], ...]:
        """Minutes, hours, days, months and weekdays (Sunday is 0) as sets."""
        parsed = CronSim(self.expression, datetime(2026, 1, 1))
        weekdays = frozenset(int(day) % 7 for day in parsed.weekdays if isinstance(day, int))
        plain = (parsed.minutes, parsed.hours, parsed.days, parsed.months)
        return (*(frozenset(int(value) for value in values) for values in plain), weekdays)

    @property
    def per_day(self) -> int:
        """How often it is due on a day when it is due."""
        return len(self._fields[0]) * len(self._fields[1])

    @property
    def numbers(self) -> str:
        """The expression without names, steps or weekday 7, which every engine reads the same way."""
        return " ".join(_numbers(values, full) for values, full in zip(self._fields, _FULL, strict=True))

    def calendar(self) -> list[str]:
        """OnCalendar= lines for systemd; two if cron means day or weekday."""
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
        """An expression in the host's time zone that is due whenever this one is, and perhaps more often.

        A cron in another zone cannot express "19:00 in Seoul" if either zone changes its clock. The expression lists
        every wall time of the host at which it may be due; the command checks whether it is.
        """
        minutes, hours, *dates = self._fields

        def ahead(moment: datetime) -> int:
            """How many minutes this zone is ahead of the host's."""
            own, other = moment.astimezone(self.zone).utcoffset(), moment.astimezone(host).utcoffset()
            return round(((own or timedelta()) - (other or timedelta())).total_seconds() / 60)

        shifts = {ahead(now + number * _GRAIN) for number in range(_YEAR // _GRAIN)}
        wanted = {hour * 60 + minute - shift for hour in hours for minute in minutes for shift in shifts}
        same_day = all(0 <= minute < DAY_MINUTES for minute in wanted)
        clock = (frozenset(minute % 60 for minute in wanted), frozenset(minute // 60 % 24 for minute in wanted))
        texts = [_numbers(values, full) for values, full in zip((*clock, *dates), _FULL, strict=True)]
        return " ".join(texts if same_day else [*texts[:2], "*", "*", "*"])


_FULL = (60, 24, 31, 12, 7)


def _numbers(values: Collection[int], full: int, digits: int = 1) -> str:
    return "*" if len(values) == full else ",".join(f"{value:0{digits}d}" for value in sorted(values))


@cache
def _zones() -> frozenset[str]:
    """The time zones of this host. Listing them opens every file of the database."""
    return frozenset(zoneinfo.available_timezones())


def _check_zone(name: str) -> None:
    known = _zones()
    if not known:
        raise RequestError("--timezone: this host has no time zone database. Run `pip install tzdata`.")
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        if _ABBREVIATION.fullmatch(name):
            # Zones with this abbreviation in winter or summer; none if there are many.
            seasons = [datetime(datetime.now(UTC).year, month, 1, tzinfo=UTC) for month in (1, 7)]
            zones = [zoneinfo.ZoneInfo(zone) for zone in sorted(known) if "/" in zone]
            close = [zone.key for zone in zones if any(s.astimezone(zone).tzname() == name for s in seasons)]
            close = close if len(close) <= MOST_MEANT else []
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise RequestError(
            f"--timezone: got {name!r}, expected a name of the tz database, such as Asia/Seoul or UTC.{hint}"
        )


def wall(moment: datetime, zone: tzinfo) -> str:
    """Local time as text: `2026-11-16 19:00 KST`."""
    return moment.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")


def moment(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)
