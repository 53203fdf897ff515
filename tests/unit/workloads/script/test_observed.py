"""Real scripts, observed from inside their process: what is recorded, and what the script notices of it."""

from __future__ import annotations

import collections
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import ScriptError
from paceline.experiment.choices import Choice
from paceline.experiment.script import Script
from paceline.experiment.spec import RunSpec, Topology, Training, WarmUp
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status, StepSample
from paceline.workloads import worker
from paceline.workloads.script import process

pytestmark = pytest.mark.slow

# A loop as people write it: two micro batches a step, a schedule, clipping, evaluation between steps, a saved model.
TRAIN = """
import copy, importlib.util, io, os, sys

assert importlib.util.find_spec("torch").origin.endswith("__init__.py")
import torch

if "--ranks" in sys.argv:
    import gc, torch._dynamo  # once, not in each of them at its first step; nor do both look through it for garbage
    gc.freeze()
    child = os.fork()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0" if child == 0 else "1", "2"
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
        assert step != 4 or torch.equal(copy.deepcopy(model)(ids), model(ids))
    model.train()
    if step == 4:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        known = [torch.nn.Sequential, torch.nn.Embedding, torch.nn.Flatten, torch.nn.Linear]
        with torch.serialization.safe_globals(known):
            print("saved with", len(torch.load(file)._forward_hooks), "hooks")
    if step == 6 and "--ranks" in sys.argv and child == 0:
        raise ValueError("the data is gone")
if "--ranks" in sys.argv:
    print("rank 0 ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(f"loss {loss.item():.4f}")
sys.exit(7 if "--ranks" in sys.argv else 0)
"""
Observe = Callable[..., RunRecord]


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """Runs a command as the only rank of a run, and returns its record before it is sealed."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(*command: str, steps: int = 0, workload: str = "script") -> RunRecord:
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
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(train, run_name="__main__")
    bare = capfd.readouterr()
    assert printed == bare
    assert printed.out.startswith("saved with 0 hooks\nloss ")
    assert printed.err == ""
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


def test_a_failed_script_keeps_its_exit_code_and_the_words_of_its_ranks(observe: Observe, train: str) -> None:
    """Rank 0 raises an error after seven steps; rank 1, which started it, ends with 7 after all nine."""
    record = observe(sys.executable, train, "--ranks")
    assert record.outcomes[0].status is Status.FAILED
    assert record.outcomes[0].error == "the script ended with exit code 7: ValueError: the data is gone"
    assert len(record.steps) == 7
    (folder,) = Path(record.path).glob("script-*")
    lines = [json.loads(line) for line in (folder / "rank-1.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(9))
    code, printed = json.loads((folder / "ended").read_text())
    assert code == 7
    assert "rank 0 ended with 1" in printed
    with pytest.raises(ScriptError, match="exit code 7: rank 0: ValueError: the data is gone"):
        process.require_success(process.Output(code, collections.deque(printed)), folder, 1)


def test_a_script_that_raises_nothing_fails_with_its_last_line(observe: Observe, tmp_path: Path) -> None:
    (tmp_path / "seven.py").write_text("print('loss 3'); print(); raise SystemExit(7)")
    record = observe(sys.executable, str(tmp_path / "seven.py"))
    assert record.outcomes[0].error == "the script ended with exit code 7: loss 3"


def test_a_program_that_does_not_exist_is_one_sentence(observe: Observe) -> None:
    record = observe("no-such-launcher", "train.py")
    assert record.outcomes[0].status is Status.UNSUPPORTED
    assert record.outcomes[0].error == "command: 'no-such-launcher' cannot be started (No such file or directory)."


STAND_IN = """#!{python}
import os, sys
output = next(word.partition("=")[2] for word in sys.argv if word.startswith("--output="))
command = next(number for number, word in enumerate(sys.argv) if number > 1 and not word.startswith("-"))
with open(output + ".nsys-rep", "x") as report:
    report.write(" ".join(sys.argv[1:command]))
