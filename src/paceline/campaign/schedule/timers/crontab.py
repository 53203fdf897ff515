"""The user's crontab: one marked block per schedule; all other lines stay unchanged."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, tzinfo
from pathlib import Path

from paceline.campaign.schedule.agenda import LOG, Schedule, folder_of
from paceline.campaign.schedule.timers import answer, command, mark, one_line
from paceline.errors import RequestError

# A start serves a time at most this old: a time in a clock gap is served up to an hour later.
WITHIN_S = 3660


def install(out: Path, schedule: Schedule) -> str:
    kept = without(_read(), mark(out, schedule))
    # Some crons apply a TZ line to all lines below it, others ignore it; above it, every cron uses the host's zone.
    zone = re.search(r"^[ \t]*([\"']?)(CRON_TZ|TZ)\1[ \t]*=", kept, flags=re.MULTILINE)
    position = zone.start() if zone else len(kept)
    _write(kept[:position] + block(out, schedule, host_zone(), datetime.now(UTC)) + kept[position:])
    return "installed in your crontab (`crontab -l`); cron must be running on this host"


def remove(out: Path, schedule: Schedule) -> None:
    before = _read()
    after = without(before, mark(out, schedule))
    if after != before:
        _write(after)


def is_installed(out: Path, schedule: Schedule) -> bool:
    return _edges(mark(out, schedule))[0] in _read()


def block(out: Path, schedule: Schedule, host: tzinfo, now: datetime) -> str:
    """The lines of one schedule. Cron reads an unescaped percent sign as a line break."""
    first, last = _edges(mark(out, schedule))
    log = one_line(str((folder_of(out, schedule.name) / LOG).absolute()), "--out")
    words = shlex.join(command(out, schedule, WITHIN_S))
    line = one_line(f"{words} >>{shlex.quote(log)} 2>&1", "--out").replace("%", "\\%")
    when = f"# {schedule.cron.expression} {schedule.cron.timezone}; the command checks whether it is due"
    return f"{first}\n{when}\n{schedule.cron.on_host(host, now)} {line}\n{last}\n"


def without(text: str, name: str) -> str:
    """The crontab without the block of that name."""
    first, last = _edges(name)
    return re.sub(rf"^{re.escape(first)}\n.*?^{re.escape(last)}\n", "", text, flags=re.MULTILINE | re.DOTALL)


def _edges(name: str) -> tuple[str, str]:
    return f"# begin {name} (written by paceline schedule)", f"# end {name}"


def host_zone(clock: Path = Path("/etc/localtime")) -> tzinfo:
    """The time zone of cron: that of the host, not of the shell that adds a schedule. UTC if the host has none."""
    import zoneinfo

    try:
        with clock.open("rb") as rules:
            return zoneinfo.ZoneInfo.from_file(rules)
    except (OSError, ValueError):
        return UTC


def _read() -> str:
    done = answer(["crontab", "-l"])
    if done.returncode == 0:
        text = done.stdout
        return text if not text or text.endswith("\n") else text + "\n"
    if "no crontab for" in done.stderr:
        return ""
    raise RequestError(f"--backend crontab: `crontab -l` failed ({' '.join(done.stderr.split())}).")


def _write(text: str) -> None:
    done = answer(["crontab", "-"], text)
    if done.returncode != 0:
        raise RequestError(f"--backend crontab: crontab rejected the new file ({' '.join(done.stderr.split())}).")
