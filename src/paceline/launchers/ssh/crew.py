"""The agents of one job: listened to by one reader, told now and then that their controller lives, ended as one."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.contract import JobState
from paceline.launchers._losses import awaited_ranks, have_ended, is_past_setup, ranks_of, reported_failure
from paceline.launchers.node import agent, log_transport
from paceline.launchers.ssh.connections import Connection
from paceline.results.records import Status

# How often an agent hears that its controller lives, and how long it goes on without.
BEAT_S, SILENCE_S = 5.0, 60.0
# When one node has failed, how long the others may take to notice it themselves.
NOTICE_S = 5.0
# How long agents may take to end their ranks and to send what these left.
FAREWELL_S = 30.0


class Crew:
    """One connection per node, in the order of the nodes. names: as hosts are told apart in the log. tries: per host,
    the command by which a person looks for what went wrong. expendable: nodes whose end ends nobody else's, once rank 0
    is past its setup; before, it would wait for them. ranks: of each node."""

    def __init__(
        self,
        run_dir: Path,
        connections: Sequence[Connection],
        names: Sequence[str],
        tries: Sequence[str],
        relay: bool,
        expendable: Collection[int] = (),
        ranks: int = 1,
    ) -> None:
        self._connections, self._names, self._tries, self._relay = connections, names, tries, relay
        self._run_dir, self._expendable, self._ranks = run_dir, expendable, ranks
        self.lost: list[int] = []
        self._receiver = log_transport.Receiver(run_dir)
        self._log = (run_dir / "log.txt").open("a", buffering=1)
        self._beat_at = time.monotonic()
        self._trouble_at: float | None = None
        self._asked_at: float | None = None

    @property
    def pids(self) -> list[int]:
        return [connection.pid for connection in self._connections]

    @property
    def is_running(self) -> bool:
        return any(connection.code is None for connection in self._connections)

    def listen(self) -> None:
        """Take what has come, and see to it that nobody waits for a node that will not come back."""
        for connection, name in zip(self._connections, self._names, strict=True):
            if connection.code is None:
                out, err = connection.listen()
                told = [line for line in out if self._receiver.feed(line) is not None]
                self._log.writelines(f"{name}: {line}\n" for line in [*told, *err])
        now = time.monotonic()
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            self._send(b"\n")
        self._see_losses()
        if not any(connection.code for connection in self._kept()):
            # Whoever failed before rank 0 was past its setup may be expendable by now.
            self._trouble_at = None
        elif self._trouble_at is None:
            self._trouble_at = now
        if self._trouble_at is not None and now - self._trouble_at > NOTICE_S:
            self.ask_to_end()

    def _see_losses(self) -> None:
        """Which expendable nodes are gone. Starters of the others would wait minutes for them when their own ranks have
        ended, so they are asked to end then."""
        for node in self._expendable if self._asked_at is None else ():
            is_new = node not in self.lost and bool(self._connections[node].code)
            own = ranks_of(node, self._ranks)
            if is_new and is_past_setup(self._run_dir) and not reported_failure(self._run_dir, own):
                self.lost.append(node)
                told = f"{self._names[node]} is gone; rank 0 goes on with the other replicas"
                self._log.write(f"paceline: {told}\n")
        awaited = awaited_ranks(len(self._connections), self.lost, self._ranks)
        if self.lost and self.is_running and have_ended(self._run_dir, awaited):
            self.ask_to_end()

    def _kept(self) -> list[Connection]:
        return [connection for node, connection in enumerate(self._connections) if node not in self.lost]

    def ask_to_end(self) -> None:
        """A polite end with a farewell; those that take too long are cut off."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._send(agent.END + b"\n")
        elif time.monotonic() - self._asked_at > FAREWELL_S:
            self.end(0.0)

    def _send(self, data: bytes) -> None:
        for connection in self._connections:
            if connection.code is None:
                connection.send(data)

    def state(self) -> JobState:
        if self.is_running:
            return JobState(running=True)
        codes = [connection.code or 0 for connection in self._kept()]
        why, code = self._lost(), next((code for code in codes if code), 0)
        status = Status.FAILED if why else None
        return JobState(running=False, exit_code=code, status=status, reason=why, lost=tuple(self.lost))

    def _lost(self) -> str | None:
        """The first node that ended without a farewell, though nobody had cut it off."""
        for node, connection in enumerate(self._connections):
            arrival = self._receiver.arrivals.get(node)
            said_farewell = arrival is not None and arrival.exit_code is not None
            spoke = said_farewell if self._relay else connection.code not in (255, 137)
            if not connection.code or node in self.lost or spoke:
                continue
            return f"{_loss(connection, self._names[node], begun=arrival is not None)}; try: {self._tries[node]}"
        return None

    def missing(self) -> str | None:
        return self._receiver.missing(len(self._connections), but=self.lost) if self._relay else None

    def end(self, patience_s: float) -> None:
        """Cut every connection; agents that still run end themselves by that. May be called again."""
        for connection in self._connections:
            connection.hang_up()
        deadline = time.monotonic() + patience_s
        while self.is_running and time.monotonic() < deadline:
            self.listen()
            time.sleep(0.05)
        for connection in self._connections:
            if connection.code is None:
                connection.code = connection.end(0.0)
        for connection in self._connections:
            connection.end(0.0)

    def close(self) -> None:
        self._log.close()


def _loss(connection: Connection, name: str, begun: bool) -> str:
    """In one clause: what ended. ssh itself ends with 255, a command killed over there with 128 and its signal."""
    code = connection.code or 0
    last = connection.complaints[-1][:200] if connection.complaints else None
    if code < 0:
        return f"the ssh client to {name} was ended by signal {-code}"
    if code == 255:
        return f"the connection to {name} was lost" + (f" ({last})" if last else "")
    if not begun:
        return f"the agent on {name} did not begin (exit code {code}: {last or 'it said nothing'})"
    return f"the agent on {name} was killed (exit code {code}: by hand, or because the host ran out of memory)"
