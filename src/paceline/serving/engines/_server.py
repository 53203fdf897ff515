"""Model servers as processes of this rank: started, waited for, and ended with everything they started.

First any server that answers at /health (`Server`), then replicas of our own, which report when they are ready.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from paceline.contract import Endpoint, Seat
from paceline.errors import LaunchError, UnsupportedError, require
from paceline.experiment.spec import RunSpec
from paceline.host import process_guard
from paceline.host.processes import end_all
from paceline.launchers.node import rendezvous, torchrun
from paceline.serving.prompts import longest_synthetic
from paceline.serving.replica.settings import BATCHING, Meeting, Settings

POLL_S = 0.25
REPORT_EVERY_S = 10.0
REQUEST_S = 5.0
# The controller ends a run without progress after stall_s as hung: report a slow start before that.
SHARE_OF_STALL = 0.8
# How much of a server's output is kept with the run.
KEPT_BYTES = 256 << 10
_LONGEST_LINE = 400
# Prefixes of log lines: the process, and the logger's level, time and file.
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^]]*\]\s*)?")
_HARMLESS = re.compile(r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b")
# The error itself, not one that only reports an error of another process.
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: |\berror: ")
_VALIDATION = re.compile(r"\b\d+ validation errors? for \w+$")
_AFTERMATH = re.compile(r"initialization failed|See root cause|EngineDeadError")
# The default length, if the model allows it.
USUAL_LENGTH, LENGTH_MULTIPLE = 2048, 256
# Reading so many tokens keeps an H200 busy (46 ms for an 8B model by its rate for 512), and is the longest prompt that
# is replayed as a CUDA graph.
USUAL_CHUNK = 1024
LOG_END_BYTES = 4096
LOOPBACK = "127.0.0.1"
COMMAND = (sys.executable, "-m", "paceline.serving.replica", "front")
# Generated prompts mean nothing, so no token ends an answer to them: every answer has its full length.
MEANINGLESS = ("synthetic", "trace")


@dataclass(frozen=True, slots=True)
class Server:
    """A running process and where its output goes. name is used in messages; secret is removed from them."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    secret: str

    def output(self) -> str:
        """The end of its output, without the key."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - KEPT_BYTES))
            return file.read().decode(errors="replace").replace(self.secret, "***")

    def wait_until_ready(self, url: str, timeout_s: float) -> float:
        """Seconds until it answered at /health; LaunchError with the reason if it ends before, or takes too long."""
        began = reported_at = time.monotonic()
        while True:
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(f"{url}/health", timeout=REQUEST_S) as answer,
            ):
                if answer.status == http.HTTPStatus.OK:
                    return time.monotonic() - began
            now = time.monotonic()
            if self.process.poll() is not None:
                raise LaunchError(f"{self.name} ended before it answered: {cause(self.output())}")
            if now - began > timeout_s:
                last = last_line(self.output())
                raise LaunchError(f"{self.name} did not answer within {timeout_s:.0f} s; its last output: {last}")
            if now - reported_at > REPORT_EVERY_S:
                reported_at = now
                _report(f"{self.name}: not ready after {now - began:.0f} s: {last_line(self.output())}")
            time.sleep(POLL_S)

    def require_alive(self, url: str, *, alone: bool) -> None:
        """LaunchError if the server died during the load and was the only one; otherwise only a message, because the
        client continues with the others."""
        # The process guard stays until it has ended what its server left.
        if self.process.poll() is None and _is_listening(url):
            return
        sentence = f"{self.name} ended during the load; its last output: {cause(self.output())}"
        if alone:
            raise LaunchError(sentence)
        _report(sentence)


@contextlib.contextmanager
def started(name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, secret: str) -> Iterator[Server]:
    """The server, until the block ends. Its output is then copied to this rank's own output."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            process_guard.command(argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(name, process, log, secret)
    try:
        yield server
    finally:
        end_all(process)
        _report(f"--- output of {name} ---\n{server.output()}")


def require_patience(ready_s: float | None, stall_s: float, where: str) -> None:
    """RequestError if the run would be ended as hung before its server may be ready."""
    require(ready_s is None or ready_s < stall_s, where, ready_s, f"less than stall_s ({stall_s:g})")


def patience_s(ready_s: float | None, stall_s: float) -> float:
    """How long a server may take to start."""
    return SHARE_OF_STALL * stall_s if ready_s is None else ready_s


