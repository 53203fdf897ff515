"""A capsule: sealed runs in one file that a stranger can check, read and repeat years later.

capsule/
  manifest.json               first: format, schema, versions, revision, and size and SHA-256 of every other file
  README.txt                  how to read it without Paceline
  versions.txt                packages of every host that took part
  experiments/<name>.yaml     the request, recreated from the specs
  runs/<experiment>/<run_id>/ the run folders (`store`); logs only where asked for

The same runs give the same bytes. `redaction` sees every file before it is packed; what a stranger's capsule holds is
checked against its manifest before any of it is used.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paceline import __version__
from paceline.errors import PacelineError, RequestError, StoreError
from paceline.experiment import recipe
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.host.processes import is_running
from paceline.results import safe_text, store
from paceline.results.records import RunRecord

FORMAT, SCHEMA = "paceline-capsule", 1
ROOT, MANIFEST = "capsule", "manifest.json"
# Beyond these a capsule is refused unread: a small file may unpack to any size.
MOST_FILES, MOST_BYTES, MOST_MANIFEST_BYTES = 500_000, 16 * 2**30, 256 * 2**20
_CHUNK = 1 << 20
# tar fills its last record of this many bytes with zeros.
_MOST_PADDING = 10_240

_KEPT = re.compile(
    r"(spec|status)\.json|samples-((gauges-)?\d+(\.\d+)?|advice|attempts)\.jsonl|outcome-\d+\.json|machine-.+\.json"
)
_LOGS = re.compile(r"log\.txt|job\.json|stack-\d+\.txt")


@dataclass(frozen=True, slots=True)
class Packed:
    """What a capsule holds, and one sentence for everything that was left out or changed."""

    path: Path
    runs: int
    sha256: str
    notes: tuple[str, ...]


# --- packing -------------------------------------------------------------------------------------------------------


def pack(directory: Path, target: Path, *, logs: bool = False, force: bool = False) -> Packed:
    """Write the sealed runs of `directory` to `target`, whole or not at all; unsealed ones are left out and named.

    One run comes with the reference that proves its work, where that stands beside it.
    """
    if target.is_dir():
        raise RequestError(f"capsule: {str(target)!r} was given, which is a folder; accepted is a file, as out.tar.gz")
    if target.exists() and not force:
        raise RequestError(f"capsule: {str(target)!r} was given, which exists; accepted is a new file, or --force")
    if not target.resolve().parent.is_dir():
        raise RequestError(f"capsule: {str(target)!r} was given; accepted is a file in a folder that exists")
    records, left_out = _sealed(directory)
    entries = _entries(records, logs)
    files, redacted = _inventory(entries)
    manifest = _manifest(records, files, left_out, redacted)
    written = (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()
    try:
        sha256 = _write(target, {MANIFEST: written, **entries}, files)
    except OSError as error:
        raise RequestError(f"capsule: {str(target)!r} cannot be written ({error.strerror})") from None
    notes = [f"left out: {text}" for text in left_out] + [f"redacted: {text}" for text in redacted]
    return Packed(target, len(records), sha256, tuple(notes))


def _sealed(directory: Path) -> tuple[list[RunRecord], list[str]]:
    if not directory.is_dir():
        raise RequestError(f"capsule: {str(directory)!r} was given, which is no folder; accepted is a run or a folder")
    records, skipped = store.read_runs(directory)
    skipped = [text.replace(f"{directory}{os.sep}", "") for text in skipped]
    if not records:
        raise RequestError(
            f"capsule: {str(directory)!r} holds no sealed run; " + ("; ".join(skipped) or "none was run")
        )
    if (directory / "spec.json").is_file():
        records += references_beside(directory, records[0])
    return sorted(records, key=lambda r: (r.spec.experiment, r.spec.run_id)), skipped


def references_beside(run: Path, record: RunRecord) -> list[RunRecord]:
    """Sealed references of the same work in the folder where a run stands that is read alone."""
    found = []
    for run_dir in store.run_dirs(run.resolve().parent):
        with contextlib.suppress(StoreError):
            spec = store.read_spec(run_dir)
            if spec.workload.name == "reference" and spec.work == record.spec.work and spec != record.spec:
                found.append(store.read_run(run_dir))
    return found


def _entries(records: Sequence[RunRecord], logs: bool) -> dict[str, Path | bytes]:
    """Every file of the capsule but its manifest, by path, in the order of paths: what it holds or where it stands."""
    found: dict[str, Path | bytes] = {"README.txt": _README.encode(), "versions.txt": _versions_text(records).encode()}
    for name, text in _recipes(records).items():
        found[f"experiments/{name}.yaml"] = text.encode()
    for record in records:
        home = PurePosixPath("runs", record.spec.experiment, record.spec.run_id)
        for path in Path(record.path).iterdir():
            wanted = _KEPT.fullmatch(path.name) or (logs and _LOGS.fullmatch(path.name))
            # A link may lead to any file of this machine.
            if wanted and path.is_file() and not path.is_symlink():
                found[str(home / path.name)] = path
    return dict(sorted(found.items()))


def _recipes(records: Sequence[RunRecord]) -> dict[str, str]:
    """One experiment file per experiment and kind of device; references follow from the others."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if not record.is_reference:
            groups.setdefault((record.spec.experiment, record.spec.topology.device), []).append(record)
    several = {name for name, _ in groups if sum(other == name for other, _ in groups) > 1}
    return {
        f"{name}-{device}" if name in several else name: recipe.text([r.spec for r in found])
        for (name, device), found in groups.items()
    }


