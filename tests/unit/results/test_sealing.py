"""A sealed run that was touched afterwards is damaged: the file is named, and no number comes from it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import DamagedRunError
from paceline.results import capsule, sealing, store
from paceline.results.records import Status

Make = Callable[..., Any]
CAPSULE = Path(__file__).parents[2] / "golden" / "capsules" / "schema-1.tar.gz"


@pytest.fixture
def run_dir(tmp_path: Path, make_spec: Make, make_run: Make, reseal: Make) -> Path:
    folder: Path = make_run(tmp_path / "results", make_spec("ddp", 2))
    store.write_json(folder / "machine-node-a.json", {"host": "node-a", "cores": 2})
    (folder / "log.txt").write_text("step 1\n")
    (folder / "progress-0").write_bytes(b"0" * 10)
    reseal(folder)
    return folder


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "samples cut to a fifth": (
        lambda d: os.truncate(d / "samples-0.jsonl", (d / "samples-0.jsonl").stat().st_size // 5),
        "samples-0.jsonl: got ",
    ),
    "durations a tenth": (lambda d: _edited(d / "samples-1.jsonl", "0.5", "0.1"), "samples-1.jsonl was changed"),
    "a line repeated": (
        lambda d: (d / "samples-0.jsonl").write_text((d / "samples-0.jsonl").read_text() * 2),
        "samples-0.jsonl: got ",
    ),
    "a byte of the spec": (lambda d: _flipped(d / "spec.json"), "spec.json was changed"),
    "an edited spec": (lambda d: _edited(d / "spec.json", '"steps": 4', '"steps": 3'), "spec.json was changed"),
    "a byte of an outcome": (lambda d: _flipped(d / "outcome-1.json"), "outcome-1.json was changed"),
    "a byte of a machine": (lambda d: _flipped(d / "machine-node-a.json"), "machine-node-a.json was changed"),
    "a cut log": (lambda d: os.truncate(d / "log.txt", 2), "log.txt: got 2 bytes, expected 7"),
    "an edited log": (lambda d: _flipped(d / "log.txt"), "log.txt was changed"),
    "no spec": (lambda d: (d / "spec.json").unlink(), "spec.json is missing"),
    "no outcome": (lambda d: (d / "outcome-0.json").unlink(), "outcome-0.json is missing"),
    "one rank more": (
        lambda d: shutil.copyfile(d / "samples-1.jsonl", d / "samples-2.jsonl"),
        "samples-2.jsonl was added",
    ),
    "one outcome more": (
        lambda d: shutil.copyfile(d / "outcome-1.json", d / "outcome-2.json"),
        "outcome-2.json was added",
    ),
    "a pipe": (lambda d: ((d / "samples-0.jsonl").unlink(), os.mkfifo(d / "samples-0.jsonl")), "is not a regular file"),
    "another status": (
        lambda d: _edited(d / "status.json", '"status": "ok"', '"status": "oom"'),
        "status.json was changed",
    ),
    "another digest": (lambda d: _edited(d / "status.json", '"sha256": "', '"sha256": "0'), "status.json was changed"),
    "no digests": (
        lambda d: (d / "status.json").write_text('{"status": "ok", "error": null, "started_at": 1, "ended_at": 2}'),
        "status.json has no digests",
    ),
    "an empty seal": (lambda d: (d / "status.json").write_text(""), "status.json cannot be read"),
    "a list for a seal": (lambda d: (d / "status.json").write_text("[]"), "status.json is a list"),
    "a seal of gigabytes": (lambda d: os.truncate(d / "status.json", 2**32), "status.json cannot be read"),
    "a seal nested deep": (lambda d: (d / "status.json").write_text("[" * 100_000), "status.json cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_touched_run_is_damaged_and_its_file_is_named(run_dir: Path, case: str) -> None:
    assert len(store.read_run(run_dir).steps) == 8
    damage, words = DAMAGES[case]
    damage(run_dir)
    with pytest.raises(DamagedRunError) as caught:
        store.read_run(run_dir)
    assert str(caught.value).startswith(f"{run_dir}: damaged: ")
    assert words in str(caught.value)
    assert store.read_runs(run_dir.parent) == ([], [str(caught.value)])


def test_any_flipped_bit_of_any_file_is_seen(run_dir: Path) -> None:
    for path in sorted(p for p in run_dir.iterdir() if p.name != "progress-0"):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(DamagedRunError, match=path.name):
                store.read_run(run_dir)
        path.write_bytes(whole)
    assert store.read_run(run_dir).status is Status.OK


def test_a_file_that_grows_while_it_is_checked_is_damaged(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size was still right when it was looked at, and its content becomes part of the record."""
    entry = json.loads((run_dir / "status.json").read_text())["files"]["samples-0.jsonl"]
    with (run_dir / "samples-0.jsonl").open("ab") as file:
        file.write(b"{}\n")
    kept: list[bytes] = []
    real = os.fstat

    def before(descriptor: int) -> os.stat_result:
        return os.stat_result((*real(descriptor)[:6], entry["bytes"], *real(descriptor)[7:]))

    monkeypatch.setattr(sealing.os, "fstat", before)
    with pytest.raises(DamagedRunError, match="was changed"):
        sealing._check_file(run_dir, "samples-0.jsonl", entry, lambda name, content: kept.append(content))
    assert not kept


