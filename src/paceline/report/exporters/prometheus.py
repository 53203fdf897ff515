"""metrics.prom: every measurement in Prometheus' text format, for the textfile collector of node_exporter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from paceline.analysis.findings import Report
from paceline.host.files import write_atomically
from paceline.report.exporters._prometheus_text import Family, render
from paceline.report.text.cells import trusted_runs


def export(report: Report, directory: Path) -> list[Path]:
    """Moved into place whole, as the collector demands; without time stamps, which it refuses."""
    return [write_atomically(directory / "metrics.prom", text(report))]


def text(report: Report) -> str:
    """A family per metric, bounds of the 95 % interval as families of their own (_low, _high), cells as labels."""
    # The time of the report, so that a dashboard can see stale numbers as stale.
    runs = Family("runs", "Runs of the experiment by status, references included.")
    for status, count in sorted(Counter(run.status for run in report.runs).items()):
        runs.add(count, {"experiment": report.title, "status": status})
    made = Family("report_created_timestamp_seconds", "When the report was made, in seconds since 1970.")
    made.add(report.created_at, {"experiment": report.title, "version": report.paceline_version})
    families: dict[str, Family] = {}
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
            families.setdefault(name, Family(name, help_text)).add(value, labels)
    return render([runs, made, *families.values()])
