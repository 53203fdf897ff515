"""A folder written by one exporter: replaced whole at every export, and only if an export made it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import RequestError
from paceline.host.processes import is_running

OWNER = ".written-by-paceline"


def check_owned(folder: Path) -> None:
    """Refuse a folder of that name that somebody else made: replacing it would destroy their files."""
    if folder.exists() and not (folder / OWNER).is_file():
        raise RequestError(f"{folder}: this directory was not written by an export. Move it and export again")


def mark_owned(folder: Path) -> None:
    """Make a folder that grows, and mark it as ours."""
    check_owned(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OWNER).touch()


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A fresh folder to fill, which replaces `folder` at the end; after an error the old one is kept."""
    check_owned(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Remove what killed exports left behind.
    for left in folder.parent.glob(f".{folder.name}.*"):
        owner = re.fullmatch(r"(\d+)\.(tmp|old)", left.name.removeprefix(f".{folder.name}."))
        if owner and not is_running(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    fresh.mkdir()
    try:
        yield fresh
        (fresh / OWNER).touch()
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)
