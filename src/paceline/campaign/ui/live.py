"""The live view of a campaign as server-sent events.

One thread per watched campaign looks once a second and writes one message for all browsers; it ends when the last
browser has left. `layout` names nodes and limits and is sent when they change, `tick` has the numbers, column by
column, `steps` the steps of rank 0, `runs` what has ended.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.campaign.live.nodes import CampaignWatch, Look, NodeReading, Step
from paceline.campaign.live.progress import left_text, pulse_text, spent_text, title
from paceline.campaign.live.status import state_text
from paceline.campaign.ui.library import Campaign, RunRow
from paceline.errors import PacelineError
from paceline.host.gauges import HEAT_REASONS, THROTTLE_REASONS
from paceline.results import store
from paceline.results.campaign_file import CampaignView

INTERVAL_S = 1.0
# How long a thread goes on without a browser: a page that is loaded again finds its history.
IDLE_S = 10.0
# Steps that a browser gets at first; more are thinned out evenly.
MOST_STEPS = 600
GIB, MEGA = 2**30, 1e6
REASONS = tuple(THROTTLE_REASONS.values())


def event(name: str, value: object) -> bytes:
    """One server-sent event; JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(value, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class Feed:
    """What all browsers of one campaign get."""

    def __init__(self, campaign: Campaign, rows: Callable[[], Sequence[RunRow]]) -> None:
        self._rows = rows
        self._watch = CampaignWatch(campaign.path)
        self._changed = threading.Condition()
        self._readers, self._number, self._message = 0, 0, b""
        self._layout: dict[str, Any] = {}
        self._ended: list[Any] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[tuple[bytes, int]]:
        """The events that a new browser needs first, and the number of the message they end with."""
        with self._changed:
            self._readers += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="paceline-live", daemon=True)
                self._thread.start()
            first = event("layout", self._layout) + event("runs", self._ended) if self._layout else b""
            run = self._watch.run
            past = thinned(run.history) if run else []
            first += event("steps", {"run": run.spec.run_id if run else None, "all": True, "steps": rows_of(past)})
            number = self._number
        try:
            yield first, number
        finally:
            with self._changed:
                self._readers -= 1

    def next(self, number: int, patience_s: float) -> tuple[bytes, int]:
        """The messages after a number; empty if none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number, patience_s)
            return (self._message, self._number) if self._number > number else (b"", number)

    def _work(self) -> None:
        idle_since, due = None, time.monotonic()
        while True:
            with self._changed:
                idle_since = None if self._readers else idle_since or time.monotonic()
                if idle_since is not None and time.monotonic() - idle_since > IDLE_S:
                    self._thread = None
                    return
            with contextlib.suppress(PacelineError, OSError):  # files may be moved or removed at any time
                message = self.look()
                with self._changed:
                    self._message, self._number = message, self._number + 1
                    self._changed.notify_all()
            due = max(due + INTERVAL_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def look(self) -> bytes:
        """The events of one look."""
        run = self._watch.run
        found = self._watch.look()
        view, parts = self._watch.view, []
        assert view is not None
        layout = self._layout
        if found is not None and self._watch.run is not None:
            layout = layout_of(found, self._watch.run.run_dir, layout)
        if layout is not self._layout:
            self._layout = layout
            parts.append(event("layout", layout))
        ended = [[row.title, row.status, row.seconds, row.slug, row.error] for row in self._rows()]
        if ended != self._ended:
            self._ended = ended
            parts.append(event("runs", ended))
        if found is not None and (found.steps or run is not self._watch.run):
            is_new = run is not self._watch.run
            steps = {"run": found.pulse.spec.run_id, "all": is_new, "steps": rows_of(thinned(found.steps))}
            parts.append(event("steps", steps))
        parts.append(event("tick", tick_of(view, found)))
        return b"".join(parts)


def thinned(steps: Sequence[Step]) -> Sequence[Step]:
    return steps if len(steps) <= MOST_STEPS else [steps[i * len(steps) // MOST_STEPS] for i in range(MOST_STEPS)]


def rows_of(steps: Sequence[Step]) -> list[list[float | None]]:
    return [[step.step, round(step.duration_s, 6), step.loss] for step in steps]


def layout_of(found: Look, run_dir: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Nodes, their ranks and GPUs, and the limits of the scales; the known one if nothing changed."""
    spec = found.pulse.spec
    nodes = [[node.host, node.rank, len(node.gpus)] for node in found.nodes]
    if known.get("run") == spec.run_id and known.get("nodes") == nodes:
        return known
    machines: tuple[dict[str, Any], ...] = ()
    with contextlib.suppress(PacelineError, OSError):
        machines = store.read_machines(run_dir)
    gpus = [gpu for machine in machines for gpu in machine.get("gpus") or () if isinstance(gpu, dict)]

    def largest(name: str, unit: float) -> float | None:
        values = [gpu[name] for gpu in gpus if isinstance(gpu.get(name), int | float)]
        return max(values) / unit if values else None

    return {
        "run": spec.run_id,
        "nodes": nodes,
        "reasons": REASONS,
        "heat": sum(1 << i for i, reason in enumerate(REASONS) if reason in HEAT_REASONS),
        "ranks": spec.topology.world_size,
        "per_node": spec.topology.processes_per_node,
        # Whether this host is measured: then nothing is computed that nobody asked for.
        "is_local": socket.gethostname() in {node.host for node in found.nodes},
        "limits": {
            "memory": largest("memory_bytes", GIB),
            "power": largest("power_limit_w", 1.0),
            "clock": largest("sm_clock_max_hz", MEGA),
        },
    }