def test_several_threads_check_a_large_run_as_one_does(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store.read_run(run_dir)
    monkeypatch.setattr(sealing, "_THREADED_FROM_BYTES", 0)
    assert store.read_run(run_dir) == whole
    for name in ("samples-1.jsonl", "outcome-1.json"):
        _flipped(run_dir / name)
    # The first in the order of the seal.
    with pytest.raises(DamagedRunError, match=r"outcome-1\.json was changed"):
        store.read_run(run_dir)


def test_a_copy_under_another_name_is_no_second_run(run_dir: Path) -> None:
    shutil.copytree(run_dir, run_dir.with_name("other"))
    records, skipped = store.read_runs(run_dir.parent)
    assert [Path(r.path).name for r in records] == [run_dir.name]
    assert skipped == [
        f"{run_dir.with_name('other')}: damaged: the directory is not named '{run_dir.name}', as its spec.json says"
    ]


def test_what_may_change_after_the_seal(run_dir: Path) -> None:
    """A process that ends late prints its last line, positions are overwritten, users add reports and notes."""
    with (run_dir / "log.txt").open("a") as log:
        log.write("terminated\n")
    (run_dir / "progress-0").write_bytes(b"1" * 10)
    (run_dir / "notes.md").write_text("looks good")
    (run_dir / "report.json").write_text("{}")
    assert store.read_run(run_dir).status is Status.OK


def test_a_seal_covers_itself_and_is_amended_with_its_digest(run_dir: Path) -> None:
    store.note_repeats(run_dir, 2)
    assert store.read_run(run_dir).repeated == 2
    sealed = json.loads((run_dir / "status.json").read_text())
    assert sorted(sealed["files"]) == [
        *("log.txt", "machine-node-a.json", "outcome-0.json", "outcome-1.json"),
        *("samples-0.jsonl", "samples-1.jsonl", "spec.json"),
    ]
    assert sealed["files"]["log.txt"]["bytes"] == 7


def test_an_unchanged_directory_is_hashed_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    check = sealing._check_file
    monkeypatch.setattr(sealing, "_check_file", lambda d, name, *rest: hashed.append(name) or check(d, name, *rest))
    # Files that changed just now may change again within the same tick of their clock.
    store.read_run(run_dir)
    store.read_run(run_dir)
    assert len(hashed) == 14
    monkeypatch.setattr(sealing, "_SETTLED_NS", -(10**12))
    store.read_run(run_dir)
    store.read_run(run_dir)
    assert len(hashed) == 21
    _flipped(run_dir / "samples-0.jsonl")
    with pytest.raises(DamagedRunError):
        store.read_run(run_dir)


class TestEveryVerb:
    """A damaged run is named by every verb that reads results, and its neighbours are reported as without it."""

    @pytest.fixture
    def results(self, tmp_path: Path) -> Path:
        """Two launches and their reference in `results`, one of the launches damaged; it is missing in `healthy`."""
        capsule.unpack(CAPSULE, tmp_path)
        shutil.move(tmp_path / "capsule/runs/tiny", tmp_path / "results")
        shutil.copytree(tmp_path / "results", tmp_path / "healthy")
        self.bad = next(p for p in store.run_dirs(tmp_path / "results") if "-r1-" in p.name)
        shutil.rmtree(tmp_path / "healthy" / self.bad.name)
        _edited(self.bad / "samples-0.jsonl", '"duration_s": 0.', '"duration_s": 0.0')
        self.damage = "damaged: samples-0.jsonl: got "
        return tmp_path

    def test_the_report_of_the_neighbours_is_unchanged(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        reports = []
        for name in ("results", "healthy"):
            cli.main(["report", str(results / name), "--format", "json"])
            reports.append(json.loads((results / name / "report.json").read_text()))
        shown = "".join(capsys.readouterr().out.split())
        assert "".join(f"skipped: {self.bad}: {self.damage}".split()) in shown
        assert [*map(len, (reports[0]["skipped"], reports[1]["skipped"]))] == [1, 0]
        for key in ("runs", "measurements", "certificates"):
            assert reports[0][key] == reports[1][key]

    def test_show(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["show", str(self.bad)]) == 1
        assert self.damage in capsys.readouterr().err

    def test_compare_and_its_gate(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["compare", str(results / "healthy"), str(results / "results"), "--format", "json"]
        cli.main(arguments)
        assert self.damage in json.loads(capsys.readouterr().out)["skipped"][0]
        assert cli.main([*arguments, "--fail-on-regression", "5"]) == 1
        assert "the gate cannot pass with damaged runs" in capsys.readouterr().err

    def test_history(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["history", str(results / "results"), "--format", "json"])
        assert self.damage in json.loads(capsys.readouterr().out)["skipped"][0]

    def test_status(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["status", "--out", str(results / "results")])
        shown = capsys.readouterr().out
        assert "1 damaged, 2 ok" in shown
        assert f"{self.bad.name}: {self.damage}" in shown

    def test_capsule(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["capsule", str(results / "results"), str(results / "c.tar.gz")]) == 0
        shown = capsys.readouterr().out
        assert self.damage in shown
        assert "2 runs" in shown


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("started_at", 1e18, "started_at: got 1e"),
        ("ended_at", -1.0, "ended_at: got -1.0"),
        ("evidence", {"shape": {"name": "tiny"}}, "is missing"),
    ],
)
def test_a_seal_of_values_that_cannot_be_is_damaged(
    run_dir: Path, reseal: Make, field: str, value: Any, problem: str
) -> None:
    path = run_dir / "outcome-0.json"
    outcome = json.loads(path.read_text())
    changed = {**outcome["evidence"], **value} if field == "evidence" else value
    path.write_text(json.dumps({**outcome, field: changed}))
    reseal(run_dir)
    with pytest.raises(DamagedRunError, match=r"outcome-0\.json") as damage:
        store.read_run(run_dir)
    assert problem in str(damage.value)