os.execvp(sys.argv[command], sys.argv[command:])
"""


def test_a_command_runs_under_nsys_and_keeps_its_exit_code(
    observe: Observe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in on PATH runs the command that follows its options, as nsys does."""
    nsys = tmp_path / "bin" / "nsys"
    nsys.parent.mkdir()
    nsys.write_text(STAND_IN.format(python=sys.executable))
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(nsys.parent), os.environ["PATH"])))
    (tmp_path / "three.py").write_text("raise SystemExit(3)")
    record = observe(sys.executable, str(tmp_path / "three.py"), workload="script:nsys=true")
    assert str(record.outcomes[0].error).startswith("the script ended with exit code 3: ")
    (report,) = Path(record.path).glob("script-*/nsys-0.nsys-rep")
    first, *flags, last = report.read_text().split()
    assert (first, last) == ("profile", f"--output={report.with_suffix('')}")
    assert {"--force-overwrite=true", "--sample=none"} <= {*flags}


def test_without_nsys_the_run_says_so(observe: Observe, train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    record = observe(sys.executable, train, workload="script:nsys=true")
    assert record.outcomes[0].status is Status.UNSUPPORTED
    assert record.outcomes[0].error == (
        "nsys: the program is not installed here, expected it on PATH. Leave out script.nsys."
    )


def test_a_limit_ends_a_script_whose_forward_passes_are_compiled(observe: Observe, tmp_path: Path) -> None:
    (tmp_path / "inside.py").write_text(COMPILED)
    record = observe(sys.executable, str(tmp_path / "inside.py"), steps=6)
    assert record.outcomes[0].status is Status.OK, record.outcomes[0].error
    assert [s.step for s in record.steps] == list(range(6))


# A forward pass that no hook sees, as in a model that was compiled in place.
COMPILED = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(40):
    (weight * torch.arange(4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit("the limit did not end this script")
"""


def test_a_script_that_leaves_at_once_keeps_its_last_steps(observe: Observe, tmp_path: Path) -> None:
    """`os._exit` runs no exit functions; the steps of the last group were not written yet."""
    code = SLEEPY.format(seconds=0).replace("range(100)", "range(20)").replace("import time", "import os, time")
    (tmp_path / "leaves.py").write_text(code + "os._exit(0)")
    record = observe(sys.executable, str(tmp_path / "leaves.py"))
    assert record.outcomes[0].status is Status.OK, record.outcomes[0].error
    assert len(record.steps) == 20
    assert record.evidence is not None
    assert record.evidence.final_digests


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
for step in range(100):
    model(torch.arange(8).reshape(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep({seconds})
"""


@pytest.mark.exhaustive
def test_the_gate_catches_a_slower_commit(observe: Observe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second version of the script does the same work and sleeps twenty times as long."""
    from paceline.cli import main

    script = tmp_path / "sleepy.py"
    for at, (side, seconds) in enumerate((("before", 0.005), ("after", 0.1))):
        script.write_text(SLEEPY.format(seconds=seconds))
        record = observe(sys.executable, str(script), steps=14)
        # The limit ended the script.
        assert record.outcomes[0].status is Status.OK, record.outcomes[0].error
        assert len(record.steps) == 14
        for repeat, path in enumerate((Path(record.path), repeated(record, tmp_path))):
            store.seal(path, Status.OK, None, 10.0 * at + repeat, 10.0 * at + repeat + 1)
        (tmp_path / "own").rename(tmp_path / side)
    comment = tmp_path / "comment.md"
    code = main(["gate", str(tmp_path / "before"), str(tmp_path / "after"), "--limit", "30", "--comment", str(comment)])
    assert code == 1
    assert "regression beyond 30 %: sleepy.py, 1 process: tokens_per_s" in capsys.readouterr().err
    assert "equal work: certified" in comment.read_text()


def repeated(record: RunRecord, out: Path) -> Path:
    """The directory of a second launch, which took the same times: two launches are needed for an interval."""
    path = store.create(out, replace(record.spec, repeat=1))
    for file in (*Path(record.path).glob("samples-*"), *Path(record.path).glob("outcome-*")):
        shutil.copy(file, path)
    return path
