"""Recorded circumstances of a launch, and how those of two sets of launches differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from paceline.analysis.findings import Differing
from paceline.analysis.statistics.intervals import Ratio
from paceline.analysis.statistics.verdict import BETWEEN_DAYS
from paceline.experiment.choices import Choice
from paceline.host import machine
from paceline.results.records import RunRecord

# Fields of a spec that do not change the work: launches that differ only in them are compared, and the report says so.
CIRCUMSTANCES = (
    *("launcher", "steps", "warmup", "reference_steps", "timeout_s", "stall_s", "telemetry_hz"),
    *("max_restarts", "checkpoint_every", "checkpoint_async"),
)
SCRIPT = "code of the script"
# The most frequent explanations of a change come first.
_ORDER = (
    *(SCRIPT, "gpus.name", "engine", "driver", "cuda", "versions"),
    *("gpus", "switches", "settings", "environment", "launcher"),
)
_TOPOLOGY = "topology."
_INDEX = re.compile(r"\.\d+(?=\.|$)")

Read = Callable[[RunRecord], Iterable[tuple[str, Any]]]


def _machines(record: RunRecord) -> Iterable[tuple[str, Any]]:
    for facts in record.machines:
        # The difference from an empty mapping lists every fact by dotted path.
        yield from ((path, value) for path, (value, _) in machine.fingerprint_diff(facts, {}).items())


def _everything(record: RunRecord) -> Iterable[tuple[str, Any]]:
    """Facts of the machines, and how the launch was requested and set up."""
    yield from _machines(record)
    # Fields that are left out of spec.json have their default.
    spec = {"checkpoint_async": record.spec.checkpoint_async, **record.spec.to_dict()}
    for name in CIRCUMSTANCES if record.spec.is_trained else ("launcher",):
        value = str(Choice(**spec[name])) if name == "launcher" else spec.get(name)
        yield from ((path, inner) for path, (inner, _) in machine.fingerprint_diff({name: value}, {}).items())
    if record.spec.engine:
        yield "engine", str(record.spec.engine)
    for sample in record.replicas:
        reported = {"version": sample.version, "devices": sample.devices, "settings": dict(sample.settings)}
        yield from ((f"engine.{path}", value) for path, (value, _) in machine.fingerprint_diff(reported, {}).items())
    if record.spec.script:
        yield SCRIPT, record.spec.script.code
    evidence = record.evidence
    for group in ("settings", "switches") if evidence else ():
        yield from ((f"{group}.{key}", value) for key, value in getattr(evidence, group).items())


def occasions(records: Iterable[RunRecord]) -> frozenset[tuple[str, str]]:
    """On which days (UTC) and nodes these launches ran: launches of one day and node share conditions."""
    return frozenset(
        (
            datetime.fromtimestamp(record.started_at, UTC).date().isoformat(),
            ", ".join(sorted({str(facts["host"]) for facts in record.machines if facts.get("host")})),
        )
        for record in records
    )


def apart(first: Iterable[RunRecord], second: Iterable[RunRecord]) -> float:
    """Factor on the spread between days and nodes: 0 if both sides ran on the same ones, less the more each had."""
    ours, theirs = occasions(first), occasions(second)
    return 0.0 if ours == theirs else math.sqrt(1 / len(ours) + 1 / len(theirs))


def allow_for_days(
    ratio: Ratio, first: Iterable[RunRecord], second: Iterable[RunRecord], between_days: float = BETWEEN_DAYS
) -> Ratio:
    """The ratio of two sides with the error of their days and nodes, which all comparisons between them share."""
    return ratio._replace(common=between_days * apart(first, second))


def _text(value: object) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


Judge = Callable[[frozenset[str], frozenset[str]], bool]


def differences(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> tuple[Differing, ...]:
    """Every fact whose values differ between the sides."""
    return _differences(first, second, lambda a, b: a != b, _everything)


def machine_differences(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> tuple[Differing, ...]:
    """Differences of the machines alone, over all hosts of a side; none if a side recorded none."""
    if not all(any(r.machines for r in side) for side in (first, second)):
        return ()
    return _differences(first, second, lambda a, b: a != b, _machines)


def separating(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> tuple[Differing, ...]:
    """Every fact that no launch of one side shares with a launch of the other: possible explanations of a change."""
    return _differences(first, second, lambda a, b: not a & b, _everything)


def _differences(
    first: Sequence[RunRecord], second: Sequence[RunRecord], differ: Judge, read: Read
) -> tuple[Differing, ...]:
    a, b = _facts(first, read), _facts(second, read)
    none: frozenset[str] = frozenset()
    # Runs of earlier versions recorded no topology: that is unknown, not different.
    unknown = () if all(any(path.startswith(_TOPOLOGY) for path in side) for side in (a, b)) else (_TOPOLOGY,)
    candidates = [path for path in dict.fromkeys((*a, *b)) if not path.startswith(unknown)]
    paths = [path for path in candidates if differ(a.get(path, none), b.get(path, none))]
    found = [Differing(path=p, first=_joined(a.get(p)), second=_joined(b.get(p))) for p in paths]

    def rank(path: str) -> int:
        return next((i for i, start in enumerate(_ORDER) if path == start or path.startswith(f"{start}.")), len(_ORDER))

    return tuple(sorted(found, key=lambda d: (rank(d.path), d.path)))


def _facts(records: Sequence[RunRecord], read: Read) -> dict[str, frozenset[str]]:
    """Dotted name -> every value on any host and device of any launch; unknown ones are absent."""
    found: dict[str, set[str]] = {}
    for path, value in (each for record in records for each in read(record)):
        if value is not None and not path.endswith(".index"):
            found.setdefault(_INDEX.sub("", path), set()).add(_text(value))
    return {path: frozenset(values) for path, values in found.items()}


def _joined(values: frozenset[str] | None) -> str | None:
    return ", ".join(sorted(values)) if values else None
