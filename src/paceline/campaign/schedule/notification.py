"""Notifications about scheduled runs: a shell command, or a POST to a webhook.

Names and results are passed as data: in environment variables of the command, in the JSON of the POST. A failed
notification never changes the outcome of the run; it is recorded in the history.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from paceline.campaign.schedule.agenda import Schedule
from paceline.host.redirects import NoRedirects

COMMAND_S, WEBHOOK_S = 120.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The content of a notification. regression: message of the regression gate, if any. sentence: the reason for the
    outcome, or the result of the comparison."""

    name: str
    outcome: str
    exit_code: int
    report: str | None
    regression: str | None
    sentence: str | None


def send(schedule: Schedule, notice: Notice, environ: Mapping[str, str]) -> list[str]:
    """Send all notifications of the schedule; returns a message for each, without URL, header or response."""
    messages = []
    if schedule.command is not None:
        messages.append(_by_command(schedule.command, notice, environ, schedule.directory))
    if schedule.webhook is not None:
        messages.append(_by_webhook(schedule.webhook, schedule.headers, notice, environ))
    return messages


def _by_command(command: str, notice: Notice, environ: Mapping[str, str], directory: str) -> str:
    """Run the user's shell command; facts are in PACELINE_ variables, so that no name becomes code."""
    facts = {f"PACELINE_{key.upper()}": "" if value is None else str(value) for key, value in asdict(notice).items()}
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env={**environ, **facts},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the notify command timed out after {COMMAND_S:g} s"
    except OSError as error:
        return f"the notify command failed to start ({error.strerror})"
    return f"the notify command {'succeeded' if done.returncode == 0 else f'failed with {done.returncode}'}"


def _by_webhook(variable: str, headers: Mapping[str, str], notice: Notice, environ: Mapping[str, str]) -> str:
    absent = [name for name in (variable, *headers.values()) if not environ.get(name)]
    if absent:
        return f"the webhook was not called: {', '.join(absent)} is not set where the timer runs (see --env-file)"
    address = environ[variable].strip()
    if not address.lower().startswith(("http://", "https://")):
        return f"the webhook was not called: {variable} is not an http or https URL"
    given = {name: environ[value].strip() for name, value in headers.items()}
    try:
        request = urllib.request.Request(
            address,
            data=json.dumps(asdict(notice)).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "paceline", **given},
            method="POST",
        )
        with urllib.request.build_opener(NoRedirects).open(request, timeout=WEBHOOK_S) as response:
            return f"the webhook answered {response.status}"
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Errors of urllib may quote the URL, which may be a secret.
        return f"the webhook could not be reached ({type(error).__name__})"


def variables(text: str) -> dict[str, str]:
    """NAME=VALUE lines as systemd and Docker read them: no shell, no expansion; one pair of quotes is removed."""
    values = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip().isidentifier():
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            values[name.strip()] = value[1:-1] if quoted else value
    return values
