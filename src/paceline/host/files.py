"""Atomic file writes, and reads that tolerate missing files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path


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


# JSON takes up to twenty times its size in memory.
LARGEST_DOCUMENT_BYTES = 32 * 2**20


def document_of(path: Path) -> bytes:
    """The content of a JSON or CSV file, which may be anybody's. OSError for a device or a pipe, which may never end,
    and for a file that is larger than any that Paceline writes."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        content = file.read(LARGEST_DOCUMENT_BYTES + 1)
    if len(content) > LARGEST_DOCUMENT_BYTES:
        raise OSError(errno.EFBIG, f"larger than {LARGEST_DOCUMENT_BYTES // 2**20} MiB", str(path))
    return content


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
