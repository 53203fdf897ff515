from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DamagedRunError, RequestError, StoreError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.results import store
from paceline.results.records import MemorySample, RunRecord, Sample, Status, TraceSample, WireSample
from paceline.results.samples import read_samples

Make = Callable[..., Any]


@pytest.fixture
def spec(make_spec: Callable[..., RunSpec]) -> RunSpec:
    return make_spec("ddp", 2)


def test_a_run_reads_back_as_it_was_written(tmp_path: Path, spec: RunSpec, make_run: Make, make_step: Make) -> None:
    shared = {"rank": 1, "step": 4}
    samples = [
        make_step(0, 0, loss=1.25, grad_norm=None, data_digest=2**64 - 1),
        make_step(1, 0),
        MemorySample(
            rank=0, moment="steps", allocated_bytes=None, reserved_bytes=None, device_bytes=None, resident_bytes=5
        ),
        WireSample(**shared, operation="all_reduce", dtype="fp32", group_size=2, calls=3, payload_bytes=12),
        TraceSample(rank=1, steps=2, wall_s=1.0, compute_s=0.5, communication_s=0.4, exposed_s=0.1),
    ]
    run_dir = make_run(tmp_path, spec, Status.OK, samples=samples)
    record = store.read_run(run_dir)
    assert record.spec == spec
    assert (record.status, record.error, record.started_at, record.ended_at) == (Status.OK, None, 100.0, 160.0)
    assert record.steps == tuple(samples[:2])
    assert [*record.memory, *record.wire, *record.traces] == samples[2:]
    assert [o.rank for o in record.outcomes] == [0, 1]
    assert record.evidence is not None
    assert record.evidence.init_digest == "abc"


def test_a_run_stored_with_options_at_their_default_is_read_in_its_folder(
    tmp_path: Path, make_spec: Make, make_run: Make
) -> None:
    """Experiments leave them out today; folders written before did not."""
    run_dir = make_run(tmp_path, make_spec("mesh:tp=2,sequence=true", 2), Status.OK, samples=[])
    record = store.read_run(run_dir)
    assert run_dir.name.startswith("mesh-tp-2-sequence-true-")
    assert record.spec.cell == make_spec("mesh:tp=2", 2).cell
    assert record.spec.axes()["strategy"] == "mesh:tp=2"


