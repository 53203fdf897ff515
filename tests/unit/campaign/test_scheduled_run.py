"""One scheduled run: due or not, alone or skipped, measured, compared, told. `paceline` itself is a stand-in here that
leaves a report and ends as it is told; tests/end_to_end/test_scheduled_runs.py runs the real one."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign import scheduled_run
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule import tables as present
from paceline.campaign.schedule.cron import Cron
from paceline.errors import RequestError

pytestmark = pytest.mark.slow

STAND_IN = """
import json, os, pathlib, sys, time
verb, *rest = sys.argv[1:]
asked = pathlib.Path(os.environ["STAND_IN"])
told = json.loads(asked.read_text())
if verb == "run":
    folder = pathlib.Path(rest[rest.index("--out") + 1]) / "nightly"
    folder.mkdir(parents=True)
    (folder / "arguments.json").write_text(json.dumps(rest))
    if told.get("report", True):
        (folder / "report.html").write_text("<p>")
    print(told.get("says", ""), flush=True)
    time.sleep(told.get("sleeps", 0))
    if told.get("signal"):
        os.kill(os.getpid(), told["signal"])
    sys.exit(told.get("code", 0))
answer = told.get("answer", "B and A are equal.")
print(json.dumps({"answer": answer}) if rest[-1] == "json" else "**B and A are equal.**")
print(told.get("gate", ""), file=sys.stderr)
sys.exit(told.get("compare", 0))
"""


WORDS = "paceline: interrupted; finished runs are kept, repeat the command to continue"


def schedule_of(**more: Any) -> agenda.Schedule:
    usual: dict[str, Any] = {
        "name": "nightly",
        "cron": Cron("* * * * *", "Asia/Seoul"),
        "backend": "crontab",
        "experiment": "quick",
        "source": "quick",
        "added_at": time.time() - 7200,
        "directory": "/",
    }
    return agenda.Schedule(**usual | more)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """How the stand-in shall behave from now on."""
    program, answers = tmp_path / "stand_in.py", tmp_path / "stand_in.json"
    program.write_text(STAND_IN)
    monkeypatch.setenv("STAND_IN", str(answers))
    monkeypatch.setattr(scheduled_run, "_paceline", lambda *arguments: [sys.executable, str(program), *arguments])

    def tell(**behaviour: Any) -> None:
        answers.write_text(json.dumps(behaviour))

    tell()
    return tell


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "it's $(touch evil) results"
    agenda.write(folder, schedule_of())
    return folder


def run(out: Path, within_s: float | None = None) -> tuple[int, list[str]]:
    said: list[str] = []
    within = None if within_s is None else timedelta(seconds=within_s)
    return scheduled_run.run(out, "nightly", within, said.append), said


def last(out: Path) -> agenda.Occasion:
    return agenda.occasions(out, "nightly")[-1]


def test_a_run_by_hand_is_recorded_with_its_report(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(settings=("model=it's",), launcher="local:threads=2"))
    assert run(out)[0] == 0
    found = last(out)
    assert (found.outcome, found.exit_code, found.due_at, found.sentence) == ("ok", 0, None, None)
    assert found.report is not None
    assert (out / found.report).read_text() == "<p>"
    arguments = json.loads((out / found.report).with_name("arguments.json").read_text())
    assert arguments[0] == "quick"
    assert arguments[-2:] == ["--launcher=local:threads=2", "--set=model=it's"]
    assert (out / "status.html").is_file()
    assert (out / "status.md").is_file()


def test_a_timer_serves_a_due_time_once(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(cron=Cron("0 * * * *", "UTC")))
    assert run(out, within_s=3600)[0] == 0
    due = last(out).due_at
    assert due is not None
    assert datetime.fromtimestamp(due, UTC).minute == 0
    assert run(out, within_s=3600) == (0, [])
    assert len(agenda.occasions(out, "nightly")) == 1


def test_a_timer_that_is_too_early_or_too_late_does_nothing(out: Path, told: Callable[..., None]) -> None:
    now = datetime.now(UTC)
    other = (now + timedelta(hours=6)).hour
    agenda.write(out, schedule_of(cron=Cron(f"0 {other} * * *", "UTC"), added_at=0.0))
    assert run(out, within_s=3600) == (0, [])
    assert agenda.occasions(out, "nightly") == []


def test_a_second_start_is_skipped_and_says_why(out: Path, told: Callable[..., None], golden: object) -> None:
    with agenda.exclusive(out, "nightly"):
        agenda.record(out, "nightly", "began", "x", at=time.time(), due_at=None)
        code, said = run(out)
        assert code == 1
    found = last(out)
    assert found.outcome == "skipped"
    assert str(found.sentence) == golden
    assert said[0] == golden


@pytest.mark.parametrize(
    ("behaviour", "outcome", "code"),
    [
        ({"code": 1, "says": "✗ 2/3 ddp failed: rank 1 was killed"}, "failed", 1),
        ({"code": 2, "says": "paceline: model: 'x' was given", "report": False}, "refused", 2),
        ({"code": 130, "says": WORDS, "report": False}, "interrupted", 130),
        ({"signal": 9, "report": False}, "failed", 1),
        ({"code": 1, "says": "HF_TOKEN=hf_abcdefghijklmnop"}, "failed", 1),
    ],
)
def test_every_end_is_recorded_with_one_sentence(
    behaviour: dict[str, Any], outcome: str, code: int, out: Path, told: Callable[..., None], golden: object
) -> None:
    told(**behaviour)
    assert run(out)[0] == code
    found = last(out)
    assert (found.outcome, found.exit_code) == (outcome, code)
    assert str(found.sentence) == golden
    assert "hf_abcd" not in (agenda.folder_of(out, "nightly") / agenda.HISTORY).read_text()


def test_a_day_without_runs_is_notified_with_its_reason(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real campaign, where Slurm's commands are not. It was served, so it does not read as missed."""
    why = "launcher slurm: sbatch is not installed here: run paceline on a host with Slurm's commands"
    monkeypatch.setenv("PATH", "/nonexistent")
    added_at = time.time() // 3600 * 3600 - 60  # one due time since then
    asked = {"cron": Cron("0 * * * *", "UTC"), "launcher": "slurm", "settings": ("device=cpu",)}
    agenda.write(out, schedule_of(**asked, added_at=added_at))
    code, said = run(out, within_s=3600)
    assert (code, said[-1]) == (2, f"nightly: refused: {why}")
    assert last(out).due_at is not None
    assert agenda.view(out, "nightly", datetime.now(UTC)).missed == ()
    for page in ("status.md", "status.html"):
        told = html.unescape((out / page).read_text()).replace("\\", "")
        assert f"The last run of nightly was refused: {why}." in told
        assert "Missed" not in told
    assert [path.name for path in out.glob("schedules/nightly/*/*")] == ["log.txt"], "no run was begun"


