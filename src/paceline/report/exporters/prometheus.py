"""metrics.prom: every measurement in Prometheus' text format, for the textfile collector of node_exporter.

The format is 0.0.4: families of gauges and counters with HELP, TYPE and escaped labels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.analysis.findings import Report
from paceline.errors import Scalar
from paceline.host.files import write_atomically
from paceline.report.text.cells import trusted_runs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "paceline_"
UNITS = {"s": "seconds", "w": "watts", "c": "celsius", "hz": "hertz", "j": "joules"}


@dataclass(slots=True)
class Family:
    """All samples of one name. kind is gauge or counter; of equal labels the last value is kept.

    samples has the values by their labels as text, labels the same labels by name.
    """

    name: str
    help: str
    kind: str = "gauge"
    samples: dict[str, float] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, value: float | None, labels: Mapping[str, Scalar] | None = None) -> None:
        """What is missing has no sample: a zero would be a measurement."""
        if value is None:
            return
        shown, kept = [], {}
        for name, label in (labels or {}).items():
            # An empty label means the same to Prometheus as none.
            if label not in (None, ""):
                name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                name = name if re.match(r"[a-zA-Z]", name) else f"label_{name}"
                text = str(label).lower() if isinstance(label, bool) else str(label)
                kept[name] = text
                escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                shown.append(f'{name}="{escaped}"')
        key = "{" + ",".join(shown) + "}" if shown else ""
        self.samples[key], self.labels[key] = float(value), kept


def render(families: Iterable[Family]) -> str:
    """Families without a sample are left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        name = metric_name(family.name)
        help_text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.samples.items():
            if not math.isfinite(value):
                number = "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
            else:
                number = repr(int(value) if value.is_integer() and abs(value) < 2**53 else value)
            lines.append(f"{name}{labels} {number}")
    return "".join(f"{line}\n" for line in lines)


def metric_name(text: str) -> str:
    """Our prefix, then letters, digits and _, with units spelled out as Prometheus asks: tokens_per_s is
    paceline_tokens_per_second. A colon is allowed by the format but reserved for recording rules."""
    words = re.sub(r"[^a-zA-Z0-9_]", "_", text).split("_")
    pairs = zip(("", *words), words, strict=False)
    return PREFIX + "_".join("second" if pair == ("per", "s") else UNITS.get(pair[1], pair[1]) for pair in pairs)


def export(report: Report, directory: Path) -> list[Path]:
    """Moved into place whole, as the collector demands; without time stamps, which it refuses."""
    return [write_atomically(directory / "metrics.prom", text(report))]


def text(report: Report) -> str:
    return render(families(report))


def families(report: Report) -> list[Family]:
    """A family per metric, bounds of the 95 % interval as families of their own (_low, _high), cells as labels."""
    # The time of the report, so that a dashboard can see stale numbers as stale.
    runs = Family("runs", "Runs of the experiment by status, references included.")
    for status, count in sorted(Counter(run.status for run in report.runs).items()):
        runs.add(count, {"experiment": report.title, "status": status})
    made = Family("report_created_timestamp_seconds", "When the report was made, in seconds since 1970.")
    made.add(report.created_at, {"experiment": report.title, "version": report.paceline_version})
    by_name: dict[str, Family] = {}
    trusted = trusted_runs(report)
    for m in report.measurements:
        certified = bool(m.runs) and trusted.issuperset(m.runs)
        labels = {"experiment": report.title, "cell": m.cell, **m.axes, "certified": certified}
        what = f"{m.metric} of a cell, in {m.unit}, {m.better} is better."
        for name, value, help_text in (
            (m.metric, m.value, what),
            (f"{m.metric}_low", m.low, f"Lower bound of the 95 % interval of {what}"),
            (f"{m.metric}_high", m.high, f"Upper bound of the 95 % interval of {what}"),
        ):
            by_name.setdefault(name, Family(name, help_text)).add(value, labels)
    return [runs, made, *by_name.values()]
