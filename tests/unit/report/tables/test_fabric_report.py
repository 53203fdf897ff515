"""A sweep, a tournament and an explained scaling as people read them: tables, sentences, charts, files."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fabric_records as made
import pytest
from fabric_records import MiB
from rich.console import Console

from paceline import report as present
from paceline import wording
from paceline.analysis import report as analysis
from paceline.analysis.findings import MemoryRow, Report, ScalingExplanation, Traffic
from paceline.host.files import write_atomically
from paceline.report.answer import answer, grounds
from paceline.report.charts import charts
from paceline.report.exporters import csv, html, markdown, plots, suite_json
from paceline.report.tables import fabric, fabric_links
from paceline.report.tables.scaling import efficiency, explanation
from paceline.report.tables.table import NO_ANSWER, Table
from paceline.results.machine_samples import OverlapSample

SIZES = tuple(2**k for k in range(10, 25, 2))


def samples(n: int = 4) -> list[Any]:
    """all_reduce at 9.7 GB/s after 20.3 us, in two dtypes and both places; an all_to_all that runs out of memory."""
    found: list[Any] = []
    for dtype in ("fp32", "bf16"):
        for place in (False, True):
            found += made.sweep(
                lambda s: 20.3e-6 + s * 2 * (n - 1) / n / 9.7e9, SIZES, ranks=n, dtype=dtype, in_place=place
            )
    found += made.sweep(lambda s: 5e-6 + s / 10e9, SIZES, "broadcast", ranks=n)
    burst = made.row([[1.0]] * n, "all_to_all", MiB)
    found += [
        dataclasses.replace(s, durations_s=(), wrong=None, status="oom", error="tried to allocate 2 GiB") for s in burst
    ]
    found += made.row([[8e-6] * 100] * n, "barrier", 0)
    found += [
        OverlapSample(
            rank=rank,
            operation="all_reduce",
            dtype="bf16",
            size_bytes=64 * MiB,
            group_size=n,
            collective_s=(0.004,) * 4,
            compute_s=(0.010,) * 4,
            together_s=(0.011,) * 4,
        )
        for rank in range(n)
    ]
    return found


def build(*more: Any, n: int = 4, **spec: Any) -> Report:
    record = made.build_record(made.build_spec(n, **{"nodes": n, **spec}), [*samples(n), *more])
    return analysis.build([record], "fabric")


@pytest.fixture(scope="module")
def swept() -> Report:
    slow = made.tournament(4, lambda a, b: 10e9 * (0.5 if 2 in (a, b) else 1))
    return build(*slow, workload="collectives:warmup=10,iters=20")


def cells(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def column(table: Table, name: str) -> list[str]:
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in cells(table)]


def printed(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


# --- tables ---


def test_one_line_per_operation_and_dtype_with_peak_latency_and_fit(swept: Report, golden: object) -> None:
    table = fabric.tables(swept)[0]
    assert table.title == golden
    assert column(table, "operation") == ["all_reduce", "all_reduce", "broadcast", "all_to_all", "barrier"]
    assert column(table, "latency")[0] == "20.5"
    assert column(table, "peak busbw")[0] == "9.62"
    assert column(table, "at")[0] == "16 MiB"
    assert column(table, "half from")[0] == "256 KiB"
    assert (column(table, "fit \u03b1")[0], column(table, "fit \u03b2")[0]) == ("20.3", "9.70")
    assert column(table, "rows") == ["16 ok", "16 ok", "8 ok", "1 oom", "1 ok"]
    assert column(table, "peak busbw")[3:] == ["\u2013", "\u2013"]
    assert table.notes == golden
    assert any("all_to_all" in note for note in table.notes)
    assert any("fp32" in note for note in table.notes)


def test_every_row_reads_as_nccl_tests_prints_it(swept: Report, golden: object) -> None:
    fits, first, *_ = fabric.details(swept)
    assert fits.title == golden
    assert column(fits, "residual")[0] == "0.00"
    assert first.title == golden
    assert "all_reduce" in first.title
    assert "fp32" in first.title
    names = [c.heading for c in first.columns]
    assert names[:7] == golden
    assert names == golden
    last = cells(first)[-1]
    assert last[:7] == ["16,777,216", "4,194,304", "fp32", "2,610", "6.42", "9.62", "0"]
    assert len(first.rows) == len(SIZES)


def test_an_operation_in_one_place_has_no_columns_for_the_other(swept: Report) -> None:
    table = next(t for t in fabric.details(swept) if "broadcast" in t.title)
    assert not any("in-place" in c.heading for c in table.columns)


def test_what_was_not_measured_is_a_dash_with_its_reason(swept: Report) -> None:
    table = next(t for t in fabric.details(swept) if "all_to_all" in t.title)
    (row,) = table.rows
    assert [c.text for c in row[3:7]] == ["\u2013"] * 4
    assert (row[-1].text, row[-1].detail) == ("oom", "tried to allocate 2 GiB")


def test_overlap_tournament_and_suspects_have_their_tables(swept: Report, golden: object) -> None:
    titles = {t.title: t for t in fabric.tables(swept)}
    assert column(titles["Collectives beside matrix products"], "hidden") == ["75.0"]
    assert column(titles["Pair tournament"], "of its kind") == ["50.0"]
    (suspect,) = cells(titles["Suspects"])
    assert suspect[:4] == ["node", "2", "node-c", "cpu"]
    assert suspect[-1] == "\u2713"
    assert titles["Suspects"].notes[0] == golden


@pytest.mark.parametrize(
    ("workloads", "names"),
    [
        (
            ("c:mode=batch,batch=4,iters=5", "c:mode=graph,batch=4,iters=5", "c:iters=5,max_bytes=1MiB"),
            ["mode=batch", "mode=graph", "max_bytes=1MiB"],
        ),
        (("c", "c:iters=5"), ["c", "iters=5"]),
        (("c:a=1", "c:a=1,b=2"), ["c:a=1", "b=2"]),
        (("c:a=1,b=1", "c:a=1,b=2", "c:a=2,b=1"), ["a=1, b=1", "a=1, b=2", "a=2"]),
    ],
)
def test_sweeps_are_named_by_the_first_options_that_distinguish_them(
    swept: Report, workloads: tuple[str, ...], names: list[str]
) -> None:
    first = swept.collectives[0]
    rows = [dataclasses.replace(first, axes=dict(first.axes) | {"workload": w}) for w in workloads]
    report = dataclasses.replace(swept, collectives=tuple(rows), runs=swept.runs[:1])
    shown = [fabric_links.fabric_name(report, row.axes) for row in rows]
    assert [text.removeprefix(f"{fabric_links.fabric_name(swept, first.axes)}, ") for text in shown] == names


def test_nobody_suspected_is_said(golden: object) -> None:
    found = build(*made.tournament(4, noise=0.02))
    table = next(t for t in fabric.tables(found) if t.title == "Pair tournament")
    assert table.notes == golden
    assert "Suspects" not in {t.title for t in fabric.tables(found)}


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_terminal_never_overflows(swept: Report, width: int) -> None:
    text = printed(present.section_group(swept), width)
    assert max(map(len, text.splitlines())) <= width
    assert "all_reduce" in text
    assert "9.62" in text


@pytest.mark.parametrize(
    ("size", "text"), [(8, "8 B"), (1024, "1 KiB"), (1536 * 1024, "1.5 MiB"), (2**30, "1 GiB"), (1000, "1000 B")]
)
def test_sizes_read_in_powers_of_two(size: int, text: str) -> None:
    assert wording.format_size(size) == text


# --- sentences ---


def test_the_answer_is_what_the_fabric_can_do(swept: Report, golden: object) -> None:
    first, second = answer(swept)
    assert first == golden
    assert "all_reduce" in first
    assert "9.62" in first
    assert "GB" in first
    assert second == golden
    text = grounds(swept)
    assert text == golden
    assert "42" in text
    assert present.recommendation_lines(swept) == [first, second, grounds(swept)]


def test_wrong_data_comes_first_in_words(golden: object) -> None:
    wrong = made.row(0.001, "broadcast", 2 * MiB)
    wrong[1] = dataclasses.replace(wrong[1], wrong=3)
    found = build(*wrong)
    text = " ".join(answer(found))
    assert text == golden
    assert "43" in text
    assert "invalid" in fabric.tables(found)[0].title
    assert answer(found)[0] == golden


def test_rows_without_a_check_are_not_called_right(golden: object) -> None:
    unchecked = [dataclasses.replace(s, wrong=None) for s in made.row(0.001, "reduce")]
    found = build(*unchecked)
    assert " ".join((*answer(found), grounds(found))) == golden


def test_a_report_about_training_keeps_its_answer(report: Report, swept: Report, golden: object) -> None:
    assert answer(dataclasses.replace(report, collectives=swept.collectives))[0] == golden
    undecided = dataclasses.replace(report, recommendations=(), collectives=swept.collectives)
    silent, beside = answer(undecided)
    assert silent == NO_ANSWER
    assert beside == golden
    assert "ddp" in beside
    assert "all_reduce reaches" in grounds(undecided)


def test_a_shared_gpu_says_so_beside_its_number(golden: object) -> None:
    record = made.build_record(made.build_spec(4, device="cuda"), samples(), shared=True)
    assert answer(analysis.build([record], "fabric"))[0] == golden


# --- files ---


def test_a_fabric_alone_is_neither_ranked_nor_certified_nor_listed_as_a_failure(swept: Report) -> None:
    for text in (html.text(swept), markdown.text(swept)):
        for word in ("Ranking", "Equal work", "Certificates", "Not ranked", "not certified"):
            assert word not in text
    assert present.section_group(swept, "not-ranked") is None


def test_pages_fold_every_row(swept: Report) -> None:
    page = html.text(swept)
    assert page.count("<summary>Every row:") == 5
    assert "16,777,216" in page.split("<summary>Every row: all_reduce, fp32")[1]
    assert markdown.text(swept).count("<details><summary>Every row:") == 5


def test_csv_holds_every_row_beside_the_metrics(swept: Report, tmp_path: Path) -> None:
    metrics, rows = csv.export(swept, tmp_path)
    assert (metrics.name, rows.name) == ("metrics.csv", "collectives.csv")
    head, *lines = rows.read_text().splitlines()
    assert len(lines) == len(swept.collectives)
    assert head.split(",")[:2] == ["workload", "strategy"]
    assert "busbw_bytes_per_s" in head
    assert sum("busbw_bytes_per_s" in line for line in metrics.read_text().splitlines()) == 40


def test_golden(swept: Report, golden_folder: Path) -> None:
    """PACELINE_UPDATE_GOLDEN=1 writes what is produced now; read the difference before you commit it."""
    text, kept = markdown.text(swept), golden_folder / "fabric.md"
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        write_atomically(kept, text)
    assert text == kept.read_text()


# --- suite-json ---


def test_suite_has_the_keys_that_parsers_look_for(swept: Report, tmp_path: Path) -> None:
    (path,) = suite_json.export(swept, tmp_path)
    found = json.loads(path.read_text())
    assert path.name == "suite.json"
    assert (found["name"], found["world_size"], found["timestamp"]) == (
        "benchmark_4cpu",
        4,
        "1970-01-01T00:02:40+00:00",
    )
    assert found["config"] == {"warmup_iters": 10, "benchmark_iters": 20, "device": "Xeon"}
    assert set(found["results"]) == {"communication", "training", "memory"}
    assert set(found["results"]["communication"]) == {"allreduce", "broadcast", "alltoall", "barrier"}
    ring = found["results"]["communication"]["allreduce"]
    assert ring["peak_busbw_gbps"] == pytest.approx(9.625, abs=0.001)
    assert ring["rows"][-1]["time_ms"] == pytest.approx(2.6147, rel=1e-3)
    assert ring["rows"][-1]["wrong"] == 0
    assert "1e9" in found["units"]["gbps"]
    assert found["results"]["communication"]["alltoall"]["rows"][0]["time_ms"] is None


def test_suite_names_gpus(tmp_path: Path) -> None:
    (path,) = suite_json.export(build(device="cuda"), tmp_path)
    found = json.loads(path.read_text())
    assert (found["name"], found["config"]["device"]) == ("benchmark_4gpu", "NVIDIA H200")
    assert found["config"]["warmup_iters"] is None


def test_suite_writes_one_file_per_world_size(report: Report, swept: Report, tmp_path: Path) -> None:
    both = dataclasses.replace(report, collectives=swept.collectives)
    written = suite_json.export(both, tmp_path)
    assert [p.name for p in written] == ["suite_1.json", "suite_2.json", "suite_4.json"]
    two = json.loads(written[1].read_text())["results"]
    assert two["communication"] == {}
    ddp = two["training"]["ddp, gpt-tiny, 2 processes"]
    assert ddp["tokens_per_second"] == 12345.0
    assert ddp["step_time_ms"] == pytest.approx(663.6)
    assert ddp["weak_scaling_efficiency_percent"] == pytest.approx(91.1)
    assert (ddp["mfu_percent"], ddp["samples_per_second"]) == (None, None)
    assert not any("zero:stage=3" in name for name in two["training"])


def test_suite_holds_memory_by_component(report: Report) -> None:
    row = MemoryRow(
        cell="c",
        axes=report.runs[1].axes,
        predicted={"parameters": 10, "activations": None},
        measured={"parameters": 11, "gradients": 12, "activations": 13},
        error_ratio=None,
        capacity_bytes=None,
        runs=(),
    )
    found = suite_json.document(dataclasses.replace(report, memory=(row,)), 2)["results"]["memory"]
    assert found["ddp, gpt-tiny, 2 processes"] == {
        "micro_batch": 2,
        "sequence_length": 512,
        "parameters_bytes": 11,
        "gradients_bytes": 12,
        "activations_bytes": 13,
        "predicted": {"parameters_bytes": 10, "activations_bytes": None},
    }


# --- scaling explained ---


def explained(report: Report, **more: Any) -> Report:
    point = report.scaling[1]
    usual: dict[str, Any] = {
        "kind": "weak",
        "series": point.series,
        "cell": point.cell,
        "baseline": point.baseline,
        "world_size": 2,
        "baseline_world_size": 1,
        "step_s": 0.6636,
        "ideal_s": 0.6046,
        "loss_s": 0.059,
        "exposed_s": 0.075,
        "exposed_loss_s": 0.044,
        "rest_s": 0.015,
        "predicted_s": 0.031,
        "exposed_share_ratio": 0.746,
        "network_share_ratio": 0.525,
        "karp_flatt_ratio": 0.098,
        "grade": "excellent",
        "traffic": (
            Traffic(
                operation="all_reduce",
                dtype="fp32",
                group_size=2,
                calls=1,
                payload_bytes=40_100_000,
                sent_bytes=40.1e6,
                predicted_s=0.031,
            ),
        ),
        "text": "2 processes take 664 ms per step where 605 ms would be ideal.",
        "notes": ("gloo does this",),
        "runs": point.efficiency.runs,
    }
    return dataclasses.replace(report, explanations=(ScalingExplanation(**usual | more),))


def test_scaling_shows_grade_and_parts_that_add_up(report: Report) -> None:
    found = explained(report)
    table, parts = efficiency(found), explanation(found)
    assert table is not None
    assert parts is not None
    assert column(table, "grade") == ["\u2013", "excellent"]
    assert column(table, "Karp-Flatt") == ["\u2013", "9.80"]
    step, ideal, exposed, rest = (float(column(parts, name)[0]) for name in ("step", "ideal", "exposed comm.", "rest"))
    assert step == ideal + exposed + rest
    assert column(parts, "sent") == ["40.1"]
    assert column(parts, "predicted transfer") == ["31.0"]
    assert any("605 ms would be ideal" in note for note in parts.notes)
    assert "gloo does this" in parts.notes
    assert "605 ms would be ideal" in printed(present.section_group(found, "scaling", "loss"), 200)


def test_what_was_not_measured_stays_a_dash(report: Report) -> None:
    unknown = {"exposed_s", "exposed_loss_s", "rest_s", "predicted_s", "exposed_share_ratio", "network_share_ratio"}
    parts = explanation(explained(report, **dict.fromkeys(unknown), karp_flatt_ratio=None, traffic=()))
    assert parts is not None
    assert cells(parts)[0][5:] == ["\u2013"] * 6
    assert explanation(report) is None


# --- charts ---


def svg_text(found: Report, name: str) -> str:
    return " ".join(ElementTree.fromstring(plots.image(found, name, "svg")).itertext())


def test_the_charts_of_a_fabric(swept: Report, empty_report: Report) -> None:
    main, time, bandwidth, pairs = (chart.name for chart in charts(swept))
    assert (main, time[:16], bandwidth[:21], pairs) == (
        *("collective_busbw", "collective_time_", "collective_bandwidth_", "pairs"),
    )
    assert charts(empty_report) == ()
    text = svg_text(swept, bandwidth)
    for words in ("bus bandwidth over size, 4 processes", "GB/s", "fp32", "bf16", "all_reduce", "broadcast", "1 KiB"):
        assert words in text
    assert "barrier" not in text
    assert "\u00b5s" in svg_text(swept, time)


def test_the_matrix_names_hosts_and_bandwidths(swept: Report, golden: object) -> None:
    text = svg_text(swept, "pairs")
    assert text == golden
    assert text.count("5.00") == 6
    assert text.count("10.0") == 6


def test_many_ranks_are_coloured_without_numbers() -> None:
    record = made.build_record(made.build_spec(20, 5), made.tournament(20, turns=1))
    text = svg_text(analysis.build([record], "t"), "pairs")
    assert "1.00" not in text


def test_the_loss_is_drawn_in_its_parts(report: Report, golden: object) -> None:
    text = svg_text(explained(report), "scaling_loss")
    for words in ("ideal", "exposed communication", "rest", "91% efficient"):
        assert words in text
    assert text == golden
    unknown = explained(report, exposed_loss_s=None, rest_s=None, exposed_share_ratio=None)
    assert "not measured" in svg_text(unknown, "scaling_loss")


def test_charts_are_the_same_bytes_again(swept: Report) -> None:
    for chart in charts(swept):
        assert plots.image(swept, chart.name, "svg") == plots.image(swept, chart.name, "svg")
