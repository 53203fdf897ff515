"""metrics.prom: the text format to the letter, checked by Prometheus' own linter where it is installed."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.analysis.findings import Report
from paceline.report.exporters import prometheus
from paceline.report.exporters.prometheus import Family, metric_name, render

SAMPLE = re.compile(r'([a-z_][a-z0-9_]*)(\{[a-z_]\w*="(?:[^"\\\n]|\\.)*"(?:,[a-z_]\w*="(?:[^"\\\n]|\\.)*")*\})? \S+')


def test_each_measurement_is_a_gauge_with_its_cell_and_bounds(report: Report) -> None:
    lines = prometheus.text(report).splitlines()
    (value,) = [
        line for line in lines if line.startswith("paceline_tokens_per_second{") and 'cell="ddp-2-cell"' in line
    ]
    assert value.endswith(" 12345")
    assert 'strategy="ddp"' in value
    assert 'certified="true"' in value
    assert "bucket_mb" not in value, "a missing axis is no label"
    (low,) = [x for x in lines if x.startswith("paceline_tokens_per_second_low{") and 'cell="ddp-2-cell"' in x]
    assert float(low.rpartition(" ")[2]) == pytest.approx(12345 * 0.9955)
    assert not [line for line in lines if line.startswith("paceline_mfu_ratio")], "missing is no sample"
    assert 'paceline_runs{experiment="quick",status="oom"} 1' in lines


def test_every_line_is_valid_and_every_family_occurs_once(report: Report) -> None:
    lines = prometheus.text(report).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(SAMPLE.fullmatch(line) for line in samples)
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert {line.partition("{")[0].split()[0] for line in samples} == set(kinds)
    assert len({line.rpartition(" ")[0] for line in samples}) == len(samples), "no series twice"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_to_say(report: Report) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=prometheus.text(report), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_values_are_escaped_and_names_are_made_fit(report: Report) -> None:
    first = report.measurements[0]
    odd = dataclasses.replace(first, axes={**first.axes, "model": 'a"b\\c\nd', "2nd way": "<script>"})
    text = prometheus.text(dataclasses.replace(report, measurements=(odd,)))
    assert 'model="a\\"b\\\\c\\nd"' in text
    assert 'label_2nd_way="<script>"' in text


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("step_time_s", "paceline_step_time_seconds"),
        ("tokens_per_s_per_gpu", "paceline_tokens_per_second_per_gpu"),
        ("peak memory-bytes", "paceline_peak_memory_bytes"),
        ("gpu_power_w", "paceline_gpu_power_watts"),
    ],
)
def test_units_are_spelled_out(ours: str, theirs: str) -> None:
    assert metric_name(ours) == theirs


def test_numbers_keep_their_digits() -> None:
    family = Family("x", "help with \\ and\nline")
    for number, value in enumerate((0.1, 1e300, float("nan"), float("-inf"), 3.0)):
        family.add(value, {"n": number})
    family.add(None, {"n": 9})
    lines = render([family, Family("empty", "nothing")]).splitlines()
    assert lines[0] == "# HELP paceline_x help with \\\\ and\\nline"
    assert [line.rpartition(" ")[2] for line in lines[2:]] == ["0.1", "1e+300", "NaN", "-Inf", "3"]


def test_the_file_is_replaced_whole(report: Report, empty_report: Report, tmp_path: Path) -> None:
    (path,) = prometheus.export(report, tmp_path)
    once = path.read_bytes()
    prometheus.export(report, tmp_path)
    assert path.read_bytes() == once
    prometheus.export(empty_report, tmp_path)
    assert [line.split()[2] for line in path.read_text().splitlines() if line.startswith("# TYPE")] == [
        "paceline_report_created_timestamp_seconds"
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.prom"]
