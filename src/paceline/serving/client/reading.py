"""Whole answers turned into results, a few events at a time, between two looks at the schedule."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice

from paceline.serving.client import tally
from paceline.serving.client.orders import Handled, Limits, Orders, stamps
from paceline.serving.client.response import Answer, BrokenResponse, Response, understand

# Less than a hundred microseconds: an answer of a thousand tokens, understood at once, would make other requests late.
EVENTS_AT_ONCE = 16
DETAIL_BYTES = 300
FINISH_BYTES = 80


class Reading:
    """`go_on` until it says that everything stands in `handled`; an answer that is no success is an error by its
    number. A server may send back what it was sent: `secret`, the key it was asked with, is in none of it."""

    def __init__(self, handled: Handled, response: Response, stamped: bool, secret: bytes | None = None) -> None:
        self.handled, self.response = handled, response
        self._secret = None if secret is None else secret.decode(errors="replace")
        handled.status, handled.stamped = response.status, stamped
        handled.first_byte_ns, handled.ended_ns = response.kernel_ns[0], response.kernel_ns[-1]
        self._events = response.events()
        self._answer = Answer()

    def go_on(self, keeps_text: bool) -> bool:
        if self.response.status != 200:
            self._refused()
            return True
        before = self._answer.events
        try:
            understand(islice(self._events, EVENTS_AT_ONCE), self._answer)
        except BrokenResponse as error:
            self.handled.error = str(error)
            return True
        if self._answer.events - before == EVENTS_AT_ONCE:
            return False
        self._answered(keeps_text)
        return True

    def _refused(self) -> None:
        """What the server says of it; when to come again is told, not obeyed: a second try would be another load."""
        response, handled = self.response, self.handled
        handled.error = f"http_{response.status}"
        later = response.headers.get(b"retry-after")
        wish = f"Retry-After: {self._told(later.decode(errors='replace'), 40)}; " if later else ""
        handled.detail = wish + self._told(response.body().decode(errors="replace"), DETAIL_BYTES)

    def _told(self, text: str, most: int | None = None) -> str:
        """Cut only without the key: a part of one would not be found."""
        return (text if self._secret is None else text.replace(self._secret, "***"))[:most]

    def _answered(self, keeps_text: bool) -> None:
        handled, answer, times = self.handled, self._answer, self.response.kernel_ns
        handled.first_ns = None if answer.first_read is None else times[answer.first_read]
        if answer.first_reasoning_read is not None:
            handled.first_reasoning_ns = times[answer.first_reasoning_read]
        handled.last_ns = None if answer.last_read is None else times[answer.last_read]
        handled.token_ns.extend(map(times.__getitem__, answer.reads))
        handled.pieces, handled.coalesced = answer.pieces, answer.coalesced
        handled.finish = None if answer.finish is None else self._told(answer.finish, FINISH_BYTES)
        handled.tokens_told, handled.prompt_tokens = answer.tokens_told, answer.prompt_tokens
        if keeps_text:
            handled.text = self._told("".join(answer.text))
        if answer.error is not None:
            handled.error, handled.detail = "in_stream", self._told(answer.error, DETAIL_BYTES)
        elif answer.damaged:
            handled.error = "malformed"
        elif answer.pieces == 0:
            handled.error = "empty"


def first_token_ns(handled: Handled) -> int | None:
    """Of reasoning or of the answer, whichever came first: the one that TTFT is of."""
    return min((at for at in (handled.first_ns, handled.first_reasoning_ns) if at is not None), default=None)


def is_late(handled: Handled, limits: Limits) -> bool:
    """Whether an answer came later than a limit allows; from when it was due, as all latencies are."""
    first, last, ended = first_token_ns(handled), handled.last_ns, handled.ended_ns
    if first is None or last is None or ended is None:
        return False
    tokens = handled.pieces if handled.tokens_told is None else handled.tokens_told
    spans = (
        (first - handled.due_ns, limits.ttft_ns),
        ((last - first) / (tokens - 1) if tokens > 1 else 0, limits.tpot_ns),
        (ended - handled.due_ns, limits.latency_ns),
    )
    return any(limit is not None and span > limit for span, limit in spans)


class Results:
    """What has ended. Answers wait in `unread`, whole, until there is time for them; `slot` tells others the counts."""

    def __init__(self, orders: Orders, slot: memoryview[int]) -> None:
        self._keeps_text, self._limits, self._slot = orders.keeps_text, orders.limits, slot
        self._secrets = [target.secret for target in orders.targets]
        self.handled: list[Handled] = []
        self.read_lag_ns: array[int] = stamps()
        self.unread: deque[Reading] = deque()
        self.unread_bytes = 0

    def answered(self, handled: Handled, response: Response, stamped: bool) -> None:
        self.unread.append(Reading(handled, response, stamped, self._secrets[handled.replica]))
        self.unread_bytes += len(response.data)

    def read_off(self) -> None:
        """A few events of the answer that has waited longest."""
        reading = self.unread[0]
        if reading.go_on(self._keeps_text):
            self.unread.popleft()
            self.unread_bytes -= len(reading.response.data)
            self.read_lag_ns += reading.response.lag_ns
            self.keep(reading.handled)

    def keep(self, handled: Handled) -> None:
        self.handled.append(handled)
        self._slot[tally.ENDED] += 1
        if handled.error is not None:
            self._slot[tally.FAILED] += 1
        elif is_late(handled, self._limits):
            self._slot[tally.LATE] += 1
