"""The seal of a run: status.json, written last, with size and SHA-256 of every other file of the run directory.

A sealed run is checked before anything of it is used. What was cut, edited, added, removed or renamed afterwards makes
the run damaged, and the message names the file. The seal also protects itself: `seal` is the SHA-256 of its other
fields. It detects damage and careless edits; a forger can write a new seal, which the digest of a capsule detects.

Progress files, which ranks overwrite in place, and directories (checkpoints, earlier attempts) are not part of it. Logs
may grow: a process that ends late still prints its last line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from paceline.errors import damaged
from paceline.host.files import document_of, sync, write_atomically

FILE, SPEC = "status.json", "spec.json"
# The field with the files whose content is in others now, and their sizes: a process that was killed may leave them.
REPLACED = "replaced"
# Files that are read as results: one that the seal does not list was added later.
READ = re.compile(r"spec\.json|clocks\.json|samples-.*\.jsonl|steps\.npy|outcome-.*\.json|machine-.*\.json")
_LEFT_OUT = re.compile(rf"{re.escape(FILE)}|progress-.*|\..*")
_GROWING = re.compile(r".*\.txt")
_CHUNK = 1 << 20
# The files of a run that is this large are checked by several threads.
_THREADED_FROM_BYTES, _THREADS, _AT_ONCE = 1 << 27, 2, 64
# Times of files are not finer than this: a file that changed so recently may change again without a trace in them.
_SETTLED_NS = 2 * 10**9

State: TypeAlias = tuple[int, ...]
# Directories that were found intact, with the state of their files as far as `stat` shows it.
_intact: dict[Path, dict[str, State]] = {}


# --- writing ---


def write(run_dir: Path, body: Mapping[str, Any]) -> None:
    """Seal the directory. All files are on the disk before the seal gets its name, so a power loss leaves the whole run
    or a run without a seal. Files that `body` calls replaced are left out, and removed when the seal is there."""
    replaced = body.get(REPLACED, {})
    paths = sorted(
        path
        for path in run_dir.iterdir()
        if path.is_file() and path.name not in replaced and not _LEFT_OUT.fullmatch(path.name)
    )
    if run_dir / SPEC not in paths:
        # The disk of the run was unmounted: what is here now is another one.
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run_dir / SPEC))
    files = {}
    for path in paths:
        with path.open("rb") as file:
            files[path.name] = entry_of(file)
            os.fsync(file.fileno())
    sync(run_dir)
    sync(run_dir.parent)
    write_atomically(run_dir / FILE, text_of({**body, "files": files}), durable=True)
    for name, size in replaced.items():
        # One that has grown meanwhile stays, and makes the run damaged.
        with contextlib.suppress(OSError):
            if (run_dir / name).stat().st_size == size:
                (run_dir / name).unlink()


def amend(run_dir: Path, **changes: Any) -> None:
    """Replace fields of a seal; the files that it lists stay the same."""
    write_atomically(run_dir / FILE, text_of({**_read(run_dir), **changes}), durable=True)


def text_of(body: Mapping[str, Any]) -> str:
    """The text of status.json, with the digest over its other fields."""
    fields = {key: value for key, value in body.items() if key != "seal"}
    return json.dumps({**fields, "seal": _own_digest(fields)}, indent=1, allow_nan=False) + "\n"


def entry_of(file: BinaryIO, size: int | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file, or of its first `size` bytes."""
    digest, count = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK if size is None else min(_CHUNK, size - count)):
        digest.update(chunk)
        count += len(chunk)
    return {"bytes": count, "sha256": digest.hexdigest()}


# --- checking ---


# Is called with the name and the content of a file that is intact.
Keep = Callable[[str, bytes], None]


def read(
    run_dir: Path, keep: Keep | None = None, kept: Callable[[Mapping[str, Any]], re.Pattern[str]] = lambda body: READ
) -> dict[str, Any]:
    """The fields of the seal of an intact run; DamagedRunError names the file that is not intact.

    keep: for files with names like `kept` says for this seal, so that they are not read twice. A directory that did not
    change is checked once per process, and keep is not called then.
    """
    body = _read(run_dir)
    names = os.listdir(run_dir)  # noqa: PTH208 - names are enough
    if run_dir not in _intact or _intact[run_dir] != {name: _state(os.lstat(run_dir / name)) for name in names}:
        _intact.pop(run_dir, None)
        began_ns = time.time_ns()
        state = _check(run_dir, body, keep, kept(body))
        for name in sorted({*names} - state.keys()):
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(run_dir / name)
                if READ.fullmatch(name) and facts.st_size != _replaced(run_dir, body).get(name):
                    raise damaged(run_dir, f"{name} was added after the run ended")
                state[name] = _state(facts)
        if all(max(times) < began_ns - _SETTLED_NS for _, _, _, *times in state.values()):
            _intact[run_dir] = state
    return body


