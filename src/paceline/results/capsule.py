"""A capsule: finished runs in one file that anybody can check, read and repeat years later.

capsule/
  manifest.json               first: format, schema, versions, revision, size and SHA-256 of every other file, and a
                              digest of all this
  README.txt                  how to read it without Paceline
  versions.txt                packages of every host that took part
  experiments/<name>.yaml     the request, recreated from the specs
  runs/<experiment>/<run_id>/ the run directories (`store`), steps as lines; logs only if requested

The same runs give the same bytes. Every file is redacted before it is packed. Every file of a capsule is checked
against the manifest before anything is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from paceline import __version__
from paceline.errors import DamagedRunError, PacelineError, RequestError, StoreError
from paceline.experiment import recipe
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.host.processes import is_running
from paceline.results import columns, safe_text, sealing, store
from paceline.results.records import RunRecord, StepSample
from paceline.results.tar_stream import TarStream, is_plain

FORMAT, SCHEMA = "paceline-capsule", 1
ROOT, MANIFEST = "capsule", "manifest.json"
# Larger capsules are rejected unread: a small file may unpack to any size.
# A manifest takes up to twenty times its size in memory.
MOST_FILES, MOST_BYTES, MOST_MANIFEST_BYTES = 200_000, 16 * 2**30, 32 * 2**20
# tar fills its last record of this many bytes with zeros.
_MOST_PADDING = 10_240
_EXPECTED = "expected a file as written by `paceline capsule`"

_KEPT = re.compile(
    r"(spec|status)\.json|samples-((gauges-)?\d+(\.\d+)?|advice|attempts|all)\.jsonl|outcome-\d+\.json|machine-.+\.json"
)
_LOGS = re.compile(r"log\.txt|job\.json|stack-\d+\.txt")

# Where the content of a file of the capsule comes from.
Entry: TypeAlias = Path | bytes | Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Packed:
    """A capsule that was written or verified. sha256 is of the file, digest of its content (see `_digest`). notes: one
    sentence for everything that was left out or changed."""

    path: Path
    runs: int
    sha256: str
    digest: str
    notes: tuple[str, ...]


# --- packing -------------------------------------------------------------------------------------------------------


def pack(directory: Path, target: Path, *, logs: bool = False, force: bool = False) -> Packed:
    """Write the finished runs of `directory` to `target`, completely or not at all; the others are named in the notes.

    A single run is packed with the reference that proves its work, if that is in the same directory.
    """
    got = f"capsule: got {str(target)!r}"
    if target.is_dir():
        raise RequestError(f"{got}, which is a directory, expected a file such as out.tar.gz.")
    if target.exists() and not force:
        raise RequestError(f"{got}, which exists, expected a new file. Use --force to replace it.")
    if not target.resolve().parent.is_dir():
        raise RequestError(f"{got}, expected a file in an existing directory.")
    if not directory.is_dir():
        raise RequestError(
            f"capsule: got {str(directory)!r}, which is not a directory, expected a run or results directory."
        )
    records, skipped = store.read_runs(directory)
    left_out = [text.replace(f"{directory}{os.sep}", "") for text in skipped]
    if not records:
        raise RequestError(
            f"capsule: no finished run in {str(directory)!r} ({'; '.join(left_out) or 'no run was started'})."
        )
    if (directory / "spec.json").is_file():
        references, unreadable = references_beside(directory, records[0])
        records += references
        left_out += [text.replace(f"{directory.resolve().parent}{os.sep}", "") for text in unreadable]
    records.sort(key=lambda r: (r.spec.experiment, r.spec.run_id))
    entries = _entries(records, logs)
    files: dict[str, dict[str, Any]] = {}
    redacted = []
    # The seals last: they contain the digests of the other files as they are packed.
    for name in sorted(entries, key=lambda name: PurePosixPath(name).name == sealing.FILE):
        content, secrets = _content(name, entries[name])
        if PurePosixPath(name).name == sealing.FILE:
            content = entries[name] = _resealed(name, content, files)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if secrets:
            redacted.append(f"{secrets} secret-shaped {'text' if secrets == 1 else 'texts'} in {name}")
    manifest = {
        "format": FORMAT,
        "schema": SCHEMA,
        "paceline_version": __version__,
        # The end of the last run, not now: the same runs give the same bytes.
        "created_at": max(record.ended_at for record in records),
        "runs": [_listed(r.spec, r.status) for r in records],
        "environments": environments(facts for record in records for facts in record.machines),
        "left_out": left_out,
        "redacted": sorted(redacted),
        "files": dict(sorted(files.items())),
    }
    manifest["digest"] = _digest(manifest)
    written = (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()
    try:
        sha256 = _write(target, {MANIFEST: written, **entries}, files)
    except OSError as error:
        raise RequestError(f"capsule: cannot write {str(target)!r} ({error.strerror}).") from None
    notes = [f"left out: {text}" for text in left_out] + [f"redacted: {text}" for text in redacted]
    return Packed(target, len(records), sha256, str(manifest["digest"]), tuple(notes))


def _digest(manifest: Mapping[str, Any]) -> str:
    """The digest of a capsule: over its manifest, and so over the content of every file, however it is compressed."""
    fields = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _resealed(name: str, seal: bytes, files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The seal of a packed run: without the files that are left out, and with the digests of redacted ones and of steps
    as lines."""
    home = PurePosixPath(name).parent
    packed = {
        PurePosixPath(path).name: facts for path, facts in sorted(files.items()) if PurePosixPath(path).parent == home
    }
    fields = {key: value for key, value in json.loads(seal).items() if key != sealing.REPLACED}
    return sealing.text_of({**fields, "files": packed}).encode()


