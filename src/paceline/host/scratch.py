"""A temporary directory for one node. Directories left by killed nodes are removed by the next one.

The owner locks a file in the directory; the kernel releases the lock however the owner ends. A directory whose lock is
free has no owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "paceline-node-"
_LOCK = ".held"


@contextlib.contextmanager
def own_folder(parent: Path | None) -> Iterator[Path]:
    """A new directory in `parent`, or in the system's temporary directory; deleted afterwards."""
    base = Path(parent or tempfile.gettempdir())
    sweep(base)
    # `sweep` ignores this name: until the directory is locked, it looks like that of a dead node.
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    own = made.with_name(made.name[1:])
    try:
        with (made / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made.rename(own)
            yield own
    finally:
        for folder in (made, own):
            shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> None:
    """Remove directories that killed nodes of this user left. Unreadable ones belong to others."""
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