def test_an_interrupted_run_is_notified_once_and_promises_no_next_run(out: Path, told: Callable[..., None]) -> None:
    told(code=130, says=WORDS, report=False)
    run(out)
    (shown,) = [line for line in present.lines(agenda.view(out, "nightly", datetime.now(UTC))) if "  ran " in line]
    assert shown.count("interrupted") == 1
    assert "the same command" not in shown


def test_the_next_run_is_compared_with_the_last_good_one(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(fail_on_regression=5.0))
    run(out)
    good = last(out)
    time.sleep(1.1)  # folders are named by the second
    told(compare=1, gate="paceline: regression beyond 5 %: ddp is 12 % slower")
    assert run(out)[0] == 1
    slow = last(out)
    assert slow.outcome == "regression"
    assert "ddp is 12 % slower" in str(slow.sentence)
    assert slow.compared_with == str(Path(str(good.report)).parent)
    assert (agenda.folder_of(out, "nightly") / slow.id / "comparison.md").read_text().startswith("**B and A are equal")
    time.sleep(1.1)
    told()
    assert run(out)[0] == 0
    assert last(out).compared_with == slow.compared_with, "a regression is no measure for the next run"


def test_a_comparison_that_was_refused_does_not_pass_the_gate(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(fail_on_regression=5.0))
    run(out)
    time.sleep(1.1)
    told(compare=2, gate="paceline: other devices")
    assert run(out)[0] == 1
    assert (last(out).outcome, "other devices" in str(last(out).sentence)) == ("regression", True)


def test_a_gate_that_could_not_have_seen_the_regression_is_inconclusive(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(fail_on_regression=1.0))
    run(out)
    good = last(out)
    time.sleep(1.1)
    told(compare=3, gate="paceline: the gate could have caught a regression of 4 % or more in ddp")
    assert run(out)[0] == 3
    assert (last(out).outcome, last(out).exit_code) == ("inconclusive", 3)
    assert "could have caught a regression of 4 %" in str(last(out).sentence)
    time.sleep(1.1)
    told()
    assert run(out)[0] == 0
    assert last(out).compared_with == str(Path(str(good.report)).parent), "it is no measure for the next run"


def test_a_gate_does_not_hide_that_a_run_failed(out: Path, told: Callable[..., None]) -> None:
    agenda.write(out, schedule_of(fail_on_regression=1.0))
    run(out)
    time.sleep(1.1)
    told(code=1, compare=3, gate="paceline: the gate could not have caught any regression in ddp")
    assert run(out)[0] == 1
    assert last(out).outcome == "failed"


def test_a_command_gets_its_values_as_variables_and_no_name_becomes_code(
    out: Path, told: Callable[..., None], golden: object
) -> None:
    note = out / "note"
    command = (
        f'printf "%s|%s|%s|%s" "$PACELINE_NAME" "$PACELINE_OUTCOME" "$PACELINE_EXIT_CODE" "$PACELINE_REPORT" > "{note}"'
    )
    agenda.write(out, schedule_of(command=command.replace("$(", "\\$("), directory=str(out)))
    run(out)
    assert note.read_text() == f"nightly|ok|0|{(out / str(last(out).report)).absolute()}"
    assert not list(out.glob("**/evil"))
    assert last(out).notified == golden


