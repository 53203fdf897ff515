"""The ssh connections of one job: their processes, their output line by line, their end.

`Connection` is one ssh client. `Sessions` has one connection per node: a single reader takes their output, sends
heartbeats to the agents, notices lost nodes, and ends all of them together.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.contract import JobState
from paceline.host.processes import end_with_parent
from paceline.host.rank_lines import LineSplitter
from paceline.launchers._job import awaited_ranks, have_ended, is_past_setup, ranks_of, reported_failure
from paceline.launchers.node import agent, log_transport
from paceline.results.records import Status

PIECE = 1 << 16
# Per call of `listen`, so that the other connections get their turn.
MOST_LINES = 1000
# Interval of the heartbeats to the agents, and how long agents continue without one.
BEAT_S, SILENCE_S = 5.0, 60.0
# When one node has failed, how long the others may take to notice it themselves.
NOTICE_S = 5.0
# How long agents may take to end their ranks and send their files.
FAREWELL_S = 30.0


class Lines:
    """Whole lines of a pipe, without blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._lines = descriptor, LineSplitter()
        self.is_at_end = False

    def take(self) -> list[str] | None:
        """Return the lines of one read, or None if nothing is available. The last line may be incomplete."""
        if self.is_at_end:
            return None
        try:
            piece = os.read(self.descriptor, PIECE)
        except BlockingIOError:
            return None
        lines = self._lines.add(piece)
        if not piece:
            self.is_at_end = True
            lines += self._lines.last()
        return [line.decode(errors="replace") for line in lines]