def _replaced(run_dir: Path, body: Mapping[str, Any]) -> Mapping[str, object]:
    replaced = body.get(REPLACED, {})
    if not isinstance(replaced, dict):
        raise damaged(run_dir, f"{FILE}: {REPLACED}: got a {type(replaced).__name__}, expected an object")
    return replaced


def _state(facts: os.stat_result) -> State:
    return facts.st_mode, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _read(run_dir: Path) -> dict[str, Any]:
    """status.json as it is, because its digest covers each character; ValueError and OSError become damage."""
    try:
        body = json.loads(document_of(run_dir / FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(run_dir, f"{FILE} cannot be read ({error})") from None
    if not isinstance(body, dict):
        raise damaged(run_dir, f"{FILE} is a {type(body).__name__}, expected an object")
    return body


def _check(run_dir: Path, body: Mapping[str, Any], keep: Keep | None, kept: re.Pattern[str]) -> dict[str, State]:
    """The state of every file that the seal lists; DamagedRunError if one is not intact."""
    fields = {key: value for key, value in body.items() if key != "seal"}
    files = fields.get("files")
    if not isinstance(files, dict) or "seal" not in body:
        raise damaged(run_dir, f"{FILE} has no digests of the files")
    if body["seal"] != _own_digest(fields):
        raise damaged(run_dir, f"{FILE} was changed after the run ended")

    def state_of(name: str) -> State:
        return _check_file(run_dir, name, files[name], keep if kept.fullmatch(name) else None)

    sizes = (entry.get("bytes") if isinstance(entry, dict) else 0 for entry in files.values())
    if sum(size for size in sizes if type(size) is int) < _THREADED_FROM_BYTES:
        return {name: state_of(name) for name in files}
    # Not at the top: few runs are large.
    from concurrent.futures import ThreadPoolExecutor

    def states_of(names: Sequence[str]) -> list[State]:
        return list(map(state_of, names))

    # Reading and hashing do not hold the interpreter's lock. The first damaged file in the order of the seal is named.
    names = list(files)
    parts = [names[first : first + _AT_ONCE] for first in range(0, len(names), _AT_ONCE)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, chain.from_iterable(pool.map(states_of, parts)), strict=True))


def _check_file(run_dir: Path, name: str, entry: object, keep: Keep | None) -> State:
    wanted = entry.get("bytes") if isinstance(entry, dict) else None
    if type(wanted) is not int or "/" in name or name in ("", "."):
        raise damaged(run_dir, f"{FILE}: got {name!r} with {entry!r:.100}, expected a file name, a size and a SHA-256")
    try:
        # Opening a pipe does not wait for a writer. Not a Path: a report reads thousands of small files.
        descriptor = os.open(f"{run_dir}/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise damaged(run_dir, f"{name} is not a regular file")
            if facts.st_size < wanted or (facts.st_size > wanted and not _GROWING.fullmatch(name)):
                raise damaged(run_dir, f"{name}: got {facts.st_size} bytes, expected {wanted}")
            if keep:
                content = _whole(descriptor, wanted)
                intact = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} == entry
            else:
                with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
                    intact = entry_of(file, wanted) == entry
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise damaged(run_dir, f"{name} is missing") from None
    except OSError as error:
        raise damaged(run_dir, f"{name} cannot be read ({error.strerror})") from None
    if not intact:
        raise damaged(run_dir, f"{name} was changed after the run ended")
    if keep:
        keep(name, content)
    return _state(facts)


def _whole(descriptor: int, size: int) -> bytes:
    """The content of a file that should have this size, to its end."""
    # One byte more: the file may have grown since its size was looked at.
    content = os.read(descriptor, size + 1)
    # On network file systems a read may be short before the end.
    while len(content) < size and (more := os.read(descriptor, size + 1 - len(content))):
        content += more
    return content


def _own_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
