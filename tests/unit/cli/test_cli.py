"""The command line as a user meets it: wrong requests are one line and change nothing; reading verbs only read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from paceline import cli
from paceline.cli import experiments, machines, results
from paceline.cli.results import token_count
from paceline.experiment import expansion, plugins
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with one small experiment in it, to stand in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    base = {"model": "tiny", "device": "cpu", "processes": 2, "steps": 4, "precision": "fp32", "sequence_length": 32}
    content = {"name": "mine", "base": base, "matrix": {"strategy": ["ddp", "fsdp2", "zero:stage=3"]}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


WRONG = {
    "unknown verb": (["rnu"], "rnu"),
    "unknown flag": (["run", "mine.yaml", "--speed"], "--speed"),
    "flag without value": (["run", "mine.yaml", "--set"], "--set"),
    "no experiment": (["run"], "PRESET|FILE"),
    "unknown preset": (["run", "quik"], "got 'quik', expected a YAML file or one of the presets "),
    "unknown preset, guessed": (["run", "quik"], "Did you mean 'quick'?"),
    "unknown field": (["run", "mine.yaml", "--set", "stratgy=ddp"], "'stratgy', expected a known field. Did you mean "),
    "unknown field of a file": (["run", "typo.yaml"], "typo: got the field 'stratgy', expected a known field. Did you"),
    "unknown part of a file": (["run", "part.yaml"], "part.yaml: got the field 'matrxi', expected a known field. Did"),
    "unknown part of a design": (["run", "design.yaml"], "got the field 'design.factor', expected a known field. Did"),
    "unknown group": (["run", "mine.yaml", "--set", "stratgy.stage=3"], "Did you mean 'strategy'?"),
    "a field like no other": (["run", "mine.yaml", "--set", "qqqqq=1"], "expected one of workload, model, strategy"),
    "a model that is spelt otherwise": (["run", "mine.yaml", "--set", "model=gpt2"], "Did you mean 'gpt2-124m'?"),
    "another tool's name": (["run", "mine.yaml", "--launcher", "k8s"], "Did you mean 'kubernetes'?"),
    "a name from a list": (["run", "mine.yaml", "--set", "checkpointing=ful"], "Did you mean 'full'?"),
    "no path": (["run", "mine.yaml", "--out", ""], "--out: got '', expected a path"),
    "no directory": (["report", ""], "DIR: got '', expected a path"),
    "a key twice": (["run", "twice.yaml"], "twice.yaml, line 2, column 19: not valid YAML: 'steps' occurs twice"),
    "a tab in a file": (["run", "tab.yaml"], "tab.yaml, line 2, column 1: not valid YAML: found character"),
    "a file of bytes": (["run", "binary.yaml"], "cannot be read (it is not UTF-8 text), expected a YAML file"),
    "a mapping that is a number": (["run", "mine.yaml", "--set", "warmup=3"], "expected a mapping with minimum, max"),
    "options without a name": (
        ["run", "mine.yaml", "--set", "strategy={stage: 1}"],
        "or a mapping with name and options",
    ),
    "no script": (["measure", "--", "absent.py"], "measure: got 'absent.py', expected a script that exists"),
    "no program": (["measure", "--", "absent", "x"], "measure: got 'absent', expected a program on the PATH"),
    "no model to predict": (["predict"], "--model: got nothing, expected a name from `paceline list models`"),
    "an option like no other": (["plan", "mine.yaml", "--format", "x"], "plan: got the unknown option '--format'. See"),
    "zero3": (["run", "mine.yaml", "--set", "strategy=zero3"], "Did you mean 'zero:stage=3'?"),
    "wrong type": (["run", "mine.yaml", "--set", "steps=lots"], "steps: got 'lots'"),
    "wrong value": (["run", "mine.yaml", "--set", "steps=0"], "steps: got 0"),
    "slots below 0": (["mock-replica", "--slots", "-1"], "--slots: got -1, expected a whole number from 0"),
    "no equals": (["run", "mine.yaml", "--set", "steps"], "key=value"),
    "unknown strategy": (["run", "mine.yaml", "--set", "strategy=fsdp"], "Did you mean 'fsdp2'?"),
    "unknown strategy option": (["run", "mine.yaml", "--set", "strategy=zero:sage=1"], "got 'sage', expected stage"),
    "wrong strategy option": (["run", "mine.yaml", "--set", "strategy=zero:stage=4"], "1, 2 or 3"),
    "unknown model": (["run", "mine.yaml", "--set", "model=gpt5"], "'gpt5'"),
    "unknown model option": (["run", "mine.yaml", "--set", "model=tiny:depth=3"], "'depth'"),
    "unknown launcher": (["run", "mine.yaml", "--launcher", "loca"], "Did you mean 'local'?"),
    "unknown launcher option": (
        ["run", "mine.yaml", "--launcher", "kubernetes:imag=x"],
        "option of kubernetes: got 'imag', expected kind, ",
    ),
    "unknown launcher option, guessed": (
        ["run", "mine.yaml", "--launcher", "kubernetes:imag=x"],
        "Did you mean 'image'?",
    ),
    "empty launcher file": (
        ["run", "mine.yaml", "--launcher", "empty.yaml"],
        "mapping with name and the launcher's options",
    ),
    "list as a launcher file": (["run", "mine.yaml", "--launcher", "list.yaml"], "a list"),
    "binary launcher file": (["run", "mine.yaml", "--launcher", "binary.yaml"], "binary.yaml"),
    "nameless launcher file": (["run", "mine.yaml", "--launcher", "nameless.yaml"], "name: got none"),
    "relaunch on a cluster": (
        ["run", "mine.yaml", "--relaunch", "full", "--launcher", "slurm"],
        "--relaunch full: got 'slurm', expected the launcher local",
    ),
    "empty experiment": (["run", "empty.yaml"], "a mapping with name, base and matrix"),
    "unknown workload": (["run", "mine.yaml", "--set", "workload=pretrian"], "Did you mean 'pretrain'?"),
    "unknown module": (["run", "mine.yaml", "--set", "strategy=no.such"], "cannot be imported"),
    "unknown data": (["run", "mine.yaml", "--set", "device=tpu"], "auto, cpu or cuda"),
    "plan too": (["plan", "mine.yaml", "--set", "strategy=fsdp"], "Did you mean 'fsdp2'?"),
    "report of nothing": (["report", "absent"], "'absent'"),
    "report of no runs": (["report", "."], "run"),
    "unknown price": (["report", ".", "--price", "oci-h10"], "Did you mean 'oci-h100'?"),
    "no price": (["report", ".", "--price", "0"], "--price: got '0', expected USD per GPU-hour"),
    "price before a run": (["run", "mine.yaml", "--price", "cheap"], "--price: got 'cheap'"),
    "price file": (["report", ".", "--price", "absent.toml"], "absent.toml"),
    "no tokens": (["report", ".", "--train-tokens", "0"], "--train-tokens: got '0'"),
    "unknown tokens": (["run", "mine.yaml", "--train-tokens", "1Z"], "such as 300M, 1.5B or 15T"),
    "half a token": (["report", ".", "--train-tokens", "1.5"], "a whole number of tokens"),
    "endless tokens": (["report", ".", "--train-tokens", "9" * 5000], "a whole number of tokens"),
    "too many tokens": (["report", ".", "--train-tokens", "1000001T"], "up to 1,000,000T"),
    "too high a price": (["report", ".", "--price", "1e308"], "from 0.0001 to 100000"),
    "too low a price": (["report", ".", "--price", "1e-9"], "from 0.0001 to 100000"),
    "import of nothing": (["import", "absent.csv"], "'absent.csv'"),
    "unknown format": (["report", ".", "--format", "pdf"], "got 'pdf'"),
    "a module that is no exporter": (["report", ".", "--format", "os.path"], "a module with export(report, directory)"),
    "another one": (["report", ".", "--format", "json.tool"], "a module with"),
    "a dotted name that is none": (["report", ".", "--format", "../x.py"], "or a dotted module name"),
    "a module that is no strategy": (
        ["run", "mine.yaml", "--set", "strategy=os.path"],
        "a module with check(spec), wrap(spec, seat)",
    ),
    "binary experiment": (["plan", "binary.yaml"], "binary.yaml"),
    "nested experiment": (["plan", "nested.yaml"], "not valid YAML"),
    "show of no run": (["show", "."], "a run directory"),
    "compare of nothing": (["compare", "a", "b"], "'a'"),
    "advice about no GPU": (["predict", "--model", "llama-8b", "--gpu", "h1", "--gpus", "8"], "--gpu: got 'h1'"),
    "advice about no model": (
        ["predict", "--model", "llama", "--gpu", "h100", "--gpus", "8"],
        "'llama'",
    ),
    "unknown list": (["list", "colours"], "expected workloads, strategies"),
    "status of nothing": (["status", "--out", "absent"], "absent"),
    "wrong interval": (["monitor", "--interval", "0"], "a positive number of seconds"),
    "endless interval": (["monitor", "--interval", "inf"], "up to 86400"),
    "interval of no number": (["monitor", "--interval", "nan"], "up to 86400"),
    "long interval": (["monitor", "--interval", "1e308"], "up to 86400"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_one_line_exit_code_2_and_nothing_on_disk(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, words = WRONG[case]
    (here / "binary.yaml").write_bytes(b"\x80\xff\x00")
    (here / "empty.yaml").write_text("")
    (here / "list.yaml").write_text("- kubernetes")
    (here / "nameless.yaml").write_text("image: x")
    (here / "typo.yaml").write_text("name: typo\nbase: {stratgy: ddp}")
    (here / "part.yaml").write_text("name: part\nmatrxi: {strategy: [ddp]}")
    (here / "design.yaml").write_text("name: design\ndesign: {factor: {strategy: [ddp]}}")
    (here / "nested.yaml").write_text("[" * 10_000)
    (here / "twice.yaml").write_text("name: twice\nbase: {steps: 10, steps: 20}")
    (here / "tab.yaml").write_text("name: tab\n\tbase: {}")
    before = files(here)
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline: ")
    assert captured.err.count("\n") == 1, captured.err
    assert words.casefold() in captured.err.casefold()
    assert files(here) == before


def test_an_out_folder_that_cannot_be_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "taken").write_text("a file")
    assert cli.main(["run", "mine.yaml", "--out", "taken"]) == 2
    assert "--out: cannot write in taken/mine" in capsys.readouterr().err


def test_an_error_cannot_command_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.tar.gz").write_bytes(b"")
    assert cli.main(["report", "x.tar.gz", "--format", "\x1b[2J"]) == 2
    (here / "\x1b[2J.yaml").write_text("3")
    assert cli.main(["plan", "\x1b[2J.yaml"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_real_process_says_the_same(here: Path, paceline: Any) -> None:
    done = paceline("run", "mine.yaml", "--set", "strategy=fsdp", cwd=here)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert paceline("--help").returncode == 0
    assert paceline("--version").stdout.startswith("paceline ")


# --- reading verbs ---


def test_plan_shows_every_run_and_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(here)
    assert cli.main(["plan", "mine.yaml", "--commands", "--set", "repeats=2"]) == 0
    text = capsys.readouterr().out
    assert files(here) == before
    specs = expansion.load("mine.yaml", ["repeats=2"])
    for spec in specs:
        assert f"{spec.run_id}  [to run]" in text
        assert f"paceline.workloads.worker results/mine/{spec.run_id}" in text
    assert "3 cells, 6 runs, 1 reference run; results go to results" in text
    assert f"{arithmetic.parameters(arithmetic.load(specs[0].model)):,} parameters" in text
    assert "128 tokens per step" not in text
    assert "64 tokens per step" in text
    assert text.count("--nproc-per-node=2") == 6
    assert text.count("--nproc-per-node=1") == 1


@pytest.mark.parametrize(
    ("words", "setting"),
    [((), ()), (("--relaunch", "warm"), ()), (("--relaunch", "full"), ("launcher.warm=false",))],
)
def test_relaunch_selects_how_ranks_start(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], setting: tuple[str, ...]
) -> None:
    assert cli.main(["plan", "mine.yaml", "--commands", *words]) == 0
    text = capsys.readouterr().out
    specs = expansion.load("mine.yaml", setting)
    assert all(f"{spec.run_id}  [to run]" in text for spec in specs)
    assert {spec.launcher.options.get("warm", True) for spec in specs} == {"full" not in words}


def test_relaunch_warm_overrides_the_launcher(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "mine.yaml", "--commands", "--launcher", "local:warm=false", "--relaunch", "warm"]) == 0
    (wanted, *_) = expansion.load("mine.yaml", ["launcher.warm=true"])
    assert f"{wanted.run_id}  [to run]" in capsys.readouterr().out


def test_relaunch_warm_is_the_default_on_a_gpu_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["device=cuda", "processes=1", "launcher=local:shared_gpu=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["plan", "mine.yaml", *words, "--commands", "--relaunch", "warm"]) == 0
    text = capsys.readouterr().out
    assert all(f"{spec.run_id}  [to run]" in text for spec in expansion.load("mine.yaml", settings))


def test_a_plan_is_a_table_of_cells(here: Path, make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --commands: a row per cell with its runs, its memory and what is left to do."""
    specs = expansion.load("mine.yaml", ["repeats=2"])
    make_run(here / "results", specs[0], Status.OK)
    assert cli.main(["plan", "mine.yaml", "--set", "repeats=2"]) == 0
    text = capsys.readouterr().out
    assert "paceline.workloads.worker" not in text
    rows = [line.split() for line in text.splitlines() if "to run" in line]
    assert len(rows) == 4, "three cells and a reference"
    (begun,) = [line for line in text.splitlines() if "1 finished; to run" in line]
    assert str(specs[0].strategy) in begun
    assert "reference, global batch" in text
    assert "3 cells, 6 runs, 1 reference run; results go to results" in text


