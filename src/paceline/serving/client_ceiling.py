"""The ceiling of this host's load generator as `paceline selftest` measured it, stored for later runs.

One small file for each host and each client: home directories are shared between nodes, and another processor, number
of usable cores, Python or client has another ceiling. The file holds only these numbers.
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
from paceline.host.files import state_directory, write_atomically
from paceline.host.machine import cpu_model, usable_cores
from paceline.results.served_samples import CeilingSample

SCHEMA = 1
# Our file has some hundred bytes for each number of processes.
LARGEST_FILE = 1 << 16
_CLIENT = Path(__file__).parent / "client"


def keep(ceiling: CeilingSample, environ: Mapping[str, str] = os.environ) -> Path:
    """Store the ceiling beside those of other numbers of processes; OSError if the directory is not writable."""
    others = [each for each in known(environ) if each.processes != ceiling.processes]
    ceilings = sorted((*others, ceiling), key=lambda each: each.processes)
    plain = [{name: value for name, value in asdict(each).items() if name != "rank"} for each in ceilings]
    whole = {"schema": SCHEMA, "host": host(), "client": client(), "ceilings": plain}
    return write_atomically(path(environ), json.dumps(whole, indent=1) + "\n")


def known(environ: Mapping[str, str] = os.environ, rank: int = 0) -> list[CeilingSample]:
    """The ceilings of this client on this host; none if the file is missing or damaged."""
    try:
        with path(environ).open("rb") as file:
            raw = json.loads(file.read(LARGEST_FILE))
        return [_sample(each, rank) for each in raw["ceilings"]] if raw["schema"] == SCHEMA else []
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError, RuntimeError):
        # RuntimeError: a user without a home directory. OverflowError: JSON allows Infinity and integers of any length.
        return []


def path(environ: Mapping[str, str]) -> Path:
    return state_directory(environ) / f"client-ceiling-{host()}-{client()}.json"


def host() -> str:
    """A digest of what decides how much a client can send: host, processor, usable cores and Python."""
    facts = (socket.gethostname(), platform.machine(), cpu_model(), usable_cores(), platform.python_version())
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@functools.cache
def client() -> str:
    """The version of the client: of the package and of its source, which changes between versions too."""
    source = hashlib.sha256()
    for file in sorted(_CLIENT.glob("*.py")):
        source.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{__version__}-{source.hexdigest()[:12]}"


def _sample(raw: Mapping[str, Any], rank: int) -> CeilingSample:
    """ValueError for impossible numbers."""
    ceiling = CeilingSample(
        rank=rank,
        processes=int(raw["processes"]),
        events_per_s=float(raw["events_per_s"]),
        streams=int(raw["streams"]),
        measured_at_s=float(raw["measured_at_s"]),
        is_brief=bool(raw.get("is_brief", False)),
    )
    if not all(0 < value < math.inf for value in (ceiling.processes, ceiling.events_per_s, ceiling.measured_at_s)):
        raise ValueError("not a ceiling")
    return ceiling