def _report(text: str) -> None:
    """Print to the log of the run."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _is_listening(url: str) -> bool:
    """Whether its port is in use. A server too busy to accept in time is alive."""
    parts = urlsplit(url)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 80), timeout=REQUEST_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def cause(output: str) -> str:
    """The line of a server's output that says why it ended, else its last line.

    >>> cause("ValidationError: 1 validation error for ModelConfig\\n  Value error, too long\\n  See the docs\\n")
    'ValidationError: 1 validation error for ModelConfig: Value error, too long'
    """
    lines = output.splitlines()
    grave = [n for n, line in enumerate(lines) if _CAUSE.search(line) and not _HARMLESS.match(line)]
    if not grave:
        return last_line(output)
    number = ([n for n in grave if not _AFTERMATH.search(lines[n])] or grave)[-1]
    # pydantic writes on the next line what is wrong.
    more = lines[number + 1 : number + 2] if _VALIDATION.search(lines[number]) else []
    return last_line(": ".join([lines[number], *map(str.strip, more)]))


def last_line(output: str) -> str:
    """The last line that is not empty, without logger prefixes."""
    stripped = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in stripped if line]
    return lines[-1][:_LONGEST_LINE] if lines else "nothing"


# --- where it listens ---


def own_address(nodes: int, environ: Mapping[str, str], interfaces: rendezvous.Interfaces | None = None) -> str:
    """The address at which the ranks of the run reach this host: loopback, the interface of the ranks, or the one that
    leads to the first node."""
    if nodes == 1:
        return "127.0.0.1"
    known = rendezvous.all_interfaces() if interfaces is None else interfaces
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if usable := [address for address in known.get(named, []) if not ipaddress.ip_address(address).is_link_local]:
        return usable[0]
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        # The address from which this host would connect to the first node; nothing is sent.
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return rendezvous.plain(str(probe.getsockname()[0]))
    except OSError as error:
        raise LaunchError(f"this node has no route to {host}, which sends the load to its replica ({error})") from None


def free_port(address: str) -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def url_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


# --- replicas of our own ---


@dataclass(frozen=True)
class ReplicaOptions:
    """max_batch: requests computed together. max_length: tokens of a prompt and its answer together (0: 2048, or more
    if synthetic prompts need it; never more than the model's context). batching: continuous or static. tensor_parallel:
    devices of one replica. nodes: nodes that serve one replica together, with one rank and the same number of devices
    on each. prefill_tokens: the most tokens of prompts that are read together. prefill_chunk: the most tokens of
    prompts that are read between two decode steps with continuous batching; longer prompts are read in pieces (default:
    1024; 0: no limit). ready_s: time limit of the start (default: 80 % of stall_s)."""

    max_batch: int = 32
    max_length: int = 0
    batching: str = "continuous"
    tensor_parallel: int = 1
    nodes: int = 1
    prefill_tokens: int = 16_384
    prefill_chunk: int | None = None
    ready_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "tensor_parallel", "nodes", "prefill_tokens"):
            require(getattr(self, name) >= 1, f"engine.{name}", getattr(self, name), "a whole number from 1")
        accepted = "a whole number from 2, or 0 for the default"
        fits = self.max_length == 0 or self.max_length >= 2
        require(fits, "engine.max_length", self.max_length, accepted)
        require(self.batching in BATCHING, "engine.batching", self.batching, " or ".join(BATCHING))
        fits = self.prefill_chunk is None or self.prefill_chunk >= 0
        require(fits, "engine.prefill_chunk", self.prefill_chunk, "a whole number from 1, or 0 for no limit")
        fits = self.batching == "continuous" or not self.prefill_chunk
        require(
            fits, "engine.prefill_chunk", self.prefill_chunk, "0 with static batching, which reads before it decodes"
        )
        fits = self.ready_s is None or self.ready_s > 0
        require(fits, "engine.ready_s", self.ready_s, "a positive number of seconds")


def refusal(spec: RunSpec, chosen: ReplicaOptions) -> str | None:
    """Why such a replica is impossible, by arithmetic alone."""
    assert spec.engine is not None
    require_patience(chosen.ready_s, spec.stall_s, f"{spec.engine.name}.ready_s")
    settings = settings_of(spec, chosen, first_device=0, host=LOOPBACK)
    shape, size, engine = settings.shape, chosen.tensor_parallel, spec.engine.name
    if shape.experts:
        return f"the engine {engine} serves dense models, but {settings.served} is a mixture of experts"
    if (shape.positions == "learned") != (shape.family == "gpt") or (shape.family == "gpt" and not shape.bias):
        return f"transformers has no architecture for {settings.served} with these options"
    if chosen.max_length > shape.context:
        return f"max_length {chosen.max_length} exceeds the {shape.context} positions of {settings.served}"
    if size > 1 and shape.positions == "learned":
        return f"tensor_parallel {size} needs a model of the llama family, but {settings.served} is not"
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(shape, name) % size:
            return f"tensor_parallel {size} does not divide the {getattr(shape, name)} {name} of {settings.served}"
    return spread_refusal(spec, size, chosen.nodes)


def longest_request(spec: RunSpec, chosen: ReplicaOptions) -> tuple[int, str]:
    """The most tokens of a prompt and its answer together, and the option that decides it."""
    return settings_of(spec, chosen, first_device=0, host=LOOPBACK).max_length, "engine.max_length"


def spread_refusal(spec: RunSpec, tensor_parallel: int, nodes: int) -> str | None:
    """Why replicas cannot have so many nodes each."""
    if nodes == 1:
        return None
    if tensor_parallel % nodes:
        return f"tensor_parallel {tensor_parallel} does not divide over {nodes} nodes"
    if spec.topology.nodes % nodes:
        return f"replicas of {nodes} nodes do not fit {spec.topology.nodes} nodes (topology.nodes)"
    if (count := spec.topology.processes_per_node) > 1:
        return f"a replica over several nodes has one rank on each, but there are {count} (topology.processes)"
    return None


def settings_of(spec: RunSpec, chosen: ReplicaOptions, *, first_device: int, host: str) -> Settings:
    assert spec.engine is not None
    usual_chunk = USUAL_CHUNK if chosen.batching == "continuous" else 0
    prefill_chunk = usual_chunk if chosen.prefill_chunk is None else chosen.prefill_chunk
    settings = Settings(
        engine=spec.engine.name,
        model=spec.model.name,
        model_options=dict(spec.model.options),
        seed=spec.seed,
        precision=spec.training.precision.compute,
        device=spec.topology.device,
        first_device=first_device,
        tensor_parallel=chosen.tensor_parallel,
        nodes=chosen.nodes,
        max_batch=chosen.max_batch,
        max_length=1,
        prefill_tokens=chosen.prefill_tokens,
        prefill_chunk=prefill_chunk,
        batching=chosen.batching,
        host=host,
    )
    return replace(settings, max_length=chosen.max_length or min(usual_length(spec), settings.shape.context))


def usual_length(spec: RunSpec) -> int:
    """Enough for synthetic prompts, whose lengths are known."""
    data, serving = spec.training.data, spec.serving
    if serving is None or data.name != "synthetic":
        return USUAL_LENGTH
    longest = sum(longest_synthetic(data, count=serving.requests, seed=spec.seed))
    return max(USUAL_LENGTH, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


@contextlib.contextmanager
def opened(spec: RunSpec, seat: Seat, chosen: ReplicaOptions, **own: Any) -> Iterator[list[Endpoint]]:
    """The endpoint of one replica on the devices of its rank; none if this rank serves another part of the replica of
    an earlier rank. own: settings of one engine alone. If the only replica dies during the load, this raises
    LaunchError at the end of the block; with several, the client notices and continues with the others."""
    replica, part = divmod(seat.rank, chosen.nodes)
    first = seat.local_rank * chosen.tensor_parallel // chosen.nodes
    host = own_address(spec.topology.nodes, os.environ)
    settings = replace(settings_of(spec, chosen, first_device=first, host=host), part=part, **own)
    # Parts on several nodes meet in the store of the launch, which opens no port of its own.
    meeting = (*torchrun.launch_address(), f"paceline/replica/{replica}") if chosen.nodes > 1 else None
    ready_s = patience_s(chosen.ready_s, spec.stall_s)
    secret = secrets.token_urlsafe(24)
    began = time.monotonic()
    with tempfile.TemporaryFile() as log, _process(settings, secret, meeting, log) as child:
        message = _first_message(child, log, ready_s)
        if part:
            yield []
            return
        facts = {
            **message["facts"],
            "ready_s": time.monotonic() - began,
            "body": {"ignore_eos": True} if spec.training.data.name in MEANINGLESS else {},
        }
        url = url_of(settings.host, message["port"])
        yield [Endpoint(url=url, model=settings.served, secret=secret, facts=facts)]
        if child.poll() is not None:
            sentence = f"the replica ended{_how(child)} during the load; its last output: {_end_of(log)}"
            sys.stderr.write(f"{sentence}\n")
            if seat.world_size == chosen.nodes:
                raise LaunchError(sentence)


@contextlib.contextmanager
def _process(
    settings: Settings, secret: str, meeting: Meeting | None, log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Settings and key go over its standard input, which no other user of this host can read."""
    # Without the variables of a rank: the model's processes form a group of their own.
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    kept = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith("TORCHELASTIC")}
    child = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            fields = {"settings": asdict(settings), "secret": secret, "meeting": meeting}
            child.stdin.write(json.dumps(fields).encode() + b"\n")
            child.stdin.close()
        yield child
    finally:
        end_all(child)
        if child.stdout is not None:
            child.stdout.close()


def _first_message(child: subprocess.Popen[bytes], log: IO[bytes], ready_s: float) -> dict[str, Any]:
    """Port and facts of a replica that is ready; otherwise an error with the end of its log."""
    assert child.stdout is not None
    if not select.select([child.stdout], [], [], ready_s)[0]:
        raise LaunchError(f"the replica was not ready within {ready_s:g} s; its last output: {_end_of(log)}")
    line = child.stdout.readline()
    message: dict[str, Any] = json.loads(line) if line else {}
    if "failed" in message:
        raise UnsupportedError(message["failed"])
    if "port" not in message:
        child.wait()
        raise LaunchError(f"the replica ended{_how(child)} before it was ready; its last output: {_end_of(log)}")
    return message


def _how(child: subprocess.Popen[bytes]) -> str:
    return f" by signal {-child.returncode}" if child.returncode < 0 else ""


def _end_of(log: IO[bytes]) -> str:
    """The last line that is not empty: for a traceback, its error."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_END_BYTES))
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "none"
