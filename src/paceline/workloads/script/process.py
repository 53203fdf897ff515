"""The process of a script: how it is started, how its lines and files are read, and how it ended.

worker of a rank ── starts `python train.py` (or, on the first rank of a node, `torchrun train.py`)
     │                    └── PYTHONPATH: training/attachment ── rank-R.jsonl, rank-R.facts.json
     └── reads the files while the script runs ── samples ── at the end: evidence, or ScriptError
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from paceline.contract import Recorder, Seat
from paceline.errors import InvalidRunError, ScriptError, UnsupportedError
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_all, end_with_parent, signal_name
from paceline.results.records import SAMPLE_TYPES, StepSample
from paceline.training import attachment
from paceline.workloads.script.evidence import evidence_of
from paceline.workloads.script.options import Options

POLL_S = 0.1
LAST_LINES = 30
# Signals of which the process that they end is the cause; another one may be the way in which a launcher ends ranks.
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Variables by which torchrun places a rank: a command that starts its own ranks must not inherit them.
_PLACEMENT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)


def observe(
    spec: RunSpec,
    seat: Seat,
    recorder: Recorder,
    options: Options,
    fields: Mapping[str, str | int | float | bool | None],
) -> None:
    """Run or await the script of this rank, and record its steps and evidence."""
    assert spec.script is not None
    assert seat.run_dir is not None
    # The port of the store is the same on all ranks, and another one at each launch.
    folder = Path(seat.run_dir).absolute() / f"script-{os.environ.get('MASTER_PORT') or os.getpid()}"
    folder.mkdir(exist_ok=True)
    recorder.progress(0, "setup")
    reader = Reader(folder / f"rank-{seat.rank}.jsonl", seat.rank, recorder)
    words, files = spec.script.rendered(fields, str(folder))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    starts = not spec.script.starts_ranks or seat.local_rank == 0
    ended = folder / "ended"
    if starts:
        output = run_command(
            argv_of(spec, words, options, folder / f"nsys-{seat.rank}"), environment(spec, folder, options), reader
        )
        if spec.script.starts_ranks:
            ended.write_text(json.dumps([output.code, list(output.lines)]))
    else:
        while not ended.exists() or not ended.read_text():
            reader.read()
            time.sleep(POLL_S)
        code, lines = json.loads(ended.read_text())
        output = Output(code, collections.deque(lines))
    reader.read()
    facts = read_facts(folder, seat.rank)
    if not starts and output.code != 0:
        # The launcher of the command printed them among those of all ranks.
        sys.stdout.writelines(f"{line}\n" for line in facts.get("crash", {}).get("lines", ()))
    require_success(output, folder, seat.rank)
    if not reader.steps:
        raise InvalidRunError(why_nothing(spec, folder, facts))
    if facts["world_size"] != spec.topology.world_size:
        raise UnsupportedError(
            f"the script ran {facts['world_size']} ranks, expected {spec.topology.world_size}. Set processes to "
            f"{facts['world_size'] // spec.topology.nodes}."
        )
    traces = sorted(folder.glob(f"trace-{seat.rank}.json"))
    for trace in traces:
        recorder.keep(trace.name, trace.read_bytes())
    recorder.conclude(evidence_of(facts, reader.wall_s, seat, trace=traces[0].name if traces else None))
    # Config files stay, as the script got them; what the observer wrote is in the record now.
    for left in (*folder.glob(f"rank-{seat.rank}.*"), *folder.glob(f"trace-{seat.rank}.json")):
        left.unlink()
    if spec.topology.processes_per_node == 1:
        # Other ranks of the node would still read it.
        ended.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


# --- starting it ---


# Without samples of the processor: on some hosts nsys needs minutes to end them, or may not take any.
_NSYS_FLAGS = ("--force-overwrite=true", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--wait=primary")


def argv_of(spec: RunSpec, words: tuple[str, ...], options: Options, profile: Path) -> list[str]:
    """The program and its arguments. profile: the report of this rank, if nsys writes one, without its suffix."""
    assert spec.script is not None
    argv = list(words) if spec.script.starts_ranks else [sys.executable, *words]
    if not options.nsys:
        return argv
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UnsupportedError("nsys: the program is not installed here, expected it on PATH. Leave out script.nsys.")
    return [nsys, "profile", *_NSYS_FLAGS, f"--output={profile}", *argv]


def environment(spec: RunSpec, folder: Path, options: Options) -> dict[str, str]:
    """The environment of the script: its own, and where the observer writes."""
    assert spec.script is not None
    inherited = dict(os.environ)
    if spec.script.starts_ranks:
        inherited = {
            name: value
            for name, value in inherited.items()
            if name not in _PLACEMENT and not name.startswith("TORCHELASTIC_")
        }
        # torchrun sets this for the workers of several ranks; the user's own launcher decides for itself.
        if spec.topology.processes_per_node > 1 and "OMP_NUM_THREADS" not in spec.env:
            inherited.pop("OMP_NUM_THREADS", None)
    ours = str(Path(attachment.__file__).parent)
    path = os.pathsep.join(filter(None, (ours, inherited.get("PYTHONPATH"))))
    observed = {"steps": spec.steps or None, "trace": options.traced, "trace_rank": options.trace_rank}
    # The profiler would announce its start and stop in the output.
    quiet = {"KINETO_LOG_LEVEL": "99"} if options.traced else {}
    return {
        **inherited,
        **quiet,
        "PYTHONPATH": path,
        "PACELINE_OBSERVE": str(folder),
        "PACELINE_OBSERVE_OPTIONS": json.dumps(observed),
    }


class Output:
    """How a command ended: its exit code, and its last lines."""

    def __init__(self, code: int, lines: collections.deque[str]) -> None:
        self.code, self.lines = code, lines


def run_command(argv: list[str], env: Mapping[str, str], reader: Reader) -> Output:
    """Run the command to its end. What it prints is passed on, and its steps are recorded while it runs.

    It ends with this process. On SIGTERM to this one, all processes that the command started end; if it is
    killed, the command gets SIGTERM, which launchers such as torchrun pass on to their ranks.
    """
    lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
    try:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),
        )
    except OSError as error:
        raise UnsupportedError(f"command: {argv[0]!r} cannot be started ({error.strerror}).") from None
    assert child.stdout is not None
    pump = threading.Thread(target=pass_on, args=(child.stdout, lines), daemon=True)
    pump.start()
    try:
        with exit_on_sigterm():
            while child.poll() is None:
                reader.read()
                time.sleep(POLL_S)
    finally:
        if child.poll() is None:
            end_all(child)
    # Processes that the script left behind may keep its output open.
    pump.join(timeout=5)
    return Output(child.returncode, lines)


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """SystemExit on SIGTERM, by which torchrun ends a rank: the command of the rank must not outlive it."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def pass_on(stream: IO[bytes], lines: collections.deque[str]) -> None:
    """Copy the output of the script, line by line, to that of this rank."""
    for raw in stream:
        text = raw.decode(errors="replace")
        sys.stdout.write(text)
        lines.append(text.rstrip().rpartition("\r")[2])
    sys.stdout.flush()


