"""Run files as lines of a log: the way results take where nodes and controller share no disk.

A node prints what its ranks write, between lines of their own output:

    @paceline/1 NODE NUMBER hello {"host": ..., "wall_s": ..., "version": ...}
    @paceline/1 NODE NUMBER part NAME OFFSET CHECKSUM DATA     what a file gained since the last look
    @paceline/1 NODE NUMBER whole INDEX/COUNT CHECKSUM DATA    all files once more, after the last rank has ended
    @paceline/1 NODE NUMBER end EXIT_CODE

NUMBER counts a node's lines, so a gap is known. Parts survive a node that disappears, the whole survives a log that
lost its beginning. DATA is zlib in base64, short enough for every engine's longest line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launchers.node import clock_offsets

MARK = "@paceline/1"
# Container runtimes split lines from 16 KiB on.
LONGEST_DATA = 8192
LONGEST_LINE = 15 * 1024
# How a rank hands its agent a file for which the disk has no room: one short line of its output.
SPOKEN = "@paceline/file"
# Of one node's files: far above any run, far below what would fill a controller's memory.
LARGEST_WHOLE = 1 << 30
# The names that ranks give their files; anything else of a foreign log is not written anywhere.
CARRIED = re.compile(r"(samples|outcome|machine|stack|progress|loadgen)-[A-Za-z0-9._-]+")
_GROWING = ("samples-", "stack-")


class Sender:
    """One node's side. `changes` is called now and then, `farewell` once, after the last rank has ended. own: which
    files to send, where the folder holds those of other nodes too."""

    def __init__(self, run_dir: Path | None, node: int, own: Callable[[str], bool] | None = None) -> None:
        self.run_dir, self._node, self.own = run_dir, node, own
        self._number = 0
        self._sent: dict[str, int] = {}
        self._digests: dict[str, int] = {}
        self._unwritten: dict[str, bytes] = {}

    def keep(self, name: str, data: bytes) -> None:
        """A file for which the node's disk has no room travels all the same."""
        self._unwritten[name] = data

    def hello(self, facts: Mapping[str, Any]) -> str:
        return self._line("hello", json.dumps({"wall_s": time.time(), **facts}, separators=(",", ":")))

    def changes(self) -> Iterator[str]:
        """What is new since the last call: the end of growing files, small files as they are."""
        for name, content in self._files():
            if name.startswith(_GROWING):
                offset = self._sent.get(name, 0)
                # Only whole lines: a rank may be at the middle of one.
                gained = content[offset : content.rfind(b"\n") + 1]
                self._sent[name] = offset + len(gained)
                for begin in range(0, len(gained), LONGEST_DATA):
                    yield self._part(name, offset + begin, gained[begin : begin + LONGEST_DATA])
            elif self._digests.get(name) != zlib.crc32(content):
                self._digests[name] = zlib.crc32(content)
                # One too long for a line comes with the whole.
                if len(_packed(content)) <= LONGEST_LINE:
                    yield self._part(name, 0, content)

    def _files(self) -> Iterator[tuple[str, bytes]]:
        for path in carried(self.run_dir, self.own) if self.run_dir else ():
            with contextlib.suppress(FileNotFoundError):
                yield path.name, path.read_bytes()
        yield from self._unwritten.items()

    def _part(self, name: str, offset: int, piece: bytes) -> str:
        return self._line("part", name, str(offset), f"{zlib.crc32(piece):08x}", _packed(piece))

    def farewell(self, exit_code: int) -> Iterator[str]:
        files = {name: base64.b64encode(content).decode() for name, content in self._files()}
        data = _packed(json.dumps(files).encode())
        digest = hashlib.sha256(data.encode()).hexdigest()
        pieces = [data[begin : begin + LONGEST_DATA] for begin in range(0, len(data), LONGEST_DATA)]
        for index, piece in enumerate(pieces):
            yield self._line("whole", f"{index}/{len(pieces)}", digest, piece)
        yield self._line("end", str(exit_code))

    def _line(self, *words: str) -> str:
        line = " ".join((MARK, str(self._node), str(self._number), *words))
        self._number += 1
        return line


def carried(run_dir: Path, own: Callable[[str], bool] | None = None) -> list[Path]:
    found = (path for path in run_dir.iterdir() if CARRIED.fullmatch(path.name) and path.is_file())
    return sorted(path for path in found if own is None or own(path.name))


@dataclass(slots=True)
class Arrival:
    """What has come from one node so far."""

    facts: dict[str, Any] = field(default_factory=dict)
    received_wall_s: float | None = None
    next_number: int = 0
    gaps: int = 0
    pieces: dict[int, str] = field(default_factory=dict)
    is_whole: bool = False
    exit_code: int | None = None


