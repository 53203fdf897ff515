"""Run files as lines of a log, for nodes and controllers that share no disk.

A node prints the files of its ranks between lines of their own output:

    @paceline/1 NODE NUMBER hello {"host": ..., "wall_s": ..., "version": ...}
    @paceline/1 NODE NUMBER part NAME OFFSET CHECKSUM DATA     what a file gained since the last call
    @paceline/1 NODE NUMBER whole INDEX/COUNT CHECKSUM DATA    all files again, after the last rank has ended
    @paceline/1 NODE NUMBER end EXIT_CODE

NUMBER counts the lines of a node, so gaps are detected. The parts survive the loss of a node; the whole survives a log
that lost its beginning. DATA is zlib in base64, shorter than the line limit of every engine.

At the end of this file: the same files on a disk that only the nodes of a job can reach.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import re
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.experiment.spec import RunSpec
from paceline.launchers.node import clock_offsets
from paceline.results import safe_text

MARK = "@paceline/1"
# Container runtimes split lines of 16 KiB and more.
LONGEST_DATA = 8192
LONGEST_LINE = 15 * 1024
# Begins the line by which a rank gives its agent a small file when the disk is full.
FILE_LINE = "@paceline/file"
# Limit for the files of one node: far above any run, far below the memory of a controller.
LARGEST_WHOLE = 1 << 30
# Files of ranks. Other names in a log are never written.
CARRIED = re.compile(r"(samples|outcome|machine|stack|progress|loadgen|trace)-[A-Za-z0-9._-]{1,200}")
# Numbers as an agent writes them. Python's int() would also accept signs, spaces and other scripts.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,11}")
MOST_NODES = 65_536
LONGEST_HOST = 253
_GROWING = ("samples-", "stack-")


class Sender:
    """The node's side. Call `changes` regularly, and `farewell` once after the last rank has ended.

    own: selects the files to send, if the directory also holds those of other nodes.
    """

    def __init__(self, run_dir: Path | None, node: int, own: Callable[[str], bool] | None = None) -> None:
        self.run_dir, self._node, self.own = run_dir, node, own
        self._number = 0
        self._sent: dict[str, int] = {}
        self._digests: dict[str, int] = {}
        self._unwritten: dict[str, bytes] = {}

    def keep(self, name: str, data: bytes) -> None:
        """Add a file that could not be written to the node's disk."""
        self._unwritten[name] = data

    def hello(self, facts: Mapping[str, Any]) -> str:
        return self._line("hello", json.dumps({"wall_s": time.time(), **facts}, separators=(",", ":")))

    def changes(self) -> Iterator[str]:
        """Yield what is new since the last call: the additions to growing files, and small files completely."""
        for name, content in self._files(self._sent):
            if name.startswith(_GROWING):
                offset = self._sent.get(name, 0)
                # Only complete lines: a rank may be in the middle of one.
                added = content[: content.rfind(b"\n") + 1]
                self._sent[name] = offset + len(added)
                for begin in range(0, len(added), LONGEST_DATA):
                    yield self._part(name, offset + begin, added[begin : begin + LONGEST_DATA])
            elif self._digests.get(name) != zlib.crc32(content):
                self._digests[name] = zlib.crc32(content)
                # A file too long for one line is sent with the whole.
                if len(_packed(content)) <= LONGEST_LINE:
                    yield self._part(name, 0, content)

    def farewell(self, exit_code: int) -> Iterator[str]:
        """Yield all files once more, then the exit code."""
        files = {name: base64.b64encode(content).decode() for name, content in self._files()}
        data = _packed(json.dumps(files).encode())
        digest = hashlib.sha256(data.encode()).hexdigest()
        pieces = [data[begin : begin + LONGEST_DATA] for begin in range(0, len(data), LONGEST_DATA)]
        for index, piece in enumerate(pieces):
            yield self._line("whole", f"{index}/{len(pieces)}", digest, piece)
        yield self._line("end", str(exit_code))

    def _files(self, sent: Mapping[str, int] | None = None) -> Iterator[tuple[str, bytes]]:
        """The files, each without the bytes that were sent: a long run need not be read again every second."""
        sent = sent or {}
        for path in carried(self.run_dir, self.own) if self.run_dir else ():
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(sent.get(path.name, 0))
                yield path.name, file.read()
        yield from ((name, data[sent.get(name, 0) :]) for name, data in self._unwritten.items())

    def _part(self, name: str, offset: int, piece: bytes) -> str:
        return self._line("part", name, str(offset), f"{zlib.crc32(piece):08x}", _packed(piece))

    def _line(self, *words: str) -> str:
        line = " ".join((MARK, str(self._node), str(self._number), *words))
        self._number += 1
        return line


