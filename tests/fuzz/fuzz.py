"""A seeded fuzzer for what strangers can hand to Paceline: experiments, run directories, answers of servers.

    python tests/fuzz/fuzz.py experiments 50000        mutated YAML through `paceline plan`
    python tests/fuzz/fuzz.py runs 20000               mutated run directories through a report with healthy neighbours
    python tests/fuzz/fuzz.py streams 50000            mutated HTTP streams through the load generator's client
    python tests/fuzz/fuzz.py live 20000               mutated files of a running campaign through every live display

Whatever the input, there is no traceback, none takes more than 5 s of processor time (user and system, all threads) or
60 s by the clock, and the process, all inputs together, needs at most 1 GB of data. A sealed input is read as damaged
or harmless, never as other numbers. Each input has its own seed, which a failure names: `fuzz.py TARGET 1 --seed N`
repeats it. The last line is a summary as JSON; the exit code is 1 if there was a failure. `test_fuzz.py` runs some
of each.

The processor's time is the limit because the clock also counts what other programs take from a busy machine; the limit
of the clock finds an input that waits. Three inputs are tried before the first, so that none pays for imports.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

LONGEST_S = 5
LONGEST_WAIT_S = 60
MOST_BYTES = 10**9
WARM_UPS = 3
ROOT = Path(__file__).parents[2]

# Values that programs stumble over.
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, 10**400, -0.0, 0.5, -1e-9, 1e-308, 1e308, math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    " ",
    "x",
    "nan",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "\u202e",
    "../..",
    "a" * 5000,
    "²",
    "1e999",
    "null",
    "{",
    "[[",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], [[]], {"": 1}, {"kind": "step"}, [1, "a"])


class Hang(BaseException):
    """An input took too long. Not an Exception: nothing may catch it on the way."""


def value_of(draw: random.Random) -> Any:
    return draw.choice(draw.choice((NUMBERS, TEXTS, OTHERS)))


def mutated_bytes(draw: random.Random, content: bytes, words: Sequence[bytes] = ()) -> bytes:
    """A few random edits: bits, spans that are cut, repeated or moved, words of the format, and the end cut off."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at, to = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
        to = min(to, at + draw.choice((1, 4, 40, 4000)))
        kind = draw.randrange(6)
        if kind == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:to]
        elif kind == 2:
            data[at:at] = data[at:to] * draw.choice((1, 2, 50))
        elif kind == 3:
            data[at:to] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 3, 20))))
        elif kind == 4 and words:
            data[at:to] = draw.choice(words)
        elif draw.random() < 0.3:
            del data[at:]
    return bytes(data)