class Receiver:
    """The controller's side: what was carried is written into the run folder, whatever else was printed is given back.

    A log may be fed again from its beginning: what is known is not written twice. Damaged lines count as gaps, unless
    they come once more and whole.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.arrivals: dict[int, Arrival] = {}

    def feed(self, line: str) -> str | None:
        """The line itself where it is nobody's of ours, else None."""
        if not line.startswith(MARK + " "):
            return line
        try:
            _, node, number, kind, *words = line.rstrip("\n").split(" ", 4)
            arrival = self.arrivals.setdefault(int(node), Arrival())
            if int(number) < arrival.next_number:
                return None
            self._take(int(node), arrival, kind, words[0] if words else "")
            arrival.gaps += int(number) > arrival.next_number
            arrival.next_number = int(number) + 1
        except (ValueError, KeyError, TypeError, zlib.error):
            # Not known yet: the next reading may bring it whole; else the line after it shows the gap.
            pass
        return None

    def _take(self, node: int, arrival: Arrival, kind: str, rest: str) -> None:
        if kind == "hello":
            arrival.facts, arrival.received_wall_s = json.loads(rest), time.time()
            self._note_clock(node, arrival)
        elif kind == "part":
            self._take_part(*rest.split(" "))
        elif kind == "whole":
            self._take_piece(arrival, *rest.split(" "))
        elif kind == "end":
            arrival.exit_code = int(rest)

    def _note_clock(self, node: int, arrival: Arrival) -> None:
        """The node spoke after the controller wrote the spec and before its line was read."""
        spec = self._run_dir / "spec.json"
        if spec.exists() and arrival.received_wall_s is not None:
            host, said_s = str(arrival.facts.get("host")), float(arrival.facts["wall_s"])
            heard = clock_offsets.heard(node, host, said_s, spec.stat().st_mtime, arrival.received_wall_s)
            clock_offsets.note(self._run_dir, [heard])

    def _take_part(self, name: str, offset: str, checksum: str, data: str) -> None:
        piece = _unpacked(data)
        if f"{zlib.crc32(piece):08x}" != checksum:
            raise ValueError("a torn part")
        if not CARRIED.fullmatch(name):
            return
        path, begin = self._run_dir / name, int(offset)
        if not name.startswith(_GROWING):
            path.write_bytes(piece)
        elif begin <= (path.stat().st_size if path.exists() else 0):
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.seek(begin)
                file.write(piece)

    def _take_piece(self, arrival: Arrival, position: str, digest: str, data: str) -> None:
        index, count = map(int, position.split("/"))
        if index < count - 1 and len(data) != LONGEST_DATA:
            raise ValueError("a torn piece")
        arrival.pieces[index] = data
        if len(arrival.pieces) < count:
            return
        text = "".join(arrival.pieces[i] for i in range(count))
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("a torn last piece")
        for name, content in json.loads(_unpacked(text)).items():
            if CARRIED.fullmatch(name):
                (self._run_dir / name).write_bytes(base64.b64decode(content))
        arrival.is_whole = True

    def missing(self, nodes: int, but: Collection[int] = ()) -> str | None:
        """None when every node's files came whole, but for some; else what did not, in one sentence."""
        partial = []
        for node in (node for node in range(nodes) if node not in but):
            arrival = self.arrivals.get(node)
            if arrival is None:
                partial.append(f"node {node} sent nothing")
            elif not arrival.is_whole:
                lost = f", {arrival.gaps} gaps in its lines" if arrival.gaps else ""
                ended = "its log ends early" if arrival.exit_code is None else "its log was cut"
                partial.append(f"node {node} ({arrival.facts.get('host', 'unknown')}): {ended}{lost}")
        return "; ".join(partial) or None


def spoken(name: str, data: bytes) -> str:
    """A small file as a line of a rank's own output, for the agent to keep."""
    return f"{SPOKEN} {name} {zlib.crc32(data):08x} {_packed(data)}"


def understood(line: str) -> tuple[str, bytes] | None:
    """The file that a rank's line carries; None for every other line, and for one that was torn."""
    words = line.split()
    if len(words) != 4 or words[0] != SPOKEN or not CARRIED.fullmatch(words[1]):
        return None
    try:
        data = _unpacked(words[3])
    except (ValueError, zlib.error):
        return None
    return (words[1], data) if f"{zlib.crc32(data):08x}" == words[2] else None


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpacked(text: str) -> bytes:
    """At most as much as a run may be: a few bytes of zlib can stand for gigabytes."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_WHOLE)
    if unpacker.unconsumed_tail:
        raise ValueError("larger than any run")
    return data
