"""Telling somebody how a scheduled run ended: a command of theirs, or a POST to their webhook.

Everything that comes from names or results travels as data: in variables of the command, in JSON of the POST. A failure
to tell never changes how the run ended; it is a sentence in the history.
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

COMMAND_S, WEBHOOK_S = 120.0, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What is told. regression is the gate's sentence, None where it found none; sentence is why the outcome is what it
    is, or what the comparison says."""

    name: str
    outcome: str
    exit_code: int
    report: str | None
    regression: str | None
    sentence: str | None


def tell(schedule: Schedule, notice: Notice, environ: Mapping[str, str]) -> list[str]:
    """Tell everyone the schedule names; one sentence for each, which holds no address, header or answer."""
    told = []
    if schedule.command is not None:
        told.append(_by_command(schedule.command, notice, environ, schedule.directory))
    if schedule.webhook is not None:
        told.append(_by_webhook(schedule.webhook, schedule.headers, notice, environ))
    return told


def _by_command(command: str, notice: Notice, environ: Mapping[str, str], directory: str) -> str:
    """The user's own shell text; what it shall tell stands in PACELINE_ variables, so that no name becomes code."""
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
        return f"the notify command did not end within {COMMAND_S:g} s"
    except OSError as error:
        return f"the notify command could not be started ({error.strerror})"
    return "the notify command was run" if done.returncode == 0 else f"the notify command ended with {done.returncode}"


class _Stay(urllib.request.HTTPRedirectHandler):
    """Headers are meant for the address that was given: nobody else gets them. The 3xx is then told as it is."""

    def redirect_request(self, *_: object) -> None:
        return None


def _by_webhook(variable: str, headers: Mapping[str, str], notice: Notice, environ: Mapping[str, str]) -> str:
    absent = [name for name in (variable, *headers.values()) if not environ.get(name)]
    if absent:
        return f"the webhook was not called: {', '.join(absent)} is not set where the timer runs (see --env-file)"
    address = environ[variable].strip()
    if not address.lower().startswith(("http://", "https://")):
        return f"the webhook was not called: {variable} holds no http or https address"
    given = {name: environ[value].strip() for name, value in headers.items()}
    try:
        request = urllib.request.Request(
            address,
            data=json.dumps(asdict(notice)).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "paceline", **given},
            method="POST",
        )
        with urllib.request.build_opener(_Stay).open(request, timeout=WEBHOOK_S) as response:
            return f"the webhook answered {response.status}"
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Errors of urllib may quote the address, which may be the secret itself.
        return f"the webhook could not be reached ({type(error).__name__})"


def variables(text: str) -> dict[str, str]:
    """NAME=VALUE lines, as systemd and Docker read them: no shell, no expansion; one pair of quotes is taken off."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name.strip().isidentifier():
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name.strip()] = value[1:-1] if quoted else value
    return found
