"""Checkpoints of one launch: written between two steps, complete or absent, and loaded by its next attempt.

ROOT/<run_id>-<lineage>/step-<n>/     the state after n steps
  ...                 the trainer's own files, rank-<r>.pt (random number state)
  complete.json       written last: the owning run, and the size and checksum of every other file

The last two are kept. ROOT is `checkpoints` in the run directory, or PACELINE_CHECKPOINTS if nodes do not share one.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import CheckpointError, InvalidRunError, RequestError, UnsupportedError
from paceline.experiment.spec import RunSpec
from paceline.host.files import write_atomically
from paceline.results.records import CheckpointSample, StartSample
from paceline.training.instruments import Weights

KEPT = 2
MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8})")
_CHUNK = 1 << 22
# Some shared file systems show a file of another node only after a delay.
PATIENCE_S = 10.0


class Checkpointer:
    """Loads and writes the checkpoints of one launch. Every method is called on every rank."""

    def __init__(self, spec: RunSpec, seat: Seat, trainer: Trainer, recorder: Recorder, initial: Weights) -> None:
        self.spec, self.seat, self.trainer, self.recorder, self.initial = spec, seat, trainer, recorder, initial
        self.home: Path | None = None
        if spec.checkpoint_every is not None:
            assert seat.checkpoints is not None
            if not hasattr(trainer, "save"):
                raise UnsupportedError(
                    f"the strategy {spec.strategy} cannot write checkpoints: it has no save and load"
                )
            self.home = Path(seat.checkpoints) / f"{spec.run_id}-{spec.lineage}"
        self.writer = BackgroundWriter(spec, trainer) if spec.checkpoint_async else None

    def resume(self) -> int:
        """Load the newest intact checkpoint; returns the step to continue with, 0 if there is none."""
        if self.home is None:
            return 0
        self.recorder.progress(0, "setup")
        _require_shared(self.home, self.seat)
        for name in _from_rank_0(sorted(_complete(self.home), reverse=True)):
            folder = self.home / name
            marker: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):
                content = json.loads((folder / MARKER).read_text())
                marker = content if isinstance(content, dict) else {}
            if marker:
                self._require_own(folder, marker)
            intact = torch.tensor(int(bool(marker) and self._is_intact(folder, marker)), device=self.seat.torch_device)
            dist.all_reduce(intact, op=dist.ReduceOp.MIN)
            if not intact.item():
                sys.stderr.write(f"paceline: {folder} is damaged; trying the checkpoint before it\n")
                continue
            self.trainer.load(folder)  # type: ignore[attr-defined]
            random_state = torch.load(folder / f"rank-{self.seat.rank}.pt", weights_only=True)
            torch.set_rng_state(random_state["cpu"])
            if "cuda" in random_state:
                torch.cuda.set_rng_state(random_state["cuda"])
            return int(marker["step"])
        return 0

    def _require_own(self, folder: Path, marker: Mapping[str, Any]) -> None:
        """Reject a checkpoint of another run: its weights would be reported under this run's name."""
        expected = {"run": self.spec.run_id, "lineage": self.spec.lineage, "world_size": self.seat.world_size}
        actual = {key: marker.get(key) for key in expected}
        if actual != expected:
            raise RequestError(f"{folder}: got a checkpoint of {actual}, expected one of {expected}.")
        if marker.get("initial") != self.initial.digest:
            raise InvalidRunError(
                f"the run began with weights of hash {marker.get('initial')}, but this attempt built "
                f"{self.initial.digest}"
            )

    def _is_intact(self, folder: Path, marker: Mapping[str, Any]) -> bool:
        """Whether this rank's share of the files has the recorded sizes and checksums."""
        files = marker["files"]
        try:
            return all(_size_and_checksum(folder / name) == files[name] for name in self._own_share(sorted(files)))
        except OSError:
            return False

    def _own_share(self, names: list[str]) -> list[str]:
        """The files that this rank verifies: together, the ranks read every file once."""
        return names[self.seat.rank :: self.seat.world_size]

    def begin(self, step: int) -> None:
        """Record that the first step of this attempt begins now."""
        setup_s = time.monotonic() - self.seat.taken_at_s
        self.recorder.add(StartSample(rank=self.seat.rank, step=step, setup_s=setup_s, at_s=time.time()))

    def is_due(self, steps_done: int) -> bool:
        """Whether to write a checkpoint now. None is written after the last step, which nothing follows."""
        every = self.spec.checkpoint_every
        return every is not None and steps_done % every == 0 and steps_done < self.spec.steps

    def save(self, steps_done: int, ended_s: float) -> None:
        """Write the state after `steps_done` steps; ended_s is `time.perf_counter` at the end of the last one."""
        assert self.home is not None
        self.recorder.progress(steps_done - 1, "checkpoint")
        folder = self.home / f"step-{steps_done:08d}"
        partial = folder.with_name(f"{folder.name}.partial")
        try:
            size = self._write(partial, folder, steps_done)
        except (CheckpointError, OSError, RuntimeError) as error:
            # Frees space for the samples and the outcome if the disk is full.
            shutil.rmtree(partial, ignore_errors=True)
            kept = max(_complete(self.home), default=None)
            remaining = f"{kept} is kept" if kept else "there is no earlier checkpoint"
            text = str(error).partition("\n")[0]
            raise CheckpointError(f"cannot write the checkpoint {folder} ({text}); {remaining}") from None
        pause_s = time.perf_counter() - ended_s
        self.recorder.add(CheckpointSample(rank=self.seat.rank, step=steps_done, duration_s=pause_s, bytes=size))

    def _write(self, partial: Path, folder: Path, steps_done: int) -> int | None:
        """Write to `partial` and rename it to `folder` when complete; returns the bytes of this rank's share, None for
        a checkpoint that is still being written in the background."""
        if self.writer is not None:
            # The files of the last checkpoint come first.
            self.writer.finish()
        if self.seat.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        partial.mkdir(parents=True, exist_ok=True)
        random_state = {"cpu": torch.get_rng_state()}
        if self.seat.device == "cuda":
            random_state["cuda"] = torch.cuda.get_rng_state()
        torch.save(random_state, partial / f"rank-{self.seat.rank}.pt")
        if self.writer is not None:
            self.writer.start(partial, lambda group: self._complete(partial, folder, steps_done, group))
            return None
        self.trainer.save(partial)  # type: ignore[attr-defined]
        return self._complete(partial, folder, steps_done, None)

    def _complete(self, partial: Path, folder: Path, steps_done: int, group: Any) -> int:
        """Once every rank has written its files: describe them, rename the directory and remove old ones."""
        dist.barrier(group=group)
        names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
        own = {name: _size_and_checksum(partial / name) for name in self._own_share(names)}
        gathered: list[Any] = [None] * self.seat.world_size
        dist.all_gather_object(gathered, own, group=group)
        if self.seat.rank == 0:
            marker = {
                "run": self.spec.run_id,
                "lineage": self.spec.lineage,
                "world_size": self.seat.world_size,
                "step": steps_done,
                "initial": self.initial.digest,
                "files": {name: stamp for part in gathered for name, stamp in part.items()},
            }
            write_atomically(partial / MARKER, json.dumps(marker, indent=1) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for name in sorted(_complete(folder.parent))[:-KEPT]:
                shutil.rmtree(folder.parent / name, ignore_errors=True)
        dist.barrier(group=group)
        return sum(size for size, _ in own.values())

    def remove(self) -> None:
        """Delete all checkpoints: the run is complete and nothing will resume it."""
        if self.writer is not None:
            self.writer.finish()
        dist.barrier()
        if self.home is not None and self.seat.rank == 0:
            shutil.rmtree(self.home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.home.parent.rmdir()


class BackgroundWriter:
    """Writes one checkpoint at a time beside the steps. A checkpoint counts once it is complete, as any other.

    torch's thread and ours have process groups of their own, because collectives of two threads must not mix.
    """

    def __init__(self, spec: RunSpec, trainer: Trainer) -> None:
        if not hasattr(trainer, "save_later"):
            raise UnsupportedError(f"the strategy {spec.strategy} cannot write checkpoints in the background")
        self.trainer: Any = trainer
        self.saving, self.completing = (dist.new_group(backend="gloo") for _ in range(2))
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[object] | None = None

    def start(self, partial: Path, complete: Callable[[Any], object]) -> None:
        """Copy the state, then return; `complete` is called in the background with a process group."""
        wait = self.trainer.save_later(partial, self.saving)

        def write() -> object:
            wait()
            return complete(self.completing)

        self.pending = self.thread.submit(write)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written; its error is raised here."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()


def _complete(home: Path) -> list[str]:
    entries = home.iterdir() if home.is_dir() else ()
    return [path.name for path in entries if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]


def _size_and_checksum(path: Path) -> list[int]:
    """Size and CRC-32, which detect accidental damage, not tampering."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _from_rank_0(names: list[str]) -> list[str]:
    """Rank 0's list: on a shared disk, other nodes may see fewer files."""
    shared: list[Any] = [names]
    dist.broadcast_object_list(shared, src=0)
    return list(shared[0])


def _require_shared(home: Path, seat: Seat) -> None:
    """Reject a directory that is not the same on every node: no attempt could resume from parts of a checkpoint."""
    token = _from_rank_0([secrets.token_hex(8)])[0]
    mark = home / f".seen-{token}"
    if seat.rank == 0:
        home.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    is_visible = _appears(mark)
    dist.barrier()
    if seat.rank == 0:
        mark.unlink(missing_ok=True)
    if not is_visible:
        raise UnsupportedError(
            f"checkpoints: rank {seat.rank} does not see the directory {home} of rank 0, expected one that all nodes "
            "share. Set the variable PACELINE_CHECKPOINTS to such a directory."
        )


def _appears(path: Path) -> bool:
    """Whether the file appears within PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