def test_a_plan_for_another_gpu_has_minutes_and_one_reason(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot run here is predicted for the GPU that was named; a reason that all cells share is printed once."""
    settings = ("device=cuda", "processes=8", "model=llama-1b", "precision=bf16", "steps=400")
    there = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["plan", "mine.yaml", "--gpu", "h100", "--price", "2", *there]) == 0
    text = capsys.readouterr().out
    assert text.count("8 processes need 8 GPUs") == 1
    rows = [line.split() for line in text.splitlines() if line.endswith("unsupported ")]
    assert len(rows) == 3
    for row in rows:
        minutes, usd = map(float, row[-3:-1])
        assert usd == pytest.approx(minutes / 60 * 8 * 2, rel=0.15), "both are rounded"
    assert "predicted in total: about" in text


def test_a_plan_counts_only_what_could_run_somewhere(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def total(strategies: str) -> str:
        settings = ("device=cuda", "processes=8", "model=llama-1b", "precision=bf16", f"strategy={strategies}")
        there = [word for setting in settings for word in ("--set", setting)]
        assert cli.main(["plan", "mine.yaml", "--gpu", "h100", "--price", "2", *there]) == 0
        text = " ".join(capsys.readouterr().out.split())
        return text[text.index("predicted") :].partition("about")[2]

    assert total("[ddp, 'mesh:tp=3']") == total("[ddp]")


def test_plan_shows_the_size_of_a_load(here: Path, capsys: pytest.CaptureFixture[str], golden: object) -> None:
    asked = ["scenario=search", "rate_per_s=2", "engine.urls=[http://a:1, http://b:1]", "processes=1"]
    words = [word for setting in asked for word in ("--set", setting)]
    assert cli.main(["plan", "inference", "--commands", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.partition(" GLOO_SOCKET_IFNAME=")[0] == golden


def test_plan_remarks_a_sequence_beyond_the_context(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "the sequence length 257 exceeds the 256 positions of tiny-llama"
    settings = ["--set", "model=tiny-llama", "--set", "strategy=ddp", "--set"]
    for length, said in ((256, 0), (257, 2)):
        assert cli.main(["plan", "mine.yaml", "--commands", *settings, f"sequence_length={length}"]) == 0
        assert capsys.readouterr().out.count(told) == said, "of the run and of its reference"


def test_plan_knows_what_is_finished_and_what_cannot_be(
    here: Path, make_run: Make, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    spec = expansion.load("mine.yaml")[0]
    make_run(here / "results", spec, Status.OK)
    assert (
        cli.main(["plan", "mine.yaml", "--commands", "--set", 'strategy=["ddp","single","fsdp2","zero:stage=3"]']) == 0
    )
    text = capsys.readouterr().out
    assert f"{spec.run_id}  [finished]" in text
    assert text == golden


@pytest.mark.parametrize("kind", machines.LISTS)
def test_list_shows_what_exists(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 1
    assert all(len(line.split()) >= 2 for line in lines), "a name and a description each"
    names = [line.split()[0] for line in lines]
    if kind in plugins.KINDS:
        assert names == [*plugins.names(kind), *plugins.short_names(kind)]
    if kind == "prices":
        assert {"oci-a10-0.60", "oci-a10-1.50", "oci-a10-spot", "aws-h100"} <= set(names)
    if kind == "metrics":
        assert {"usd_per_mtok", "tokens_per_usd", "usd_per_1k_samples"} <= set(names)
    if kind == "models":
        assert {"tiny", "gpt2-124m", "llama-8b"} <= set(names)
    if kind == "presets":
        assert {"compute", "fabric", "memory", "quick", "scaling", "strategies", "suite"} <= set(names)


def terminal(width: int) -> Console:
    return Console(file=sys.stdout, force_terminal=True, width=width, color_system=None)


@pytest.mark.parametrize("kind", ["strategies", "presets", "exporters"])
def test_a_list_hangs_on_a_terminal(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["list", kind])
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) > 80
    monkeypatch.setattr(machines, "console", lambda: terminal(80))
    cli.main(["list", kind])
    wrapped = capsys.readouterr().out
    assert max(map(len, wrapped.splitlines())) <= 80
    assert wrapped.split() == plain.split(), "every word is there"
    begins = [line.split()[0] for line in wrapped.splitlines() if not line.startswith(" ")]
    assert begins == [line.split()[0] for line in plain.splitlines()], "only names stand at the left"


def test_a_plan_hangs_on_a_terminal_and_its_commands_stay_whole(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.main(["plan", "mine.yaml", "--commands"])
    plain = capsys.readouterr().out
    monkeypatch.setattr(experiments, "console", lambda: terminal(50))
    cli.main(["plan", "mine.yaml", "--commands"])
    wrapped = capsys.readouterr().out
    assert wrapped.split() == plain.split()
    commands = [line for line in plain.splitlines() if "paceline.workloads.worker" in line]
    assert commands
    assert set(commands) <= set(wrapped.splitlines())
    assert all(len(line) <= 50 for line in wrapped.splitlines() if line not in commands)


def test_list_alone_says_what_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(machines.LISTS)


def test_doctor_answers_and_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(here)
    code = cli.main(["doctor"])
    text = capsys.readouterr().out
    assert code in (0, 1)
    assert (code == 1) == ("BAD " in text)
    assert "python" in text.lower()
    assert "torch" in text
    assert files(here) == before


def test_monitor_ends_after_its_readings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["monitor", "--interval", "0.05", "--count", "2"]) == 0
    assert "host" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("300m", 3 * 10**8), ("1.5B", 15 * 10**8), ("15T", 15 * 10**12)])
def test_sizes_of_training(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.fixture
def stored(here: Path, make_spec: Callable[..., RunSpec], make_run: Make) -> Path:
    make_run(here / "results", make_spec("ddp"), Status.OOM, "rank 1 on node-a: CUDA out of memory")
    make_run(here / "results", make_spec("single"), Status.UNSUPPORTED, "one process only", [], [])
    make_run(here / "results", make_spec("fsdp2"), None)
    return here / "results" / "test"


def test_report_shows_failures_and_skipped_folders(
    stored: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert cli.main(["report", str(stored), "--format", "json", "--format", "markdown"]) == 1
    text = capsys.readouterr().out
    assert "CUDA out of memory" in text
    assert "one process only" in text
    assert "skipped: " in text
    assert text == golden
    report = json.loads((stored / "report.json").read_text())
    assert {run["status"] for run in report["runs"]} == {"oom", "unsupported"}
    assert not (stored / "report.html").exists(), "only the asked formats"


@pytest.mark.parametrize("name", ["report.json", "report.md", "plots"])
def test_what_cannot_be_written_takes_no_answer_away(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, golden: object
) -> None:
    def refuse(report: object, directory: Path) -> list[Path]:
        raise OSError(30, "Read-only file system", str(directory / name))

    exporter = {"report.json": "json", "report.md": "markdown", "plots": "plots"}[name]
    monkeypatch.setattr(plugins.load("exporters", exporter), "export", refuse)
    assert cli.main(["report", str(stored), "--format", exporter]) == 2
    captured = capsys.readouterr()
    assert "CUDA out of memory" in captured.out
    assert captured.err == golden
    assert f"{stored / name}" in captured.err


def test_reports_of_two_capsules_stand_apart(here: Path, make_spec: Make, make_run: Make) -> None:
    make_run(here / "results", make_spec("ddp"))
    for name in ("a.1.tar.gz", "a.2.tgz", "a.3"):
        assert cli.main(["capsule", "results", name]) == 0
        cli.main(["report", name, "--format", "json"])
    assert {path.name for path in here.glob("*-report")} == {"a.1-report", "a.2-report", "a.3-report"}
    (here / "b-report").write_text("a file")
    (here / "a.3").rename(here / "b.tar.gz")
    assert cli.main(["report", "b.tar.gz", "--format", "json"]) == 2


def test_folders_that_were_written_are_named_once(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def two(report: object, directory: Path) -> list[Path]:
        return [directory / "plots" / "a.svg", directory / "plots" / "b.svg", directory / "x.md", Path("/elsewhere/db")]

    report, exporter = SimpleNamespace(runs=()), SimpleNamespace(export=two)
    with results._exporting(report, [exporter], stored) as exported:  # type: ignore[arg-type, list-item]
        assert exported() == [stored / "plots", stored / "x.md", Path("/elsewhere/db")]


def test_a_large_report_is_exported_by_two_processes(
    stored: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files, their order on the screen and what is said of one that cannot be written are those of one process."""
    command = ["report", str(stored), *(w for name in ("json", "csv", "markdown") for w in ("--format", name))]
    names = ("report.json", "metrics.csv", "report.md")
    seen = []
    for fewest in (100, 1):
        monkeypatch.setattr(results, "_EXPORTED_APART_FROM", fewest)
        monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
        assert cli.main(command) == 1
        seen.append((capsys.readouterr().out, [(stored / name).read_bytes() for name in names]))
        [(stored / name).unlink() for name in names]
    assert seen[0] == seen[1]
    (stored / "report.json").mkdir()
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert "CUDA out of memory" in captured.out
    assert f"report: cannot write '{stored}/.report.json." in captured.err


def test_a_campaign_in_which_nothing_was_measured_is_a_failure(here: Path, make_spec: Make, make_run: Make) -> None:
    make_run(here / "results", make_spec("single"), Status.UNSUPPORTED, "one process only", [], [])
    assert cli.main(["report", "results", "--format", "json"]) == 1


def test_show_prints_one_run(stored: Path, capsys: pytest.CaptureFixture[str], golden: object) -> None:
    by_name = {path.name.split("-")[0]: path for path in store.run_dirs(stored)}
    assert cli.main(["show", str(by_name["ddp"])]) == 0
    assert "CUDA out of memory" in capsys.readouterr().out
    unsealed = by_name["fsdp2"]
    left = len(list(unsealed.glob("samples-*.jsonl")))
    assert left > 1
    assert cli.main(["show", str(unsealed)]) == 1
    text = capsys.readouterr().out
    assert text == golden
    assert f"{left}" in text
    for path in unsealed.glob("samples-*.jsonl"):
        path.unlink()
    assert cli.main(["show", str(unsealed)]) == 1
    assert capsys.readouterr().out == golden


@pytest.mark.parametrize("status", [Status.OK, None])
def test_names_of_folders_cannot_command_the_terminal(
    here: Path, make_spec: Make, make_run: Make, capsys: pytest.CaptureFixture[str], status: Status | None
) -> None:
    folder = here / "results" / "\x1b[2J"
    run_dir = make_run(folder, make_spec("ddp"), status)
    make_run(here / "results" / "later", make_spec("ddp"), status)
    run_dir.rename(named := run_dir.with_name("\x9b31m"))
    for arguments in (
        ["show", str(named)],
        ["status", "--out", str(folder)],
        ["report", "results", "--format", "json"],
    ):
        cli.main(arguments)
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err + (here / "results" / "report.json").read_text()) & {"\x1b", "\x9b"}