def tick_of(view: CampaignView, found: Look | None) -> dict[str, Any]:
    """The numbers of one look: of the campaign, of its run, and columns over nodes and GPUs in the layout's order."""
    done = sum(view.ended.values())
    tick: dict[str, Any] = {
        "at": round(time.time(), 3),
        "running": view.running,
        "state": state_text(view),
        "ended": done,
        "planned": view.planned,
        "waiting": list(view.waiting.values()),
        "left": left_text(view.left_s) if view.running else "",
        "spent": spent_text(view.usd),
        "run": None,
    }
    if found is None:
        return tick
    pulse = found.pulse
    nodes = found.nodes
    return tick | {
        "run": pulse.spec.run_id,
        "title": title(pulse.spec),
        "text": pulse_text(pulse),
        "phase": pulse.note or pulse.phase,
        "step": pulse.step,
        "steps": pulse.steps,
        "step_s": pulse.step_s,
        "tokens_per_s": pulse.tokens_per_s,
        "loss": pulse.loss,
        "peak": None if pulse.peak_bytes is None else round(pulse.peak_bytes / GIB, 2),
        "trust": None if pulse.trust is None else [pulse.trust.level, pulse.trust.brief],
        "ranks": found.ranks,
        "straggler": found.straggler and found.straggler.text,
        "suspects": found.suspects,
        "unseen": found.unseen_text,
        "age": [round(node.age_s) for node in nodes],
        "cpu": [scaled(node.cpu_ratio, 100) for node in nodes],
        "host_memory": [scaled(node.memory_used_bytes, 1 / GIB, 1) for node in nodes],
        "received": [scaled(node.received_per_s, 1 / MEGA, 1) for node in nodes],
        "sent": [scaled(node.sent_per_s, 1 / MEGA, 1) for node in nodes],
        **gpu_columns(nodes),
    }


def gpu_columns(nodes: Sequence[NodeReading]) -> dict[str, list[Any]]:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    numbers = {name: 1 << i for i, name in enumerate(REASONS)}
    return {
        "utilisation": [scaled(gpu.utilisation_ratio, 100) for gpu in gpus],
        "memory": [scaled(gpu.memory_used_bytes, 1 / GIB, 1) for gpu in gpus],
        "power": [scaled(gpu.power_w) for gpu in gpus],
        "temperature": [scaled(gpu.temperature_c) for gpu in gpus],
        "clock": [scaled(gpu.sm_clock_hz, 1 / MEGA) for gpu in gpus],
        "throttle": [
            None if gpu.throttle_reasons is None else sum(numbers.get(reason, 0) for reason in gpu.throttle_reasons)
            for gpu in gpus
        ],
    }


def scaled(value: float | None, factor: float = 1.0, digits: int = 0) -> float | int | None:
    """Rounded, because a screen shows no more and thousands of numbers are sent each second."""
    if value is None:
        return None
    return round(value * factor, digits) if digits else round(value * factor)
