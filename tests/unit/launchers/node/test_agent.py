"""The agent as a process, with ranks that need no torch: where its spec comes from, how it ends, what it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.experiment.spec import RunSpec
from paceline.launchers._job import spec_text
from paceline.launchers.node import log_transport
from paceline.results import store
from paceline.results.records import Status

pytestmark = pytest.mark.slow

Make = Callable[..., RunSpec]
LONG = "600"


class Agent:
    """One node alone, its files in `home`, its scratch below `scratch`."""

    def __init__(self, folder: Path, environment: dict[str, str], spec: RunSpec, *words: str) -> None:
        self.home, self.scratch = folder / "home", folder / "scratch"
        for path in (self.home, self.scratch):
            path.mkdir(exist_ok=True)
        self.spec, self.told = spec, ""
        command = [
            sys.executable,
            "-m",
            "paceline.launchers.node.agent",
            "--runner=testbed.light",
            f"--scratch={self.scratch}",
            *words,
        ]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def await_rank(self) -> psutil.Process:
        """The first rank, once it has begun."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            for path in self.scratch.glob("*/progress-0"):
                if found := store.read_progress(path.parent):
                    return psutil.Process(found[0].pid)
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(self.process.communicate()[0])

    def end(self) -> log_transport.Receiver:
        """Read to the end; the input stays open, as a living controller's does."""
        assert self.process.stdout is not None
        guard = threading.Timer(100, self.process.kill)
        guard.start()
        self.told = self.process.stdout.read()
        self.process.wait()
        guard.cancel()
        receiver = log_transport.Receiver(self.home)
        self.told = "\n".join(line for line in self.told.splitlines() if receiver.feed(line) is not None)
        return receiver


@pytest.fixture
def agent(
    tmp_path: Path, environment: Callable[..., dict[str, str]], make_spec: Make
) -> Iterator[Callable[..., Agent]]:
    started: list[Agent] = []

    def start(*words: str, env: dict[str, str] | None = None, **more: Any) -> Agent:
        spec = make_spec(None, processes=1, workload="reference", **more)
        started.append(Agent(tmp_path, environment(**(env or {})), spec, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def request(agent: Agent, **env: str) -> str:
    return json.dumps({"spec": json.loads(spec_text(agent.spec)), "env": env})


def test_spec_and_variables_come_through_the_input(agent: Callable[..., Agent]) -> None:
    one = agent("--relay", "--spec-stdin", "--controller-link")
    one.tell(request(one, PACELINE_NODE="gpu-7", LIGHT_S="0.2"))
    receiver = one.end()
    assert one.process.returncode == 0, one.told
    assert receiver.missing(1) is None
    (outcome,) = store.read_outcomes(one.home)
    assert (outcome.status, outcome.host) == (Status.OK, "gpu-7")
    assert list(one.scratch.iterdir()) == []


def test_the_end_of_the_input_ends_everything_in_silence(agent: Callable[..., Agent]) -> None:
    one = agent("--relay", "--spec-stdin", "--controller-link")
    one.tell(request(one, LIGHT_S=LONG))
    rank = one.await_rank()
    assert one.process.stdin is not None
    one.process.stdin.close()
    receiver = one.end()
    assert not rank.is_running()
    assert receiver.arrivals[0].exit_code is None, "nobody is left to hear a farewell"
    assert list(one.scratch.iterdir()) == []


def test_silence_beyond_the_limit_is_the_end_too(agent: Callable[..., Agent]) -> None:
    """A connection may be lost without a word: the far side of a cable that was pulled."""
    one = agent("--relay", "--spec-stdin", "--controller-link=1")
    one.tell(request(one, LIGHT_S=LONG))
    end = time.monotonic() + 120
    while one.process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert one.process.poll() == 128 + signal.SIGTERM
    assert list(one.scratch.iterdir()) == []


@pytest.mark.parametrize("how", ["asked", signal.SIGTERM, signal.SIGHUP])
def test_a_polite_end_brings_the_stacks_and_a_farewell(agent: Callable[..., Agent], how: Any) -> None:
    """Twice, as impatient people do: the second time must not interrupt the clearing up."""
    one = agent("--relay", "--spec-stdin", "--controller-link")
    one.tell(request(one, LIGHT_S=LONG))
    rank = one.await_rank()
    for _ in range(2):
        if how == "asked":
            one.tell("end")
        else:
            one.process.send_signal(how)
    receiver = one.end()
    assert not rank.is_running()
    assert receiver.missing(1) is None, one.told
    assert receiver.arrivals[0].exit_code == 128 + signal.SIGTERM
    assert "in live" in (one.home / "stack-0.txt").read_text()
    assert list(one.scratch.iterdir()) == []


def test_a_killed_agent_takes_its_ranks_along(agent: Callable[..., Agent]) -> None:
    one = agent("--relay", "--spec-stdin", "--controller-link")
    one.tell(request(one, LIGHT_S=LONG))
    rank = one.await_rank()
    one.process.kill()
    rank.wait(60)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PACELINE_SPEC": "no JSON"},
        {"PACELINE_SPEC": '{"schema": 99}'},
        {"PACELINE_SPEC": '{"schema": 1, "training": {}}'},
    ],
)
def test_a_spec_that_is_none_is_one_sentence(agent: Callable[..., Agent], env: dict[str, str], golden: object) -> None:
    one = agent("--relay", env=env)
    one.end()
    assert one.process.returncode == 1
    assert one.told == golden
    assert "Traceback" not in one.told


def test_a_wrong_number_of_nodes_is_the_word_of_the_first_rank(agent: Callable[..., Agent], golden: object) -> None:
    one = agent("--relay", "--spec-stdin", nodes=2)
    one.tell(request(one))
    one.end()
    (outcome,) = store.read_outcomes(one.home)
    assert outcome.error == golden


def test_a_missing_scratch_directory_is_reported(agent: Callable[..., Agent]) -> None:
    one = agent("--relay", "--spec-stdin", "--scratch=/nowhere/at/all")
    one.tell(request(one, PACELINE_NODE="gpu-7"))
    receiver = one.end()
    assert receiver.missing(1) is None
    (outcome,) = store.read_outcomes(one.home)
    assert outcome.status is Status.FAILED
    assert "gpu-7: [Errno 2] No such file or directory: '/nowhere/at/all" in str(outcome.error)


def test_facts_and_the_time_on_request() -> None:
    command = [sys.executable, "-m", "paceline.launchers.node.agent", "--facts"]
    before = time.time()
    done = subprocess.run(command, input="\n\n", capture_output=True, text=True, check=True)
    facts, *times = done.stdout.splitlines()
    assert {"paceline", "versions", "gpus", "driver", "host"} <= set(json.loads(facts))
    assert len(times) == 2
    assert before <= float(times[0]) <= float(times[1]) <= time.time()
