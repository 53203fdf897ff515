"""The ceiling of this host's client as `paceline selftest` found it, kept for the runs that follow.

One small file for each host and each client: homes are shared between nodes, and another processor, another number of
usable cores, another Python or another client has another ceiling. Nothing in it is of the user but the numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.host.files import write_atomically
from paceline.host.machine import cpu_model, usable_cores
from paceline.results.served_samples import CeilingSample

SCHEMA = 1
# A file of ours has some hundred bytes for each number of processes.
LARGEST_FILE = 1 << 16
_CLIENT = Path(__file__).parent / "client"


def keep(found: CeilingSample, environ: Mapping[str, str] = os.environ) -> Path:
    """Beside those of other numbers of processes; OSError where the folder takes no file."""
    others = [each for each in known(environ) if each.processes != found.processes]
    ceilings = sorted((*others, found), key=lambda each: each.processes)
    whole = {"schema": SCHEMA, "host": host(), "client": client(), "ceilings": list(map(_plain, ceilings))}
    return write_atomically(path(environ), json.dumps(whole, indent=1) + "\n")


def known(environ: Mapping[str, str] = os.environ, rank: int = 0) -> list[CeilingSample]:
    """What was measured of this client on this host; a file that is missing or damaged tells nothing."""
    try:
        with path(environ).open("rb") as file:
            raw = json.loads(file.read(LARGEST_FILE))
        return [_sample(each, rank) for each in raw["ceilings"]] if raw["schema"] == SCHEMA else []
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError, RuntimeError):
        # RuntimeError: a user without a home. OverflowError: JSON has Infinity, and whole numbers of any length.
        return []


def path(environ: Mapping[str, str]) -> Path:
    """Where the XDG specification wants what a program keeps of itself; a relative folder there is to be ignored."""
    named = environ.get("XDG_STATE_HOME", "")
    folder = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state"
    return folder / "paceline" / f"client-ceiling-{host()}-{client()}.json"


def host() -> str:
    """A mark of what decides how much a client holds here: which host, processor, usable cores and Python."""
    facts = (socket.gethostname(), platform.machine(), cpu_model(), usable_cores(), platform.python_version())
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@functools.cache
def client() -> str:
    """The version of the client: of the package, and of its source, which changes between versions too."""
    source = hashlib.sha256()
    for file in sorted(_CLIENT.glob("*.py")):
        source.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}-{source.hexdigest()[:12]}"


def _plain(ceiling: CeilingSample) -> dict[str, Any]:
    return {name: value for name, value in asdict(ceiling).items() if name != "rank"}


def _sample(raw: Mapping[str, Any], rank: int) -> CeilingSample:
    """ValueError for numbers that are none."""
    found = CeilingSample(
        rank=rank,
        processes=int(raw["processes"]),
        events_per_s=float(raw["events_per_s"]),
        streams=int(raw["streams"]),
        measured_at_s=float(raw["measured_at_s"]),
    )
    if not all(0 < value < math.inf for value in (found.processes, found.events_per_s, found.measured_at_s)):
        raise ValueError("no ceiling")
    return found
