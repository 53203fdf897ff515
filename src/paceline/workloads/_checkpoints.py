"""Checkpoints of one launch: written between two steps, whole or not at all, and found again by its next attempt.

ROOT/<run_id>-<lineage>/step-<n>/     the state after n steps
  ...                 the trainer's own files, rank-<r>.pt (random numbers)
  complete.json       last: whose it is, and size and checksum of every other file

The last two are kept. ROOT is `checkpoints` in the run folder, or PACELINE_CHECKPOINTS where nodes share no run folder.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import CheckpointError, InvalidRunError, RequestError, UnsupportedError
from paceline.experiment.spec import RunSpec
from paceline.host.files import write_atomically
from paceline.results.attempt_samples import CheckpointSample, StartSample
from paceline.training.instruments import Weights

KEPT = 2
MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8})")
_CHUNK = 1 << 22
# A file that another node has made is not seen at once on every shared disk.
PATIENCE_S = 10.0


class Keeper:
    """Says where each attempt begins, and keeps its checkpoints. Every method is called on every rank."""

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

    # --- going on ---

    def resume(self) -> int:
        """Load the newest checkpoint that is whole; returns the step to go on with, 0 where there is none."""
        if self.home is None:
            return 0
        self.recorder.progress(0, "setup")
        _share(self.home, self.seat)
        for name in _agreed(sorted(_complete(self.home), reverse=True)):
            folder = self.home / name
            marker = _marker(folder)
            if marker:
                self._require_own(folder, marker)
            if not _all_true(bool(marker) and _is_whole(folder, marker, self.seat), self.seat):
                _say(f"{folder} is damaged; going on from the one before it")
                continue
            self._load(folder)
            return int(marker["step"])
        return 0

    def _require_own(self, folder: Path, marker: Mapping[str, Any]) -> None:
        """A checkpoint of another run would give other weights under this run's name."""
        mine = {"run": self.spec.run_id, "lineage": self.spec.lineage, "world_size": self.seat.world_size}
        theirs = {key: marker.get(key) for key in mine}
        if theirs != mine:
            raise RequestError(f"{folder}: the checkpoint is of {theirs}; accepted is one of {mine}")
        began, built = marker.get("initial"), self.initial.digest
        if began != built:
            raise InvalidRunError(f"the run began with weights of hash {began}, and this attempt built {built}")

    def _load(self, folder: Path) -> None:
        self.trainer.load(folder)  # type: ignore[attr-defined]
        held = torch.load(folder / f"rank-{self.seat.rank}.pt", weights_only=True)
        torch.set_rng_state(held["cpu"])
        if "cuda" in held:
            torch.cuda.set_rng_state(held["cuda"])

    def begin(self, step: int) -> None:
        """The first step of this attempt begins now."""
        setup_s = time.monotonic() - self.seat.taken_at_s
        self.recorder.add(StartSample(rank=self.seat.rank, step=step, setup_s=setup_s, at_s=time.time()))

    # --- writing ---

    def is_due(self, steps_done: int) -> bool:
        """Not after the last step: nothing would go on from there."""
        every = self.spec.checkpoint_every
        return every is not None and steps_done % every == 0 and steps_done < self.spec.steps

    def save(self, steps_done: int, ended_s: float) -> None:
        """Write the state after this many steps; ended_s is `time.perf_counter` at the end of the last of them."""
        assert self.home is not None
        self.recorder.progress(steps_done - 1, "checkpoint")
        folder = self.home / f"step-{steps_done:08d}"
        try:
            size = self._write(folder)
        except (CheckpointError, OSError, RuntimeError) as error:
            self._discard(folder)
            kept = max(_complete(self.home), default=None)
            what = f"{kept} is kept" if kept else "there is none before it"
            text = str(error).partition("\n")[0]
            raise CheckpointError(f"the checkpoint {folder} could not be written ({text}); {what}") from None
        pause_s = time.perf_counter() - ended_s
        self.recorder.add(CheckpointSample(rank=self.seat.rank, step=steps_done, duration_s=pause_s, bytes=size))

    def _write(self, folder: Path) -> int:
        partial = _partial(folder)
        if self.seat.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        partial.mkdir(parents=True, exist_ok=True)
        self.trainer.save(partial)  # type: ignore[attr-defined]
        torch.save(_random_state(self.seat.device), partial / f"rank-{self.seat.rank}.pt")
        dist.barrier()
        own = {name: _stamp(partial / name) for name in _share_of(_files(partial), self.seat)}
        stamps: list[Any] = [None] * self.seat.world_size
        dist.all_gather_object(stamps, own)
        if self.seat.rank == 0:
            self._finish(partial, folder, {name: stamp for part in stamps for name, stamp in part.items()})
        dist.barrier()
        return sum(size for size, _ in own.values())

    def _finish(self, partial: Path, folder: Path, files: dict[str, list[int]]) -> None:
        marker = {
            "run": self.spec.run_id,
            "lineage": self.spec.lineage,
            "world_size": self.seat.world_size,
            "step": int(folder.name.rpartition("-")[2]),
            "initial": self.initial.digest,
            "files": files,
        }
        write_atomically(partial / MARKER, json.dumps(marker, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for name in sorted(_complete(folder.parent))[:-KEPT]:
            shutil.rmtree(folder.parent / name, ignore_errors=True)

    def _discard(self, folder: Path) -> None:
        """Room for the samples and the outcome of a rank whose disk is full."""
        shutil.rmtree(_partial(folder), ignore_errors=True)

    def remove(self) -> None:
        """The run is whole: nothing will go on from them."""
        dist.barrier()
        if self.home is not None and self.seat.rank == 0:
            shutil.rmtree(self.home, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.home.parent.rmdir()


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _complete(home: Path) -> list[str]:
    found = home.iterdir() if home.is_dir() else ()
    return [path.name for path in found if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]


def _marker(folder: Path) -> dict[str, Any]:
    """Empty where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / MARKER).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _share_of(names: list[str], seat: Seat) -> Iterator[str]:
    """Every rank looks after some of the files, so that all are read once."""
    return iter(names[seat.rank :: seat.world_size])


def _stamp(path: Path) -> list[int]:
    """Size and checksum: damage by accident is found, not by intent."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _is_whole(folder: Path, marker: Mapping[str, Any], seat: Seat) -> bool:
    try:
        return all(_stamp(folder / name) == marker["files"][name] for name in _share_of(sorted(marker["files"]), seat))
    except OSError:
        return False


def _random_state(device: str) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def _agreed(names: list[str]) -> list[str]:
    """What rank 0 sees: a disk may show others less."""
    told: list[Any] = [names]
    dist.broadcast_object_list(told, src=0)
    return list(told[0])


def _all_true(answer: bool, seat: Seat) -> bool:
    vote = torch.tensor(int(answer), device=seat.torch_device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())


def _share(home: Path, seat: Seat) -> None:
    """Refuse a folder that is another one on every node: no attempt could go on from parts of it."""
    token = _agreed([secrets.token_hex(8)])[0]
    mark = home / f".seen-{token}"
    if seat.rank == 0:
        home.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    seen = _appears(mark)
    dist.barrier()
    if seat.rank == 0:
        mark.unlink(missing_ok=True)
    if not seen:
        raise UnsupportedError(
            f"checkpoints: rank {seat.rank} does not see the folder {home} of rank 0; accepted is one that all nodes "
            "share, which the variable PACELINE_CHECKPOINTS names"
        )


def _appears(path: Path) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _say(text: str) -> None:
    """Into the run's log."""
    sys.stderr.write(f"paceline: {text}\n")