def test_the_run_folder_has_the_documented_path(tmp_path: Path, spec: RunSpec) -> None:
    assert store.create(tmp_path, spec) == tmp_path / "test" / spec.run_id
    assert json.loads((tmp_path / "test" / spec.run_id / "spec.json").read_text())["schema"] == 1


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    store.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        store.write_json(path, {"a": object()})
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    """The new text is complete under another name before the old one is replaced."""
    path = tmp_path / "x.json"
    store.write_json(path, {"a": 1})
    code = (
        "import os, sys, pathlib; from paceline.results import store\n"
        "pathlib.Path.replace = lambda *_: os._exit(9)\n"
        f"store.write_json(pathlib.Path({str(path)!r}), {{'a': 2}})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert json.loads(path.read_text()) == {"a": 1}


def test_only_the_seal_makes_a_run_complete(tmp_path: Path, spec: RunSpec, make_run: Make, golden: object) -> None:
    run_dir = make_run(tmp_path, spec, None)
    assert not store.is_sealed(run_dir)
    with pytest.raises(StoreError) as caught:
        store.read_run(run_dir)
    assert str(caught.value) == golden
    assert len(store.read_unsealed(run_dir, started_at=0.0, ended_at=1.0).steps) == 8
    store.seal(run_dir, Status.FAILED, "why", 1.0, 2.0)
    assert store.read_run(run_dir).error == "why"
    assert store.read_run(run_dir).lost_nodes == ()


def test_the_seal_masks_secrets_that_a_process_printed(
    tmp_path: Path, spec: RunSpec, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "correct-horse-battery")
    run_dir = make_run(tmp_path, spec, None)
    (run_dir / "log.txt").write_text("key: correct-horse-battery\n")
    store.seal(run_dir, Status.OK, None, 1.0, 2.0)
    assert "horse" not in (run_dir / "log.txt").read_text()
    assert store.read_run(run_dir).status is Status.OK


def test_a_fresh_attempt_sets_the_earlier_ones_aside(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    for attempt in range(3):
        run_dir = make_run(tmp_path, spec, Status.FAILED, f"attempt {attempt}")
    assert store.read_run(run_dir).error == "attempt 2"
    errors = [json.loads((run_dir / "attempts" / n / "status.json").read_text())["error"] for n in ("1", "2")]
    assert errors == ["attempt 0", "attempt 1"]
    assert store.run_dirs(tmp_path) == [run_dir], "attempts are not runs"


def test_an_earlier_launch_can_take_its_place_again(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    for status, error in ((Status.OK, None), (Status.FAILED, "later")):
        run_dir = make_run(tmp_path, spec, status, error)
    store.restore(run_dir, 1)
    store.note_repeats(run_dir, 1)
    record = store.read_run(run_dir)
    assert (record.status, record.error, record.repeated, len(record.steps)) == (Status.OK, None, 1, 8)
    assert [path.name for path in (run_dir / "attempts").iterdir()] == ["2"]
    assert json.loads((run_dir / "attempts/2/status.json").read_text())["error"] == "later"
    # A run that was launched once has no such key.
    assert "repeated" not in json.loads((run_dir / "attempts/2/status.json").read_text())


def test_a_last_line_cut_short_is_dropped(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    run_dir = make_run(tmp_path, spec)
    path = run_dir / "samples-0.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert [s.step for s in read_samples(path)] == [0, 1, 2]
    path.write_text(whole + '{"kind": "st')
    assert [s.step for s in read_samples(path)] == [0, 1, 2, 3]
    path.write_text("")
    assert list(read_samples(path)) == []


# What the run itself, or a careful forger, may have left: sealed, and still nothing that can be used.
CONTENTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "middle of the samples": (
        "samples-1.jsonl",
        lambda p: p.write_text(p.read_text().replace('"rank"', '"ra', 1)),
        "samples-1.jsonl is not valid JSON",
    ),
    "unknown field": (
        "samples-0.jsonl",
        lambda p: p.write_text(p.read_text().replace('"rank"', '"colour": 1, "rank"', 1)),
        "samples-0.jsonl, line 1: colour is unknown",
    ),
    "field missing": (
        "samples-0.jsonl",
        lambda p: p.write_text('{"kind": "memory"}\n'),
        "samples-0.jsonl, line 1: allocated_bytes is missing",
    ),
    "unknown kind": ("samples-0.jsonl", lambda p: p.write_text('{"kind": "dream"}\n'), "line 1: got the kind 'dream'"),
    "no object": ("samples-0.jsonl", lambda p: p.write_text("3\n"), "samples-0.jsonl, line 1: got a int"),
    "bytes": ("samples-0.jsonl", lambda p: p.write_bytes(b"\xff\xfe\n"), "samples-0.jsonl cannot be read"),
    "spec without a schema": ("spec.json", lambda p: p.write_text("{}"), "schema: got None"),
    "spec cut": ("spec.json", lambda p: p.write_text(p.read_text()[:50]), "spec.json cannot be read"),
    "newer schema": (
        "spec.json",
        lambda p: p.write_text(p.read_text().replace('"schema": 1', '"schema": 2')),
        "schema: got 2, expected 1",
    ),
    "impossible spec": (
        "spec.json",
        lambda p: p.write_text(p.read_text().replace('"steps": 4', '"steps": 0')),
        "spec.json: steps: got 0, expected a whole number from 1",
    ),
    "another spec": (
        "spec.json",
        lambda p: p.write_text(p.read_text().replace('"steps": 4', '"steps": 3')),
        "the directory is not named",
    ),
    "outcome": ("outcome-0.json", lambda p: p.write_text("{"), "outcome-0.json cannot be read"),
    "outcome field": (
        "outcome-0.json",
        lambda p: p.write_text('{"status": "ok"}'),
        "outcome-0.json: ended_at is missing",
    ),
    "nested": ("outcome-0.json", lambda p: p.write_text("[" * 100_000 + "]" * 100_000), "outcome-0.json cannot be"),
    "nested less": ("outcome-0.json", lambda p: p.write_text('{"a":' * 200 + "1" + "}" * 200), "than 100 levels"),
    "nested samples": (
        "samples-0.jsonl",
        lambda p: p.write_text("[" * 100_000 + "]" * 100_000 + "\n"),
        "samples-0.jsonl is not valid JSON",
    ),
    "machine": (
        "machine-a.json",
        lambda p: p.write_text('{"gpus": [{"name": 3}]}'),
        "machine-a.json: gpus[0].name: got 3, expected text",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_cannot_be_is_one_sentence_and_the_folder_is_skipped(
    tmp_path: Path, make_spec: Make, make_run: Make, reseal: Make, name: str
) -> None:
    good = make_run(tmp_path, make_spec("fsdp2"))
    bad = make_run(tmp_path, make_spec("ddp"))
    file, damage, words = CONTENTS[name]
    damage(bad / file)
    reseal(bad)
    with pytest.raises(StoreError) as caught:
        store.read_run(bad)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{bad}: ")
    assert "\n" not in str(caught.value)
    records, skipped = store.read_runs(tmp_path)
    assert [r.path for r in records] == [str(good)]
    assert skipped == [str(caught.value)]


NO_NUMBERS = {
    "negative duration": ("duration_s", -0.5, "got -0.5, expected a number above 0"),
    "no duration": ("duration_s", 0.0, "got 0.0, expected a number above 0"),
    "NaN duration": ("duration_s", float("nan"), "got nan, expected a number above 0"),
    "endless": ("duration_s", float("inf"), "got inf, expected a number above 0"),
    "text": ("duration_s", "0.5", "got '0.5', expected a number above 0"),
    "true": ("duration_s", True, "got True, expected a number above 0"),
    "negative tokens": ("tokens", -64, "got -64, expected a whole number from 0"),
    "half a token": ("tokens", 64.5, "got 64.5, expected a whole number from 0"),
    "a count beyond any": ("tokens", 10**300, "got about 2**997, expected a whole number from 0"),
    "null": ("tokens", None, "got None, expected a whole number from 0"),
    "negative phase": ("forward_s", -1e-9, "got -1e-09, expected a number from 0 or null"),
    "a list": ("loss", [1.0], "got a list, expected a number"),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_a_value_that_cannot_be_is_never_a_number(
    tmp_path: Path, spec: RunSpec, make_run: Make, reseal: Make, name: str
) -> None:
    run_dir = make_run(tmp_path, spec)
    path, (field, value, words) = run_dir / "samples-1.jsonl", NO_NUMBERS[name]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2][field] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reseal(run_dir)
    with pytest.raises(DamagedRunError) as caught:
        store.read_run(run_dir)
    assert str(caught.value) == f"{run_dir}: damaged: samples-1.jsonl, line 3: {field}: {words}"


def test_many_runs_are_read_by_several_processes_as_by_one(
    tmp_path: Path, make_spec: Make, make_run: Make, make_step: Make, reseal: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [make_spec("ddp", repeat=repeat) for repeat in range(6)]
    samples = [make_step(rank, step, data_digest=2**64 - 1, grad_norm=None) for rank in (0, 1) for step in range(3)]
    folders = [make_run(tmp_path, spec, samples=samples) for spec in specs]
    (folders[2] / "samples-1.jsonl").write_text("3\n")
    reseal(folders[2])
    (folders[3] / "samples-1.jsonl").write_text("3\n")
    (folders[4] / "status.json").unlink()
    make_run(tmp_path / "again", specs[0])
    alone = store.read_runs(tmp_path)
    readers: list[int] = []
    pool = store.forked_pool
    monkeypatch.setattr(store, "forked_pool", lambda size: readers.append(size) or pool(size))
    monkeypatch.setattr(store, "PARALLEL_FROM", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert store.read_runs(tmp_path) == alone
    assert len(alone[0]) == 3
    assert len(alone[1]) == 4
    # This process reads a share, too.
    assert readers == ([1] if sys.platform == "linux" else [])


def _works_and_runs(launches: list[RunRecord]) -> list[tuple[int, int]]:
    return sorted((record.spec.seed, record.spec.repeat) for record in launches)


def test_runs_of_one_work_are_judged_together(
    tmp_path: Path, make_spec: Make, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A work with more than a fair share of the runs is read by all processes and judged by none."""
    for seed, launches in ((1, 2), (2, 2), (3, 1), (4, 7)):
        for repeat in range(launches):
            make_run(tmp_path, make_spec("ddp", repeat=repeat, seed=seed))
    monkeypatch.setattr(store, "PARALLEL_FROM", 1)
    monkeypatch.setattr(store, "LEAST_SHARE", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    records, skipped, parts = store.read_judged(tmp_path, _works_and_runs)
    assert records == [store.read_run(folder) for folder in store.run_dirs(tmp_path)]
    assert skipped == []
    if sys.platform == "linux":
        assert sorted(parts) == [[(1, 0), (1, 1), (2, 0), (2, 1)], [(3, 0)]]


LINES = {
    "another order of keys": lambda row: dict(reversed(row.items())),
    "without a field that has a default": lambda row: {key: row[key] for key in row if key != "variant"},
    "missing values": lambda row: row | {"h2d_s": None, "grad_norm": None, "forward_s": None},
    "whole numbers for seconds": lambda row: row | {"duration_s": 1, "loss": 5},
    "no number": lambda row: row | {"loss": float("nan"), "grad_norm": float("-inf")},
    "large numbers": lambda row: row | {"data_digest": 2**64 - 1, "tokens": 2**40, "h2d_bytes": 2**80},
}


@pytest.mark.parametrize("name", LINES)
def test_steps_of_a_run_are_the_samples_of_its_lines(
    tmp_path: Path, spec: RunSpec, make_run: Make, reseal: Make, name: str
) -> None:
    """A run keeps columns; whatever stands in the lines, they say what the lines say, in the same order."""
    run_dir = make_run(tmp_path, spec)
    path = run_dir / "samples-1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] = LINES[name](rows[1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reseal(run_dir)
    found = [*read_samples(run_dir / "samples-0.jsonl"), *read_samples(path)]
    steps = store.read_run(run_dir).steps
    assert [*map(_values, steps)] == [*map(_values, found)]
    assert _values(steps[-3]) == _values(found[-3])
    assert [*map(_values, steps[3:6])] == [*map(_values, found[3:6])]


def _values(sample: Sample) -> dict[str, object]:
    """A loss that is no number is not even equal to itself."""
    return {key: "nan" if value != value else value for key, value in dataclasses.asdict(sample).items()}


def test_an_interrupted_run_is_reported_too(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    make_run(tmp_path, spec, None)
    records, skipped = store.read_runs(tmp_path)
    assert records == []
    assert len(skipped) == 1


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_a_launch_that_is_not_ok_never_hides_one_that_is(
    tmp_path: Path, spec: RunSpec, make_run: Make, status: Status, golden: object
) -> None:
    good, bad = make_run(tmp_path / "a", spec), make_run(tmp_path / "b", spec, status)
    store.seal(bad, status, "no", 500.0, 501.0)
    for launches in ([good, bad], [bad, good]):
        standing, others, sentences = store.newest(map(store.read_run, launches))
        assert [r.path for r in standing] == [str(good)]
        assert [r.path for r in others] == [str(bad)]
        assert sentences == golden


def test_of_launches_with_one_outcome_the_newest_counts(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    for status in (Status.OK, Status.FAILED):
        old, new = make_run(tmp_path / f"{status}-a", spec, status), make_run(tmp_path / f"{status}-b", spec, status)
        store.seal(new, status, None, 500.0, 501.0)
        assert [r.path for r in store.newest(map(store.read_run, [new, old]))[0]] == [str(new)]


SECRETS = ("hf_abcdefgh1234", "AKIAABCDEFGH1234", "https://me:hunter22@example.org/x")


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_a_message_is_neither_stored_nor_read(
    tmp_path: Path, spec: RunSpec, make_run: Make, make_outcome: Make, reseal: Make, secret: str
) -> None:
    outcome = make_outcome(0, Status.FAILED, f"got {secret}")
    run_dir = make_run(tmp_path, spec, Status.FAILED, f"got {secret}", outcomes=[outcome])
    assert not any(secret in path.read_text() for path in run_dir.glob("*.json"))
    (run_dir / "outcome-0.json").write_text((run_dir / "outcome-0.json").read_text().replace(redaction.MARK, secret))
    facts = {"cpu": f"x {secret}", "environment": {"NCCL_NOTE": secret, "OMP_NUM_THREADS": "1"}}
    store.write_json(run_dir / "machine-a.json", facts)
    reseal(run_dir, error=f"got {secret}")
    record = store.read_run(run_dir)
    assert secret not in repr(record)
    assert redaction.MARK in (record.error or "")
    assert record.machines[0]["environment"] == {"OMP_NUM_THREADS": "1"}


# Clear the screen, eight-bit CSI, return, delete, right-to-left override, isolate.
CONTROLS = "\x1b[2J \x9b31m \r \x7f \u202e \u2066"


def test_what_would_command_a_terminal_is_neutral_when_read(
    tmp_path: Path, make_spec: Make, make_run: Make, make_outcome: Make, make_evidence: Make, reseal: Make
) -> None:
    spec = make_spec(data=Choice("tokens", {"path": CONTROLS}))
    outcome = make_outcome(0, Status.FAILED, CONTROLS, evidence=make_evidence(settings={CONTROLS: CONTROLS}))
    wire = WireSample(rank=0, step=0, operation=CONTROLS, dtype="fp32", group_size=2, calls=3, payload_bytes=12)
    run_dir = make_run(tmp_path, spec, Status.FAILED, f"a\tb\n{CONTROLS}", samples=[wire], outcomes=[outcome])
    (run_dir / "machine-a.json").write_text(json.dumps({"host": CONTROLS}, ensure_ascii=False))
    reseal(run_dir)
    record = store.read_run(run_dir)
    seen = [
        str(record.error), str(record.spec.training.data.options["path"]), record.wire[0].operation,
        str(record.outcomes[0].error), *record.outcomes[0].evidence.settings, record.machines[0]["host"],
    ]  # fmt: skip
    for text in seen:
        assert not set(text) & set("\x1b\x9b\r\x7f\u202e\u2066")
        assert "\ufffd[2J" in text
    assert seen[0].startswith("a\tb\n"), "what only arranges text stays"


def test_a_folder_that_is_skipped_is_named_harmlessly(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    make_run(tmp_path / "\x1b[2J", spec, None)
    (sentence,) = store.read_runs(tmp_path)[1]
    assert "\x1b" not in sentence
    assert "\ufffd[2J" in sentence


def test_a_look_at_the_lock_makes_nothing_and_holds_nothing(tmp_path: Path, golden: object) -> None:
    store.require_free(tmp_path / "absent")
    store.require_free(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with store.exclusive(tmp_path), pytest.raises(RequestError) as caught:
        store.require_free(tmp_path)
    assert str(caught.value) == golden
    store.require_free(tmp_path)
    with store.exclusive(tmp_path):
        pass


def test_only_one_controller_writes(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from paceline import errors; from paceline.results import store\n"
        "try:\n"
        f"    with store.exclusive(pathlib.Path({str(tmp_path)!r})): print('mine')\n"
        "except errors.RequestError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    with store.exclusive(tmp_path):
        assert "in use by another" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "mine\n"


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path, spec: RunSpec, golden: object) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError) as caught:
        store.create(tmp_path / "file", spec)
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught, store.exclusive(tmp_path / "file" / "x"):
        pass
    assert str(caught.value) == golden


def test_progress_is_read_while_it_moves(tmp_path: Path, golden: object) -> None:
    assert store.read_progress(tmp_path) == ()
    before = time.time()
    second, first = store.ProgressFile(tmp_path, 1), store.ProgressFile(tmp_path, 0)
    first.loss = 3.5
    first.mark(7, "backward")
    second.mark(6, "setup of variant 2")
    (tmp_path / "progress-2").write_bytes(b"half")
    a, b = store.read_progress(tmp_path)
    assert (a.rank, a.step, a.phase, a.loss) == (0, 7, "backward", 3.5)
    assert (b.rank, b.step, b.phase) == (1, 6, "setup")
    first.mark(412, "timing: 412 of 662 needed, 1 late, " + "ü" * 100)
    a, _ = store.read_progress(tmp_path)
    assert (a.step, a.phase) == (412, "timing")
    # What is too long for its place is cut, in the middle of a character too.
    assert a.note == golden
    assert "412" in a.note
    assert "662" in a.note
    assert len(a.note.encode()) <= 120
    first.mark(413, "timing")
    assert store.read_progress(tmp_path)[0].note == ""
    assert before <= a.beat <= time.time()


def test_progress_that_no_rank_can_have_written_is_ignored(tmp_path: Path) -> None:
    """Its process id may be signalled, and its phase is an index: -1 would mean every process of this user."""
    store.ProgressFile(tmp_path, 3).mark(1, "forward")
    good = (tmp_path / "progress-3").read_bytes()
    forged = {
        "progress-0": store._PROGRESS.pack(-1, 1, 1, 1.0, 1.0, 1.0, b""),
        "progress-1": store._PROGRESS.pack(7, 1, 99, 1.0, 1.0, 1.0, b""),
        "progress-2": store._PROGRESS.pack(7, 1, 1, 1.0, 1.0, math.inf, b""),
        "progress-4": store._PROGRESS.pack(7, -5, 1, 1.0, 1.0, 1.0, b""),
        "progress-5": store._PROGRESS.pack(7, 1, 1, math.nan, 1.0, 1.0, b""),
        "progress-x": good,
        "progress-0-0": good,
        f"progress-{9**9}9": good,
    }
    for name, content in forged.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "progress-9").mkdir()
    assert [(position.rank, position.step) for position in store.read_progress(tmp_path)] == [(3, 1)]
    (tmp_path / "progress-3").write_bytes(store._PROGRESS.pack(7, 1, 1, 1.0, 1.0, 1.0, b"\x1b[2Jgone"))
    assert "\x1b" not in store.read_progress(tmp_path)[0].note


@pytest.mark.parametrize("seed", range(4))
def test_any_outcome_file_is_an_outcome_or_a_failure_that_names_it(
    tmp_path: Path, make_outcome: Make, seed: int
) -> None:
    """What a node left is read while its run is in progress: whatever it is, the campaign goes on."""
    draw = random.Random(seed)
    store.write_outcome(tmp_path, make_outcome(0, Status.OK))
    good = json.loads((tmp_path / "outcome-0.json").read_text())
    values = [None, [], {}, -1, 1e999, "x" * 100_000, True, [[]], {"a": 1}, float("nan"), "\x1b[2J", 10**400]
    sound = 0
    for _ in range(150):
        raw = dict(good)
        for _ in range(draw.randint(1, 3)):
            key = draw.choice([*good, "more"])
            if draw.random() < 0.3:
                raw.pop(key, None)
            else:
                raw[key] = draw.choice(values)
        text = json.dumps(raw)
        if draw.random() < 0.3:
            text = text[: draw.randrange(len(text))]
        (tmp_path / "outcome-0.json").write_text(text)
        (outcome,) = store.reported_outcomes(tmp_path)
        assert outcome.rank == 0
        if outcome.status is Status.FAILED and outcome.error and "outcome-0.json" in outcome.error:
            with pytest.raises(StoreError, match="outcome-0"):
                store.read_outcomes(tmp_path)
        else:
            sound += 1
            assert isinstance(outcome.host, str)
            assert len(outcome.error or "") <= 70_000
    assert sound < 150


def test_an_attempt_takes_a_number_above_all_that_are_left(tmp_path: Path, make_spec: Callable[..., RunSpec]) -> None:
    run_dir = store.create(tmp_path, make_spec())
    for name in ("3", "requeued-1"):
        (run_dir / "attempts" / name).mkdir(parents=True)
    store.create(tmp_path, make_spec())
    store.create(tmp_path, make_spec())
    assert sorted(path.name for path in (run_dir / "attempts").iterdir()) == ["3", "4", "5", "requeued-1"]


def test_runs_of_an_experiment_called_attempts_are_found(tmp_path: Path, make_spec: Callable[..., RunSpec]) -> None:
    run_dir = store.create(tmp_path, dataclasses.replace(make_spec(), experiment="attempts"))
    store.create(tmp_path, dataclasses.replace(make_spec(), experiment="attempts"))
    assert (run_dir / "attempts" / "1" / "spec.json").is_file()
    assert store.run_dirs(tmp_path) == store.run_dirs(run_dir.parent) == [run_dir]
