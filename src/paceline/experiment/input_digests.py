"""Short digests of the files that a run reads, so that changed data under the same path counts as different data.

A file of at most 64 MiB, and any JSONL file, is read whole. For a larger file (weights, token files) the digest covers
the size and 256 evenly spaced blocks of 64 KiB: training changes every block of the weights that it changes. Dates do
not count, so the same files on another host have the same digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from paceline.experiment.choices import Choice

WHOLE_BYTES = 64 * 2**20
BLOCKS, BLOCK_BYTES = 256, 64 * 2**10


def digests(model: Choice, data: Choice) -> dict[str, str]:
    """Digests of `model` and `data`, as far as they name existing files; other code checks that files exist."""
    both = {"model": _of_model(model), "data": _of_data(data)}
    return {name: digest for name, digest in both.items() if digest is not None}


def _of_model(model: Choice) -> str | None:
    if "/" not in model.name:
        return None
    folder = Path(model.name)
    return _of_files([folder / "config.json", *sorted(folder.glob("*.safetensors"))])


def _of_data(data: Choice) -> str | None:
    if "path" not in data.options:
        return None
    files = [Path(str(data.options["path"]))]
    if "tokenizer" in data.options:
        folder = Path(str(data.options["tokenizer"]))
        files += [folder / "tokenizer.json", folder / "tokenizer_config.json", folder / "tokenizer.model"]
    return _of_files(files, whole=data.name == "jsonl")


def _of_files(files: Iterable[Path], whole: bool = False) -> str | None:
    """One digest of all files, independent of their names; None if the first does not exist."""
    parts = []
    for number, file in enumerate(files):
        part = _of_file(file, whole)
        if part is None and not number:
            return None
        parts.append(part or "")
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _of_file(file: Path, whole: bool) -> str | None:
    with contextlib.suppress(OSError):
        stat = file.stat()
        if file.is_file():
            return _read(str(file), stat.st_size, stat.st_mtime_ns, whole)
    return None


@functools.cache
def _read(file: str, size: int, changed_ns: int, whole: bool) -> str:
    """The digest of a file, cached for all cells of an experiment until the file changes (`changed_ns`)."""
    with Path(file).open("rb") as content:
        if whole or size <= WHOLE_BYTES:
            return hashlib.file_digest(content, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for block in range(BLOCKS):
            content.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            digest.update(content.read(BLOCK_BYTES))
        return digest.hexdigest()
