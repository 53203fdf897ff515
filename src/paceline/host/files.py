"""Atomic file writes, and reads that tolerate missing files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> Path:
    """Write a temporary file next to `path` and rename it; creates missing directories.

    durable: the content is on the disk before the name, and the name before this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A link of that name, in a directory of somebody else, is not followed.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            # Names of files that are not UTF-8 have characters that cannot be encoded.
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.errno is not None:
            # A write that fails does not say where.
            error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return path


def sync(path: Path) -> None:
    """Wait until a file or the entries of a directory are on the disk. Some file systems cannot sync a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = error.filename or str(path)
            raise
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a directory that may be anybody's. OSError for a device or a pipe, which may never end; opening a
    pipe does not wait for a writer."""
    return os.fdopen(_open_regular(path), "rb")


def _open_regular(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


# JSON takes up to twenty times its size in memory.
LARGEST_DOCUMENT_BYTES = 32 * 2**20


def document_of(path: Path) -> bytes:
    """The content of a JSON or CSV file, which may be anybody's. OSError for a device or a pipe, which may never end,
    and for a file that is larger than any that Paceline writes."""
    # Not a file object: a report reads thousands of small files, and making one takes longer than reading.
    descriptor = _open_regular(path)
    parts, size = [], 0
    try:
        # Until nothing is left: on network file systems a read may be short before the end.
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
            size += len(part)
            if size > LARGEST_DOCUMENT_BYTES:
                raise OSError(errno.EFBIG, f"larger than {LARGEST_DOCUMENT_BYTES // 2**20} MiB", str(path))
    finally:
        os.close(descriptor)
    return b"".join(parts)


# What is read of a log: its end says why a job failed, its beginning where it ran.
LOG_BEGIN_BYTES, LOG_END_BYTES = 1 << 20, 1 << 24


def log_text(path: Path) -> str:
    """The text of a log, of a long one its beginning and its end: ranks may print gigabytes. Empty if there is none."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        content = file.read(LOG_BEGIN_BYTES)
        size = os.fstat(file.fileno()).st_size
        if size > LOG_BEGIN_BYTES + LOG_END_BYTES:
            content += b"\n"
            file.seek(size - LOG_END_BYTES)
        return (content + file.read(LOG_END_BYTES)).decode(errors="replace")
    return ""


def state_directory(environ: Mapping[str, str]) -> Path:
    """Paceline's own in the state directory of the XDG specification, which ignores a relative XDG_STATE_HOME.
    RuntimeError for a user without a home directory."""
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "paceline"


def text_of(path: Path) -> str:
    """The text of a file without surrounding white space; empty if it cannot be read, as files of /proc and /sys."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
