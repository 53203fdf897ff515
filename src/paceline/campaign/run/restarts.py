"""Attempts of one run until one of them ends for good: the same for every launcher.

A restart is cancel and submit of the same job on the same run folder. What an attempt may go on from is the ranks'
affair (`workloads/_checkpoints`); whether another one is worth it is `ending`'s.
"""

from __future__ import annotations

import time
from pathlib import Path

from paceline.campaign.run import supervision
from paceline.campaign.run.ending import judge, may_pass
from paceline.campaign.run.supervision import Launch, Observer
from paceline.contract import Launcher
from paceline.errors import LaunchError, StrayJobError
from paceline.experiment.spec import RunSpec
from paceline.results import attempts, store
from paceline.results.records import Status

# Before the next attempt after one that no rank lived to begin: an engine that lost a node needs a moment.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0

# How it ended, why, and the nodes that the last attempt went on without.
Ended = tuple[Status, str | None, tuple[int, ...]]


def see_through(launcher: Launcher, launch: Launch | None, spec: RunSpec, run_dir: Path, observer: Observer) -> Ended:
    """Follow the attempt under way, or start one, and those after it; `max_restarts` bounds how many follow."""
    while True:
        (status, error, lost), passing, gone = _attempt(launcher, launch, spec, run_dir, observer)
        done = attempts.restarts(run_dir)
        if not passing or done >= spec.max_restarts:
            break
        if not gone:
            # Two jobs would write into one folder.
            passing, error = False, f"{error}; not restarted: its job could not be ended, and may still be running"
            break
        began = bool(store.read_progress(run_dir))
        attempts.close(run_dir, status, error)
        observer.restarting(spec, error or str(status), spec.max_restarts - done - 1)
        if not began:
            time.sleep(min(FIRST_PAUSE_S * 2**done, LONGEST_PAUSE_S))
        launch = None
    attempts.conclude(run_dir, status, error)
    return status, f"{error}; {_tried(done)}" if passing and done else error, lost


def _attempt(
    launcher: Launcher, launch: Launch | None, spec: RunSpec, run_dir: Path, observer: Observer
) -> tuple[Ended, bool, bool]:
    """How it ended, whether another one may end otherwise, and whether the engine has let go of its job."""
    try:
        if launch is None:
            launch = supervision.start(launcher, launcher.prepare(spec, run_dir), spec, run_dir)
        end = supervision.follow(launcher, launch, spec, run_dir, observer)
    except LaunchError as refusal:
        # An engine that has taken this job before may take it again.
        refused = (Status.FAILED, str(refusal), ())
        return refused, bool(attempts.ended(run_dir)), not isinstance(refusal, StrayJobError)
    status, error = judge(spec, run_dir, end)
    return (status, error, end.state.lost), may_pass(status, spec, run_dir, end), end.gone


def _tried(restarts: int) -> str:
    return f"restarted {restarts} time{'' if restarts == 1 else 's'}, as often as max_restarts allows"
