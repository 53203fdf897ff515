"""`pytest -n N`: tests in N processes, forked when all tests have been collected, which is so done only once.

A file stays with one worker: campaigns of real processes are run once per file and shared by its tests. A worker asks
for the next file when it is done with one, and sends the report of each test to pytest here, which treats it as one of
its own. A worker that dies fails the test it was at; the rest of its file goes to another one.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

# The process that collected the tests, also in its workers.
OWNER = os.getpid()


@dataclass
class Worker:
    name: str
    process: int
    link: Connection
    # Of the tests of its file, by their number: the first is running.
    ahead: deque[int] = field(default_factory=deque)

    def ended(self) -> int:
        """Its exit code, negative for a signal. It ends by itself once nobody listens to it."""
        self.link.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def run(session: pytest.Session, processes: int) -> None:
    """Run all collected tests, file by file in the order of their first tests, in so many processes at once."""
    by_file: dict[Path, list[int]] = {}
    for number, item in enumerate(session.items):
        by_file.setdefault(item.path, []).append(number)
    files = deque(by_file.values())
    session.config.pluginmanager.getplugin("terminalreporter").showfspath = False
    names = (f"w{number}" for number in itertools.count())
    # Made here, else each worker would make one.
    folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: list[Worker] = []
    try:
        while True:
            while files and len(workers) < processes:
                workers.append(_forked(session, next(names), folder, [worker.link for worker in workers]))
            if not workers:
                return
            ready = wait([worker.link for worker in workers])
            for worker in [worker for worker in workers if worker.link in ready]:
                if not _heard(session, worker, files):
                    workers.remove(worker)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.ended()


def _heard(session: pytest.Session, worker: Worker, files: deque[list[int]]) -> bool:
    """Do what this worker asks for. False: it has ended."""
    hook = session.config.hook
    try:
        kind, said = worker.link.recv()
    except (EOFError, ConnectionResetError):
        code = worker.ended()
        if worker.ahead or code:
            _fail(session, worker, code)
        if worker.ahead:
            files.appendleft(list(worker.ahead))
        return False
    if kind == "next":
        worker.ahead = deque(files.popleft() if files else ())
        worker.link.send(list(worker.ahead))
    elif kind == "done":
        worker.ahead.popleft()
    elif kind == "warning":
        session.config.pluginmanager.getplugin("terminalreporter").pytest_warning_recorded(**said)
    else:
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=said))
    return True


def _fail(session: pytest.Session, worker: Worker, code: int) -> None:
    """The test at which a worker died, or the one before, whose file it was about to leave."""
    item = session.items[worker.ahead.popleft()] if worker.ahead else session.items[0]
    why = f"worker {worker.name} ended with exit code {code} at or after this test"
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _forked(session: pytest.Session, name: str, folder: Path, links: Sequence[Connection]) -> Worker:
    here, there = Pipe()
    process = os.fork()
    if not process:
        for link in (here, *links):
            link.close()
        _work(session, name, folder / name, there)
    there.close()
    return Worker(name, process, here)


def _work(session: pytest.Session, name: str, folder: Path, link: Connection) -> NoReturn:
    """A worker, from its first file to its last. Never returns."""
    code = 1
    try:
        _become_worker(session.config, name, folder, link)
        while not session.shouldfail and not session.shouldstop and (numbers := _asked(link)):
            for number, after in itertools.pairwise([*numbers, None]):
                # Fixtures of the session stay when those of a file go.
                following: Any = session if after is None else session.items[after]
                item = session.items[number]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    break
                link.send(("done", None))
        session._setupstate.teardown_exact(None)
        code = 0
    except (BrokenPipeError, ConnectionResetError, EOFError, KeyboardInterrupt):
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def _asked(link: Connection) -> list[int]:
    link.send(("next", None))
    numbers: list[int] = link.recv()
    return numbers


def _become_worker(config: pytest.Config, name: str, folder: Path, link: Connection) -> None:
    # Read by plugins that leave it to the owner to write what they keep.
    config.workerinput = {"workerid": name}  # type: ignore[attr-defined]
    plugins = config.pluginmanager
    for plugin in ("terminalreporter", "terminalprogress"):
        if plugins.hasplugin(plugin):
            plugins.unregister(name=plugin)
    # What it writes is kept in files of its own.
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
    plugins.register(Sender(config, link))


@dataclass(eq=False)
class Sender:
    config: pytest.Config
    link: Connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.link.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if when != "runtest":  # seen by all, reported by their owner
            return
        text, category = str(warning_message.message), UserWarning
        said = warnings.WarningMessage(text, category, warning_message.filename, warning_message.lineno)
        self.link.send(("warning", {"warning_message": said, "nodeid": nodeid}))
