"""The replicas as one process of the client sees them: who is alive, who has room, and which requests wait for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from paceline.serving.client.orders import ANY_REPLICA

# Connections refused in a row by which a replica counts as dead: one may be refused by a full queue.
REFUSALS = 3


class Fleet:
    """in_flight and given count requests of this process, by replica."""

    def __init__(self, replicas: int, most: int | None) -> None:
        self.in_flight = [0] * replicas
        self.given = [0] * replicas
        self.died_ns: dict[int, int] = {}
        self.reassigned: dict[int, int] = {}
        self._most = most
        self._refusals = [0] * replicas

    def has_room(self, replica: int) -> bool:
        return self._most is None or self.in_flight[replica] < self._most

    def alive(self, but: Collection[int] = ()) -> list[int]:
        return [r for r in range(len(self.in_flight)) if r not in self.died_ns and r not in but]

    def freest(self, but: Collection[int] = ()) -> int | None:
        """The living replica with the fewest requests in flight, of equals the one that was given fewest so far."""
        able = [r for r in self.alive(but) if self.has_room(r)]
        return min(able, key=lambda r: (self.in_flight[r], self.given[r], r), default=None)

    def give(self, replica: int) -> None:
        self.in_flight[replica] += 1
        self.given[replica] += 1

    def accepted(self, replica: int) -> None:
        self._refusals[replica] = 0

    def refused(self, replica: int, now_ns: int) -> bool:
        """Whether that was the refusal by which the replica counts as dead."""
        self._refusals[replica] += 1
        if self._refusals[replica] < REFUSALS or replica in self.died_ns:
            return False
        self.died_ns[replica] = now_ns
        return True

    def taken_from(self, replica: int, count: int = 1) -> None:
        self.reassigned[replica] = self.reassigned.get(replica, 0) + count


class Lanes:
    """Requests that are due and wait: a lane for each replica, and one for those that any may take, so that a full
    replica holds up nobody else's. Requests are numbers in the order of the schedule."""

    def __init__(self, replicas: int) -> None:
        # The last is ANY_REPLICA's.
        self._lanes: list[deque[int]] = [deque() for _ in range(replicas + 1)]
        self._tried: dict[int, set[int]] = {}
        self.waiting = 0

    def join(self, request: int, replica: int) -> None:
        self._lanes[replica].append(request)
        self.waiting += 1

    def join_again(self, request: int, replica: int, fleet: Fleet) -> bool:
        """A request that the replica did not answer, before all that wait for any; False where all were tried."""
        tried = self._tried.setdefault(request, set())
        tried.add(replica)
        if not fleet.alive(but=tried):
            return False
        self._lanes[ANY_REPLICA].appendleft(request)
        self.waiting += 1
        fleet.taken_from(replica)
        return True

    def take(self, fleet: Fleet) -> tuple[int, int | None] | None:
        """The earliest request whose replica has room, and that replica (None: no one is left to ask)."""
        ready: list[tuple[int, int, int | None]] = [
            (lane[0], replica, replica)
            for replica, lane in enumerate(self._lanes[:ANY_REPLICA])
            if lane and fleet.has_room(replica)
        ]
        if shared := self._lanes[ANY_REPLICA]:
            tried = self._tried.get(shared[0], ())
            chosen = fleet.freest(but=tried)
            if chosen is not None or not fleet.alive(but=tried):
                ready.append((shared[0], ANY_REPLICA, chosen))
        if not ready:
            return None
        request, lane, replica = min(ready, key=lambda each: each[0])
        self._lanes[lane].popleft()
        self.waiting -= 1
        return request, replica

    def release(self, replica: int, fleet: Fleet) -> None:
        """What waits for a replica that is dead may be taken by any other."""
        left = self._lanes[replica]
        if not left or not fleet.alive():
            return
        fleet.taken_from(replica, len(left))
        self._lanes[ANY_REPLICA] = deque(sorted([*self._lanes[ANY_REPLICA], *left]))
        left.clear()

    def forget(self, kept: Collection[int]) -> None:
        """All but those: no more are given out."""
        self._lanes = [deque(request for request in lane if request in kept) for lane in self._lanes]
        self.waiting = sum(map(len, self._lanes))
