"""A published table is imported whole or not at all, and nothing that comes from it is ever measured or ranked."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import cli
from paceline.analysis.findings import Claim, Report
from paceline.analysis.report import build
from paceline.errors import RequestError
from paceline.report.tables import claims as shown
from paceline.report.text.cells import ranked_cells, unranked
from paceline.results import store
from paceline.results.claims import import_table
from paceline.results.records import Status

HEADER = "source,strategy,model,gpu,world_size,sequence_length,micro_batch,tokens_per_s"
ROWS = ("them,ddp,small,A10,1,100,1,1000", "them,ddp,small,A10,4,100,1,3000", "them,fsdp,small,A10,4,100,1,2000")


def written(folder: Path, *lines: str) -> Path:
    path = folder / "theirs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def reported(folder: Path, *lines: str) -> Report:
    directory, _ = import_table(written(folder, *lines), folder / "out")
    records, skipped = store.read_runs(directory)
    return build(records, "theirs", skipped)


def claim(report: Report, metric: str, strategy: str = "ddp", world_size: int = 4) -> Claim:
    (found,) = (
        c
        for c in report.claims
        if c.metric == metric and (c.axes["strategy"], c.axes["world_size"]) == (strategy, world_size)
    )
    return found


def test_a_claimed_run_holds_what_its_source_says_and_nothing_that_was_seen(tmp_path: Path, golden: object) -> None:
    directory, count = import_table(written(tmp_path, "# a remark", HEADER, *ROWS), tmp_path / "out")
    assert (directory, count) == (tmp_path / "out" / "theirs", 3)
    records, skipped = store.read_runs(directory)
    assert not skipped
    for record in records:
        assert record.status is Status.CLAIMED
        assert record.error == golden
        assert record.claims
        assert (record.steps, record.outcomes, record.machines) == ((), (), ())


def test_nothing_is_measured_ranked_compared_or_recommended(tmp_path: Path) -> None:
    report = reported(tmp_path, HEADER, *ROWS)
    assert len(report.claims) >= 3
    concluded = (report.measurements, report.comparisons, report.recommendations, report.certificates, report.scaling)
    assert concluded == ((),) * 5
    assert not report.costs
    assert not ranked_cells(report)
    assert {u.status for u in unranked(report)} == {"claimed"}
    assert not any(run.is_failure for run in report.runs)


def test_only_what_the_source_states_is_an_axis(tmp_path: Path) -> None:
    for run in reported(tmp_path, HEADER, *ROWS).runs:
        assert run.axes["sequence_length"] == 100
        assert not {"seed", "data", "launcher", "steps", "compile"} & set(run.axes)


def test_efficiency_is_relative_to_the_smallest_stated_size(tmp_path: Path) -> None:
    report = reported(tmp_path, f"{HEADER},scaling_efficiency_ratio", f"{ROWS[0]},0.5", f"{ROWS[1]},0.75")
    smallest, four = (claim(report, "scaling_efficiency_ratio", world_size=n) for n in (1, 4))
    assert (smallest.recomputed, smallest.contradicted) == (1.0, True)
    assert (four.recomputed, four.contradicted) == (0.75, False)
    assert four.how == "(3,000 / 4) / (1,000 / 1)"


def test_a_series_of_one_has_no_efficiency(tmp_path: Path) -> None:
    report = reported(tmp_path, f"{HEADER},scaling_efficiency_ratio", f"{ROWS[2]},0.5")
    assert claim(report, "scaling_efficiency_ratio", "fsdp").recomputed is None


def test_cost_and_work_are_recomputed(tmp_path: Path, golden: object) -> None:
    """3000 tokens/s * 3600 s / (4 * 1 USD); 3000 tokens/s * 2 s are 6000 tokens where the request makes 400."""
    header = f"{HEADER},usd_per_gpu_hour,step_time_s,accumulation"
    report = reported(tmp_path, header, *(f"{row},1,2,1" for row in ROWS))
    assert claim(report, "tokens_per_usd").recomputed == pytest.approx(2_700_000)
    assert claim(report, "tokens_per_usd").claimed is None
    assert claim(report, "relative_cost_ratio", "fsdp").recomputed == pytest.approx(1.5)
    work = claim(report, "tokens_per_step")
    assert (work.claimed, work.recomputed, work.contradicted) == (400, 6000, True)
    cells = [cell for table in shown.tables(report) for row in table.rows for cell in row]
    assert {cell.detail for cell in cells} == golden
    assert any("400" in str(cell.detail) for cell in cells)


def test_a_batch_that_is_not_stated_contradicts_nothing(tmp_path: Path, golden: object) -> None:
    """Without accumulation nobody said how many micro batches a step has; one is only the default of a spec."""
    report = reported(tmp_path, f"{HEADER},step_time_s", f"{ROWS[1]},2")
    work = claim(report, "tokens_per_step")
    assert (work.claimed, work.recomputed, work.contradicted) == (None, 6000, False)
    assert shown.sentence(report) == golden


def test_one_contradicting_number_is_counted_as_one(tmp_path: Path, golden: object) -> None:
    report = reported(tmp_path, f"{HEADER},step_time_s,accumulation", f"{ROWS[1]},2,4")
    assert shown.sentence(report) == golden


def transfer_rows(step: float) -> list[str]:
    """Steps of 1 s + bytes / (1 GB/s) exactly, but for the last one, which takes `step`."""
    steps = {1: 1.4, 2: 1.8, 3: 2.2}
    rows = [f"them,ddp,m{k},A10,5,100,1,1000,{t},5e8,{k},1e9" for k, t in steps.items()]
    return [*rows, f"them,ddp,m4,A10,5,100,1,1000,{step},5e8,4,1e9"]


WIRED = f"{HEADER},step_time_s,wire_parameters,wire_bytes_per_parameter,link_bytes_per_s"


def test_bytes_that_explain_a_table_are_found(tmp_path: Path, golden: object) -> None:
    """5e8 parameters, k bytes each, 4/5 of them sent."""
    report = reported(tmp_path, WIRED, *transfer_rows(2.6))
    (found,) = report.claimed_transfers
    assert found.alpha_s == pytest.approx(1.0)
    assert found.rows[0].sent_bytes == pytest.approx(4e8)
    assert found.largest_error_ratio == pytest.approx(0, abs=1e-9)
    assert shown.sentence(report) == golden


def test_bytes_that_do_not_explain_it_are_not_said_to(tmp_path: Path, golden: object) -> None:
    report = reported(tmp_path, WIRED, *transfer_rows(0.9))
    assert shown.sentence(report) == golden


def test_tables_say_everywhere_that_nothing_was_measured(tmp_path: Path, golden: object) -> None:
    report = reported(tmp_path, WIRED, *transfer_rows(2.6))
    tables = shown.tables(report)
    assert len(tables) == 2
    assert all(shown.NOT_MEASURED in table.notes for table in tables)
    assert tables[0].title == golden


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (HEADER,),
        (f"{HEADER},speed", f"{ROWS[0]},1"),
        (HEADER.replace(",gpu", ""), ROWS[0]),
        (f"{HEADER},gpu", f"{ROWS[0]},A10"),
        (HEADER, "them,ddp,small"),
        (HEADER, ROWS[0].replace("1000", "fast")),
        (HEADER, ROWS[0].replace("1000", "0")),
        (HEADER, ROWS[0].replace("1000", "")),
        (HEADER, ROWS[0].replace("them", "")),
        (HEADER, ROWS[0].replace("A10,1", "A10,0")),
        (HEADER, ROWS[0], "# again", ROWS[0]),
        (f"{HEADER},nodes", f"{ROWS[1]},3"),
        (f"{HEADER},precision", f"{ROWS[1]},fp7"),
    ],
)
def test_a_table_at_fault_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[str, ...], golden: object
) -> None:
    path, out = written(tmp_path, *lines), tmp_path / "out"
    with pytest.raises(RequestError):
        import_table(path, out)
    assert cli.main(["import", str(path), "--out", str(out)]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert captured == golden
    assert not out.exists()


def test_import_then_report_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    path = written(tmp_path, HEADER, *ROWS)
    assert cli.main(["import", str(path), "--out", str(tmp_path / "out")]) == 0
    directory = tmp_path / "out" / "theirs"
    shown_text = capsys.readouterr().out
    assert shown_text == golden
    assert f"{directory}" in shown_text
    formats = [word for name in ("markdown", "csv", "json") for word in ("--format", name)]
    assert cli.main(["report", str(directory), *formats]) == 1, "nothing was measured"
    text = (directory / "report.md").read_text()
    assert text == golden
