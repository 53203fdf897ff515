"""Every node and GPU of a running campaign, its steps and its straggler, from the files that the controller receives.

Each launcher brings gauges, progress and samples of all ranks into the run directory while a run lasts: ranks write
there, or their agents send it once a second. So one reader serves all launchers, and no shared disk is needed. Reading
costs little: only what was added since the last look is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.campaign.live.logs import GrowingFile
from paceline.errors import PacelineError, StoreError
from paceline.experiment.spec import RunSpec
from paceline.host.gauges import HEAT_REASONS
from paceline.results import campaign_file, safe_text, store
from paceline.results.campaign_file import CampaignView, Pulse, finite

GAUGE_FILE = re.compile(r"samples-gauges-(0|[1-9][0-9]{0,6})\.jsonl")
# The end of a file of gauges that is read first: at least one reading of a host with 16 GPUs.
TAIL_BYTES = 1 << 15
LONGEST_NAME = 100
MOST_GPUS = 256
MOST_REASONS = 16
# Trackers count steps in 63 bits.
MOST_STEPS = 1 << 63
# How often the state of the campaign is read: which runs ended, which one runs.
VIEW_S = 3.0
# It takes at most one part in this many of the time: a run of 4,096 ranks has many files.
LEAST_PAUSE = 20
# How often nodes beyond the expected number are looked for.
SEARCH_S = 10.0
# Looks that a straggler is judged by, and how many it takes.
LOOKS = 60
FEWEST_LOOKS = 20
# Files of other nodes arrive once a second and are read once a second: a lag below this shows nothing.
RELAY_S = 2.5
# Once a step has ended, all ranks run: files of a rank that take longer than this do not arrive here.
UNSEEN_S = 30.0
# A busy GPU whose clock is this far below the median of all busy ones is named.
SLOW_CLOCK_RATIO = 0.9
BUSY_RATIO = 0.5
MOST_SUSPECTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU; None is not reported."""

    utilisation_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    energy_j: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One host and its GPUs. rank: its first rank. age_s: since its last reading arrived here.

    received_per_s and sent_per_s are bytes over all network interfaces since the reading before.
    """

    host: str
    rank: int
    age_s: float
    cpu_ratio: float | None = None
    memory_used_bytes: float | None = None
    received_per_s: float | None = None
    sent_per_s: float | None = None
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of rank 0."""

    step: int
    duration_s: float
    loss: float | None


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that was last in `count` of `looks` looks. slowed: why its GPU is throttled, if it is."""

    rank: int
    host: str
    count: int
    looks: int
    slowed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        why = f"; its GPU is throttled: {', '.join(self.slowed)}" if self.slowed else ""
        return f"rank {self.rank} ({self.host}) is last in {self.count} of {self.looks} looks{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A run at one moment. steps are those of rank 0 since the look before; ranks counts those that have started.

    unseen: how many ranks run without their files arriving here.
    """

    pulse: Pulse
    nodes: tuple[NodeReading, ...]
    steps: tuple[Step, ...]
    straggler: Straggler | None
    suspects: tuple[str, ...]
    ranks: int
    unseen: int = 0

    @property
    def unseen_text(self) -> str:
        """Why some ranks are not shown; empty if all are."""
        whole = self.pulse.spec.topology.world_size
        return (
            f"No files of {self.unseen} of {whole} ranks: their nodes do not share the results directory with this host"
            if self.unseen
            else ""
        )


