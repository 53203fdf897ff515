"""The log of one run, line by line and by rank: as far as it goes, or until the run ends.

Every launcher brings the output of all nodes into log.txt of the run directory, so there is one file to read.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import PacelineError, RequestError, require
from paceline.host.files import open_regular
from paceline.host.rank_lines import LineSplitter, split_rank, with_rank
from paceline.results import campaign_file, safe_text, store
from paceline.results.attempts import RESTARTS

LOG = "log.txt"
POLL_S = 0.2
# How often the state of the controller is read.
STATE_S = 2.0
PIECE = 1 << 20
OTHERS = "[job] "


class GrowingFile:
    """Whole lines of a file that grows, and that a new attempt may empty or replace."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """last_bytes: skip what the file has before its last bytes now."""
        self._path, self._offset, self._inode, self._lines = path, 0, 0, LineSplitter()
        self._cut = False
        with contextlib.suppress(FileNotFoundError):
            state = path.stat()
            if last_bytes is not None and state.st_size > last_bytes:
                self._inode, self._offset, self._cut = state.st_ino, state.st_size - last_bytes, True

    def take(self, is_last: bool) -> Iterator[str]:
        """Yield the lines that were added. The last one may be incomplete."""
        with contextlib.suppress(FileNotFoundError), open_regular(self._path) as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._inode, self._offset, self._lines, self._cut = state.st_ino, 0, LineSplitter(), False
            file.seek(self._offset)
            while piece := file.read(PIECE):
                self._offset += len(piece)
                lines = self._lines.add(piece)
                if self._cut and lines:
                    lines, self._cut = lines[1:], False  # the first line is incomplete
                yield from (line.decode(errors="replace") for line in lines)
        if is_last:
            yield from (line.decode(errors="replace") for line in self._lines.last())


def check(run_dir: Path, rank: int | None) -> None:
    """RequestError if this is no run directory, or the run has no such rank."""
    if not (run_dir / "spec.json").is_file():
        raise RequestError(f"logs: got {str(run_dir)!r}, expected a run directory (DIR/<experiment>/<run id>).")
    world_size = store.read_spec(run_dir).topology.world_size
    accepted = f"a rank of this run, 0 to {world_size - 1}" if world_size > 1 else "0, the only rank of this run"
    require(rank is None or 0 <= rank < world_size, "--rank", rank, accepted)


def read(
    run_dir: Path,
    rank: int | None,
    follow: bool,
    notify: Callable[[str], None],
    has_reader: Callable[[], bool],
    last_bytes: int | None = None,
) -> Iterator[str]:
    """Yield the lines of a run, each with its rank, and of one rank if given.

    follow: continue until the run ends, or until has_reader is false. notify gets sentences about the run itself: why
    its job waits, how it ended, and where logs of earlier attempts are. last_bytes: begin so far before the end.
    """
    for earlier in sorted(run_dir.glob(f"{RESTARTS}/*/{LOG}")):
        notify(f"the log of an earlier attempt is in {earlier}")
    file, state, looked_at = GrowingFile(run_dir / LOG, last_bytes), "", float("-inf")
    while True:
        # Looked up first, so that what is written before the end is still read.
        is_over = not follow or store.is_sealed(run_dir)
        if follow and not is_over and time.monotonic() - looked_at > STATE_S:
            looked_at = time.monotonic()
            now, is_over = _state(run_dir)
            if now != state and now:
                notify(now)
            state = now
        pids = _ranks_by_pid(run_dir)
        for line in file.take(is_last=is_over):
            own, text = split_rank(line.rstrip("\r"), pids)
            if rank is None or own == rank:
                yield safe_text.text(OTHERS + text if own is None else with_rank(own, text))
        if is_over or not has_reader():
            break
        time.sleep(POLL_S)
    if follow and (end := campaign_file.read_end(run_dir)):
        notify(f"the run ended: {end.status}")


def _ranks_by_pid(run_dir: Path) -> dict[int, int]:
    """The rank of each process. Processes of different nodes may have the same id, which then says nothing."""
    pairs: set[tuple[int, int]] = set()
    with contextlib.suppress(PacelineError, OSError, ValueError):
        pairs |= {(position.pid, position.rank) for position in store.read_progress(run_dir)}
        pairs |= {(outcome.pid, outcome.rank) for outcome in store.read_outcomes(run_dir)}
    known = Counter(pid for pid, _ in pairs)
    return {pid: rank for pid, rank in pairs if known[pid] == 1}


def _state(run_dir: Path) -> tuple[str, bool]:
    """A sentence about an unfinished run, empty while it runs, and whether nothing more can come."""
    view = campaign_file.read_view(run_dir.absolute().parent)
    name = safe_text.text(run_dir.absolute().name)
    if name in view.waiting:
        return f"the job waits: {view.waiting[name]}", False
    if name not in view.interrupted:
        return "", False
    job = f"; {view.left_jobs[name]}" if name in view.left_jobs else ""
    return f"no controller follows this run{job}. Repeat its command to continue it", True
