"""The words and numbers all exporters share."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping

import pytest
from rich.console import Console

from paceline import report as present
from paceline import wording
from paceline.analysis.findings import Report
from paceline.errors import Scalar
from paceline.report import summary, terminal
from paceline.report.tables import table as tables
from paceline.report.tables.table import CORRECTED, Cell, Column, Table, numeric, ranking
from paceline.report.text import cells
from paceline.report.text.machine_facts import flatten
from paceline.wording import MISSING, format_duration, format_quantity


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "metric", "text"),
    [
        (12345.0, 12290.0, 12400.0, "tokens/s", "tokens_per_s", "12,345 [12,290, 12,400] tokens/s"),
        (12345.0, 11800.0, 12900.0, "tokens/s", "tokens_per_s", "12,340 [11,800, 12,900] tokens/s"),
        (12345.0, None, None, "tokens/s", "tokens_per_s", "12,300 tokens/s"),
        (123.456789, 123.456788, 123.45679, "tokens/s", "tokens_per_s", "123.46 [123.46, 123.46] tokens/s"),
        (1234567.0, 1234560.0, 1234574.0, "tokens/s", "tokens_per_s", "1,234,600 [1,234,600, 1,234,600] tokens/s"),
        (0.0200014, 0.0200013, 0.0200016, "s", "tpot_p50_s", "20.001 [20.001, 20.002] ms"),
        (0.66361, 0.6606, 0.6666, "s", "step_time_s", "663.6 [660.6, 666.6] ms"),
        (4 * 2.0**30, None, None, "bytes", "peak_memory_bytes", "4.00 GiB"),
        (40.1e6, None, None, "bytes/step", "wire_bytes_per_step", "40.1 MB/step"),
        (25e9, None, None, "bytes/s", "busbw_bytes_per_s", "25.0 GB/s"),
        (0.4213, 0.41, 0.43, "ratio", "mfu_ratio", "42.1 [41.0, 43.0] %"),
        (1.82, None, None, "ratio", "speedup_ratio", "1.82\u00d7"),
        (0.0, None, None, "ratio", "comm_exposed_ratio", "0 %"),
        (5.0, 5.0, 5.0, "samples/s", "samples_per_s", "5.00 samples/s"),
        (None, None, None, "ratio", "mfu_ratio", MISSING),
        (math.nan, math.nan, math.nan, "s", "step_time_s", MISSING),
        (math.inf, None, None, "tokens/s", "tokens_per_s", MISSING),
    ],
)
def test_a_quantity_is_rounded_by_its_uncertainty(
    value: float | None, low: float | None, high: float | None, unit: str, metric: str, text: str
) -> None:
    assert format_quantity(value, low, high, unit, metric) == text


def test_what_is_not_zero_never_reads_as_zero() -> None:
    assert format_quantity(2000.0, 400.0, 24000.0, "tokens/s") == "2,000 [400, 24,000] tokens/s"
    assert format_quantity(300.0, 0.0, 24000.0, "tokens/s") == "300 [0, 24,000] tokens/s"
    assert format_quantity(0.0, -3.0, 3.0, "tokens/s") == "0.0 [-3.0, 3.0] tokens/s"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((1.3412, 1.312, 1.371), "a is 34 % faster than b (95 % interval 31 to 37 %)"),
        ((1.025, 1.011, 1.039), "a is 2.5 % faster than b (95 % interval 1.1 to 3.9 %)"),
        ((1.25, 1.25, 1.25), "a is 25 % faster than b"),
        ((3.0, 2.0, 4.5), "a is 3 times as fast as b (95 % interval 2 to 4.5)"),
    ],
)
def test_a_margin_is_in_percent_until_a_factor_reads_better(numbers: tuple[float, float, float], text: str) -> None:
    assert wording.margin_sentence("tokens_per_s", "a", "b", *numbers) == text


def test_names_in_a_row_and_cut_short() -> None:
    assert [wording.listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert wording.short_names([]) == {}
    assert wording.short_names(["ddp, tiny, fp32", "ddp, tiny, bf16"]) == {
        "ddp, tiny, fp32": "fp32",
        "ddp, tiny, bf16": "bf16",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (42.4, "42 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_equal_cells_share_a_rank(report: Report) -> None:
    first, single = cells.groups(report)
    assert [(row.rank, row.label) for row in first.rows] == [
        ("1", "ddp"),
        ("1", "fsdp2"),
        ("3", "zero:stage=1"),
        ("4", "zero:stage=2"),
    ]
    assert [row.rank for row in single.rows] == [None]


def test_layouts_that_accumulate_more_for_the_same_batch_are_ranked_with_the_others(report: Report) -> None:
    """A strategy that splits the model over both processes has one replica, which takes all eight micro batches."""

    def split(axes: Mapping[str, Scalar]) -> dict[str, Scalar]:
        is_split = axes["strategy"] == "zero:stage=2" and axes["world_size"] == 2
        return {**axes, "strategy": "mesh:tp=2", "accumulation": 8} if is_split else dict(axes)

    measurements = tuple(dataclasses.replace(m, axes=split(m.axes)) for m in report.measurements)
    runs = tuple(dataclasses.replace(r, axes=split(r.axes)) for r in report.runs)
    before, layouts = cells.groups(report)[0], dataclasses.replace(report, measurements=measurements, runs=runs)
    group = cells.groups(layouts)[0]
    assert [row.rank for row in group.rows] == [row.rank for row in before.rows]
    assert "mesh:tp=2" in [row.label for row in group.rows]
    assert (group.title, group.axes.get("accumulation")) == (before.title, None)
    assert "accumulation" not in cells.varying_axes(layouts), "it follows from the strategy"
    other = tuple(
        dataclasses.replace(m, axes={**m.axes, "global_batch": 32}) if "tp" in str(m.axes) else m for m in measurements
    )
    apart = cells.groups(dataclasses.replace(layouts, measurements=other))
    assert len(apart) == len(cells.groups(report)) + 1, "another global batch is other work"
    assert f"{before.title}, global batch 32" in [group.title for group in apart]
    assert len({group.title for group in apart}) == len(apart)


def test_without_comparisons_nothing_is_ranked(report: Report) -> None:
    group = cells.groups(dataclasses.replace(report, comparisons=()))[0]
    assert {row.rank for row in group.rows} == {None}
    uncertified = tuple(dataclasses.replace(c, certified=False) for c in report.comparisons)
    group = cells.groups(dataclasses.replace(report, comparisons=uncertified))[0]
    assert {row.rank for row in group.rows} == {None}


def test_a_comparison_reads_the_same_from_both_sides(report: Report) -> None:
    verdicts = cells.throughput_comparisons(report)
    there, back = verdicts["ddp-2-cell", "zero-stage1-2-cell"], verdicts["zero-stage1-2-cell", "ddp-2-cell"]
    assert (there.verdict, back.verdict) == ("better", "worse")
    assert there.ratio * back.ratio == pytest.approx(1)
    assert back.low < back.ratio < back.high
    assert back.low == pytest.approx(1 / there.high)


def test_an_inconclusive_or_missing_comparison_gives_a_range_of_ranks(report: Report) -> None:
    """zero:stage=1 was compared with zero:stage=2 alone, and beats it: it may be first, second or third."""
    kept = tuple(c for c in report.comparisons if {c.label, c.other_label}.isdisjoint({"zero:stage=1"}))
    lone = tuple(c for c in report.comparisons if {c.label, c.other_label} == {"zero:stage=1", "zero:stage=2"})
    (group,) = (
        g for g in cells.groups(dataclasses.replace(report, comparisons=kept + lone)) if g.axes["world_size"] == 2
    )
    assert {row.label: row.rank for row in group.rows} == {
        "ddp": "1-2",
        "fsdp2": "1-2",
        "zero:stage=1": "1-3",
        "zero:stage=2": "4",
    }


def test_every_run_is_ranked_a_reference_or_listed_with_a_reason(report: Report) -> None:
    ranked = {run for group in cells.groups(report) for row in group.rows for run in row.runs}
    listed = {run for item in cells.unranked(report) for run in item.runs}
    references = {run.run for run in report.runs if run.is_reference}
    assert ranked | listed | references == {run.run for run in report.runs}
    assert not ranked & listed
    assert all(item.reason for item in cells.unranked(report))


def test_a_run_without_certificate_is_never_ranked(report: Report) -> None:
    bare = dataclasses.replace(report, certificates=tuple(c for c in report.certificates if c.cell != "fsdp2-2-cell"))
    assert "fsdp2" not in [row.label for group in cells.groups(bare) for row in group.rows]
    assert ("not certified", 3) in [(item.status, len(item.runs)) for item in cells.unranked(bare)]


def test_cells_that_are_not_compared_are_neither_sorted_by_speed_nor_a_base(report: Report) -> None:
    """Ranks that share a GPU give numbers, but no speeds."""
    apart = dataclasses.replace(report, comparisons=())
    table = tables.ranking(apart)[0]
    headings = [column.heading for column in table.columns]
    names = [row[headings.index("strategy")].text for row in table.rows]
    assert names == sorted(names)
    assert "vs best" not in headings, "no column of one word"
    assert tables.NOT_COMPARED in table.notes


def test_notes_stand_under_the_table_with_the_rows_they_concern(report: Report, golden: object) -> None:
    notes = tables.ranking(report)[0].notes
    assert notes == golden
    assert any("fsdp2" in note for note in notes)
    assert any("NCCL" in note for note in notes)
    assert notes[-1] == golden
    assert "MFU" in notes[-2]


def test_equal_devices_are_listed_once() -> None:
    gpu = {"name": "H100", "memory_bytes": 80 * 2**30, "peak_flops": {"bf16": 989e12, "fp8": None}}
    machine = {"host": "a", "gpus": [gpu | {"index": i} for i in range(8)], "ecc": True, "links": ["nvlink", "ib"]}
    assert dict(flatten("", machine)) == {
        "host": "a",
        "gpus (each of 8).name": "H100",
        "gpus (each of 8).memory_bytes": "80.0 GiB",
        "gpus (each of 8).peak_flops.bf16": "989 TFLOP/s",
        "gpus (each of 8).peak_flops.fp8": MISSING,
        "ecc": "yes",
        "links": "nvlink, ib",
    }


def test_a_table_of_some_rows_loses_no_column() -> None:
    """Up to MOST_ROWS rows become cards where a table is too narrow; only longer tables leave columns out."""
    columns = (Column("what", prose=True), *(numeric(f"component-{i}", 3) for i in range(8)))

    def lines(rows: int) -> str:
        made = [(Cell(f"cell {i}"), *(Cell(f"{i}.{j}") for j in range(8))) for i in range(rows)]
        return printed(terminal.Fitted(Table("Memory", columns, tuple(made))), 80)

    kept = lines(terminal.MOST_ROWS)
    assert "Too narrow" not in kept
    assert all(f"component-{j} {i}.{j}" in " ".join(kept.split()) for i in range(16) for j in range(8))
    assert "Too narrow to show: " in lines(terminal.MOST_ROWS + 1)


def printed(renderable: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_terminal_shows_the_ranking_with_brackets_and_verdicts(report: Report, golden: object) -> None:
    text = printed(present.section_group(report, "effects", "ranking"), 160)
    for shown in (
        "[12,289, 12,401]",
        "11 % slower",
        "0.893x [0.884, 0.902]",
        "equal (within 2 %)",
        "(formula 120.3)",
        "3 runs",
    ):
        assert shown in text
    assert text == golden


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_terminal_never_overflows_and_loses_no_column_that_matters(report: Report, width: int) -> None:
    text = printed(present.section_group(report, "effects", "ranking"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "12,345" in text
    assert "Too narrow to show" not in text
    for words in ("vs best", "step time", "peak memory", "wire per step"):
        assert words in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_without_verbose_the_terminal_shows_the_answer_one_table_and_what_is_left_out(
    report: Report, width: int
) -> None:
    text = printed(present.brief_group(report), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert words.startswith(" ".join(summary.headline(report).split()))
    assert words.count("Trust: ") == 1
    for word in ("tokens/s", "vs", "best", "step", "time", "peak", "memory"):
        assert word in words
    assert "tp=3 does not divide 4 heads" in words, "a failure is never left out"
    assert "with --verbose and in the report." in words
    assert "Cost at" not in words


def test_a_table_says_why_an_interval_beyond_1_may_be_inconclusive(report: Report) -> None:
    assert not any(CORRECTED in table.notes for table in ranking(report))
    undecided = [dataclasses.replace(c, verdict="inconclusive") for c in report.comparisons]
    corrected = dataclasses.replace(report, comparisons=tuple(undecided))
    assert any(CORRECTED in table.notes for table in ranking(corrected))
    alone = [dataclasses.replace(c, launches=1) for c in undecided]
    assert not any(CORRECTED in t.notes for t in ranking(dataclasses.replace(report, comparisons=tuple(alone))))


def test_the_terminal_breaks_sentences_before_it_leaves_out_a_column(golden: object) -> None:
    columns = (Column("what", prose=True), Column("tokens/s", numeric=True), Column("padding, %", True, priority=1))
    table = Table("t", columns, ((Cell("a long name " * 6), Cell("9,548"), Cell("49")),))
    text = printed(terminal.Fitted(table), 60)
    assert "padding" in text
    assert text == golden
    assert max(map(len, text.splitlines())) <= 60
    assert printed(terminal.Fitted(table), 38) == golden


def test_the_terminal_lists_failures_and_scaling_only_where_there_are_some(
    report: Report, empty_report: Report, golden: object
) -> None:
    assert "tp=3 does not divide 4 heads" in printed(present.section_group(report, "not-ranked", "advice"), 120)
    assert printed(present.section_group(report, "scaling", "loss"), 120) == golden
    assert present.section_group(empty_report, "not-ranked", "advice") is None
    assert present.section_group(empty_report, "scaling", "loss") is None
    assert printed(present.section_group(empty_report, "effects", "ranking"), 80) == golden


def test_recommendations_read_by_group_with_each_caveat_once(report: Report, golden: object) -> None:
    lines = present.recommendation_lines(report)
    assert lines[0] == golden
    assert lines[1] == golden
    assert "fsdp2" in lines[1]
    assert sum("caveat" in line for line in lines) == 1
    silent, measured = present.recommendation_lines(dataclasses.replace(report, recommendations=()))
    assert silent == tables.NO_ANSWER
    assert "times" not in measured


def test_a_table_that_is_too_wide_is_transposed_in_parts() -> None:
    columns = (
        Column("strategy"),
        *(numeric(f"{name}, {unit}") for name, unit in (("step time", "ms"), ("change", "%"))),
    )
    columns += tuple(numeric(f"metric {i}, GiB") for i in range(5))
    rest = (Cell("12,345,678"),) * 5
    rows = [(Cell(f"strategy-{i}"), Cell("100", "[98, 102]"), Cell("-30.4", "[-34.8, -25.8]"), *rest) for i in range(4)]
    text = printed(terminal.Fitted(Table("t", columns, tuple(rows))), 48)
    assert max(map(len, text.splitlines())) <= 48
    lines = [line.split() for line in text.splitlines() if line.strip()]
    assert ["strategy-0", "strategy-1"] in lines
    assert ["strategy-2", "strategy-3"] in lines
    assert lines.count(["step", "time,", "ms", "100", "100"]) == 2
    assert text.count("\u00b12 %") == 4
    assert text.count("[-34.8,") == 4, "a share of a percentage would be read as percentage points"
    assert lines.count(["metric", "4,", "GiB", "12,345,678", "12,345,678"]) == 2
