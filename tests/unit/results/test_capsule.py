"""Capsules: the same runs give the same bytes, without secrets; a stranger's is checked before it is used."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import RequestError
from paceline.experiment import expansion, reading, recipe
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.results import capsule, store
from paceline.results.launches import read_experiment
from paceline.results.records import GaugeSample, Status

GOLDEN = Path(__file__).parents[2] / "golden" / "capsules"
MACHINE = {
    "host": "node-a",
    "gpus": [],
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "revision": "c64c8142fac6-dirty",
    "environment": {"OMP_NUM_THREADS": "1"},
}

MakeSpec = Callable[..., RunSpec]
MakeRun = Callable[..., Path]
Reseal = Callable[..., None]


@pytest.fixture
def runs(tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, reseal: Reseal) -> Path:
    """Two sealed runs with logs, and one that was interrupted."""
    out = tmp_path / "results"
    for strategy in ("ddp", "fsdp2"):
        run_dir = make_run(out, make_spec(strategy))
        store.write_json(run_dir / "machine-node-a.json", MACHINE)
        (run_dir / "log.txt").write_text("step 1\n")
        reseal(run_dir)
    make_run(out, make_spec("zero:stage=1"), status=None)
    return out


def test_steps_stored_as_columns_are_packed_as_lines(tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun) -> None:
    """Whoever opens a capsule years later needs neither Paceline nor NumPy."""
    run_dir = make_run(tmp_path / "results", make_spec("ddp", 2))
    lines = [path.read_text() for path in sorted(run_dir.glob("samples-*.jsonl"))]
    record = store.read_run(run_dir)
    store.seal(run_dir, record.status, None, record.started_at, record.ended_at, steps=record.steps)
    packed = capsule.pack(tmp_path / "results", tmp_path / "c.tar.gz")
    assert not any(name.endswith(".npy") for name in names(packed.path))
    capsule.verify(packed.path, packed.digest)
    (read,), skipped = capsule.read_runs(packed.path)
    assert (list(read.steps), skipped) == (list(record.steps), [])
    capsule.unpack(packed.path, tmp_path / "unpacked")
    unpacked = sorted((tmp_path / "unpacked").rglob("samples-[0-9].jsonl"))
    assert [path.read_text() for path in unpacked] == lines


def names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return [member.name for member in tar]


def texts(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: stream.read() for m in tar if (stream := tar.extractfile(m))}


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The capsule with other files in it, packed well and with a digest that agrees, as someone who edits it would."""
    files = texts(path)
    change(files)
    with contextlib.suppress(RecursionError):
        manifest = json.loads(files["capsule/manifest.json"])
        files["capsule/manifest.json"] = json.dumps(manifest | {"digest": capsule._digest(manifest)}).encode()
    target = path.with_name(f"changed-{path.name}")
    with tarfile.open(target, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target


class TestPacking:
    def test_the_same_runs_give_the_same_bytes(self, runs: Path, tmp_path: Path) -> None:
        for name in ("a", "b"):
            capsule.pack(runs, tmp_path / f"{name}.tar.gz")
        assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()

    def test_what_comes_back_is_what_was_packed(self, runs: Path, tmp_path: Path) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz")
        before, _ = store.read_runs(runs)
        after, skipped = capsule.read_runs(packed.path)
        assert packed.runs == len(after) == 2
        assert not skipped
        assert {r.spec.run_id: (r.steps, r.outcomes, r.machines) for r in before} == {
            r.spec.run_id: (r.steps, r.outcomes, r.machines) for r in after
        }

    def test_gauges_travel_with_the_run(self, runs: Path, tmp_path: Path, reseal: Reseal) -> None:
        run_dir = next(d for d in store.run_dirs(runs) if store.is_sealed(d))
        sample = GaugeSample(rank=0, host="node-a", at_s=1.5, device=0, power_w=500.0, throttle_reasons=("heat",))
        (run_dir / "samples-gauges-0.jsonl").write_text(store.sample_line(sample))
        reseal(run_dir)
        after, _ = capsule.read_runs(capsule.pack(runs, tmp_path / "c.tar.gz").path)
        assert {r.gauges for r in after} == {(sample,), ()}, "as it was written; a run without any is read as ever"

    def test_an_unsealed_run_is_left_out_with_a_sentence_that_names_no_place(
        self, runs: Path, tmp_path: Path, golden: object
    ) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz")
        assert len(packed.notes) == 1
        assert packed.notes[0] == golden
        assert str(tmp_path) not in texts(packed.path)["capsule/manifest.json"].decode()

    def test_logs_come_only_when_asked_for(self, runs: Path, tmp_path: Path) -> None:
        without = capsule.pack(runs, tmp_path / "a.tar.gz").path
        with_logs = capsule.pack(runs, tmp_path / "b.tar.gz", logs=True).path
        assert not any(name.endswith("log.txt") for name in names(without))
        assert sum(name.endswith("log.txt") for name in names(with_logs)) == 2

    def test_a_link_is_not_followed(self, runs: Path, tmp_path: Path, reseal: Reseal) -> None:
        (tmp_path / "private.jsonl").write_text("")
        run_dir = next(d for d in store.run_dirs(runs) if store.is_sealed(d))
        (run_dir / "samples-7.jsonl").symlink_to(tmp_path / "private.jsonl")
        reseal(run_dir)
        assert not any("samples-7" in name for name in names(capsule.pack(runs, tmp_path / "c.tar.gz").path))

    def test_the_manifest_has_versions_and_revision(self, runs: Path, tmp_path: Path) -> None:
        files = texts(capsule.pack(runs, tmp_path / "c.tar.gz").path)
        manifest = json.loads(files["capsule/manifest.json"])
        assert manifest["environments"] == [
            {"hosts": ["node-a"], "revision": "c64c8142fac6", "dirty": True, "versions": MACHINE["versions"]}
        ]
        assert "torch==2.11.0\n" in files["capsule/versions.txt"].decode()
        assert set(manifest["files"]) == {name.removeprefix("capsule/") for name in files} - {"manifest.json"}

    def test_a_run_brings_the_reference_that_proves_it(
        self, tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun
    ) -> None:
        spec, other = make_spec("ddp"), make_spec("ddp", seed=7)
        reference, stranger = (make_spec(None, workload="reference", seed=s.seed) for s in (spec, other))
        run_dir = make_run(tmp_path, spec)
        for one in (reference, stranger, other):
            make_run(tmp_path, one)
        records, _ = capsule.read_runs(capsule.pack(run_dir, tmp_path / "c.tar.gz").path)
        assert {r.spec.run_id for r in records} == {spec.run_id, reference.run_id}

    def test_an_existing_file_is_kept_unless_forced(self, runs: Path, tmp_path: Path, golden: object) -> None:
        target = tmp_path / "c.tar.gz"
        target.write_text("mine")
        with pytest.raises(RequestError) as caught:
            capsule.pack(runs, target)
        assert str(caught.value) == golden
        assert "--force" in str(caught.value)
        assert target.read_text() == "mine"
        capsule.pack(runs, target, force=True)
        assert capsule.read_runs(target)[0]

    def test_a_folder_is_refused_however_it_is_asked_for(self, runs: Path, tmp_path: Path, golden: object) -> None:
        for force in (False, True):
            with pytest.raises(RequestError) as caught:
                capsule.pack(runs, runs, force=force)
            assert str(caught.value) == golden

    def test_what_a_killed_packing_left_is_swept(self, runs: Path, tmp_path: Path) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        (tmp_path / f".c.tar.gz.{gone.pid}").write_text("half")
        kept = [f".c.tar.gz.{os.getppid()}", f".other.tar.gz.{gone.pid}", ".c.tar.gz.mine"]
        for name in kept:
            (tmp_path / name).write_text("")
        capsule.pack(runs, tmp_path / "c.tar.gz")
        assert {path.name for path in tmp_path.iterdir()} == {"results", "c.tar.gz", *kept}

    def test_a_failure_leaves_no_half_file(
        self, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tarfile.TarFile, "addfile", full)
        with pytest.raises(RequestError) as caught:
            capsule.pack(runs, tmp_path / "c.tar.gz")
        assert str(caught.value) == golden
        assert [path.name for path in tmp_path.iterdir()] == ["results"]

    def test_a_folder_of_unsealed_runs_is_refused(
        self, tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, golden: object
    ) -> None:
        make_run(tmp_path / "r", make_spec(), status=None)
        with pytest.raises(RequestError) as caught:
            capsule.pack(tmp_path / "r", tmp_path / "c.tar.gz")
        assert str(caught.value) == golden


SECRETS = (
    "hf_abcdefgh1234",
    "sk-proj-abcdefgh1234",
    "github_pat_11AAAAAAA0abcdef",
    "https://me:hunter22@example.org/x",
    "HF_TOKEN=abcdefghij",
    "password: hunter2222",
    "Authorization: Bearer abcdefgh.ijkl",
)


class TestSecrets:
    @pytest.mark.parametrize("secret", SECRETS)
    @pytest.mark.parametrize("name", ["log.txt", "status.json", "samples-0.jsonl"])
    def test_texts_shaped_like_one_are_taken_out(self, secret: str, name: str) -> None:
        value = {"error": f'first\n{secret}\nand "more"', "tokens": 64}
        text = str(value["error"]) if name == "log.txt" else json.dumps(value) + "\n"
        cleaned, count = redaction.clean(name, text.encode(), where=name)
        assert count == 1
        assert secret.encode() not in cleaned
        assert redaction.MARK.encode() in cleaned
        if name != "log.txt":
            assert json.loads(cleaned)["tokens"] == 64

    @pytest.mark.parametrize("sign", ["\n", "\u2018", "\u00a7", "\\"])
    def test_one_behind_an_escape_is_found(self, sign: str) -> None:
        cleaned, count = redaction.clean("status.json", json.dumps({"error": f"x{sign}hf_abcdefgh1234"}).encode(), "")
        assert count == 1
        assert json.loads(cleaned) == {"error": f"x{sign}{redaction.MARK}"}

    def test_a_named_field_of_any_value_is_taken_out(self) -> None:
        cleaned, count = redaction.clean("job.json", b'{"env": {"MY_API_KEY": "short-but-secret"}}', where="")
        assert (json.loads(cleaned), count) == ({"env": {"MY_API_KEY": redaction.MARK}}, 1)

    def test_what_holds_none_is_not_touched(self) -> None:
        content = b'{"kind":  "step", "tokens": 64, "label": "task-1234567890 KeyError: x"}\n\xff'
        assert redaction.clean("log.txt", content, where="") == (content, 0)

    def test_of_a_machine_only_variables_that_change_speed_are_kept(self) -> None:
        facts = MACHINE | {"environment": {"OMP_NUM_THREADS": "1", "HOME": "/home/me", "NCCL_TOKEN": "x"}}
        cleaned, count = redaction.clean("machine-a.json", json.dumps(facts).encode(), where="")
        assert (json.loads(cleaned)["environment"], count) == ({"OMP_NUM_THREADS": "1"}, 2)

    def test_a_spec_with_one_is_refused(
        self, tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, golden: object
    ) -> None:
        make_run(tmp_path / "r", make_spec(data=Choice("tokens", {"path": "https://me:hunter22@example.org/x"})))
        with pytest.raises(RequestError) as caught:
            capsule.pack(tmp_path / "r", tmp_path / "c.tar.gz")
        assert str(caught.value) == golden
        assert "spec.json" in str(caught.value)
        assert not (tmp_path / "c.tar.gz").exists()

    def test_the_user_is_warned_and_the_record_still_reads(
        self, tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, reseal: Reseal, golden: object
    ) -> None:
        run_dir = make_run(tmp_path / "r", make_spec(), status=Status.FAILED)
        # As an older version wrote it: today's takes a secret out before it is stored.
        reseal(run_dir, error="fetch https://me:hunter22@example.org")
        packed = capsule.pack(tmp_path / "r", tmp_path / "c.tar.gz")
        assert packed.notes[0] == golden
        (record,) = capsule.read_runs(packed.path)[0]
        assert record.error == f"fetch https{redaction.MARK}example.org"


def _flip(files: dict[str, bytes]) -> None:
    name = next(n for n in files if n.endswith("samples-0.jsonl"))
    files[name] = files[name].replace(b"0.5", b"0.4")


def _drop(files: dict[str, bytes]) -> None:
    del files[next(n for n in files if n.endswith("status.json"))]


def _add(files: dict[str, bytes]) -> None:
    files["capsule/runs/extra.json"] = b"{}"


def _climb(files: dict[str, bytes]) -> None:
    manifest = json.loads(files["capsule/manifest.json"])
    manifest["files"]["../../outside"] = {"sha256": "0" * 64, "bytes": 2}
    files["capsule/manifest.json"] = json.dumps(manifest).encode()
    files["capsule/../../outside"] = b"{}"


def _manifest(**more: Any) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        files["capsule/manifest.json"] = json.dumps(json.loads(files["capsule/manifest.json"]) | more).encode()

    return change


def _told(**more: str) -> Callable[[dict[str, bytes]], None]:
    """What the manifest says of its first run, changed."""

    def change(files: dict[str, bytes]) -> None:
        manifest = json.loads(files["capsule/manifest.json"])
        manifest["runs"][0] |= more
        files["capsule/manifest.json"] = json.dumps(manifest).encode()

    return change


def _nest(files: dict[str, bytes]) -> None:
    files["capsule/manifest.json"] = b"[" * 100_000 + b"]" * 100_000


def _move(files: dict[str, bytes]) -> None:
    """A run under another name, with a manifest that agrees."""
    manifest = json.loads(files["capsule/manifest.json"])
    run = manifest["runs"][0]["run"]
    manifest = json.loads(json.dumps(manifest).replace(run, "other"))
    moved = {name.replace(run, "other"): content for name, content in files.items()}
    files.clear()
    files |= moved | {"capsule/manifest.json": json.dumps(manifest).encode()}


CHANGES = {
    "a run under another name": _move,
    "a manifest nested deep": _nest,
    "a changed file": _flip,
    "a missing file": _drop,
    "an added file": _add,
    "a path outside": _climb,
    "a newer schema": _manifest(schema=99),
    "another format": _manifest(format="zip"),
    "another status": _told(status="failed"),
    "another cell": _told(cell="0" * 16),
    "a run that is a path": _told(run="../../outside"),
    "other versions": _manifest(environments=[]),
    "a run less": _manifest(runs=[]),
    "no table of files": _manifest(files=[]),
    "a bomb": _manifest(files={"x": {"sha256": "0" * 64, "bytes": 2**50}}),
}


class TestVerifying:
    @pytest.mark.parametrize("case", CHANGES)
    def test_a_capsule_that_was_changed_is_refused(self, runs: Path, tmp_path: Path, case: str, golden: object) -> None:
        changed = rewritten(capsule.pack(runs, tmp_path / "c.tar.gz").path, CHANGES[case])
        with pytest.raises(RequestError) as caught:
            capsule.unpack(changed, tmp_path / "unpacked" / "here")
        assert str(caught.value) == golden
        assert not (tmp_path / "outside").exists()

    def test_a_link_is_refused(self, runs: Path, tmp_path: Path, golden: object) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        target = tmp_path / "link.tar.gz"
        with tarfile.open(packed) as source, tarfile.open(target, "w:gz") as tar:
            for member in source:
                if member.name.endswith("README.txt"):
                    member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/hostname", 0
                tar.addfile(member, source.extractfile(member) if member.isreg() else None)
        with pytest.raises(RequestError) as caught:
            capsule.unpack(target, tmp_path / "unpacked")
        assert str(caught.value) == golden
        assert "README" in str(caught.value)

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_a_truncated_file_is_refused(self, runs: Path, tmp_path: Path, share: float) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        content = packed.read_bytes()
        packed.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(RequestError, match=r"not a complete capsule|is missing|does not begin with"):
            capsule.read_runs(packed)

    @pytest.mark.parametrize("cut", [1, 4, 8, 9])
    def test_one_whose_last_bytes_are_cut_is_refused(self, runs: Path, tmp_path: Path, cut: int) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        packed.write_bytes(packed.read_bytes()[:-cut])
        with pytest.raises(RequestError, match="not a complete capsule"):
            capsule.read_runs(packed)

    @pytest.mark.parametrize("place", [-1, -5])
    def test_a_wrong_checksum_or_length_is_refused(self, runs: Path, tmp_path: Path, place: int) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        content = bytearray(packed.read_bytes())
        content[place] ^= 1
        packed.write_bytes(content)
        with pytest.raises(RequestError, match="not a complete capsule"):
            capsule.read_runs(packed)

    @pytest.mark.parametrize(
        "more",
        [b"garbage", b"\0", gzip.compress(b""), gzip.compress(b"x"), gzip.compress(b"\0" * 9)],
        ids=["text", "zero", "empty gzip", "gzip", "gzip of zeros"],
    )
    def test_bytes_after_its_end_are_refused(self, runs: Path, tmp_path: Path, more: bytes, golden: object) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        packed.write_bytes(packed.read_bytes() + more)
        with pytest.raises(RequestError) as caught:
            capsule.read_runs(packed)
        assert str(caught.value) == golden

    @pytest.mark.parametrize("more", [b"x", b"\0" * 20_480])
    def test_bytes_after_the_end_of_tar_are_refused(
        self, runs: Path, tmp_path: Path, more: bytes, golden: object
    ) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        packed.write_bytes(gzip.compress(gzip.decompress(packed.read_bytes()) + more))
        with pytest.raises(RequestError) as caught:
            capsule.read_runs(packed)
        assert str(caught.value) == golden

    @pytest.mark.parametrize("content", [b"", b"hello", gzip.compress(b"hello" * 1000)], ids=["empty", "text", "gzip"])
    def test_any_other_file_is_refused(self, tmp_path: Path, content: bytes, golden: object) -> None:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(RequestError) as caught:
            capsule.read_runs(tmp_path / "x")
        assert str(caught.value) == golden


@pytest.mark.parametrize("left_out", [None, 5, "x", {}])
def test_what_was_left_out_is_a_list(runs: Path, tmp_path: Path, left_out: object) -> None:
    changed = rewritten(capsule.pack(runs, tmp_path / "c.tar.gz").path, _manifest(left_out=left_out))
    with pytest.raises(RequestError, match=r"manifest\.json does not list what was left out"):
        capsule.verify(changed)


def test_a_note_of_a_manifest_moves_no_cursor(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = rewritten(capsule.pack(runs, tmp_path / "c.tar.gz").path, _manifest(left_out=["\x1b]0;title\x07"]))
    assert cli.main(["capsule", "--verify", str(changed)]) == 0
    assert capsys.readouterr().out.startswith("left out: \ufffd]0;title\ufffd\n")


class TestDigest:
    """A published capsule can be shown to be the one that was measured."""

    def test_it_is_printed_and_can_be_checked(
        self, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "c.tar.gz"
        assert cli.main(["capsule", str(runs), str(target)]) == 0
        printed = capsys.readouterr().out
        digest = re.search(r"^digest ([0-9a-f]{64})$", printed, re.MULTILINE)
        sha256 = re.search(r"sha256 ([0-9a-f]{64})$", printed, re.MULTILINE)
        assert digest
        assert sha256
        assert json.loads(texts(target)["capsule/manifest.json"])["digest"] == digest[1]
        for known in (digest[1], sha256[1], digest[1].upper()):
            assert cli.main(["capsule", "--verify", str(target), "--digest", known]) == 0
            assert "the digest is the one given" in capsys.readouterr().out
        assert cli.main(["capsule", "--verify", str(target)]) == 0

    def test_it_does_not_depend_on_the_compression(self, runs: Path, tmp_path: Path) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz")
        packed.path.write_bytes(gzip.compress(gzip.decompress(packed.path.read_bytes()), 1))
        again = capsule.verify(packed.path, packed.digest)
        assert again.digest == packed.digest
        assert again.sha256 != packed.sha256

    def test_other_runs_with_a_manifest_that_agrees_are_seen(
        self, tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, make_step: Callable[..., Any], golden: object
    ) -> None:
        """Somebody measures again, or rewrites samples, seal and manifest: only the published digest shows it."""
        spec, digests = make_spec("ddp", 1), []
        for name, duration_s in (("a", 0.5), ("b", 0.4)):
            make_run(tmp_path / name, spec, samples=[make_step(0, 0, duration_s=duration_s)])
            digests.append(capsule.pack(tmp_path / name, tmp_path / f"{name}.tar.gz").digest)
        with pytest.raises(RequestError) as caught:
            capsule.verify(tmp_path / "b.tar.gz", digests[0])
        assert str(caught.value).replace(digests[0], "FIRST").replace(digests[1], "SECOND") == golden

    def test_a_manifest_that_was_edited_is_refused(self, runs: Path, tmp_path: Path, golden: object) -> None:
        packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
        files = texts(packed)
        manifest = json.loads(files["capsule/manifest.json"]) | {"paceline_version": "99"}
        files["capsule/manifest.json"] = json.dumps(manifest).encode()
        with tarfile.open(packed, "w:gz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        with pytest.raises(RequestError) as caught:
            capsule.verify(packed)
        assert str(caught.value) == golden

    @pytest.mark.parametrize("more", [["x.tar.gz", "--digest", "00"], ["x.tar.gz", "--verify"], []])
    def test_a_wrong_request_is_one_sentence(
        self, runs: Path, more: list[str], capsys: pytest.CaptureFixture[str], golden: object
    ) -> None:
        assert cli.main(["capsule", str(runs), *more]) == 2
        assert capsys.readouterr().err == golden


class TestRecipe:
    def test_the_experiment_is_recreated_to_the_run_id(self, tmp_path: Path, make_spec: MakeSpec) -> None:
        specs = [
            make_spec("ddp", processes=2),
            make_spec("zero:stage=2", processes=1, precision="bf16/fp32", compile=True, bucket_mb=25.0),
            make_spec(None, workload="collectives:iters=5,dtypes=bf16", processes=2),
            make_spec("ddp", processes=2, repeat=1, learning_rate=1e-05, launcher="local:threads=2"),
        ]
        (tmp_path / "again.yaml").write_text(recipe.text(specs))
        again = expansion.load(str(tmp_path / "again.yaml"))
        assert {spec.cell for spec in again} == {spec.cell for spec in specs}
        assert {spec.run_id for spec in specs} <= {spec.run_id for spec in again}

    @pytest.mark.parametrize("preset", sorted(reading.presets()))
    def test_every_preset_is_recreated_to_the_run_id(self, tmp_path: Path, preset: str) -> None:
        specs = expansion.load(preset, ["device=cpu"])
        (tmp_path / "again.yaml").write_text(recipe.text(specs))
        assert {s.run_id for s in expansion.load(str(tmp_path / "again.yaml"))} == {s.run_id for s in specs}

    def test_one_cell_needs_no_matrix(self, tmp_path: Path, make_spec: MakeSpec) -> None:
        (tmp_path / "one.yaml").write_text(recipe.text([make_spec("ddp")]))
        assert expansion.load(str(tmp_path / "one.yaml")) == [make_spec("ddp")]


class TestGolden:
    """Capsules of every schema that was ever written; a change that cannot read one must bring an update to it."""

    @pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.tar.gz")), ids=lambda path: path.name)
    def test_it_still_verifies_and_reports(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        assert cli.main(["report", str(copy), "--format", "json"]) == 0
        report = json.loads((tmp_path / f"{path.name.partition('.')[0]}-report" / "report.json").read_text())
        assert [run["status"] for run in report["runs"]] == ["ok"] * 3
        assert all(certificate["valid"] for certificate in report["certificates"])
        speed = next(m for m in report["measurements"] if m["metric"] == "tokens_per_s")
        assert speed["launches"] == 2
        assert speed["value"] == pytest.approx(GOLDEN_TOKENS_PER_S[path.name])
        assert copy.read_bytes() == path.read_bytes()

    def test_there_is_one_for_every_schema(self) -> None:
        found = {path.name for path in GOLDEN.glob("*.tar.gz")}
        assert found == {f"schema-{n}.tar.gz" for n in range(1, capsule.SCHEMA + 1)} == set(GOLDEN_TOKENS_PER_S)


GOLDEN_TOKENS_PER_S = {"schema-1.tar.gz": 1576.9290969397384}


def test_a_capsule_is_accepted_wherever_a_folder_is(runs: Path, tmp_path: Path) -> None:
    packed = capsule.pack(runs, tmp_path / "c.tar.gz").path
    assert {r.spec.run_id for r in read_experiment(packed)[0]} == {r.spec.run_id for r in read_experiment(runs)[0]}