def carried(run_dir: Path, own: Callable[[str], bool] | None = None) -> list[Path]:
    """Return the files of a run directory that travel, sorted."""
    paths = (path for path in run_dir.iterdir() if CARRIED.fullmatch(path.name) and path.is_file())
    return sorted(path for path in paths if own is None or own(path.name))


@dataclass(slots=True)
class Arrival:
    """What one node has sent so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    received_wall_s: float | None = None
    next_number: int = 0
    gaps: int = 0
    pieces: dict[int, str] = field(default_factory=dict)
    is_whole: bool = False
    exit_code: int | None = None


class Receiver:
    """The controller's side: writes the files into the run directory and returns all other lines.

    A log may be fed again from its beginning; known lines are not written twice. A damaged line counts as a gap, unless
    it arrives intact later.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.arrivals: dict[int, Arrival] = {}

    def feed(self, line: str) -> str | None:
        """Take one line. Returns it if it is ordinary output, else None. Ignores what no agent writes."""
        if not line.startswith(MARK + " "):
            return line
        try:
            if len(line) > 2 * LONGEST_LINE:
                raise ValueError("longer than any line of an agent")
            _, node, number, kind, *words = line.rstrip("\n").split(" ", 4)
            sender, position = _number(node, MOST_NODES), _number(number)
            arrival = self.arrivals.setdefault(sender, Arrival())
            if position < arrival.next_number:
                return None
            self._take(sender, arrival, kind, words[0] if words else "")
            arrival.gaps += position > arrival.next_number
            arrival.next_number = position + 1
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError, zlib.error):
            # Damaged: the line may arrive intact at the next reading. Otherwise the next line shows the gap.
            pass
        return None

    def _take(self, node: int, arrival: Arrival, kind: str, rest: str) -> None:
        if kind == "hello":
            self._greet(node, arrival, json.loads(rest))
        elif kind == "part":
            name, offset, checksum, data = rest.split(" ")
            piece, path, begin = _unpacked(data), self._run_dir / name, _number(offset)
            if f"{zlib.crc32(piece):08x}" != checksum:
                raise ValueError("damaged part")
            if not CARRIED.fullmatch(name):
                return
            if not name.startswith(_GROWING):
                path.write_bytes(piece)
            elif begin <= (path.stat().st_size if path.exists() else 0):
                with path.open("r+b" if path.exists() else "w+b") as file:
                    file.seek(begin)
                    file.write(piece)
        elif kind == "whole":
            position, digest, data = rest.split(" ")
            index, count = (_number(word) for word in position.split("/"))
            if not index < count <= LARGEST_WHOLE // LONGEST_DATA:
                raise ValueError("damaged position")
            if len(data) > LONGEST_DATA or (index < count - 1 and len(data) != LONGEST_DATA):
                raise ValueError("damaged piece")
            arrival.pieces[index] = data
            if len(arrival.pieces) < count:
                return
            text = "".join(arrival.pieces[i] for i in range(count))
            if hashlib.sha256(text.encode()).hexdigest() != digest:
                raise ValueError("damaged last piece")
            files = json.loads(_unpacked(text))
            if not isinstance(files, dict):
                raise ValueError("not a mapping of files")
            for name, content in files.items():
                if CARRIED.fullmatch(name):
                    (self._run_dir / name).write_bytes(base64.b64decode(content))
            arrival.is_whole = True
        elif kind == "end":
            arrival.exit_code = _number(rest.removeprefix("-"), 1 << 31) * (-1 if rest.startswith("-") else 1)

    def _greet(self, node: int, arrival: Arrival, facts: object) -> None:
        """Take the first line of a node, and compare its clock with this one."""
        if not isinstance(facts, dict):
            raise ValueError("not a mapping of facts")
        node_time_s = float(facts["wall_s"])
        if not math.isfinite(node_time_s):
            raise ValueError("not a time")
        arrival.facts, arrival.received_wall_s = facts, time.time()
        arrival.facts["host"] = host = safe_text.text(str(facts.get("host"))[:LONGEST_HOST])
        # The node started after the controller wrote the spec, and before its line was read.
        spec = self._run_dir / "spec.json"
        if spec.exists():
            earliest_s, latest_s = spec.stat().st_mtime, arrival.received_wall_s
            clock_offsets.note(self._run_dir, [clock_offsets.observed(node, host, node_time_s, earliest_s, latest_s)])

    def missing(self, nodes: int, but: Collection[int] = ()) -> str | None:
        """Return None if all files of every node arrived, else a sentence. but: nodes that are not expected."""
        partial = []
        for node in (node for node in range(nodes) if node not in but):
            arrival = self.arrivals.get(node)
            if arrival is None:
                partial.append(f"node {node} sent nothing")
            elif not arrival.is_whole:
                gaps = f", {arrival.gaps} {'gap' if arrival.gaps == 1 else 'gaps'} in its lines" if arrival.gaps else ""
                end = "its log ends early" if arrival.exit_code is None else "its log is incomplete"
                partial.append(f"node {node} ({arrival.facts.get('host', 'unknown')}): {end}{gaps}")
        return "; ".join(partial) or None


