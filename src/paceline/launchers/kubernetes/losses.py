"""Nodes that a run on a cluster goes on without: which indexes of its Job are gone, and what that means for the rest.

Only of jobs whose nodes may be lost (`plugins.may_be_lost`); every other one is as `_kube_watch` says. Their Job keeps
its other indexes when one has failed, so it is decided here when such a run is at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.contract import JobState
from paceline.errors import StoreError
from paceline.launchers._losses import awaited_ranks, have_spoken, is_past_setup
from paceline.launchers.kubernetes import watch
from paceline.launchers.kubernetes.watch import Object, Sight
from paceline.results.records import Status

# Of a node that fell before rank 0 was seen to be past its setup: how long the word of rank 0 may still be on its way.
NOTICE_S = 5.0
_DROPPED = (
    "the cluster has dropped backoffLimitPerIndex from the Job (Kubernetes before 1.29, or the feature is off): "
    "the loss of any node ends this run"
)


@dataclass
class Losses:
    """Of one run, over all looks at it. expendable: nodes that it may lose once rank 0 asks. ranks: of each node. note:
    is told each loss once, with the names of that node's pods that are still listed."""

    run_dir: Path
    nodes: int
    ranks: int
    expendable: Collection[int]
    note: Callable[[str, list[str]], None]
    lost: list[int] = field(default_factory=list)
    _fell_at: float | None = None
    _is_warned: bool = False
    # By node: the pod of one that is gone may be listed no more.
    _hosts: dict[int | None, str] = field(default_factory=dict)

    def state_of(self, sight: Sight) -> JobState:
        """Running, waiting or ended, and how: of the nodes that are left, once some are lost."""
        if not self.expendable or watch.is_ending_as_a_whole(sight):
            return watch.state_of(self._left(sight))
        self._hosts |= {watch.index_of(pod): host for pod in sight.pods if (host := pod["spec"].get("nodeName"))}
        fallen, spare = watch.fallen(sight), self._spare(sight)
        if is_past_setup(self.run_dir):
            for node in sorted((fallen & spare) - set(self.lost)):
                self._give_up(sight, node)
        rest = fallen - set(self.lost)
        if rest and rest <= spare and self._is_news():
            return JobState(running=True, waiting=watch.why_waiting(sight))
        left = self._left(sight)
        state = _end_by(left, min(rest)) if rest else self._state_of_rest(left)
        return replace(state, lost=tuple(self.lost))

    def _left(self, sight: Sight) -> Sight:
        kept = [pod for pod in sight.pods if watch.index_of(pod) not in self.lost]
        return replace(sight, pods=kept, nodes=sight.nodes - len(self.lost))

    def _spare(self, sight: Sight) -> set[int]:
        """None where the cluster has dropped what keeps the others: its Job would start nodes again."""
        if sight.job is None or sight.job["spec"].get("backoffLimitPerIndex") is not None:
            return set(self.expendable)
        if not self._is_warned and watch.why_waiting(sight) is None:
            self._is_warned = True
            self.note(_DROPPED, [])
        return set()

    def _give_up(self, sight: Sight, node: int) -> None:
        self.lost.append(node)
        told = f"node {node} ({self._hosts.get(node, 'not seen')}) is gone; rank 0 goes on with the other replicas"
        self.note(told, [str(pod["metadata"]["name"]) for pod in _pods_of(sight, node)])

    def _is_news(self) -> bool:
        self._fell_at = time.monotonic() if self._fell_at is None else self._fell_at
        return time.monotonic() - self._fell_at < NOTICE_S

    def _state_of_rest(self, sight: Sight) -> JobState:
        """Once all that are left have spoken nothing more is waited for: their starters would wait for the lost ones
        for minutes, and end at once when they are told to."""
        self._fell_at = None
        if self.lost and (watch.has_failed_by_indexes(sight) or self._have_spoken()):
            return JobState(running=False, exit_code=0)
        return watch.state_of(sight)

    def _have_spoken(self) -> bool:
        # Whoever follows a log may be at the middle of a file: it is whole at the next look.
        with contextlib.suppress(StoreError):
            return have_spoken(self.run_dir, awaited_ranks(self.nodes, self.lost, self.ranks))
        return False


def _pods_of(sight: Sight, node: int) -> Iterator[Object]:
    return (pod for pod in sight.pods if watch.index_of(pod) == node)


def _end_by(sight: Sight, node: int) -> JobState:
    """What a run comes to by the end of a node that it cannot go on without, though its Job would."""
    state = watch.failure(sight, {})
    if state.status is None and not any(_pods_of(sight, node)):
        # One that failed by itself would be listed still: somebody has deleted it.
        return replace(state, status=Status.PREEMPTED, reason=f"the pod of node {node} of {sight.name} was taken away")
    return state