class _NodeFile:
    """The file of gauges of one host."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._file = GrowingFile(path, TAIL_BYTES)
        self._name = f"rank {rank}"
        self._host: dict[str, Any] = {}
        self._gpus: dict[int, GpuReading] = {}
        self._traffic: tuple[float, float, float] | None = None
        self._rates: tuple[float | None, float | None] = (None, None)
        self._arrived = time.monotonic()

    def read(self) -> NodeReading | None:
        """The newest reading; None before the first."""
        lines = list(self._file.take(is_last=False))
        for line in reversed(lines):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(row, dict):
                continue
            self._arrived = time.monotonic()
            self._name = safe_text.text(str(row.get("host"))[:LONGEST_NAME])
            device = row.get("device")
            if device is None:
                self._take_host(row)
                break  # the lines before it are an older reading
            if isinstance(device, int) and 0 <= device < MOST_GPUS:
                self._gpus[device] = _gpu(row)
        if not self._host and not self._gpus:
            return None
        return NodeReading(
            host=self._name,
            rank=self.rank,
            age_s=time.monotonic() - self._arrived,
            cpu_ratio=self._host.get("cpu_ratio"),
            memory_used_bytes=self._host.get("memory_used_bytes"),
            received_per_s=self._rates[0],
            sent_per_s=self._rates[1],
            gpus=tuple(self._gpus.get(i, GpuReading()) for i in range(max(self._gpus, default=-1) + 1)),
        )

    def _take_host(self, row: Mapping[str, Any]) -> None:
        self._host = {name: finite(row.get(name)) for name in ("cpu_ratio", "memory_used_bytes")}
        at_s, received, sent = (finite(row.get(name)) for name in ("at_s", "received_bytes", "sent_bytes"))
        if at_s is None or received is None or sent is None:
            return
        if self._traffic is not None and at_s > self._traffic[0]:
            passed = at_s - self._traffic[0]
            now = (received - self._traffic[1]) / passed, (sent - self._traffic[2]) / passed
            # Counters that went backwards were reset.
            self._rates = (now[0], now[1]) if min(now) >= 0 else (None, None)
        self._traffic = at_s, received, sent


def _gpu(row: Mapping[str, Any]) -> GpuReading:
    reasons = row.get("throttle_reasons")
    names = (
        tuple(safe_text.text(str(r)[:LONGEST_NAME]) for r in reasons[:MOST_REASONS]) if type(reasons) is list else None
    )
    numbers = {name: finite(row.get(name)) for name in GpuReading.__slots__ if name != "throttle_reasons"}
    return GpuReading(**numbers, throttle_reasons=names)


class RunWatch:
    """Looks at one running run, again and again."""

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        self.run_dir, self.spec = run_dir, spec
        self._nodes: dict[str, _NodeFile] = {}
        self._samples = GrowingFile(run_dir / "samples-0.jsonl")
        self._last: deque[int | None] = deque(maxlen=LOOKS)
        self.history: list[Step] = []
        self._searched_at = float("-inf")
        self._stepped_at: float | None = None

    def look(self) -> Look | None:
        """The run now; None before any rank has started."""
        positions = store.read_progress(self.run_dir)
        pulse = campaign_file.read_pulse(self.run_dir, self.spec, positions)
        if pulse is None:
            return None
        self._find_nodes()
        files = sorted(self._nodes.values(), key=lambda file: file.rank)
        nodes = tuple(reading for file in files if (reading := file.read()) is not None)
        steps = tuple(self._new_steps())
        self.history += steps
        if self.spec.is_trained:
            per_node = self.spec.topology.processes_per_node
            ages = {node.rank // per_node: node.age_s for node in nodes}
            self._last.append(last_rank(positions, per_node, pulse.step_s, ages))
        return Look(
            pulse=pulse,
            nodes=nodes,
            steps=steps,
            straggler=straggler(self._last, nodes, self.spec.topology.processes_per_node),
            suspects=tuple(suspects(nodes)),
            ranks=len(positions),
            unseen=self._unseen(pulse, len(positions)),
        )

    def _unseen(self, pulse: Pulse, ranks: int) -> int:
        if not self.spec.is_trained or pulse.step < 1:
            return 0
        now = time.monotonic()
        self._stepped_at = self._stepped_at or now
        return max(self.spec.topology.world_size - ranks, 0) if now - self._stepped_at > UNSEEN_S else 0

    def _find_nodes(self) -> None:
        """Look for files of new nodes, not every second once all are there."""
        is_due = time.monotonic() - self._searched_at > SEARCH_S
        if len(self._nodes) >= self.spec.topology.nodes and not is_due:
            return
        self._searched_at = time.monotonic()
        with os.scandir(self.run_dir) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            if name not in self._nodes and (match := GAUGE_FILE.fullmatch(name)):
                self._nodes[name] = _NodeFile(self.run_dir / name, int(match[1]))

    def last_steps(self) -> list[Step]:
        """The steps that were written after the last look. The seal of a run replaces the lines that have them."""
        rest = list(self._new_steps())
        with contextlib.suppress(StoreError):
            sealed = store.read_columns(self.run_dir) if store.is_sealed(self.run_dir) else None
            own = [step for step in sealed or () if step.rank == 0]
            rest += [Step(step.step, step.duration_s, step.loss) for step in own[len(self.history) + len(rest) :]]
        return rest

    def _new_steps(self) -> Iterable[Step]:
        for line in self._samples.take(is_last=False):
            try:
                row = json.loads(line)
                step, duration = row["step"], finite(row["duration_s"])
            except (ValueError, RecursionError, KeyError, TypeError):
                continue
            if row.get("kind") == "step" and type(step) is int and 0 <= step < MOST_STEPS and duration is not None:
                yield Step(step, duration, finite(row.get("loss")))


# --- stragglers ---


def last_rank(
    positions: Sequence[store.Progress], per_node: int, step_s: float | None, ages: Mapping[int, float]
) -> int | None:
    """The rank that the others wait for at this moment; None if that cannot be said.

    Ranks of one node are compared by step and phase. Those of different nodes arrive at different times, so a node
    counts only if it is behind by more than that can explain. ages: seconds since the last files of each node arrived.
    """
    if len(positions) < 2:
        return None
    front = max(position.step for position in positions)
    far = [p for p in positions if step_s and (front - p.step) * step_s > RELAY_S + ages.get(p.rank // per_node, 0.0)]
    if far:
        return min(far, key=lambda p: (p.step, store.PHASES.index(p.phase))).rank
    groups: dict[int, list[store.Progress]] = {}
    for position in positions:
        groups.setdefault(position.rank // per_node, []).append(position)
    lonely = []
    for group in groups.values():
        first, *others = sorted(group, key=lambda p: (p.step, store.PHASES.index(p.phase)))
        if others and (first.step, first.phase) != (others[0].step, others[0].phase):
            lonely.append(first.rank)
    return lonely[0] if len(lonely) == 1 else None


def straggler(last: Sequence[int | None], nodes: Sequence[NodeReading], per_node: int) -> Straggler | None:
    """The rank that is last in most looks; None if there is none."""
    counts = Counter(rank for rank in last if rank is not None)
    if not counts or len(last) < FEWEST_LOOKS:
        return None
    (rank, count), *_ = counts.most_common(1)
    if count * 2 <= len(last):
        return None
    node = next((n for n in nodes if n.rank <= rank < n.rank + per_node), None)
    gpu = node.gpus[rank - node.rank] if node and rank - node.rank < len(node.gpus) else None
    slowed = tuple(sorted(HEAT_REASONS & set(gpu.throttle_reasons or ()))) if gpu else ()
    return Straggler(rank, node.host if node else "unknown node", count, len(last), slowed)


def suspects(nodes: Sequence[NodeReading]) -> Iterable[str]:
    """GPUs that run hot or slower than their peers, each as one sentence; the first few only."""
    busy = [gpu.sm_clock_hz for node in nodes for gpu in node.gpus if gpu.sm_clock_hz and _is_busy(gpu)]
    usual, named = median(busy) if len(busy) > 1 else None, 0
    for node in nodes:
        for index, gpu in enumerate(node.gpus):
            hot = sorted(HEAT_REASONS & set(gpu.throttle_reasons or ()))
            slow = usual and gpu.sm_clock_hz and _is_busy(gpu) and gpu.sm_clock_hz < SLOW_CLOCK_RATIO * usual
            if not hot and not slow:
                continue
            why = ", ".join(hot) or f"{(gpu.sm_clock_hz or 0) / 1e6:.0f} MHz, its peers {(usual or 0) / 1e6:.0f}"
            yield f"{node.host} GPU {index}: {why}"
            named += 1
            if named == MOST_SUSPECTS:
                return


def _is_busy(gpu: GpuReading) -> bool:
    return (gpu.utilisation_ratio or 0.0) >= BUSY_RATIO


# --- the campaign ---


@dataclass
class CampaignWatch:
    """Looks at a campaign: its state every few seconds, its running run each time."""

    experiment: Path
    view: CampaignView | None = None
    run: RunWatch | None = None
    _due: float = 0.0

    def look(self) -> Look | None:
        """The running run; None between runs and after the last."""
        ended = self.run is not None and store.is_sealed(self.run.run_dir)
        began = time.monotonic()
        if self.view is None or ended or began > self._due:
            self.view = campaign_file.read_view(self.experiment)
            now = time.monotonic()
            self._due = now + max(VIEW_S, LEAST_PAUSE * (now - began))
            self._choose(self.view)
        try:
            return self.run.look() if self.run else None
        except (PacelineError, OSError):  # a restart may move files aside meanwhile
            return None

    def _choose(self, view: CampaignView) -> None:
        """Follow the first running run; stay with it as long as it runs."""
        specs = {pulse.spec.run_id: pulse.spec for pulse in view.pulses}
        if self.run is not None and self.run.spec.run_id in specs:
            return
        self.run = None
        for run_id, spec in specs.items():
            if (self.experiment / run_id / "spec.json").is_file():
                self.run = RunWatch(self.experiment / run_id, spec)
                return


class Watches:
    """Watches of all running campaigns, for readers that come now and then. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[Path, CampaignWatch] = {}

    def looks(self, views: Mapping[str, CampaignView]) -> dict[str, Look]:
        """The running run of every campaign that has one."""
        with self._lock:
            running = {name: view.experiment for name, view in views.items() if view.running}
            self._watches = {path: self._watches.get(path) or CampaignWatch(path) for path in running.values()}
            looks = {name: self._watches[path].look() for name, path in running.items()}
            return {name: look for name, look in looks.items() if look is not None}