def _number(text: str, below: int = 1 << 40) -> int:
    if not _NUMBER.fullmatch(text) or int(text) >= below:
        raise ValueError("not a number of an agent")
    return int(text)


def file_line(name: str, data: bytes) -> str:
    """Return a small file as one line of a rank's output, for its agent."""
    return f"{FILE_LINE} {name} {zlib.crc32(data):08x} {_packed(data)}"


def parse_file_line(line: str) -> tuple[str, bytes] | None:
    """Return the file in a rank's line; None for any other line and for a damaged one."""
    words = line.split()
    if len(words) != 4 or words[0] != FILE_LINE or not CARRIED.fullmatch(words[1]):
        return None
    try:
        data = _unpacked(words[3])
    except (ValueError, zlib.error):
        return None
    return (words[1], data) if f"{zlib.crc32(data):08x}" == words[2] else None


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    """Decompress at most LARGEST_WHOLE bytes: a few bytes of zlib can expand to gigabytes."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_WHOLE)
    if unpacker.unconsumed_tail:
        raise ValueError("larger than any run")
    return data


# --- a disk that only the nodes of a job can reach ---


def put_spec(run_dir: Path, spec_text: str) -> None:
    """Create the run directory on the job's disk and write the spec. Every node does this, with the same spec."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # Every agent is process 1 of its pod, so only host names differ.
    beside = run_dir / f".spec.json.{socket.gethostname()}"
    beside.write_text(spec_text, encoding="utf-8")
    beside.replace(run_dir / "spec.json")


def own_files(spec: RunSpec, node: int, host: str) -> Callable[[str], bool]:
    """Return a test for the files of one node: names that end in the number of its ranks, and its machine file."""
    count = spec.topology.processes_per_node
    ranks = range(node * count, (node + 1) * count)

    def is_own(name: str) -> bool:
        if name.startswith("machine-"):
            return name == f"machine-{host}.json"
        number = name.partition(".")[0].rpartition("-")[2]
        return number.isdigit() and int(number) in ranks

    return is_own


def hand_over(run_dir: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield all files of a run as the lines of one node."""
    sender = Sender(run_dir, 0)
    yield sender.hello(facts)
    yield from sender.farewell(0)
