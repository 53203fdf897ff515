"""A systemd user timer: two units in ~/.config/systemd/user. Times missed while the host was off are caught up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from paceline.campaign.schedule.agenda import LOG, Schedule, folder_of
from paceline.campaign.schedule.timers import answer, command, mark, one_line
from paceline.errors import RequestError
from paceline.host.files import write_atomically

# Persistent=true starts once after a boot for all missed times, however long ago the last one is.
WITHIN_S = 7 * 24 * 3600


def install(out: Path, schedule: Schedule) -> str:
    name = mark(out, schedule)
    for suffix, text in units(out, schedule).items():
        write_atomically(_folder() / f"{name}.{suffix}", text)
    try:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", f"{name}.timer")
    except RequestError:
        _forget(name)
        raise
    return (
        f"installed as the user timer {name}.timer (`systemctl --user list-timers`); run `loginctl enable-linger` once "
        "so that it also starts while you are logged out"
    )


def remove(out: Path, schedule: Schedule) -> None:
    name = mark(out, schedule)
    # A missing timer is disabled already.
    with contextlib.suppress(RequestError):
        _systemctl("disable", "--now", f"{name}.timer")
    _forget(name)
    with contextlib.suppress(RequestError):
        _systemctl("daemon-reload")


def _systemctl(*arguments: str) -> None:
    done = answer(["systemctl", "--user", *arguments])
    if done.returncode != 0:
        why = " ".join(done.stderr.split())
        raise RequestError(f"--backend systemd: `systemctl --user {' '.join(arguments)}` failed ({why}).")


def _forget(name: str) -> None:
    for suffix in ("service", "timer"):
        (_folder() / f"{name}.{suffix}").unlink(missing_ok=True)


def is_installed(out: Path, schedule: Schedule) -> bool:
    return (_folder() / f"{mark(out, schedule)}.timer").is_file()


def units(out: Path, schedule: Schedule) -> dict[str, str]:
    """The units by suffix. A failed run appears in the history; systemd does not restart it."""
    log = one_line(str((folder_of(out, schedule.name) / LOG).absolute()), "--out")
    call = " ".join(quoted(one_line(part, "--out")) for part in command(out, schedule, WITHIN_S))
    times = "\n".join(f"OnCalendar={line}" for line in schedule.cron.calendar())
    return {
        "service": (
            f"[Unit]\nDescription=Paceline schedule {schedule.name}\n\n"
            f"[Service]\nType=oneshot\nExecStart={call}\n"
            f"StandardOutput=append:{log.replace('%', '%%')}\nStandardError=inherit\n"
        ),
        "timer": (
            f"[Unit]\nDescription=Starts the Paceline schedule {schedule.name}\n\n"
            f"[Timer]\n{times}\nPersistent=true\nAccuracySec=1s\n\n"
            "[Install]\nWantedBy=timers.target\n"
        ),
    }


def quoted(argument: str) -> str:
    """One argument of ExecStart, with quotes, percent signs and dollars escaped."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _folder() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(home) / "systemd" / "user"
