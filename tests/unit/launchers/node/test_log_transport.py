"""Files that travel as lines arrive as they were, in every order of misfortune, or are known to be missing."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from pathlib import Path

import pytest

from paceline.launchers.node import log_transport


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    folder.mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def texts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lived(node: Path) -> list[str]:
    """The lines of a node whose rank writes twice, ends, and is sent whole."""
    sender = log_transport.Sender(node, 0)
    lines = [sender.hello({"host": "n1"})]
    words = random.Random(1)
    (node / "samples-0.jsonl").write_text("".join(f"{words.random()}\n" for _ in range(5000)))
    (node / "progress-0").write_bytes(bytes(range(48)))
    lines += sender.changes()
    with (node / "samples-0.jsonl").open("a") as file:
        file.write("more\n")
    (node / "outcome-0.json").write_text("{}\n")
    (node / "secret.txt").write_text("stays")
    lines += sender.changes()
    return [*lines, *sender.farewell(0)]


def carried(node: Path) -> dict[str, bytes]:
    return {name: data for name, data in texts(node).items() if name != "secret.txt"}


def test_everything_arrives_and_what_ranks_print_is_given_back(node: Path, home: Path, golden: object) -> None:
    receiver = log_transport.Receiver(home)
    text = receiver.feed("loss is 3.2\n")
    assert text == golden
    assert "3.2" in text
    assert [receiver.feed(line + "\n") for line in lived(node)] == [None] * len(lived(node))
    assert texts(home) == carried(node)
    assert receiver.missing(1) is None
    assert receiver.arrivals[0].exit_code == 0


def test_no_line_is_longer_than_a_container_runtime_keeps_whole(node: Path) -> None:
    assert max(map(len, lived(node))) < 16384


def test_what_came_before_a_node_vanished_stays(node: Path, home: Path, golden: object) -> None:
    receiver = log_transport.Receiver(home)
    lines = [line for line in lived(node) if " whole " not in line and " end " not in line]
    for line in lines:
        receiver.feed(line)
    assert texts(home) == carried(node)
    text = receiver.missing(1)
    assert text == golden
    assert "n1" in text


def test_the_end_of_a_rotated_log_is_enough(node: Path, home: Path) -> None:
    receiver = log_transport.Receiver(home)
    for line in lived(node):
        if " whole " in line or " end " in line:
            receiver.feed(line)
    assert receiver.missing(1) is None
    assert texts(home) == carried(node)


@pytest.mark.parametrize("seed", range(20))
def test_a_log_with_holes_is_whole_or_said_to_be_cut(node: Path, home: Path, seed: int) -> None:
    lines = lived(node)
    lost = random.Random(seed).randrange(len(lines))
    receiver = log_transport.Receiver(home)
    for number, line in enumerate(lines):
        if number != lost:
            receiver.feed(line)
    missing = receiver.missing(1)
    assert (missing is None and texts(home) == carried(node)) or "incomplete, 1 gap" in str(missing)


def test_a_log_read_again_from_its_beginning_changes_nothing(node: Path, home: Path) -> None:
    lines = lived(node)
    first = log_transport.Receiver(home)
    for line in lines[: len(lines) // 2]:
        first.feed(line)
    again = log_transport.Receiver(home)
    for line in [*lines, *lines]:
        again.feed(line)
    assert again.missing(1) is None
    assert texts(home) == carried(node)


@pytest.mark.parametrize(
    "line",
    [
        "@paceline/1",
        "@paceline/1 0 0 part ../../evil 0 00000000 eJwDAAAAAAE=",
        "@paceline/1 0 0 part status.json 0 00000000 eJwDAAAAAAE=",
        "@paceline/1 x y part samples-0.jsonl 0 00000000 eJwDAAAAAAE=",
        "@paceline/1 0 0 part samples-0.jsonl 0 ffffffff eJwDAAAAAAE=",
        "@paceline/1 0 0 part samples-0.jsonl 0 00000000 not-base64!",
        "@paceline/1 0 0 whole 0/1 00 AAAA",
        "@paceline/1 0 0 end soon",
        "@paceline/1 0 0 end 99999999999999999999",
        "@paceline/1 0 0 hello []",
        "@paceline/1 0 0 hello " + "[" * 12_000,
        '@paceline/1 0 0 hello {"wall_s": NaN}',
        '@paceline/1 0 0 hello {"wall_s": 1e999}',
        "@paceline/1 0 0 whole -1/1 00 AAAA",
        "@paceline/1 0 0 whole 0/-1 00 AAAA",
        "@paceline/1 0 0 whole 5/1 00 AAAA",
        "@paceline/1 0 0 whole 0/999999999999 00 AAAA",
        "@paceline/1 -1 0 end 0",
        "@paceline/1 99999999999 0 end 0",
        "@paceline/1 0 -1 end 0",
        "@paceline/1 0 0 " + "x" * 1_000_000,
    ],
)
def test_damaged_and_hostile_lines_write_nothing(home: Path, line: str) -> None:
    receiver = log_transport.Receiver(home)
    receiver.feed(line)
    assert texts(home) == {}
    assert receiver.missing(1) is not None


def test_what_the_disk_did_not_take_arrives_all_the_same(home: Path) -> None:
    sender = log_transport.Sender(None, 0)
    sender.keep("outcome-0.json", b"no room")
    receiver = log_transport.Receiver(home)
    for line in [*sender.changes(), *sender.farewell(1)]:
        receiver.feed(line)
    assert texts(home) == {"outcome-0.json": b"no room"}
    assert receiver.missing(1) is None


def test_a_file_too_long_for_a_line_comes_with_the_whole(node: Path, home: Path) -> None:
    (node / "outcome-0.json").write_bytes(random.Random(2).randbytes(40_000))
    sender = log_transport.Sender(node, 0)
    assert list(sender.changes()) == []
    receiver = log_transport.Receiver(home)
    for line in sender.farewell(0):
        assert len(line) < 16384
        receiver.feed(line)
    assert receiver.arrivals[0].gaps == 0
    assert texts(home) == texts(node)


def part(name: str, offset: int | str, data: bytes = b"x") -> str:
    return f"@paceline/1 0 0 part {name} {offset} {zlib.crc32(data):08x} {log_transport._packed(data)}"


def whole(content: object) -> str:
    data = log_transport._packed(json.dumps(content).encode())
    return f"@paceline/1 0 0 whole 0/1 {hashlib.sha256(data.encode()).hexdigest()} {data}"


HOSTILE = [
    part("samples-0.jsonl", -1),
    part("samples-0.jsonl", "+0"),
    part("samples-0.jsonl", 10**30),
    part("outcome-" + "0" * 5000, 0),
    part("samples-" + "9" * 255, 0),
    part("../samples-0.jsonl", 0),
    whole([1, 2]),
    whole({"samples-0.jsonl": ["x"]}),
    whole({"samples-" + "9" * 300: "eA=="}),
    whole({"../status.json": "eA==", "status.json": "eA=="}),
    whole(None),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_line_with_a_right_checksum_and_wrong_content_harms_nothing(home: Path, number: int) -> None:
    """Each of the first seven ended the controller, with all other runs of its campaign."""
    receiver = log_transport.Receiver(home)
    assert receiver.feed(HOSTILE[number]) is None
    assert texts(home) == {}


@pytest.mark.parametrize("seed", range(8))
def test_the_controller_survives_any_line(node: Path, home: Path, seed: int) -> None:
    """500 mutated lines each: characters, words and numbers replaced, doubled, dropped. Only known names are written,
    and what was not harmed still arrives."""
    draw = random.Random(seed)
    lines = [*lived(node), *HOSTILE]
    words = ["-1", "", "1e9", "\u0662", "9" * 5000, "[" * 3000, "{}", "[]", "null", "NaN", "../x", "a" * 300, "\ud800"]
    (home / "spec.json").write_text("{}")
    receiver = log_transport.Receiver(home)
    for _ in range(500):
        pieces = draw.choice(lines).split(" ")
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(1, len(pieces))
            kind = draw.randrange(4)
            if kind == 0:
                pieces[place] = draw.choice(words)
            elif kind == 1 and pieces[place]:
                at = draw.randrange(len(pieces[place]))
                pieces[place] = pieces[place][:at] + chr(draw.randrange(1, 0x3000)) + pieces[place][at + 1 :]
            elif kind == 2:
                pieces.insert(place, draw.choice(pieces))
            elif len(pieces) > 2:
                del pieces[place]
        receiver.feed(" ".join(pieces))
    receiver.missing(3)
    assert all(log_transport.CARRIED.fullmatch(name) for name in set(texts(home)) - {"spec.json", "clocks.json"})
    fresh = log_transport.Receiver(home)
    for line in lived(node):
        fresh.feed(line)
    assert fresh.missing(1) is None
    assert carried(node).items() <= texts(home).items()
