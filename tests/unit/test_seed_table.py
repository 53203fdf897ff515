"""The page about a published table says what the code says, and the numbers that were wrong in it are right here."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.report import terminal
from paceline.report.exporters import markdown
from paceline.report.tables import claims as shown
from paceline.results import store
from paceline.results.claims import import_table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, TABLE = DOCS / "seed-table.md", DOCS / "seed-table" / "table.csv"
MARKS = ("<!-- generated: tests/unit/test_seed_table.py -->\n", "<!-- end -->")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    directory, _ = import_table(TABLE, tmp_path_factory.mktemp("seed"))
    return build(store.read_runs(directory)[0], "table")


def at_four(report: Report, metric: str) -> dict[str, float]:
    found = (c for c in report.claims if c.metric == metric and c.axes["world_size"] == 4)
    return {str(c.axes["strategy"]): c.recomputed for c in found if c.recomputed is not None}


def test_the_page_says_what_the_code_says(report: Report) -> None:
    parts = [f"**{table.title}**\n\n{markdown.Page().render(table)}" for table in shown.tables(report)]
    generated = "\n\n".join(("", f"> {shown.sentence(report)}", *parts, "")).lstrip("\n")
    page = PAGE.read_text()
    before, rest = page.split(MARKS[0])
    written, after = rest.split(MARKS[1])
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{MARKS[0]}\n{generated}\n{MARKS[1]}{after}")
    else:
        assert written.strip() == generated.strip()


def test_eight_rows_and_none_of_them_ranked(report: Report) -> None:
    assert len(report.runs) == 8
    assert {run.status for run in report.runs} == {"claimed"}
    assert (report.measurements, report.comparisons, report.recommendations) == ((), (), ())


def test_efficiency_has_the_right_baseline(report: Report) -> None:
    found = {name: round(100 * value, 1) for name, value in at_four(report, "scaling_efficiency_ratio").items()}
    assert found == {"ddp": 73.0, "fsdp": 69.6, "zero:stage=2": 82.5, "zero:stage=3": 75.6}


def test_tokens_per_usd_are_millions(report: Report) -> None:
    assert at_four(report, "tokens_per_usd")["zero:stage=2"] == pytest.approx(10.9e6, rel=0.005)


def test_the_cheapest_is_93_percent_cheaper_than_fsdp_not_48(report: Report) -> None:
    assert round(100 * (at_four(report, "relative_cost_ratio")["fsdp"] - 1)) == 93
    assert round(100 * (at_four(report, "relative_cost_ratio")["ddp"] - 1)) == 49


def test_bytes_explain_the_whole_table(report: Report) -> None:
    (found,) = report.claimed_transfers
    assert len(found.rows) == 8
    assert found.alpha_s == pytest.approx(0.184, abs=0.0005)
    assert found.link_bytes_per_s * 8 == 25e9
    assert found.largest_error_ratio < 0.06


def test_what_the_rows_send_is_what_the_formulas_say(report: Report) -> None:
    """The columns that are not published: the model as run, and method.md's bytes per parameter of each row."""
    count = arithmetic.parameters(arithmetic.load(Choice("tinygpt-as-run")))
    factors = {"ddp": 2 * 4, "fsdp": 2 * 4 + 4, "zero:stage=2": 2 * 2 + 2 / 4, "zero:stage=3": 2 * 2 + 2}
    (found,) = report.claimed_transfers
    for row in found.rows:
        n = row.axes["world_size"]
        assert isinstance(n, int)
        assert row.sent_bytes == pytest.approx(count * factors[str(row.axes["strategy"])] * (n - 1) / n)
    ours = {
        "ddp": (Choice("ddp"), 1, 4),
        "fsdp": (Choice("fsdp2"), 1, 4),
        "zero:stage=2": (Choice("zero", {"stage": 2}), 4, 2),
    }
    for row in found.rows:
        if (known := ours.get(str(row.axes["strategy"]))) and isinstance(n := row.axes["world_size"], int):
            choice, accumulation, size = known
            sent = arithmetic.wire_bytes(choice, count, n, accumulation, size, size)
            assert sent == pytest.approx(row.sent_bytes * accumulation)


def test_no_word_or_number_breaks_on_a_narrow_terminal(report: Report) -> None:
    screen = Console(file=io.StringIO(), width=80)
    screen.print(terminal.section_group(report, "cost"))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for whole in (
        "throughput",
        "zero:stage=3, tinygpt, 4 GPUs",
        "15,977",
        "claimed 37.8",
        "peak memory",
        "relative cost",
    ):
        assert whole in text