def references_beside(run: Path, record: RunRecord) -> tuple[list[RunRecord], list[str]]:
    """Finished references of the same work, and its proof group, beside a run that is read alone; and why damaged ones
    are not used."""
    references, unreadable = [], []
    for run_dir in store.run_dirs(run.resolve().parent):
        with contextlib.suppress(StoreError):
            spec = store.read_spec(run_dir)
            if spec.proves_only and spec.group_work == record.spec.group_work and spec != record.spec:
                try:
                    references.append(store.read_run(run_dir))
                except DamagedRunError as error:
                    unreadable.append(str(error))
    return references, unreadable


def _entries(records: Sequence[RunRecord], logs: bool) -> dict[str, Entry]:
    """Every file of the capsule except the manifest, sorted by path: its content, or the file to read it from."""
    # One experiment file per experiment and kind of device; references follow from the other runs.
    groups: dict[tuple[str, str], list[RunSpec]] = {}
    for spec in (record.spec for record in records if not record.proves_only):
        groups.setdefault((spec.experiment, spec.topology.device), []).append(spec)
    names = [name for name, _ in groups]
    # Packages as `pip freeze` lists them, for each environment; other software is in comments.
    blocks = []
    for environment in environments(facts for record in records for facts in record.machines):
        state = ", changed since that commit" if environment["dirty"] else ""
        lines = [f"# on {', '.join(map(str, environment['hosts']))}"]
        lines.append(
            f"# Paceline's revision: {environment['revision'] or 'unknown (installed, not a checkout)'}{state}"
        )
        for package, version in environment["versions"].items():
            lines.append(f"# {package} {version}" if package in ("python", "nccl") else f"{package}=={version}")
        blocks.append("\n".join(lines) + "\n")
    versions = "\n".join(blocks) or "# no machine was recorded\n"
    entries: dict[str, Entry] = {"README.txt": _README.encode(), "versions.txt": versions.encode()}
    for (name, device), specs in groups.items():
        stem = f"{name}-{device}" if names.count(name) > 1 else name
        entries[f"experiments/{stem}.yaml"] = recipe.text(specs).encode()
    for record in records:
        home = PurePosixPath("runs", record.spec.experiment, record.spec.run_id)
        for path in Path(record.path).iterdir():
            wanted = _KEPT.fullmatch(path.name) or (logs and _LOGS.fullmatch(path.name))
            # A link may lead to any file of this machine.
            if wanted and path.is_file() and not path.is_symlink():
                entries[str(home / path.name)] = path
        if (Path(record.path) / columns.OTHERS).is_file():
            entries |= {str(home / f"samples-{rank}.jsonl"): lines for rank, lines in _step_lines(record.steps)}
    return dict(sorted(entries.items()))


