"""`paceline compare` and `paceline history` on folders as runs leave them: exit codes, one line for CI, all formats."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.results import store
from paceline.results.machine_samples import KernelSample
from paceline.results.records import RunRecord

Builder = Callable[..., Any]


def write(out: Path, records: Iterable[RunRecord], started_at: float, **facts: Any) -> Path:
    """Records as run folders below `out`, a minute apart."""
    for number, record in enumerate(records):
        run_dir = store.create(out, record.spec)
        samples = (*record.steps, *record.memory, *record.wire, *record.traces, *record.kernels)
        for rank in range(record.spec.topology.world_size):
            lines = [store.sample_line(s) for s in samples if s.rank == rank]
            (run_dir / f"samples-{rank}.jsonl").write_text("".join(lines))
        for outcome in record.outcomes:
            store.write_outcome(run_dir, outcome)
        store.write_json(run_dir / "machine-node-a.json", {**record.machines[0], **facts})
        start = started_at + 60 * number
        store.seal(run_dir, record.status, record.error, start, start + 50)
    return out


@pytest.fixture
def campaign(make_cell: Builder, make_reference: Builder, tmp_path: Path) -> Callable[..., Path]:
    """One folder with three launches of ddp at so many seconds per step, and their reference."""

    def make(name: str, seconds: float, day: int = 0, **facts: Any) -> Path:
        runs = make_cell(seconds, strategy="ddp")
        return write(tmp_path / name, [make_reference(runs[0].spec), *runs], 1.7e9 + 86400 * day, **facts)

    return make


def test_a_regression_is_exit_code_1_and_one_line(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    a, b = campaign("a", 1.0, driver="580"), campaign("b", 1.1, day=1, driver="590")
    assert cli.main(["compare", str(a), str(b)]) == 0
    shown = capsys.readouterr()
    days = "B ran on another day (2023-11-15, A on 2023-11-14): every interval of a speed allows for 1 % between them"
    assert shown.out.startswith(f"B is 9.1 % slower than A in the cell; {days}; driver 580 -> 590 differs.")
    assert shown.err == ""
    assert cli.main(["compare", str(a), str(b), "--fail-on-regression", "5"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error == golden
    assert "5 %" in error
    for first, second, limit in ((a, b, "20"), (b, a, "5"), (a, a, "5")):
        assert cli.main(["compare", str(first), str(second), "--fail-on-regression", limit]) == 0
        assert capsys.readouterr().err == golden


def test_a_gate_that_is_too_noisy_is_exit_code_3_and_one_line(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    """Another day allows for a difference of 4 %: a regression of 3 % would go unseen, whatever was measured."""
    a, same, b = campaign("a", 1.0), campaign("same", 1.0, day=1), campaign("b", 0.8, day=1)
    for second in (same, b):
        assert cli.main(["compare", str(a), str(second), "--fail-on-regression", "3"]) == 3
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error == golden
    assert cli.main(["compare", str(a), str(same), "--fail-on-regression", "3", "--day-spread", "0.5"]) == 0
    assert cli.main(["compare", str(a), str(same)]) == 0, "without a gate nothing is asked of the data"


def test_a_regression_is_one_even_if_a_smaller_one_would_go_unseen(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = campaign("a", 1.0), campaign("b", 1.1, day=1)
    assert cli.main(["compare", str(a), str(b), "--fail-on-regression", "1"]) == 1
    assert capsys.readouterr().err.startswith("paceline: regression beyond 1 %: ddp")


def test_the_spread_of_days_is_in_every_interval(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = campaign("a", 1.0), campaign("b", 1.02, day=1)
    verdicts = {}
    for spread in ("0", "1"):
        assert cli.main(["compare", str(a), str(b), "--day-spread", spread, "--format", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (speed,) = [c for c in document["changes"] if c["metric"] == "tokens_per_s"]
        verdicts[spread] = speed["verdict"]
        assert document["occasions"].endswith(f"allows for {spread} % between them")
    assert verdicts == {"0": "worse", "1": "inconclusive"}


def test_a_gate_that_could_decide_nothing_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_spec: Builder, make_record: Builder, golden: object
) -> None:
    """Ceilings of one launch at half speed: no interval, so no verdict, and no reason to call that a pass."""

    def ceilings(name: str, seconds: float) -> str:
        kernel = KernelSample(
            rank=0,
            kernel="matmul",
            dtype="bf16",
            label="4096",
            variant="",
            flops=10**12,
            moved_bytes=None,
            durations_s=(seconds,) * 20,
            wrong=0,
        )
        empty: dict[str, Any] = {"steps": (), "memory": (), "wire": (), "traces": ()}
        spec = make_spec(None, world_size=1, workload="compute")
        return str(write(tmp_path / name, [make_record(spec, kernels=(kernel,), **empty)], 1.7e9 + seconds))

    fast, slow = ceilings("fast", 1.0), ceilings("slow", 2.0)
    assert cli.main(["compare", fast, slow]) == 0
    shown = capsys.readouterr()
    assert shown.out == golden
    assert "50.0 %" in shown.out
    assert "slower" in shown.out
    assert shown.err == ""
    for first, second in ((fast, slow), (slow, fast)):
        assert cli.main(["compare", first, second, "--fail-on-regression", "60"]) == 3
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error == golden


def test_one_launch_of_training_does_not_pass_a_gate(
    make_cell: Builder, make_reference: Builder, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    def folder(name: str, start: float, seconds: float, repeats: int) -> str:
        runs = make_cell(seconds, repeats=repeats, strategy="ddp")
        return str(write(tmp_path / name, [make_reference(runs[0].spec), *runs], start))

    a, b = folder("a", 1.7e9, 1.0, 3), folder("b", 1.8e9, 1.01, 1)
    assert cli.main(["compare", a, b, "--fail-on-regression", "50"]) == 3
    assert capsys.readouterr().err == golden


def test_formats_for_ci_stay_parsable_when_the_gate_fails(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    a, b = campaign("a", 1.0), campaign("b", 1.1, day=1)
    assert cli.main(["compare", str(a), str(b), "--format", "json", "--fail-on-regression", "5"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["changes"][0]["verdict"] == "worse"
    assert len(document["regressions"]) == 1
    assert cli.main(["compare", str(a), str(b), "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert text == golden
    assert "9.1 %" in text
    assert "slower" in text
    assert "| tokens/s |" in text


def test_what_is_equal_is_one_line_unless_asked_for(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = campaign("a", 1.0), campaign("b", 1.1, day=1)
    assert cli.main(["compare", str(a), str(b)]) == 0
    short = capsys.readouterr().out
    assert "equal: peak memory in 1 of 1; --verbose lists them" in short
    assert "0.102" not in short
    assert "9.1 % slower" in short
    assert cli.main(["compare", str(a), str(b), "--verbose"]) == 0
    long = capsys.readouterr().out
    assert "--verbose" not in long
    assert "0.102 -> 0.102 GiB" in long


@pytest.mark.parametrize("option", ["--fail-on-regression", "--day-spread"])
@pytest.mark.parametrize("given", ["-1", "100", "nan", "inf"])
def test_a_limit_that_is_no_percentage_is_refused_before_anything_is_read(
    given: str, option: str, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert cli.main(["compare", "nowhere", "nowhere", f"{option}={given}"]) == 2
    text = capsys.readouterr().err
    assert text == golden
    assert "100" in text


def test_a_name_with_markup_stays_text(
    make_cell: Builder, make_reference: Builder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [dataclasses.replace(r, machines=({"cpu": "[red]<script>"},)) for r in make_cell(1.0, strategy="ddp")]
    records = [make_reference(runs[0].spec), *runs]
    a = write(tmp_path / "a", records, 1.7e9, cpu="[red]<script>", driver="<script>")
    b = write(tmp_path / "b", records, 1.8e9, cpu="[red]<script>", driver="[bold]")
    assert cli.main(["compare", str(a), str(b)]) == 0
    assert "driver <script> -> [bold] differs" in capsys.readouterr().out
    assert cli.main(["compare", str(a), str(b), "--format", "markdown"]) == 0
    assert "<script>" not in capsys.readouterr().out


def test_history_keeps_every_launch_of_a_repeated_run(
    campaign: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    """The same run_id on five days is five launches; the driver changed with the level."""
    for day in range(5):
        campaign(f"days/{day}", 1.0 if day < 3 else 1.08, day, driver="580" if day < 3 else "590")
    assert cli.main(["history", str(tmp_path / "days"), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    speed = next(s for s in document["histories"] if s["metric"] == "tokens_per_s")
    assert len(speed["points"]) == 15
    (change,) = speed["changes"]
    assert (change["index"], change["verdict"], change["throughout"]) == (9, "worse", True)
    assert change["low"] < 1 / 1.08 < change["high"]
    assert [d["path"] for d in change["differences"]] == ["driver"]
    assert cli.main(["history", str(tmp_path / "days")]) == 0
    text = capsys.readouterr().out
    assert text == golden
    assert "tokens/s" in text
    assert "driver 580 -> 590" in text
    assert cli.main(["history", *(str(tmp_path / "days" / str(day)) for day in range(2))]) == 0
    assert capsys.readouterr().out == golden


def test_history_says_why_launches_do_not_count(
    campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    days = campaign("days", 1.0)
    for reference in days.glob("*/reference-*"):
        shutil.rmtree(reference)
    assert cli.main(["history", str(days)]) == 0
    text = capsys.readouterr().out
    assert text == golden


def test_the_report_holds_what_history_says(
    campaign: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(5):
        campaign(f"days/{day}", 1.0 if day < 3 else 1.08, day)
    cli.main(["report", str(tmp_path / "days"), "--format", "json"])
    report = json.loads((tmp_path / "days" / "report.json").read_text())
    cli.main(["history", str(tmp_path / "days"), "--format", "json"])
    text = capsys.readouterr().out
    assert report["histories"] == json.loads(text[text.index("{\n") :])["histories"]


def test_pages_of_compare_and_history(campaign: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = campaign("a", 1.0, driver="580"), campaign("b", 1.1, day=1, driver="590")
    assert cli.main(["compare", str(a), str(b), "--format", "html"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"Page: {b / 'compare.html'}"
    page = (b / "compare.html").read_text()
    for words in ("B is 9.1 % slower than A in the cell", "driver 580 -&gt; 590", '"name":"changes"', "Trust: amber."):
        assert words in page
    later = [campaign(f"day{n}", 1.0 if n < 6 else 1.2, day=n, driver="580" if n < 6 else "590") for n in range(12)]
    assert cli.main(["history", *map(str, later), "--format", "html"]) == 0
    page = (later[0] / "history.html").read_text()
    words = re.sub("</?span[^>]*>", "", page)
    assert "tokens/s of ddp: 16.7 % lower since 2023-11-20 (driver 580 -&gt; 590)" in words
    assert "Status: red." in page
    assert '"label":"16.7 % lower: driver 580 -> 590"' in page, "a line at the change names what changed with it"
    assert "Changes of level" in page