class Connection:
    """One ssh client and the remote command it runs. `code` is its exit code, once all output was read."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # If the controller is killed, its connections close and the remote side notices.
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.out, self.err = Lines(self._process.stdout.fileno()), Lines(self._process.stderr.fileno())
        # The last lines on the error channel, from ssh itself or from the remote side.
        self.complaints: deque[str] = deque(maxlen=5)
        self._received: deque[str] = deque()
        self.code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Write to the remote command. If it is gone, its exit code shows that later."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def listen(self) -> tuple[list[str], list[str]]:
        """Return the lines of both channels that have arrived."""
        ended = self._process.poll()
        out: list[str] = []
        err: list[str] = []
        while (more := self.out.take()) is not None:
            out += more
            if len(out) > MOST_LINES:
                return out, err
        while (more := self.err.take()) is not None:
            err += more
        self.complaints.extend(line for line in err if line.strip())
        if ended is not None:
            self.code = ended
        return out, err

    def await_line(self, deadline: float) -> str | None:
        """Return the next line of output, or None at its end or at the deadline. Also reads the error channel."""
        if self._received:
            return self._received.popleft()
        with selectors.DefaultSelector() as selector:
            for lines in (self.out, self.err):
                selector.register(lines.descriptor, selectors.EVENT_READ)
            while time.monotonic() < deadline and not self.out.is_at_end:
                selector.select(0.1)
                self._received += self.out.take() or ()
                self.complaints.extend(line for line in self.err.take() or () if line.strip())
                if self._received:
                    return self._received.popleft()
        return None

    def end(self, patience_s: float) -> int:
        """Close the input and wait for the remote command to end; kill the client after the patience."""
        self.hang_up()
        deadline = time.monotonic() + patience_s
        while self._process.poll() is None and time.monotonic() < deadline:
            # Keep reading, so that a full pipe does not block the remote command.
            self.listen()
            time.sleep(0.02)
        self._process.kill()
        self.listen()
        code = self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self.out.is_at_end = self.err.is_at_end = True
        return code


class Sessions:
    """One connection per node, in node order.

    names: host names for the log. hints: per host, a command that shows what went wrong. relay: files arrive as lines.
    expendable: nodes whose loss does not end the run once rank 0 is past setup. ranks: per node.
    """

    def __init__(
        self,
        run_dir: Path,
        connections: Sequence[Connection],
        names: Sequence[str],
        hints: Sequence[str],
        relay: bool,
        expendable: Collection[int] = (),
        ranks: int = 1,
    ) -> None:
        self._connections, self._names, self._hints, self._relay = connections, names, hints, relay
        self._run_dir, self._expendable, self._ranks = run_dir, expendable, ranks
        self.lost: list[int] = []
        self._receiver = log_transport.Receiver(run_dir)
        self._log = (run_dir / "log.txt").open("a", buffering=1)
        self._beat_at = time.monotonic()
        self._failed_at: float | None = None
        self._asked_at: float | None = None

    @property
    def pids(self) -> list[int]:
        return [connection.pid for connection in self._connections]

    @property
    def is_running(self) -> bool:
        return any(connection.code is None for connection in self._connections)

    def listen(self) -> None:
        """Take new output, send heartbeats, and end the job if it waits for a node that will not return."""
        for connection, name in zip(self._connections, self._names, strict=True):
            if connection.code is None:
                out, err = connection.listen()
                printed = [line for line in out if self._receiver.feed(line) is not None]
                self._log.writelines(f"{name}: {line}\n" for line in [*printed, *err])
        now = time.monotonic()
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            self._send(b"\n")
        self._note_losses()
        if not any(connection.code for connection in self._kept()):
            # A node that failed while rank 0 was in setup may be expendable by now.
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > NOTICE_S:
            self.ask_to_end()

    def _note_losses(self) -> None:
        """Find expendable nodes that are gone, and end the job once all remaining ranks have ended."""
        for node in self._expendable if self._asked_at is None else ():
            is_new = node not in self.lost and bool(self._connections[node].code)
            own = ranks_of(node, self._ranks)
            if is_new and is_past_setup(self._run_dir) and not reported_failure(self._run_dir, own):
                self.lost.append(node)
                self._log.write(f"paceline: {self._names[node]} is gone; rank 0 continues with the other replicas\n")
        awaited = awaited_ranks(len(self._connections), self.lost, self._ranks)
        if self.lost and self.is_running and have_ended(self._run_dir, awaited):
            self.ask_to_end()

    def _kept(self) -> list[Connection]:
        return [connection for node, connection in enumerate(self._connections) if node not in self.lost]

    def ask_to_end(self) -> None:
        """Ask all agents to end and send their files. Those that take too long are cut off."""
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
        reason, code = self._explain_end(), next((code for code in codes if code), 0)
        status = Status.FAILED if reason else None
        return JobState(running=False, exit_code=code, status=status, reason=reason, lost=tuple(self.lost))

    def _explain_end(self) -> str | None:
        """Explain the end of the first node that ended without a farewell. Returns None if there is none."""
        for node, connection in enumerate(self._connections):
            arrival = self._receiver.arrivals.get(node)
            said_farewell = arrival is not None and arrival.exit_code is not None
            is_regular = said_farewell if self._relay else connection.code not in (255, 137)
            if connection.code and node not in self.lost and not is_regular:
                code, name = connection.code, self._names[node]
                last = connection.complaints[-1][:200] if connection.complaints else None
                # ssh itself exits with 255, a command killed on the host with 128 plus the signal.
                killed = "by hand, or because the host ran out of memory"
                why = f"the agent on {name} was killed (exit code {code}: {killed})"
                if code < 0:
                    why = f"the ssh client to {name} was ended by signal {-code}"
                elif code == 255:
                    why = f"the connection to {name} was lost" + (f" ({last})" if last else "")
                elif arrival is None:
                    why = f"the agent on {name} did not start (exit code {code}: {last or 'it printed nothing'})"
                return f"{why}; try: {self._hints[node]}"
        return None

    def missing(self) -> str | None:
        return self._receiver.missing(len(self._connections), but=self.lost) if self._relay else None

    def end(self, patience_s: float) -> None:
        """Cut every connection, by which agents that still run end themselves. May be called again."""
        for connection in self._connections:
            connection.hang_up()
        deadline = time.monotonic() + patience_s
        while self.is_running and time.monotonic() < deadline:
            self.listen()
            time.sleep(0.05)
        for connection in self._connections:
            code = connection.end(0.0)
            connection.code = code if connection.code is None else connection.code

    def close(self) -> None:
        self._log.close()
