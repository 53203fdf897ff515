"""Pages that take seconds to compute, built in a process of their own and kept until their runs change.

The server stays responsive meanwhile, and readers of large directories may fork, which a process with threads must not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path

from paceline.campaign.run import findings
from paceline.errors import PacelineError
from paceline.report.charts import charts
from paceline.report.exporters import html
from paceline.report.exporters._other_pages import compare_page, history_page
from paceline.report.summary import summarise
from paceline.results import safe_text

MOST_PAGES = 16
# A campaign may be measured on this host: leave the processors to it.
NICENESS = 10


class Builder:
    """Builds one page at a time; equal requests share their page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._pages: OrderedDict[Hashable, Future[str]] = OrderedDict()

    def page(self, state: Hashable, make: Callable[..., str], *arguments: object) -> str:
        """The page that `make` returns, from the store if the state of its runs is the same. PacelineError if it cannot
        be made."""
        key = _key(state, make, arguments)
        try:
            return self._page(key, make, arguments).result()
        except BrokenProcessPool:
            self.close()
            raise PacelineError(
                "the process that builds pages was ended, perhaps because memory ran out. Load the page again."
            ) from None

    def known(self, state: Hashable, make: Callable[..., str], *arguments: object) -> str | None:
        """The same if it is already made; None otherwise."""
        with self._lock:
            page = self._pages.get(_key(state, make, arguments))
        return page.result() if page is not None and page.done() and page.exception() is None else None

    def _page(self, key: Hashable, make: Callable[..., str], arguments: Sequence[object]) -> Future[str]:
        with self._lock:
            page = self._pages.get(key)
            if page is None or (page.done() and page.exception() is not None):
                page = self._pages[key] = self._workers().submit(make, *arguments)
            self._pages.move_to_end(key)
            while len(self._pages) > MOST_PAGES:
                self._pages.popitem(last=False)
            return page

    def _workers(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare)
        return self._pool

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _key(state: Hashable, make: Callable[..., str], arguments: Sequence[object]) -> Hashable:
    return make.__name__, state, repr(arguments)


def _prepare() -> None:
    """The parent handles Ctrl-C; this process ends with it.

    The kernel could end it too, but does so when the thread ends that started it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(NICENESS)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


# --- what is built there ---


def report_page(directory: Path, above: str) -> str:
    return html.text(findings.report_of(directory), above)


def headline(directory: Path) -> str:
    report = findings.report_of(directory)
    return summarise(report, charts(report)).headline


def comparison_page(a: Path, b: Path, above: str) -> str:
    found, skipped = findings.comparison_of(a, b)
    return compare_page(found, [f"skipped: {text}" for text in skipped], above)


def over_time_page(directories: Sequence[Path], above: str) -> str:
    found = findings.history_of(directories)
    return history_page(found.title, found.series, found.names, found.lines, above)


def run_text(run_dir: Path) -> str:
    """What `paceline show` prints."""
    return "\n".join(map(safe_text.text, findings.run_lines(run_dir)))
