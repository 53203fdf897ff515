"""How a run ended, from what its ranks left and what the engine says; and whether another attempt may end otherwise."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

from paceline.campaign.run.supervision import End, Words
from paceline.experiment.spec import RunSpec
from paceline.host.processes import how_it_ended
from paceline.results import store
from paceline.results.records import Outcome, Status


def judge(spec: RunSpec, run_dir: Path, end: End) -> tuple[Status, str | None]:
    """The status of a run that has ended, from what the ranks left and how the job went."""
    words = end.before or Words.read(run_dir)
    outcomes, bad = words.outcomes, _bad(words)
    if end.limit is not None and not bad:
        return end.limit, end.text
    excused = _excused(spec, end)
    whole = {outcome.rank for outcome in outcomes} | excused == set(range(spec.topology.world_size))
    if end.state.status is not None and (bad or not whole):
        # The engine knows why ranks vanished; those that were left only noticed.
        return end.state.status, end.state.reason or f"the engine calls the job {end.state.status}"
    deaths = {rank: code for rank, code in _deaths(words).items() if rank not in excused}
    if bad and not deaths:
        return bad[0].status, _blame(bad[0], spec)
    if whole and end.missing is None:
        return Status.OK, None
    if end.missing is not None and not deaths:
        return Status.FAILED, f"results did not come home whole: {end.missing}"
    return Status.FAILED, _unexplained(run_dir, end, words.log, deaths)


def _excused(spec: RunSpec, end: End) -> set[int]:
    """Ranks of nodes that the job went on without: nobody waits for their word."""
    count = spec.topology.processes_per_node
    return {rank for node in end.state.lost for rank in range(node * count, (node + 1) * count)}


# What ranks say when a peer is gone: torch's, gloo's and NCCL's words.
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe|remote process exited|network error|nccl|gloo|"
    r"Dist(Backend|Network|Store)Error|timed out|socket",
    re.IGNORECASE,
)


def may_pass(status: Status, spec: RunSpec, run_dir: Path, end: End) -> bool:
    """Whether the same job may end better next time: a rank or a node was lost, pre-empted or hung. An error that a
    rank raised itself would come again, and so would the end of a job of which no rank ever began."""
    if status in (Status.PREEMPTED, Status.HANG):
        return True
    lived = store.read_progress(run_dir)
    if status is not Status.FAILED or not lived:
        return False
    words = end.before or Words.read(run_dir)
    if _deaths(words):
        return True
    bad = _bad(words)
    if not bad:
        return len(words.outcomes) < spec.topology.world_size
    stepped = any(position.phase not in ("start", "setup") for position in lived)
    return stepped and spec.topology.world_size > 1 and _LOST_PEER.search(bad[0].error or "") is not None


def _bad(words: Words) -> list[Outcome]:
    """Of ranks that did not end well, the first one first."""
    return sorted((o for o in words.outcomes if o.status is not Status.OK), key=lambda o: o.ended_at)


def _blame(outcome: Outcome, spec: RunSpec) -> str:
    if spec.topology.world_size == 1 or outcome.status is Status.UNSUPPORTED:
        return outcome.error or "no reason was left"
    return f"rank {outcome.rank} on {outcome.host}: {outcome.error}"


# Lines of torchrun's account of a failure. Whatever stands before them on a line tells nodes apart whose logs were
# merged: srun and log followers put a name there.
_RANK = re.compile(r"^(.*?)\s*\brank\s*:\s*(\d+) \(local_rank")
_EXIT = re.compile(r"^(.*?)\s*\bexitcode\s*:\s*(-?\d+)\b")
_SECTION = re.compile(r"^(.*?)\s*\b(Failures:|Root Cause\b)")


def _deaths(words: Words) -> dict[int, int]:
    """Exit codes of ranks that died without an outcome, by torchrun's log, the likeliest cause first: every node's root
    cause, and the others that torchrun did not end itself. Such a rank is to blame: its peers only noticed that it was
    gone, and said so. One that was told to end comes last: somebody's end was the reason."""
    spoke = {outcome.rank for outcome in words.outcomes}
    found: dict[int, int] = {}
    rank_of: dict[str, int] = {}
    in_root: dict[str, bool] = {}
    for line in words.log.splitlines():
        if section := _SECTION.match(line):
            in_root[section[1]] = section[2] != "Failures:"
        elif named := _RANK.match(line):
            rank_of[named[1]] = int(named[2])
        elif ended := _EXIT.match(line):
            rank, code = rank_of.pop(ended[1], None), int(ended[2])
            told_to_end = code == -signal.SIGTERM and not in_root.get(ended[1], False)
            if rank is not None and rank not in spoke and not told_to_end:
                found[rank] = code
    return dict(sorted(found.items(), key=lambda death: (death[1] == -signal.SIGTERM, death[0])))


def _unexplained(run_dir: Path, end: End, log: str, deaths: Mapping[int, int]) -> str:
    """A rank that left no outcome was killed, or ended itself without a word."""
    if not deaths:
        lines = [line for line in log.strip().splitlines() if line.strip()]
        code = end.state.exit_code
        how = "without an exit code" if code is None else f"with exit code {code}"
        return f"the job ended {how}: {lines[-1][:300] if lines else 'it printed nothing'}"
    rank, code = next(iter(deaths.items()))
    return how_it_ended(f"rank {rank}", code, run_dir / "log.txt")