def _step_lines(steps: Sequence[StepSample]) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """The lines of each rank's steps, which a run that has columns instead does not have; made when they are packed."""
    own: dict[int, list[range]] = {}
    first = 0
    for rank, group in groupby(step.rank for step in steps):
        after = first + sum(1 for _ in group)
        own.setdefault(rank, []).append(range(first, after))
        first = after
    for rank, parts in own.items():
        yield rank, partial(_lines, steps, parts)


def _lines(steps: Sequence[StepSample], parts: Sequence[range]) -> bytes:
    return "".join(store.sample_line(steps[i]) for i in chain(*parts)).encode()


def _content(name: str, entry: Entry) -> tuple[bytes, int]:
    """The redacted content of a file, and how many secrets were removed."""
    if isinstance(entry, bytes):
        return entry, 0
    if not isinstance(entry, Path):
        return entry(), 0
    return redaction.clean(PurePosixPath(name).name, entry.read_bytes(), where=str(entry))


def _listed(spec: RunSpec, status: str) -> dict[str, str]:
    return {"run": spec.run_id, "experiment": spec.experiment, "cell": spec.cell, "status": str(status)}


def environments(machines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each distinct set of versions with its hosts and code revision; dirty is None if the revision is unknown."""
    distinct: dict[str, dict[str, Any]] = {}
    for facts in machines:
        versions, revision = dict(facts.get("versions") or {}), facts.get("revision")
        known = distinct.setdefault(
            json.dumps([versions, revision], sort_keys=True),
            {
                "hosts": [],
                "revision": revision.removesuffix("-dirty") if revision else None,
                "dirty": revision.endswith("-dirty") if revision else None,
                "versions": versions,
            },
        )
        if facts.get("host") not in known["hosts"]:
            known["hosts"].append(facts.get("host"))
    return list(distinct.values())


def _write(target: Path, entries: Mapping[str, Entry], files: Mapping[str, Any]) -> str:
    """Write the archive and return its SHA-256. Names, owners and times do not depend on the host."""
    # Remove temporary files of killed processes.
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)")
    for path in target.resolve().parent.iterdir():
        left = pattern.fullmatch(path.name)
        if left and not is_running(int(left[1])):
            path.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with (
            temporary.open("xb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, entry in entries.items():
                content, _ = _content(name, entry)
                if name in files and hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
                    raise RequestError(f"capsule: {name} changed while it was packed. Pack again.")
                member = tarfile.TarInfo(f"{ROOT}/{name}")
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
        with temporary.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        temporary.replace(target)
        return digest
    finally:
        temporary.unlink(missing_ok=True)


# --- reading -------------------------------------------------------------------------------------------------------


def verify(path: Path, expected: str | None = None) -> Packed:
    """Check every file of a capsule and every run in it; RequestError if one is not as it was packed.

    expected: the digest that was published with it, or the SHA-256 of the file.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-capsule-") as scratch:
        manifest = unpack(path, Path(scratch))
        records, skipped = store.read_runs(Path(scratch) / ROOT / "runs")
    if skipped:
        raise RequestError(f"{path}: {skipped[0].removeprefix(f'{scratch}{os.sep}{ROOT}{os.sep}')}.")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    digest, left_out = str(manifest["digest"]), manifest.get("left_out")
    if not isinstance(left_out, list):
        raise RequestError(f"{path}: {MANIFEST} does not list what was left out, {_EXPECTED}.")
    if expected is not None and expected.strip().lower() not in (digest, sha256):
        raise RequestError(
            f"{path}: got digest {digest}, expected {expected}. It is not the capsule that was published."
        )
    return Packed(path, len(records), sha256, digest, tuple(f"left out: {text}" for text in left_out))


def read_runs(path: Path) -> tuple[list[RunRecord], list[str]]:
    """As `store.read_runs`, after every file was verified; paths are those inside the capsule."""
    with tempfile.TemporaryDirectory(prefix="paceline-capsule-") as scratch:
        unpack(path, Path(scratch))
        prefix = f"{scratch}{os.sep}{ROOT}{os.sep}"
        records, skipped = store.read_runs(Path(scratch) / ROOT / "runs")
        named = [dataclasses.replace(r, path=f"{path}: {r.path.removeprefix(prefix)}") for r in records]
        return named, [text.replace(prefix, f"{path}: ") for text in skipped]


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack all files below `folder` and return the manifest; RequestError if the capsule is not as it was packed."""
    try:
        # Read forward only, so that one pass checks everything, including the CRC at the end of the gzip stream.
        with gzip.open(path, "rb") as stream:
            tar = TarStream(stream, path.stat().st_size)  # type: ignore[arg-type]
            manifest = _read_manifest(path, tar)
            pending = dict(manifest["files"])
            while (member := tar.next()) is not None:
                _unpack_member(path, tar, member, pending, folder)
            # Only tar's padding may follow, and nothing after the gzip stream, whose last four bytes are its size.
            rest = stream.read(_MOST_PADDING + 1)
            with path.open("rb") as raw:
                raw.seek(-4, os.SEEK_END)
                size = int.from_bytes(raw.read(), "little")
            if len(rest) > _MOST_PADDING or rest.strip(b"\0") or stream.tell() % 2**32 != size:
                raise RequestError(f"{path}: data after the end of the capsule, {_EXPECTED}.")
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        why = "not a gzip file" if isinstance(error, gzip.BadGzipFile) else error or type(error).__name__
        raise RequestError(f"{path}: not a complete capsule ({why}), {_EXPECTED}.") from None
    if pending:
        raise RequestError(f"{path}: {min(pending)} is missing, {_EXPECTED}.")
    _require_agreement(path, manifest, folder / ROOT / "runs")
    return manifest


def _require_agreement(path: Path, manifest: Mapping[str, Any], runs: Path) -> None:
    """Reject a manifest that does not match the runs, and runs in directories that do not match their names."""
    try:
        folders = store.run_dirs(runs)
        specs = [store.read_spec(folder) for folder in folders]
        listed = [_listed(s, store.read_end(d).status) for s, d in zip(specs, folders, strict=True)]
        recorded = environments(facts for folder in folders for facts in store.read_machines(folder))
    except (PacelineError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path}: a run cannot be read ({safe_text.text(str(error))}).") from None
    named = [runs / spec.experiment / spec.run_id for spec in specs]
    if folders != named or manifest.get("runs") != listed or manifest.get("environments") != recorded:
        raise RequestError(f"{path}: {MANIFEST} does not match the runs of the capsule, {_EXPECTED}.")


def _read_manifest(path: Path, tar: TarStream) -> dict[str, Any]:
    first = tar.next()
    if first is None or first.name != f"{ROOT}/{MANIFEST}" or not is_plain(first) or first.size > MOST_MANIFEST_BYTES:
        raise RequestError(f"{path}: not a capsule, because it does not begin with {ROOT}/{MANIFEST}.")
    content = b"".join(iter(tar.read, b""))
    try:
        manifest = json.loads(content)
        schema, files = manifest["schema"], manifest["files"]
        known = manifest["format"] == FORMAT and type(schema) is int and schema >= 1
        sizes = [int(facts["bytes"]) for facts in files.values() if len(facts["sha256"]) == 64]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RequestError(f"{path}: {MANIFEST} cannot be read ({error}).") from None
    if not known or len(sizes) != len(files):
        raise RequestError(f"{path}: {MANIFEST} is not the manifest of a capsule.")
    if schema > SCHEMA:
        raise RequestError(f"{path}: got schema {schema}, expected at most {SCHEMA}. Use a newer Paceline.")
    if manifest.get("digest") != _digest(manifest):
        raise RequestError(f"{path}: {MANIFEST} was changed after the capsule was packed, {_EXPECTED}.")
    if len(files) > MOST_FILES or sum(sizes) > MOST_BYTES or min(sizes, default=0) < 0:
        raise RequestError(f"{path}: {len(files)} files of {sum(sizes)} bytes exceed the limits of a capsule.")
    return dict(manifest)


def _unpack_member(path: Path, tar: TarStream, member: tarfile.TarInfo, pending: dict[str, Any], folder: Path) -> None:
    name = member.name.removeprefix(f"{ROOT}/")
    wanted = pending.pop(name, None)
    if wanted is None or not member.name.startswith(f"{ROOT}/"):
        raise RequestError(f"{path}: {member.name!r} is not in the manifest, {_EXPECTED}.")
    if not is_plain(member) or member.size != wanted["bytes"]:
        raise RequestError(f"{path}: {name} is not a file of {wanted['bytes']} bytes as in the manifest, {_EXPECTED}.")
    safe = tarfile.data_filter(member, str(folder))
    target = folder / safe.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as written:
        while chunk := tar.read():
            digest.update(chunk)
            written.write(chunk)
    if digest.hexdigest() != wanted["sha256"]:
        raise RequestError(f"{path}: {name} was changed after the capsule was packed, {_EXPECTED}.")


_README = """\
This is a Paceline capsule: runs of a benchmark, with everything needed to read, check and repeat them.

With Paceline     paceline report CAPSULE.tar.gz      analyse it again
                  paceline compare A.tar.gz B.tar.gz  compare it with another one
                  paceline replay CAPSULE.tar.gz      run it again and check whether it reproduces
Without it        every file is text; JSON has SI units (seconds, bytes), null is missing, 0 is a measured zero.

manifest.json               format, schema, version of Paceline, code revision ("dirty": changed since that commit), and
                            size and SHA-256 of every other file here
versions.txt                packages on each host
experiments/NAME.yaml       the request; `paceline run experiments/NAME.yaml` repeats the same runs
runs/EXPERIMENT/RUN/        one directory per run:
  spec.json                 the request: model, strategy, processes, batch, precision, steps, seed
  machine-HOST.json         processor, GPUs, driver, versions, variables that change speed
  samples-RANK.jsonl        one JSON object per line. "kind": "step" is one optimizer step of one rank: duration_s, its
                            phases, tokens, loss, grad_norm. A step takes as long as its slowest rank
  samples-all.jsonl         samples other than steps, where the files of ranks have only steps
  samples-gauges-RANK.jsonl "kind": "gauge" is a GPU, or a host (device null), at one moment; read by that rank
  samples-RANK.N.jsonl      samples of the N-th attempt of a restarted run; the last measurement of a step counts
  outcome-RANK.json         how the rank ended, and the evidence that equal work was done
  status.json               how the run ended: ok, oom, failed, ...; times are Unix seconds
  log.txt, job.json         its output and how it was started; only if requested

Tokens per second of a run: leave out the first steps (warmup.minimum of spec.json and more, until the times settle),
then divide the sum of "tokens" over all ranks by the sum over steps of "duration_s" of the slowest rank.
Check a file:  sha256sum FILE  and compare with manifest.json.
"""