def test_status_counts(stored: Path, capsys: pytest.CaptureFixture[str], golden: object) -> None:
    assert cli.main(["status", "--out", str(stored.parent)]) == 0
    text = capsys.readouterr().out
    assert text == golden


def test_compare_needs_certified_runs(stored: Path, capsys: pytest.CaptureFixture[str], golden: object) -> None:
    assert cli.main(["compare", str(stored), str(stored)]) == 2
    assert capsys.readouterr().err == golden


def test_ctrl_c_is_130_and_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    from paceline.campaign.run import controller as run

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "campaign", interrupted)
    assert cli.main(["run", "mine.yaml"]) == 130
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err == golden


def test_advice_shows_its_arithmetic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert cli.main(["predict", "--model", "llama-8b", "--gpu", "a40", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert text == golden
    assert "llama-8b: 16 B x 8.03e9 = 119.7 GiB of state; zero:stage=3 on 8 GPUs: 15.0 GiB" in text
    assert "does not predict speed" in text


def test_a_wrong_exporter_is_refused_before_anything_is_measured(
    here: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert cli.main(["run", "mine.yaml", "--format", "pdf"]) == 2
    text = capsys.readouterr().err
    assert text == golden
    assert "pdf" in text
    assert not (here / "results").exists()


def test_the_exit_code_is_of_the_runs_that_were_asked_for(tmp_path: Path, make_spec: Any, make_run: Any) -> None:
    """What an earlier command left in the folder is shown, and is no failure of this one."""
    from paceline.analysis.cost.training import Costing
    from paceline.cli.results import conclude
    from paceline.cli.verbs import console
    from paceline.results.records import MemorySample, Status

    sample = MemorySample(
        rank=0, moment="setup", allocated_bytes=1, reserved_bytes=1, device_bytes=None, resident_bytes=1
    )
    good = make_spec("ddp", 1, workload="memory")
    make_run(tmp_path, good, samples=[sample])
    bad = make_spec("ddp", 1, workload="memory", seed=7)
    make_run(tmp_path, bad, Status.FAILED, "no such partition", samples=[])
    codes = [
        conclude(console(), tmp_path / good.experiment, ["json"], Costing(), requested=asked)
        for asked in (None, {good.run_id}, {bad.run_id})
    ]
    assert codes == [1, 0, 1]


def test_status_takes_a_directory_like_report(here: Path, make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here / "elsewhere", expansion.load("mine.yaml")[0], Status.OK)
    assert cli.main(["status", "elsewhere"]) == 0
    by_name = capsys.readouterr().out
    assert cli.main(["status", "--out", "elsewhere"]) == 0
    assert capsys.readouterr().out == by_name
    assert "1 ok" in by_name
    assert cli.main(["status", "nowhere"]) == 2


def test_status_of_no_directory_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "absent"]) == 2
    assert capsys.readouterr().err == (
        "paceline: status: got 'absent', which is not a directory; expected a results directory.\n"
    )


def test_a_layout_is_drawn_below_all_strategies_that_have_it(make_spec: Callable[..., RunSpec]) -> None:
    """Two layouts have lines in common, which both show; what is not split or not possible has no picture."""
    names = (
        "mesh:tp=2",
        "mesh:tp=2,sequence=false",
        "mesh:pp=2,micro_batches=2",
        "mesh:pp=2,layers=1+1",
        "ddp",
        "mesh:tp=3",
    )
    specs = [make_spec(name, 2, model="tiny-llama", accumulation=2) for name in names]
    assert experiments.pictures([*specs, specs[0]]) == [
        "mesh:tp=2; mesh:tp=2,sequence=false",
        "  rank  replica  tensor",
        "     0        0  1 of 2",
        "     1        0  2 of 2",
        "mesh:pp=2,micro_batches=2; mesh:pp=2,layers=1+1",
        "  rank  replica  layers",
        "     0        0  0 + embedding",
        "     1        0  1 + head",
    ]
    whole = experiments.pictures([make_spec("mesh:shard=2", 4), make_spec("mesh:shard=4", 4)])
    assert len(whole) == 2 * (1 + 1 + 4)


@pytest.mark.parametrize("verb", ["ui", "status"])
def test_a_directory_that_may_not_be_read_is_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Tests may run as root, who may read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert cli.main([verb, str(tmp_path)]) == 2
    assert f"{verb}: got '{tmp_path}', which you may not read; expected a results directory." in capsys.readouterr().err