# --- what it left ---


class Reader:
    """Records the lines of one rank's file as they are written."""

    def __init__(self, path: Path, rank: int, recorder: Recorder) -> None:
        self.path, self.rank, self.recorder = path, rank, recorder
        self.steps = 0
        self.wall_s = 0.0
        self._offset = 0

    def read(self) -> None:
        for row in self._new_rows():
            kind = SAMPLE_TYPES[row.pop("kind")]
            sample = kind(**row)
            self.recorder.add(sample)
            if isinstance(sample, StepSample):
                self.steps += 1
                self.wall_s += sample.duration_s
                self.recorder.progress(self.steps, "timing")

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def read_facts(folder: Path, rank: int) -> dict[str, Any]:
    """What the observer of this rank wrote about the script; empty if nothing."""
    try:
        found = json.loads((folder / f"rank-{rank}.facts.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def require_success(output: Output, folder: Path, rank: int) -> None:
    """ScriptError if the script failed: with the first error of a rank, else the last line printed."""
    if output.code == 0:
        return
    last = next((line for line in reversed(output.lines) if line.strip()), "it printed nothing")
    # Errors of other ranks are effects of a rank that was killed.
    killed = last if -output.code in FATAL else killed_rank(output.lines)
    words = killed or first_crash(folder, rank) or last
    how = f"ended with exit code {output.code}" if output.code > 0 else f"was ended by {signal_name(-output.code)}"
    raise ScriptError(f"the script {how}: {words}")


def killed_rank(lines: Iterable[str]) -> str | None:
    """The rank that torchrun names as the first one that was ended by a signal: it could write no error itself.

    >>> killed_rank(["Root Cause (first observed failure):", " rank : 1 (local_rank: 1)", " exitcode : -9 (pid: 7)"])
    'rank 1 was ended by signal 9 (SIGKILL)'
    """
    _, _, cause = "\n".join(lines).rpartition("Root Cause")
    found = re.search(r"rank +: (\d+) .*?exitcode +: -(\d+) ", cause, re.DOTALL)
    return f"rank {found[1]} was ended by {signal_name(int(found[2]))}" if found else None


def first_crash(folder: Path, own_rank: int) -> str | None:
    """The earliest error of a rank here, which is named unless it is our own.

    Later ones are its effects: the other ranks lose their connection to it, and a launcher ends them without a word.
    """
    ranks = {int(path.name.split("-")[1].partition(".")[0]) for path in folder.glob("rank-*.facts.json")}
    found = {rank: crash for rank in ranks if (crash := read_facts(folder, rank).get("crash"))}
    if not found or (len(found) == 1 and all(crash.get("by") for crash in found.values())):
        # A program that calls `sys.exit` has said why in the line before.
        return None
    _, rank, error = min((crash["at_s"], rank, crash["error"]) for rank, crash in found.items())
    return str(error) if rank == own_rank else f"rank {rank}: {error}"


def why_nothing(spec: RunSpec, folder: Path, facts: Mapping[str, Any]) -> str:
    """Why no step was observed although the script ended well."""
    if facts.get("broken"):
        return f"the observer stopped in this script: {facts['broken']}"
    if others := sorted(path.name.split("-")[1].partition(".")[0] for path in folder.glob("rank-*.jsonl")):
        return f"this rank of the script took no optimizer step; ranks {', '.join(others)} did. Set processes"
    return (
        "no optimizer step was observed: the script took none, uses no torch.optim.Optimizer, or its Python ignores "
        "PYTHONPATH (-I, -E)"
    )
