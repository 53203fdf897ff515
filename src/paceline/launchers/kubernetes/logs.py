"""The logs of a run's pods, followed while they are written: what ranks sent goes into the run folder.

A stream that breaks is read again from its beginning. What was taken already is not taken twice; what a rotated log
has lost shows as a gap (see `parcel`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launchers.kubernetes.client import Away, Cluster, Gone, NotYet
from paceline.launchers.kubernetes.pod import CONTAINER
from paceline.launchers.kubernetes.watch import exit_code
from paceline.launchers.node.log_transport import Receiver

RETRY_S = 0.5
# For threads that end at once; one that waits for a silent node is left to itself, and writes nothing any more.
JOIN_S = 1.0


class Logs:
    """One thread for each pod. `trouble` is the refusal that one of them met, if any."""

    def __init__(self, cluster: Cluster, run_dir: Path) -> None:
        self._cluster = cluster
        self.receiver = Receiver(run_dir)
        self.trouble: LaunchError | None = None
        self._log = run_dir / "log.txt"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._printed: dict[str, int] = {}
        self._given_up: set[str] = set()

    def follow(self, pods: Iterable[str]) -> None:
        """Follow those that are not followed yet."""
        for pod in pods:
            if not self._threads:
                # A controller that has taken the job over reads everything again.
                self._log.write_text("")
            if pod not in self._threads:
                thread = threading.Thread(target=self._follow, args=(pod,), name=f"log of {pod}", daemon=True)
                self._threads[pod] = thread
                thread.start()

    def give_up(self, pods: Iterable[str]) -> None:
        """Nobody waits any more for what these have to say: their node may never answer."""
        self._given_up |= set(pods)

    def drain(self, limit_s: float) -> None:
        """Wait for what ended pods have still to say."""
        deadline = time.monotonic() + limit_s
        for pod, thread in self._threads.items():
            if pod not in self._given_up:
                thread.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Nothing is written any more after this: the folder may be sealed, or belong to the next attempt."""
        with self._lock:
            self._stop.set()
        self.drain(JOIN_S)

    def note(self, sentence: str) -> None:
        with self._lock, self._log.open("a") as log:
            log.write(f"paceline: {sentence}\n")

    def _follow(self, pod: str) -> None:
        try:
            while not self._stop.is_set() and not self._pass(pod) and pod not in self._given_up:
                self._stop.wait(RETRY_S)
        except LaunchError as refusal:
            if pod not in self._given_up:
                self.trouble = self.trouble or refusal

    def _pass(self, pod: str) -> bool:
        """Read a log once as far as it goes; true when there is nothing more to come."""
        known = self._cluster.pod(pod)
        ended = known is None or exit_code(known) is not None
        try:
            with contextlib.suppress(Gone):
                self.read(pod, follow=not ended)
        except (Away, NotYet):
            return False
        # Only one that was read after its end is known to be complete.
        return ended

    def read(self, pod: str, follow: bool) -> None:
        rest, passed = b"", 0
        for chunk in self._cluster.log(pod, CONTAINER, follow):
            *lines, rest = (rest + chunk).split(b"\n")
            passed = self._take(pod, lines, passed)
            if self._stop.is_set():
                return
        # The rest of a stream that was followed may be half a line; that of a pod that ended is its last one.
        if rest and not follow:
            self._take(pod, [rest], passed)

    def _take(self, pod: str, lines: list[bytes], passed: int) -> int:
        """A chunk at a time: what one pod prints together stays together. passed: lines of its own output that this
        reading has seen; those that an earlier one saw are not written again."""
        with self._lock:
            return passed if self._stop.is_set() else self._keep(pod, lines, passed)

    def _keep(self, pod: str, lines: list[bytes], passed: int) -> int:
        with self._log.open("ab") as log:
            for line in lines:
                if self.receiver.feed(line.decode(errors="replace")) is None:
                    continue
                passed += 1
                if passed > self._printed.get(pod, 0):
                    self._printed[pod] = passed
                    log.write(line + b"\n")
        return passed