def test_a_failure_to_notify_is_recorded_and_changes_nothing_else(
    out: Path, told: Callable[..., None], golden: object
) -> None:
    agenda.write(out, schedule_of(command="exit 7", webhook="NOT_SET_ANYWHERE"))
    assert run(out)[0] == 0
    assert last(out).outcome == "ok"
    assert str(last(out).notified) == golden
    assert "NOT_SET_ANYWHERE" in str(last(out).notified)


def test_a_folder_that_cannot_be_written_is_a_failure_with_a_sentence(
    out: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    """The disk is full when the campaign shall begin."""
    real = Path.open

    def full(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == scheduled_run.LOG:
            raise OSError(28, os.strerror(28))
        return real(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    assert run(out)[0] == 1
    assert str(last(out).sentence) == golden


def test_asked_to_end_it_asks_the_campaign_and_writes_down_how_it_ended(tmp_path: Path) -> None:
    """A polite end (systemd, a pod that is deleted) reaches the campaign's process too."""
    out = tmp_path / "results"
    agenda.write(out, schedule_of())
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom paceline.campaign import scheduled_run as schedule\n"
        "child = 'import signal, sys, time; signal.signal(15, lambda *_: sys.exit(130)); '\n"
        "child += 'print(1, flush=True); time.sleep(60)'\n"
        "schedule._paceline = lambda *_: [sys.executable, '-c', child]\n"
        "sys.exit(schedule.run(Path(sys.argv[1]), 'nightly', None, print))\n"
    )
    process = subprocess.Popen([sys.executable, str(program), str(out)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(log.read_text() for log in out.glob("schedules/nightly/*/log.txt")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert agenda.is_at_work(out, "nightly")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert last(out).outcome == "interrupted"
    assert not agenda.is_at_work(out, "nightly")


def test_a_refused_timer_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setenv("PATH", "")
    source = tmp_path / "new.yaml"
    source.write_text("name: new\n")
    with pytest.raises(RequestError) as caught:
        scheduled_run.add(tmp_path, schedule_of(), source, None, replace=False)
    assert str(caught.value) == golden
    assert agenda.names(tmp_path) == []
    agenda.write(tmp_path, schedule_of())
    with pytest.raises(RequestError) as caught:
        scheduled_run.add(tmp_path, schedule_of(), source, None, replace=False)
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        scheduled_run.add(tmp_path, schedule_of(backend="crontab", source="other"), source, None, replace=True)
    assert str(caught.value) == golden
    assert agenda.read(tmp_path, "nightly").source == "quick"
    assert not (agenda.folder_of(tmp_path, "nightly") / agenda.EXPERIMENT).exists()


def test_a_full_disk_at_the_end_does_not_prevent_the_notification(
    out: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    real = agenda.record

    def full(folder: Path, name: str, event: str, occasion: str, **facts: Any) -> None:
        if event != "began":
            raise OSError(28, os.strerror(28))
        real(folder, name, event, occasion, **facts)

    agenda.write(out, schedule_of(command=f"touch {out.parent / 'was-told'}"))
    monkeypatch.setattr(agenda, "record", full)
    code, said = run(out)
    assert code == 0
    assert (out.parent / "was-told").exists()
    assert said == golden
    assert last(out).outcome == "interrupted", "what could not be written is not made up"


def test_the_reason_of_a_run_is_complete_although_the_log_broke_its_line(tmp_path: Path, golden: object) -> None:
    log, report = tmp_path / "log.txt", tmp_path / "report.html"
    log.write_text("≠ 2/2 inference invalid (20.9 s): client: read up to\n5.5 ms late\nReport: report.html\n")
    runs = [{"status": "ok", "reason": None}, {"status": "invalid", "reason": "client: read up to 5.5 ms late"}]
    report.with_suffix(".json").write_text(json.dumps({"runs": runs}))
    words = "invalid (1 of 2 runs): client: read up to 5.5 ms late"
    assert scheduled_run._failure_reason(log, report) == words
    lost = {"fails": True, "verdict": "INVALID(client)", "reasons": ["client: read up to 5.5 ms late"]}
    told = {"runs": runs[:1], "served": [{"fails": False, "verdict": "VALID", "reasons": []}, lost]}
    report.with_suffix(".json").write_text(json.dumps(told))
    text = scheduled_run._failure_reason(log, report)
    assert text == golden
    assert "INVALID" in text
    assert "5.5" in text
    report.with_suffix(".json").write_text("{")
    assert str(scheduled_run._failure_reason(log, report)).startswith("≠ 2/2 inference invalid")
    log.write_text("paceline: model: 'x' was given\n")
    assert scheduled_run._failure_reason(log, report) == "model: 'x' was given"
