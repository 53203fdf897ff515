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
    files = {}
    if "/" in model.name:
        files["model"] = [Path(model.name, "config.json"), *sorted(Path(model.name).glob("*.safetensors"))]
    if "path" in data.options:
        files["data"] = [Path(str(data.options["path"]))]
        tokenizer = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        if "tokenizer" in data.options:
            files["data"] += [Path(str(data.options["tokenizer"]), name) for name in tokenizer]
    both = {name: _of_files(own, name == "data" and data.name == "jsonl") for name, own in files.items()}
    return {name: digest for name, digest in both.items() if digest is not None}


def _of_files(files: Iterable[Path], whole: bool) -> str | None:
    """One digest of all files, independent of their names; None if the first does not exist."""
    parts = []
    for number, file in enumerate(files):
        part = ""
        with contextlib.suppress(OSError):
            stat = file.stat()
            part = _read(str(file), stat.st_size, stat.st_mtime_ns, whole) if file.is_file() else ""
        if not part and not number:
            return None
        parts.append(part)
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


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
