"""A process that is killed, or a machine that loses power, at any write of a run: afterwards the whole run or none.

The story is one launch: an older one moves aside, ranks write samples and outcomes, the controller seals and amends
the seal. It is ended at each of its operations on files, over 200 of them. After a power loss, what was not synced may
be missing in several ways; after a kill, everything that was written is there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status, StepSample

STEPS, RANKS, FEWEST_POINTS = 30, 2, 200
# Everything by which Python changes files.
OPERATIONS = frozenset({"open", "write", "flush", "close", "__exit__", "fsync", "rename", "replace", "unlink", "mkdir"})
Step, OutcomeOf = Callable[..., StepSample], Callable[..., Outcome]


def story(out: Path, spec: RunSpec, step: Step, outcome: OutcomeOf) -> None:
    run_dir = store.create(out, spec)
    for rank in range(RANKS):
        with (run_dir / f"samples-{rank}.jsonl").open("a") as samples:
            for number in range(STEPS):
                samples.write(store.sample_line(step(rank, number)))
                samples.flush()
        store.write_outcome(run_dir, outcome(rank))
    store.write_json(run_dir / "machine-node-a.json", {"host": "node-a"})
    (run_dir / "log.txt").write_text("done\n")
    store.seal(run_dir, Status.OK, None, 200.0, 260.0)
    store.note_repeats(run_dir, 1)


def profile(each: Callable[[], None]) -> Callable[[FrameType, str, Any], None]:
    """Call `each` before every operation on files."""

    def hook(_frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in OPERATIONS:
            each()

    return hook


class Bench:
    def __init__(self, folder: Path, spec: RunSpec, step: Step, outcome: OutcomeOf) -> None:
        self.out, self.spec, self.step, self.outcome = folder / "results", spec, step, outcome
        self.run_dir = self.out / spec.experiment / spec.run_id
        store.create(self.out, spec)
        store.write_json(self.run_dir / "machine-old.json", {"host": "old"})
        store.seal(self.run_dir, Status.FAILED, "the launch before", 100.0, 160.0)
        self.before = store.read_run(self.run_dir)
        self.empty = _state(self.out)

    def reset(self) -> None:
        _write(self.out, *self.empty)

    def tell(self) -> None:
        story(self.out, self.spec, self.step, self.outcome)

    def after(self) -> str:
        """What is there now: the run before, no finished run, or the whole new run. Damage would be an exception."""
        if not store.is_sealed(self.run_dir):
            return "none"
        record = store.read_run(self.run_dir)
        if record.status is Status.FAILED:
            assert record == self.before
            return "before"
        assert record == dataclasses.replace(self.whole, repeated=record.repeated)
        return "whole"

    def tell_all(self) -> None:
        self.tell()
        self.whole: RunRecord = store.read_run(self.run_dir)
        assert len(self.whole.steps) == STEPS * RANKS


def made_in(folder: Path, make_spec: Any, make_step: Step, make_outcome: OutcomeOf) -> Bench:
    made = Bench(folder, make_spec("ddp", RANKS), make_step, make_outcome)
    made.tell_all()
    made.reset()
    assert made.after() == "before"
    return made


@pytest.fixture
def bench(tmp_path: Path, make_spec: Any, make_step: Step, make_outcome: OutcomeOf) -> Iterator[Bench]:
    yield made_in(tmp_path, make_spec, make_step, make_outcome)
    sys.setprofile(None)


def killed_at_every_write(bench: Bench) -> list[str]:
    """What is there after each kill, and last after a launch that nobody killed."""
    seen: list[str] = []
    while True:
        pid = os.fork()
        if pid == 0:
            left = len(seen)

            def end_in_time() -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(9)  # as a kill does: no buffer is written, nothing is closed

            sys.setprofile(profile(end_in_time))
            bench.tell()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seen.append(bench.after())
        bench.reset()
        if code == 0:
            return seen


def test_a_kill_at_every_write_leaves_the_whole_run_or_none(
    tmp_path: Path, environment: Callable[..., dict[str, str]]
) -> None:
    """In a small process of its own: forking one of pytest that has imported torch takes ten times as long."""
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) > FEWEST_POINTS
    # It becomes whole at one moment and stays it.
    assert seen == sorted(seen, key=["before", "none", "whole"].index)
    assert set(seen) == {"before", "none", "whole"}


# A file or a directory by its number, so that names may move: contents, and the names in each directory.
State = tuple[dict[int, bytes], dict[int, dict[str, int]], int]


def _state(root: Path) -> State:
    contents: dict[int, bytes] = {}
    names: dict[int, dict[str, int]] = {}
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        children = {path.name: path.stat().st_ino for path in folder.iterdir()}
        names[folder.stat().st_ino] = children
        contents |= {path.stat().st_ino: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return contents, names, root.stat().st_ino


def _write(root: Path, contents: dict[int, bytes], names: dict[int, dict[str, int]], top: int) -> None:
    """Make the files of a state below `root`, which is emptied first."""
    shutil.rmtree(root, ignore_errors=True)
    pending = [(root, top)]
    while pending:
        folder, number = pending.pop()
        folder.mkdir()
        for name, child in names.get(number, {}).items():
            if child in contents:
                (folder / name).write_bytes(contents[child])
            else:
                pending.append((folder / name, child))


class Disk:
    """What is certainly on the disk: contents and names as they were when they were last synced."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.contents, self.names, _ = _state(root)
        self.states: list[tuple[State, State]] = []
        fsync = os.fsync

        def sync(handle: int) -> None:
            fsync(handle)
            hook = sys.getprofile()
            sys.setprofile(None)
            number, now = os.fstat(handle).st_ino, _state(self.root)
            if number in now[1]:
                self.names[number] = now[1][number]
            else:
                self.contents[number] = now[0][number]
            sys.setprofile(hook)

        monkeypatch.setattr(os, "fsync", sync)

    def look(self) -> None:
        hook = sys.getprofile()
        sys.setprofile(None)
        now = _state(self.root)
        self.states.append((now, (dict(self.contents), dict(self.names), now[2])))
        sys.setprofile(hook)


def test_a_power_loss_at_every_write_leaves_the_whole_run_or_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk = Disk(bench.out, patch)
        sys.setprofile(profile(disk.look))
        bench.tell()
        sys.setprofile(None)
    assert len(disk.states) > FEWEST_POINTS
    seen: dict[str, list[str]] = {"only what was synced": [], "names without contents": [], "half of the contents": []}
    for (contents, names, top), (kept, kept_names, _) in disk.states:
        # Unsynced names may be on the disk or not; an unsynced file may be empty or cut.
        half = {number: kept.get(number, content[: len(content) // 2]) for number, content in contents.items()}
        nothing = {number: kept.get(number, b"") for number in contents}
        variants = {
            "only what was synced": ({**nothing, **kept}, {**names, **kept_names}, top),
            "names without contents": (nothing, names, top),
            "half of the contents": (half, names, top),
        }
        for name, state in variants.items():
            _write(bench.out, *state)
            seen[name].append(bench.after())
    for results in seen.values():
        assert results == sorted(results, key=["before", "none", "whole"].index)
        assert results[-1] == "whole", "what is sealed stays"


if __name__ == "__main__":
    import conftest

    usual = (conftest.spec_of, conftest.step_of, conftest.outcome_of)
    sys.stdout.write(json.dumps(killed_at_every_write(made_in(Path(sys.argv[1]), *usual))))
