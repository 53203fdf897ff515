"""A profiler trace that a run kept is one click away from its row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from training_records import build_record, build_spec

from paceline.analysis.report import build
from paceline.experiment.script import Script
from paceline.report.exporters import html, markdown


def test_the_row_of_a_run_links_to_its_trace(tmp_path: Path) -> None:
    spec = replace(build_spec(None, 2, workload="script"), script=Script(command=("train.py",)))
    traced = build_record(spec, evidence={"settings": {"trace": "trace-1.json"}})
    plain = build_record(replace(spec, repeat=1))
    report = build([traced, plain], title="")
    assert f"[trace-1.json]({spec.run_id}/trace-1.json)" in markdown.text(report)
    html.export(report, tmp_path)
    assert (tmp_path / "report.html").read_text().count(f'<a href="{spec.run_id}/trace-1.json">trace-1.json</a>') == 1
    assert "trace" not in markdown.text(build([plain], title=""))
