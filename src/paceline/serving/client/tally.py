"""How far a load has come, while it runs: counters in shared memory, each written by one process only.

A slot has one writer and numbers of eight bytes, so that no lock is needed; a reader may see a request as sent a moment
before it sees another as ended. STOP alone is written from outside: once it is set no more requests are given out.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

_FIELDS = 6
PLANNED, SENT, ENDED, LATE, FAILED, STOP = range(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Requests of all processes so far. ended counts all that came to an end; of those, late came whole but not within
    the limits, failed did not come whole."""

    planned: int
    sent: int
    ended: int
    late: int
    failed: int


class Board:
    """One slot for each process; made before they are forked."""

    def __init__(self, slots: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * _FIELDS * slots)).cast("q")

    def slot(self, number: int) -> memoryview[int]:
        return self._cells[number * _FIELDS : (number + 1) * _FIELDS]

    def total(self) -> Tally:
        planned, sent, ended, late, failed = (sum(self._cells[field::_FIELDS]) for field in range(STOP))
        return Tally(planned=planned, sent=sent, ended=ended, late=late, failed=failed)

    def stop(self) -> None:
        for cell in range(STOP, len(self._cells), _FIELDS):
            self._cells[cell] = 1