def _content(name: str, entry: Path | bytes) -> tuple[bytes, int]:
    """What is packed of a file, without secrets, and how many were taken out."""
    if isinstance(entry, bytes):
        return entry, 0
    return redaction.clean(PurePosixPath(name).name, entry.read_bytes(), where=str(entry))


def _inventory(entries: Mapping[str, Path | bytes]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    files, redacted = {}, []
    for name, entry in entries.items():
        content, secrets = _content(name, entry)
        files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        if secrets:
            redacted.append(f"{secrets} secret-shaped {'text' if secrets == 1 else 'texts'} in {name}")
    return files, redacted


def _manifest(
    records: Sequence[RunRecord], files: Mapping[str, Any], left_out: Sequence[str], redacted: Sequence[str]
) -> dict[str, Any]:
    """created_at is the end of the last run, not now: the same runs give the same bytes."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "paceline_version": __version__,
        "created_at": max(record.ended_at for record in records),
        "runs": [_listed(r.spec, r.status) for r in records],
        "environments": environments(facts for record in records for facts in record.machines),
        "left_out": list(left_out),
        "redacted": list(redacted),
        "files": dict(files),
    }


def _listed(spec: RunSpec, status: str) -> dict[str, str]:
    return {"run": spec.run_id, "experiment": spec.experiment, "cell": spec.cell, "status": str(status)}


def environments(machines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each distinct set of versions with its hosts and code revision; dirty is None where the revision is unknown."""
    found: dict[str, dict[str, Any]] = {}
    for facts in machines:
        versions, revision = dict(facts.get("versions") or {}), facts.get("revision")
        known = found.setdefault(
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
    return list(found.values())


def _versions_text(records: Sequence[RunRecord]) -> str:
    """As `pip freeze` writes them, for each environment; what pip does not install stands in a comment."""
    blocks = []
    for found in environments(facts for record in records for facts in record.machines):
        state = {True: ", changed since that commit", False: "", None: ""}[found["dirty"]]
        lines = [f"# on {', '.join(map(str, found['hosts']))}"]
        lines.append(f"# Paceline's revision: {found['revision'] or 'unknown (installed, not a checkout)'}{state}")
        for package, version in found["versions"].items():
            lines.append(f"# {package} {version}" if package in ("python", "nccl") else f"{package}=={version}")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks) or "# no machine was recorded\n"


def _write(target: Path, entries: Mapping[str, Path | bytes], files: Mapping[str, Any]) -> str:
    """Names, owners and times are the same wherever it is packed; the SHA-256 of the whole file is returned."""
    _sweep(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, entry in entries.items():
                content, _ = _content(name, entry)
                if name in files and hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
                    raise RequestError(f"capsule: {name} changed while it was packed; pack again")
                member = tarfile.TarInfo(f"{ROOT}/{name}")
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
        digest = _digest(temporary)
        temporary.replace(target)
        return digest
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove what a packing of the same target left behind whose process was killed."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(\d+)")
    for path in target.resolve().parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not is_running(int(found[1])):
            path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A folder with the capsule's files, every one verified; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="paceline-capsule-") as scratch:
        unpack(path, Path(scratch))
        yield Path(scratch) / ROOT


def read_runs(path: Path) -> tuple[list[RunRecord], list[str]]:
    """As `store.read_runs`; paths are said within the capsule."""
    with opened(path) as folder:
        records, skipped = store.read_runs(folder / "runs")
        prefix = f"{folder}{os.sep}"
        named = [dataclasses.replace(r, path=f"{path}: {r.path.removeprefix(prefix)}") for r in records]
        return named, [text.replace(prefix, f"{path}: ") for text in skipped]


def unpack(path: Path, folder: Path) -> dict[str, Any]:
    """The manifest, after every file it names was written below `folder` and found unchanged, and the file ended where
    it should; else one sentence."""
    try:
        # Read forward only, so that one pass checks all; the end of gzip's stream is where its CRC and length stand.
        with gzip.open(path, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            manifest = _read_manifest(path, tar)
            pending = dict(manifest["files"])
            # `for member in tar` would begin with the manifest again.
            while (member := tar.next()) is not None:
                _unpack_member(path, tar, member, pending, folder)
            _require_end(path, stream)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RequestError(
            f"{path}: not a whole capsule ({error or type(error).__name__}); accepted is what `paceline capsule` wrote"
        ) from None
    if pending:
        raise RequestError(f"{path}: {min(pending)} is missing; accepted is a capsule as it was packed")
    _require_agreement(path, manifest, folder / ROOT / "runs")
    return manifest


def _require_end(path: Path, stream: gzip.GzipFile) -> None:
    """After the last file only tar's padding, and nothing after the gzip stream, whose last four bytes are its size."""
    rest = stream.read(_MOST_PADDING + 1)
    with path.open("rb") as raw:
        raw.seek(-4, os.SEEK_END)
        size = int.from_bytes(raw.read(), "little")
    if len(rest) > _MOST_PADDING or rest.strip(b"\0") or stream.tell() % 2**32 != size:
        raise RequestError(f"{path}: more follows where the capsule should end; accepted is a capsule as it was packed")


def _require_agreement(path: Path, manifest: Mapping[str, Any], runs: Path) -> None:
    """What the manifest tells of its runs is what they say themselves; they stand where their names say."""
    try:
        folders = store.run_dirs(runs)
        specs = [store.read_spec(folder) for folder in folders]
        listed = [_listed(s, store.read_json(d / "status.json")["status"]) for s, d in zip(specs, folders, strict=True)]
        found = environments(facts for folder in folders for facts in store.read_machines(folder))
    except (PacelineError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path}: a run cannot be read ({safe_text.text(str(error))})") from None
    named = [runs / spec.experiment / spec.run_id for spec in specs]
    if folders != named or manifest.get("runs") != listed or manifest.get("environments") != found:
        raise RequestError(f"{path}: {MANIFEST} tells of other runs than it holds; accepted is a capsule as packed")


def _read_manifest(path: Path, tar: tarfile.TarFile) -> dict[str, Any]:
    first = tar.next()
    if first is None or first.name != f"{ROOT}/{MANIFEST}" or not first.isreg() or first.size > MOST_MANIFEST_BYTES:
        raise RequestError(f"{path}: no capsule, because it does not begin with {ROOT}/{MANIFEST}")
    stream = tar.extractfile(first)
    try:
        manifest = json.loads(stream.read() if stream else b"")
        schema, files = manifest["schema"], manifest["files"]
        known = manifest["format"] == FORMAT and type(schema) is int and schema >= 1
        sizes = [int(facts["bytes"]) for facts in files.values() if len(facts["sha256"]) == 64]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path}: {MANIFEST} cannot be read ({error})") from None
    if not known or len(sizes) != len(files):
        raise RequestError(f"{path}: {MANIFEST} is not that of a capsule")
    if schema > SCHEMA:
        raise RequestError(f"{path}: schema {schema} was written by a newer Paceline; this one reads up to {SCHEMA}")
    if len(files) > MOST_FILES or sum(sizes) > MOST_BYTES or min(sizes, default=0) < 0:
        raise RequestError(f"{path}: {len(files)} files of {sum(sizes)} bytes are more than any capsule should hold")
    return dict(manifest)


def _unpack_member(
    path: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, pending: dict[str, Any], folder: Path
) -> None:
    name = member.name.removeprefix(f"{ROOT}/")
    wanted = pending.pop(name, None)
    if wanted is None or not member.name.startswith(f"{ROOT}/"):
        raise RequestError(f"{path}: {member.name!r} does not stand in its manifest; accepted is a capsule as packed")
    if not member.isreg() or member.size != wanted["bytes"]:
        raise RequestError(f"{path}: {name} is not the file of {wanted['bytes']} bytes that the manifest names")
    safe = tarfile.data_filter(member, str(folder))
    source = tar.extractfile(member)
    target = folder / safe.name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as written:
        while source is not None and (chunk := source.read(_CHUNK)):
            digest.update(chunk)
            written.write(chunk)
    if digest.hexdigest() != wanted["sha256"]:
        raise RequestError(f"{path}: {name} was changed after the capsule was packed; accepted is a capsule as packed")


_README = """\
This is a Paceline capsule: runs of a training benchmark with all they need to be read, checked and repeated.

With Paceline     paceline report CAPSULE.tar.gz      conclude from it again
                  paceline compare A.tar.gz B.tar.gz  set it beside another one
                  paceline replay CAPSULE.tar.gz      run it again and say whether it reproduces
Without it        every file is text; JSON holds SI units (seconds, bytes), null is missing, 0 is a measured zero.

manifest.json               format, schema, version of Paceline, code revision ("dirty": changed since that commit), and
                            size and SHA-256 of every other file here
versions.txt                packages on each host
experiments/NAME.yaml       the request; `paceline run experiments/NAME.yaml` makes the same runs again
runs/EXPERIMENT/RUN/        one folder per run:
  spec.json                 what was asked: model, strategy, processes, batch, precision, steps, seed
  machine-HOST.json         processor, GPUs, driver, versions, variables that change speed
  samples-RANK.jsonl        one JSON object per line. "kind": "step" is one optimizer step of one rank: duration_s, its
                            phases, tokens, loss, grad_norm. A step takes as long as its slowest rank
  samples-gauges-RANK.jsonl "kind": "gauge" is a GPU, or a host (device null), at one moment; read by that rank
  samples-RANK.N.jsonl      of a run that was restarted, what its N-th attempt left; of every step the last counts
  outcome-RANK.json         how the rank ended, and the evidence that equal work was done
  status.json               how the run ended: ok, oom, failed, ...; times are Unix seconds
  log.txt, job.json         what was printed and how it was started; only where they were asked for

Tokens per second of a run: leave out the first steps (warmup.minimum of spec.json and more, until the times settle),
then divide the sum of "tokens" over all ranks by the sum over steps of "duration_s" of the slowest rank.
Check a file:  sha256sum FILE  and compare with manifest.json.
"""
