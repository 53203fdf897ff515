"""What `paceline monitor` shows: readings of a machine as lines or tables, a recording, and a summary."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from paceline.errors import RequestError
from paceline.host.gauges import DeviceSample, HostSample, Snapshot
from paceline.report.text_bars import BLOCKS
from paceline.wording import MISSING, format_si

if TYPE_CHECKING:
    from rich.console import RenderableType

GIB = 2**30
# More cores than this are shown as blocks, not as numbers.
MOST_NUMBERED_CORES = 16
FORMATS = (".jsonl", ".csv")
COLUMNS = (
    *("at_s", "source", "cpu_ratio", "utilisation_ratio", "memory_used_bytes", "memory_total_bytes"),
    *("power_w", "temperature_c", "sm_clock_hz", "memory_clock_hz", "frequency_hz", "energy_j"),
    *("load", "cores_ratio", "throttle_reasons"),
)


@dataclass(frozen=True, slots=True)
class Gauge:
    """How one field is shown: label, unit, factor from SI units, and decimal digits."""

    field: str
    label: str
    unit: str
    factor: float = 1.0
    digits: int = 0

    def number(self, value: float | None) -> str:
        return MISSING if value is None else f"{value * self.factor:.{self.digits}f}"

    def text(self, sample: object) -> str:
        value: float | None = getattr(sample, self.field)
        return MISSING if value is None else f"{self.number(value)}{self.unit}"


MEMORY = Gauge("memory_used_bytes", "memory", " GiB", 1 / GIB, 1)
TEMPERATURE = Gauge("temperature_c", "temperature", " C")
HOST_GAUGES = (
    Gauge("cpu_ratio", "cpu", " %", 100),
    MEMORY,
    Gauge("load", "load", "", 1, 1),
    Gauge("frequency_hz", "clock", " MHz", 1e-6),
    TEMPERATURE,
)
GPU_GAUGES = (
    Gauge("utilisation_ratio", "use", " %", 100),
    MEMORY,
    Gauge("power_w", "power", " W"),
    TEMPERATURE,
    Gauge("sm_clock_hz", "SM clock", " MHz", 1e-6),
    Gauge("memory_clock_hz", "memory clock", " MHz", 1e-6),
)


# --- lines and tables ---


def snapshot_lines(snapshot: Snapshot, tally: Tally) -> list[str]:
    """The host, its cores if there is no GPU, then one line per GPU; energy is since the first reading."""
    stamp = time.strftime("%H:%M:%S", time.localtime(snapshot.host.at_s))
    lines = [f"{stamp} host  " + _joined(snapshot.host, HOST_GAUGES) + _energy_so_far(tally, None)]
    if not snapshot.devices and snapshot.host.cores_ratio:
        lines.append(f"         cores  {cores_text(snapshot.host.cores_ratio)}")
    for device in snapshot.devices:
        throttled = f"{_energy_so_far(tally, device.device)}  throttled by {throttle_text(device)}"
        lines.append(f"         gpu {device.device}  " + _joined(device, GPU_GAUGES) + throttled)
    return lines


def _energy_so_far(tally: Tally, device: int | None) -> str:
    energy_j = tally.energy_j(device)
    return "" if energy_j is None else f"  energy {energy_text(energy_j)}"


def _joined(sample: HostSample | DeviceSample, gauges: Sequence[Gauge]) -> str:
    return "  ".join(f"{gauge.label} {gauge.text(sample)}" for gauge in gauges)


def cores_text(ratios: Sequence[float]) -> str:
    """`97 % 3 %`, or one block per core if there are many."""
    if len(ratios) <= MOST_NUMBERED_CORES:
        return "  ".join(f"{ratio:.0%}" for ratio in ratios)
    return "".join(BLOCKS[min(int(ratio * len(BLOCKS)), len(BLOCKS) - 1)] for ratio in ratios)


def throttle_text(device: DeviceSample) -> str:
    return MISSING if device.throttle_reasons is None else ", ".join(device.throttle_reasons) or "nothing"


def screen(snapshot: Snapshot, tally: Tally) -> RenderableType:
    """Tables for a terminal: the host, its cores if there is no GPU, the GPUs."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    host = Table("host", *(gauge.label for gauge in HOST_GAUGES), "energy", box=None)
    host.add_row("", *(gauge.text(snapshot.host) for gauge in HOST_GAUGES), energy_text(tally.energy_j(None)))
    parts: list[RenderableType] = [host]
    if not snapshot.devices and snapshot.host.cores_ratio:
        parts.append(Text(f" cores  {cores_text(snapshot.host.cores_ratio)}"))
    if snapshot.devices:
        gpus = Table("gpu", *(gauge.label for gauge in GPU_GAUGES), "energy", "throttled by", box=None)
        for device in snapshot.devices:
            energy = energy_text(tally.energy_j(device.device))
            shown = (gauge.text(device) for gauge in GPU_GAUGES)
            gpus.add_row(str(device.device), *shown, energy, throttle_text(device))
        parts.append(gpus)
    return Group(*parts)