def mutated_value(draw: random.Random, value: Any) -> Any:
    """The same document with one value replaced, removed, added or moved, anywhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if draw.random() < 0.1:
            return value | {draw.choice((*TEXTS, key)): value_of(draw)}
        return value | {key: mutated_value(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        return [*value[:place], mutated_value(draw, value[place]), *value[place + draw.choice((1, 1, 1, 0, 2)) :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.3:
        return draw.choice((-value, value * 2, value + 1, value * 10**9, value * 0 + 1e-9))
    return value_of(draw)


# --- experiments ---


class Experiments:
    """Presets and published experiments as YAML with values or bytes changed, through `paceline plan`."""

    def __init__(self, folder: Path) -> None:
        import yaml

        from paceline import cli
        from paceline.campaign.run import proofs
        from paceline.cli import command

        # A rehearsal computes in another process, for half a minute on a busy host; that it ends is tested elsewhere.
        proofs.REHEARSAL_S = 5.0
        # What no input changes is built once: it would take two thirds of the time.
        command.parser = functools.cache(command.parser)
        metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
        self.path, self.out, self._plan = folder / "experiment.yaml", folder / "results", cli.main
        presets = sorted((ROOT / "src/paceline/experiment/presets").glob("*.yaml"))
        files = [*presets, *sorted((ROOT / "docs/measured").glob("*/experiment.yaml"))]
        self.texts = [file.read_text(encoding="utf-8") for file in files]
        self.documents = [yaml.safe_load(text) for text in self.texts]
        self._dump = yaml.safe_dump

    def __call__(self, draw: random.Random) -> str:
        if draw.random() < 0.3:
            content = mutated_bytes(
                draw, draw.choice(self.texts).encode(), (b": ", b"- ", b"&a ", b"*a", b"{", b"!!", b"\t")
            )
        else:
            document = draw.choice(self.documents)
            for _ in range(draw.choice((1, 1, 2, 4))):
                document = mutated_value(draw, document)
            content = self._dump(document, allow_unicode=False).encode()
        self.path.write_bytes(content)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = self._plan(["plan", str(self.path), "--out", str(self.out), "--set", "device=cpu"])
        if code == 2:
            sentence = said.getvalue()
            assert sentence.startswith("paceline: "), f"exit code 2 without a sentence: {sentence[:500]!r}"
            assert len(sentence) < 10_000, f"a sentence of {len(sentence)} characters"
            return "refused"
        assert code == 0, f"exit code {code}"
        return "planned"


# --- run directories ---


class Runs:
    """Sealed runs of several workloads with files and values changed, reported beside healthy neighbours. Half of them
    are sealed again, as a broken or hostile rank would leave them: then every value reaches the rules of records."""

    def __init__(self, folder: Path) -> None:
        from paceline.results import store

        self.folder, self._runs = folder / "mutated", []
        for number, archive in enumerate((ROOT / "tests/golden/capsules").glob("*.tar.gz")):
            self._take(archive, folder / f"golden-{number}", 3)
        # Neighbours of runs that are not theirs take time and show nothing.
        self.neighbours = [store.read_run(run) for run in self._runs if "tiny" in run.name]
        assert len(self.neighbours) == 3
        for archive in sorted((ROOT / "docs/measured").glob("*/runs.tar.gz")):
            self._take(archive, folder / archive.parent.name, 1)
        # Two times: its records are like no other's.
        for number in range(2):
            self._take(ROOT / "tests/fuzz/nodes.tar.gz", folder / f"nodes-{number}", 1)

    def _take(self, archive: Path, target: Path, count: int) -> None:
        from paceline.results import store

        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
        found = sorted(store.run_dirs(target), key=lambda run: sum(p.stat().st_size for p in run.glob("*.jsonl")))
        self._runs += found[:count]

    def __call__(self, draw: random.Random) -> str:
        from paceline.analysis.report import build
        from paceline.report.exporters import json as json_exporter
        from paceline.report.exporters import markdown
        from paceline.report.tables.one_run import record_lines
        from paceline.results.launches import read_experiment

        source = draw.choice(self._runs)
        shutil.rmtree(self.folder, ignore_errors=True)
        target = self.folder / "test" / source.name
        shutil.copytree(source, target)
        before = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            self._damage(draw, target)
        resealed = draw.random() < 0.6 and self._reseal(target)
        if draw.random() < 0.03:
            target = target.rename(target.with_name(draw.choice(("x", f"{target.name}0", "attempts"))))
        if not (target / "spec.json").exists() and not (target / "status.json").exists():
            return "no run"
        records, skipped = read_experiment(self.folder)
        same = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()} == before
        assert resealed or not records or same or self._is_harmless(target, before), "damage went unnoticed"
        # A run that reads must not end or change the report of its neighbours either.
        report = build([*records, *self.neighbours], "fuzz", skipped)
        ids = {record.spec.run_id for record in self.neighbours}
        assert ids <= {run.run for run in report.runs}, "a neighbour is missing"
        json.dumps(json_exporter.plain(report), allow_nan=False)
        for record in records:
            list(record_lines(record, None))
        if draw.random() < 0.2:
            markdown.export(report, self.folder)
        return "damaged" if skipped else "read"

    def _damage(self, draw: random.Random, target: Path) -> None:
        paths = sorted(path for path in target.iterdir() if path.is_file() and not path.is_symlink())
        path = draw.choice(paths)
        kind = draw.random()
        if kind < 0.65 and path.suffix in (".json", ".jsonl"):
            self._edit(draw, path)
        elif kind < 0.8:
            path.write_bytes(
                mutated_bytes(draw, path.read_bytes(), (b"NaN", b"-1", b"null", b"\n", b"{}", b"1e999", b"["))
            )
        elif kind < 0.85:
            path.unlink()
        elif kind < 0.9:
            name = draw.choice(("samples-9.jsonl", "outcome-9.json", "machine-b.json", "x"))
            path.with_name(name).write_bytes(path.read_bytes())
        elif kind < 0.94:
            other = draw.choice(paths)
            content = other.read_bytes()
            other.write_bytes(path.read_bytes())
            path.write_bytes(content)
        elif kind < 0.97:
            path.unlink()
            draw.choice((path.mkdir, lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path), path.touch))()
        else:
            name = draw.choice(("spec.json", "status.json", "samples-.jsonl", "samples-0.1.jsonl"))
            with contextlib.suppress(IsADirectoryError):  # made by an earlier change of this input
                path.rename(path.with_name(name))

    def _edit(self, draw: random.Random, path: Path) -> None:
        """Change values of a document, or of one line of samples."""
        lines = (
            path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.suffix == ".jsonl" else []
        )
        with contextlib.suppress(ValueError, RecursionError):
            if lines:
                for place in draw.sample(range(len(lines)), min(len(lines), draw.choice((1, 1, 5, 100)))):
                    lines[place] = json.dumps(mutated_value(draw, json.loads(lines[place])))
                path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
            else:
                path.write_text(json.dumps(mutated_value(draw, json.loads(path.read_bytes()))))

    def _reseal(self, target: Path) -> bool:
        from paceline.results import sealing

        if not (target / sealing.FILE).is_file():
            return False
        try:
            body = json.loads((target / sealing.FILE).read_bytes())
            sealing.write(target, body)
        except (OSError, ValueError, TypeError, RecursionError):
            return False
        return True

    def _is_harmless(self, target: Path, before: dict[str, bytes]) -> bool:
        """Whether only logs grew, files changed that no seal lists, or the seal says the same in another layout."""
        seal = json.loads(before["status.json"])
        if json.loads((target / "status.json").read_bytes()) == seal:
            before = {name: content for name, content in before.items() if name != "status.json"}
        sealed = seal["files"]
        return all(
            (target / name).read_bytes() == content
            or name not in (*sealed, "status.json")
            or (name.endswith(".txt") and (target / name).read_bytes().startswith(content))
            for name, content in before.items()
            if (target / name).is_file() or name in sealed
        )


# --- a running campaign ---


class Live:
    """A run in progress, its campaign and a schedule with files and values changed, through `status`, `logs`, the page
    of metrics and what trackers are sent."""

    def __init__(self, folder: Path) -> None:
        from paceline.campaign.schedule import agenda
        from paceline.campaign.schedule.agenda import Schedule
        from paceline.campaign.schedule.cron import Cron
        from paceline.host.gauges import read as read_gauges
        from paceline.host.usage import UsageReader
        from paceline.results import campaign_file, store
        from paceline.results.records import GaugeSample

        self.folder, self._damage = folder / "mutated", Runs._damage
        self._edit = functools.partial(Runs._edit, self)  # type: ignore[arg-type]
        self._base = folder / "running"
        with tarfile.open(next((ROOT / "tests/golden/capsules").glob("*.tar.gz"))) as tar:
            tar.extractall(folder / "golden", filter="data")
        source = next(run for run in sorted(store.run_dirs(folder / "golden")) if (run / "samples-0.jsonl").exists())
        spec = store.read_spec(source)
        run = self._base / spec.experiment / spec.run_id
        shutil.copytree(source, run)
        (run / "status.json").unlink()
        (run / "log.txt").write_text("[rank 0] begins\n[rank0]: torch speaks\ngpu1:4711:4802 [0] NCCL INFO\n")
        store.write_json(run / "job.json", {"launcher": "slurm", "handle": {"job_id": 7}, "outlives_controller": True})
        for rank in range(2):
            store.ProgressFile(run, rank).mark(3, "forward")
        host, usage = read_gauges().host, UsageReader()
        lines = []
        for number in range(3):
            about = {"rank": 0, "host": "a", "at_s": host.at_s + number, "cpu_ratio": 0.5, "received_bytes": number}
            about |= {"memory_used_bytes": 1, "sent_bytes": number}
            gauge = GaugeSample(**about, device=None, usage=_as_dict(usage.read()))  # type: ignore[arg-type]
            lines += [store.sample_line(gauge), store.sample_line(GaugeSample(**about, device=0))]  # type: ignore[arg-type]
        (run / "samples-gauges-0.jsonl").write_text("".join(lines))
        campaign_file.write_plan(run.parent, [spec])
        about = {"experiment": "quick", "source": "quick", "directory": str(folder), "added_at": 1e9}
        nightly = Schedule(name="nightly", cron=Cron("0 3 * * *", "UTC"), backend="crontab", **about)  # type: ignore[arg-type]
        agenda.write(self._base, nightly)
        for event in ("began", "ended"):
            agenda.record(self._base, "nightly", event, "1", at=2e9, due_at=2e9, outcome="ok", report="x/report.html")

    def __call__(self, draw: random.Random) -> str:
        from paceline.campaign.live import logs, metrics_endpoint, status, streaming
        from paceline.campaign.live.nodes import Watches
        from paceline.errors import PacelineError
        from paceline.results import campaign_file

        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self._base, self.folder)
        folders = sorted({path.parent for path in self.folder.rglob("*") if path.is_file()})
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            with contextlib.suppress(IndexError):  # the directory has no file any more
                self._damage(self, draw, draw.choice((folders[-1], *folders)))  # type: ignore[arg-type]
        lines, running = status.folder_lines(self.folder)
        assert not any(ord(c) < 32 and c != "\t" for line in lines for c in line.replace("\n", "")), (
            "control characters"
        )
        views = campaign_file.read_views(self.folder)
        metrics_endpoint.page_text(None, views, self.folder, Watches())
        sent = Counter[str]()
        streaming.Streaming(self.folder, {"all": _Taker(sent)}, lambda text: None).look()
        for run in {path.parent for path in self.folder.glob("*/*/spec.json")}:
            with contextlib.suppress(PacelineError, OSError):
                logs.check(run, None)
                list(logs.read(run, None, False, lambda text: None, lambda: True))
        return f"{'running' if running else 'not running'}, {'steps sent' if sent['points'] else 'nothing sent'}"


def _as_dict(usage: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(usage)


class _Taker:
    """A tracker that takes what is sent to it as TensorBoard does: steps are 64 bits, values floats."""

    def __init__(self, sent: Counter[str]) -> None:
        self._sent = sent

    def write(self, run: Any, points: Sequence[Any]) -> None:
        for point in points:
            struct.pack(f"<q{len(point.values)}d", point.step, *point.values.values())
            self._sent["points"] += 1

    def gauges(self, families: Sequence[Any], at_s: float) -> None:
        self._sent["families"] += len(families)

    def end(self, run: Any, is_ok: bool) -> None: ...

    def close(self) -> None: ...


# --- streams ---


class Streams:
    """Answers of servers with bytes changed and cut anywhere, through the client to the line of the sample."""

    WORDS = (
        *(
            b"\r\n",
            b"\r\n\r\n",
            b"\n\n",
            b"0\r\n\r\n",
            b"data: ",
            b"data: [DONE]\n\n",
            b": x\n\n",
            b"fffffffffffffffff\r\n",
        ),
        *(
            b"Content-Length: ",
            b"Content-Length: 99999999999999999999\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"-5\r\n",
        ),
        *(
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 500 x\r\n",
            b"[" * 5000,
            b"9" * 5000,
            b"\xc2\xb2",
            b'"usage": {"completion_tokens": ',
        ),
        *(b"null", b"NaN", b'{"choices": [{"delta": 5}]}', b'{"error": {}}', b"\x00", b"_1\r\n", b"0x1\r\n", b"+1\r\n"),
    )

    def __init__(self, folder: Path) -> None:
        from paceline.results import samples
        from paceline.serving.prompts import Prompt

        self.path, self._read_samples = folder / "samples-0.jsonl", samples.read_samples
        self.prompt = Prompt(text="x", max_tokens=4)
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}], "model": "m"},
            {"choices": [{"delta": {"reasoning_content": "hm"}}]},
            *({"choices": [{"delta": {"content": text}}]} for text in ("Zür", "ich ", "0\r\n\r\n")),
            {"choices": [{"text": "a", "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}},
        ]
        lines = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events]
        lines += [b": keep-alive\n\n", b"data: [DONE]\n\n"]
        chunks = b"".join(f"{len(line):x}\r\n".encode() + line + b"\r\n" for line in lines) + b"0\r\n\r\n"
        body = b"".join(lines)
        self.answers = [
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
            b"HTTP/1.1 200 OK\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body,
            b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + body,
            b'HTTP/1.0 200 OK\r\n\r\ndata: {"error": {"message": "out of pages"}}\n\n',
            b'HTTP/1.1 429 Slow down\r\nRetry-After: 3\r\nContent-Length: 15\r\n\r\n{"error": "no"}',
            b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"answer": "no"}',
        ]

    def __call__(self, draw: random.Random) -> str:
        from paceline.results import store
        from paceline.serving.client.http_stream import BrokenResponse, Response
        from paceline.serving.client.schedule import RequestResult, longest_body
        from paceline.serving.client.shard import AnswerParser
        from paceline.workloads.inference.session import request_sample

        data = mutated_bytes(draw, draw.choice(self.answers), self.WORDS)
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 1, 5, 50))))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
        result = RequestResult(number=0, replica=0, due_ns=0, sent_ns=5)
        response = Response(longest_body(self.prompt.max_tokens))
        try:
            whole = any(response.feed(piece, 10 * n, 10 * n + 1) for n, piece in enumerate(pieces, 1))
            if not whole:
                response.close()
        except BrokenResponse as broken:
            result.error = str(broken)
        else:
            parser = AnswerParser(result, response, True, b"secret")
            while not parser.parse_some(True):
                pass
        sample = request_sample(result, 0, self.prompt, rank=0, stage=0, number=0, sample=0, replica=0, reference=None)
        self.path.write_text(store.sample_line(sample))
        (again,) = self._read_samples(self.path)
        assert again.kind == "request"
        return result.error or "whole"


TARGETS: dict[str, Callable[[Path], Callable[[random.Random], str]]] = {
    "experiments": Experiments,
    "runs": Runs,
    "streams": Streams,
    "live": Live,
}


def fuzz(target: str, count: int, seed: int, most_failures: int = 20) -> dict[str, Any]:
    """Run `count` inputs from `seed` on. A failure is printed with its seed and its traceback."""
    outcomes: Counter[str] = Counter()
    slowest, failures = (0.0, seed), 0
    began = time.perf_counter()
    # SIGPROF counts the processor's time of this process, SIGALRM the clock.
    signal.signal(signal.SIGPROF, _hang)
    signal.signal(signal.SIGALRM, _hang)
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as name:
        attempt = TARGETS[target](Path(name))
        for number in range(WARM_UPS):
            attempt(random.Random(f"{target} warm-up {number}"))
        for number in range(seed, seed + count):
            started = time.process_time()
            _limit(LONGEST_S, LONGEST_WAIT_S)
            try:
                outcome = attempt(random.Random(f"{target} {number}"))
            except (Exception, Hang) as failure:
                failures += 1
                outcome = f"FAILED: {type(failure).__name__}"
                sys.stdout.write(f"seed {number}: {''.join(traceback.format_exception(failure))[-3000:]}\n")
            finally:
                _limit(0, 0)
            outcomes[outcome] += 1
            slowest = max(slowest, (time.process_time() - started, number))
            if failures >= most_failures:
                break
    return {
        "target": target,
        "inputs": sum(outcomes.values()),
        "first_seed": seed,
        "failures": failures,
        "outcomes": dict(outcomes.most_common()),
        "slowest_cpu_s": round(slowest[0], 2),
        "slowest_seed": slowest[1],
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def _limit(cpu_s: float, wait_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wait_s)


def _hang(number: int, _: object) -> None:
    limit = f"{LONGEST_S} s of processor time" if number == signal.SIGPROF else f"{LONGEST_WAIT_S} s by the clock"
    raise Hang(f"took more than {limit}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    # A process that wants more than the limit gets a MemoryError, which is a failure like any other.
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    summary = fuzz(arguments.target, arguments.count, arguments.seed)
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
