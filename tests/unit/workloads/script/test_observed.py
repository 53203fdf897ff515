"""Real scripts, observed from inside their process: what is recorded, and what the script notices of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.experiment.choices import Choice
from paceline.experiment.script import Script
from paceline.experiment.spec import RunSpec, Topology, Training, WarmUp
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status, StepSample
from paceline.workloads import worker

# A loop as people write it: two micro batches a step, a schedule, clipping, evaluation between steps.
TRAIN = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Flatten(), torch.nn.Linear(8 * 6, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
batches = torch.Generator().manual_seed(1)
for step in range(9):
    for micro in range(2):
        ids = torch.randint(0, 40, (3, 6), generator=batches)
        loss = torch.nn.functional.cross_entropy(model(ids), ids[:, 0])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(ids)
    model.train()
    if step == 6 and "--crash" in sys.argv:
        raise ValueError("the data is gone")
print("loss", loss.item())
sys.exit(7 if "--seven" in sys.argv else 0)
"""
Observe = Callable[..., RunRecord]


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """Runs a command as the only rank of a run, and returns its record before it is sealed."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(*command: str, steps: int = 0, workload: str = "script", repeat: int = 0) -> RunRecord:
        spec = RunSpec(
            experiment="own",
            workload=Choice.parse(workload),
            model=Choice("unknown"),
            topology=Topology(device="cpu"),
            training=Training(sequence_length=1, micro_batch=1),
            steps=steps,
            script=Script(command=command),
            warmup=WarmUp(minimum=4, maximum=4, window=2),
            telemetry_hz=0,
            repeat=repeat,
        )
        run_dir = store.create(tmp_path, spec)
        recorder = worker.FolderRecorder(run_dir, 0)
        status, error = worker.attempt(run_dir, 0, recorder)
        recorder.close()
        outcome = Outcome(
            rank=0,
            status=status,
            error=error,
            host="here",
            pid=os.getpid(),
            started_at=1.0,
            ended_at=2.0,
            evidence=recorder.evidence,
        )
        store.write_outcome(run_dir, outcome)
        return store.read_unsealed(run_dir, started_at=1.0, ended_at=2.0)

    return run


@pytest.fixture
def train(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_every_step_is_seen_and_the_script_notices_nothing(
    observe: Observe, train: str, capfd: pytest.CaptureFixture[str]
) -> None:
    record = observe(sys.executable, train, workload="script:trace=2-3")
    printed = capfd.readouterr()
    plain = subprocess.run([sys.executable, train], capture_output=True, text=True, check=True)
    assert printed.out == plain.stdout
    assert (printed.err, plain.stderr) == ("", "")
    assert record.outcomes[0].status is Status.OK
    steps: list[StepSample] = list(record.steps)
    assert [s.step for s in steps] == list(range(9))
    assert {(s.micro_batches, s.samples, s.tokens, s.updates) for s in steps} == {(2, 6, 36, 1)}
    # The printed loss is that of the last micro batch; the step has the mean of both.
    assert all(0 < s.loss < 10 for s in steps)
    assert all(s.grad_norm is not None and s.grad_norm > 0 for s in steps)
    assert len({s.data_digest for s in steps}) == 9
    phases = [[s.data_wait_s, s.forward_s, s.backward_s, s.optimizer_s] for s in steps[1:]]
    assert all(x is not None and x > 0 for each in phases for x in each)
    evidence = record.evidence
    assert evidence is not None
    assert evidence.parameters == 40 * 8 + 8 * 6 * 40 + 40
    assert evidence.optimizer == {"class": "SGD"}
    assert evidence.groups is not None
    assert evidence.groups[0]["lr"] == 0.5
    assert evidence.settings["loss"] == "backward"
    assert evidence.settings["wrapper"] == "none"
    assert len(evidence.init_digests) == 3
    assert evidence.final_digests != evidence.init_digests
    trace = json.loads((Path(record.path) / "trace-0.json").read_text())
    assert {"aten::embedding", "aten::addmm"} <= {event.get("name") for event in trace["traceEvents"]}


def test_a_limit_ends_the_script_after_that_many_steps(observe: Observe, train: str) -> None:
    record = observe(sys.executable, train, steps=6)
    assert record.outcomes[0].status is Status.OK
    assert len(record.steps) == 6


def test_a_crash_is_a_failure_in_the_words_of_the_script(observe: Observe, train: str) -> None:
    record = observe(sys.executable, train, "--crash")
    assert record.outcomes[0].status is Status.FAILED
    assert record.outcomes[0].error == "the script ended with exit code 1: ValueError: the data is gone"
    assert len(record.steps) == 7


def test_an_exit_code_is_kept(observe: Observe, train: str) -> None:
    record = observe(sys.executable, train, "--seven")
    assert str(record.outcomes[0].error).startswith("the script ended with exit code 7: loss ")
    assert len(record.steps) == 9


def test_a_program_that_does_not_exist_is_one_sentence(observe: Observe) -> None:
    record = observe("no-such-launcher", "train.py")
    assert record.outcomes[0].status is Status.UNSUPPORTED
    assert record.outcomes[0].error == "command: 'no-such-launcher' cannot be started (No such file or directory)."


def test_a_script_without_a_step_is_invalid(observe: Observe, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("print('done')")
    record = observe(sys.executable, str(tmp_path / "none.py"))
    assert record.outcomes[0].status is Status.INVALID
    assert "no optimizer step was observed" in str(record.outcomes[0].error)


SLEEPY = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Embedding(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(14):
    model(torch.arange(8).reshape(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep({seconds})
"""


def test_the_gate_catches_a_slower_commit(observe: Observe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second version of the script does the same work and sleeps twenty times as long."""
    from paceline.cli import main

    script = tmp_path / "sleepy.py"
    for at, (side, seconds) in enumerate((("before", 0.005), ("after", 0.1))):
        script.write_text(SLEEPY.format(seconds=seconds))
        for repeat in range(2):
            record = observe(sys.executable, str(script), repeat=repeat)
            assert record.outcomes[0].status is Status.OK, record.outcomes[0].error
            store.seal(Path(record.path), Status.OK, None, 10.0 * at + repeat, 10.0 * at + repeat + 1)
        (tmp_path / "own").rename(tmp_path / side)
    comment = tmp_path / "comment.md"
    code = main(["gate", str(tmp_path / "before"), str(tmp_path / "after"), "--limit", "30", "--comment", str(comment)])
    assert code == 1
    assert "regression beyond 30 %: sleepy.py, 1 process: tokens_per_s" in capsys.readouterr().err
    assert "equal work: certified" in comment.read_text()