def energy_text(energy_j: float | None) -> str:
    return MISSING if energy_j is None else format_si(energy_j, "J")


# --- the summary ---


class Tally:
    """All readings so far, in eight bytes per number: minimum, median and maximum of each gauge of each source."""

    def __init__(self) -> None:
        self.readings = 0
        self.values: dict[tuple[str, Gauge], array[float]] = {}
        self.throttled: dict[str, Counter[str]] = {}
        self._energy: dict[int | None, tuple[float, float]] = {}

    def add(self, snapshot: Snapshot) -> None:
        self.readings += 1
        self._add("host", snapshot.host, HOST_GAUGES)
        self._count(None, snapshot.host.energy_j)
        for device in snapshot.devices:
            source = f"gpu {device.device}"
            self._add(source, device, GPU_GAUGES)
            if device.throttle_reasons is not None:
                counts = self.throttled.setdefault(source, Counter())
                counts.update({"readings": 1, "throttled": bool(device.throttle_reasons)})
                counts.update(device.throttle_reasons)
            self._count(device.device, device.energy_j)

    def _count(self, device: int | None, energy_j: float | None) -> None:
        if energy_j is not None:
            first, _ = self._energy.get(device, (energy_j, 0.0))
            self._energy[device] = (first, energy_j)

    def _add(self, source: str, sample: HostSample | DeviceSample, gauges: Sequence[Gauge]) -> None:
        for gauge in gauges:
            value = getattr(sample, gauge.field)
            if value is not None:
                self.values.setdefault((source, gauge), array("d")).append(value)

    def energy_j(self, device: int | None) -> float | None:
        """Energy of a GPU, or of the CPUs (device None), since the first reading; None if it is not counted, or if
        the driver was reloaded in between."""
        first, last = self._energy.get(device, (0.0, -1.0))
        return last - first if last >= first else None

    def lines(self) -> Iterator[str]:
        """One line per source: minimum / median / maximum."""
        yield f"{self.readings} reading{'' if self.readings == 1 else 's'}; minimum / median / maximum:"
        for source in dict.fromkeys(source for source, _ in self.values):
            ranges = []
            for (name, gauge), values in self.values.items():
                if name == source:
                    low, middle, high = map(gauge.number, (min(values), statistics.median(values), max(values)))
                    ranges.append(f"{gauge.label} {low} / {middle} / {high}{gauge.unit}")
            energy_j = self.energy_j(int(source.removeprefix("gpu ")) if source.startswith("gpu ") else None)
            energy = "" if energy_j is None else f", energy {energy_text(energy_j)}"
            throttled = ""
            if (counts := self.throttled.get(source)) is not None:
                reasons = {why: n for why, n in counts.items() if why not in ("readings", "throttled") and n}
                named = ", ".join(f"{why} {n / counts['readings']:.0%}" for why, n in sorted(reasons.items()))
                throttled = f", throttled in {counts['throttled'] / counts['readings']:.0%} of readings"
                throttled += f" ({named})" if named else ""
            yield f"  {source}: " + ", ".join(ranges) + throttled + energy


# --- the recording ---


class Recording:
    """Appends each reading to a file and flushes it: a killed process loses at most one line."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in FORMATS:
            raise RequestError(f"--record: got {str(path)!r}, expected a file that ends in .jsonl or .csv.")
        self.path = path
        # The text before the next reading: a heading, or the end of a truncated line.
        self.begins = head = ",".join(COLUMNS) + "\n" if path.suffix == ".csv" else ""
        if path.is_file() and path.stat().st_size:
            text = path.read_bytes()
            if head and not text.startswith(head.encode()):
                raise RequestError(
                    f"--record: got {str(path)!r}, which has other content; expected a new file or one written by "
                    "`paceline monitor`."
                )
            self.begins = "" if text.endswith(b"\n") else "\n"
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--record: cannot write {str(path)!r} ({error.strerror}).") from None

    def add(self, snapshot: Snapshot) -> None:
        text = csv_lines(snapshot) if self.path.suffix == ".csv" else json.dumps(dataclasses.asdict(snapshot)) + "\n"
        self._file.write(self.begins + text)
        self._file.flush()
        self.begins = ""

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def csv_lines(snapshot: Snapshot) -> str:
    """A row for the host and one per GPU; an empty field is a missing value."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, COLUMNS, extrasaction="ignore", lineterminator="\n")
    sources = {"host": snapshot.host} | {f"gpu {device.device}": device for device in snapshot.devices}
    for source, sample in sources.items():
        row: dict[str, object] = {"source": source} | dataclasses.asdict(sample)
        for name, value in row.items():
            if name == "throttle_reasons" and isinstance(value, tuple):
                row[name] = ";".join(map(str, value)) or "none"  # "none" is not throttled, empty is unknown
            elif isinstance(value, tuple):
                row[name] = " ".join(f"{share:.3f}" for share in value)
        writer.writerow(row)
    return lines.getvalue()
