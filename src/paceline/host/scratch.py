"""A folder of a node's own for as long as it works there; one that a killed node left is removed by the next.

The folder's owner holds a lock in it, which the system takes back however the owner ends. So a folder whose lock is
free is nobody's.
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
    """A new folder below parent, or where temporary files are; gone afterwards."""
    place = Path(parent or tempfile.gettempdir())
    sweep(place)
    # Until it is locked it has a name that no sweep looks at: its lock would be free, as a dead node's is.
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    own = made.with_name(made.name[1:])
    try:
        with (made / _LOCK).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            made.rename(own)
            yield own
    finally:
        for folder in (made, own):
            shutil.rmtree(folder, ignore_errors=True)


def sweep(place: Path) -> None:
    """Remove what killed nodes of this user have left. What cannot be looked into is somebody else's."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
