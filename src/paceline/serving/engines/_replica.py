"""Runs a replica of our own for the length of a block: start, wait until ready, end with all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from paceline.contract import Endpoint, Seat
from paceline.errors import LaunchError, UnsupportedError, require
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_all
from paceline.serving.engines import _server
from paceline.serving.replica.settings import BATCHING, Settings

# The default length, if the model allows it.
USUAL_LENGTH = 2048
LOG_END_BYTES = 4096
LOOPBACK = "127.0.0.1"
COMMAND = (sys.executable, "-m", "paceline.serving.replica", "front")
# Generated prompts mean nothing, so no token ends an answer to them: every answer has its full length.
MEANINGLESS = ("synthetic", "trace")


@dataclass(frozen=True)
class ReplicaOptions:
    """max_batch: requests computed together. max_length: tokens of a prompt and its answer together (0: 2048, or the
    model's context if that is less). batching: continuous or static. tensor_parallel: devices of one replica.
    prefill_tokens: prompts are read together up to so many tokens. ready_s: how long it may take to start (default: 80
    % of stall_s)."""

    max_batch: int = 32
    max_length: int = 0
    batching: str = "continuous"
    tensor_parallel: int = 1
    prefill_tokens: int = 16_384
    ready_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "tensor_parallel", "prefill_tokens"):
            require(getattr(self, name) >= 1, f"engine.{name}", getattr(self, name), "a whole number from 1")
        accepted = "a whole number from 2, or 0 for the default"
        require(self.max_length >= 0, "engine.max_length", self.max_length, accepted)
        require(self.batching in BATCHING, "engine.batching", self.batching, " or ".join(BATCHING))
        fits = self.ready_s is None or self.ready_s > 0
        require(fits, "engine.ready_s", self.ready_s, "a positive number of seconds")


def refusal(spec: RunSpec, chosen: ReplicaOptions) -> str | None:
    """Why such a replica is impossible, by arithmetic alone."""
    assert spec.engine is not None
    _server.require_patience(chosen.ready_s, spec.stall_s, f"{spec.engine.name}.ready_s")
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
    return None


def settings_of(spec: RunSpec, chosen: ReplicaOptions, *, first_device: int, host: str) -> Settings:
    assert spec.engine is not None
    settings = Settings(
        engine=spec.engine.name,
        model=spec.model.name,
        model_options=dict(spec.model.options),
        seed=spec.seed,
        precision=spec.training.precision.compute,
        device=spec.topology.device,
        first_device=first_device,
        tensor_parallel=chosen.tensor_parallel,
        max_batch=chosen.max_batch,
        max_length=1,
        prefill_tokens=chosen.prefill_tokens,
        batching=chosen.batching,
        host=host,
    )
    return replace(settings, max_length=chosen.max_length or min(USUAL_LENGTH, settings.shape.context))


@contextlib.contextmanager
def opened(spec: RunSpec, seat: Seat, chosen: ReplicaOptions, **own: Any) -> Iterator[list[Endpoint]]:
    """The endpoint of one replica on the devices of its rank; own: settings of one engine alone. If the only replica
    dies during the load, this raises LaunchError at the end of the block; with several, the client notices and
    continues with the others."""
    first = seat.local_rank * chosen.tensor_parallel
    host = _server.own_address(spec.topology.nodes, os.environ)
    settings = replace(settings_of(spec, chosen, first_device=first, host=host), **own)
    ready_s = _server.patience_s(chosen.ready_s, spec.stall_s)
    secret = secrets.token_urlsafe(24)
    began = time.monotonic()
    with tempfile.TemporaryFile() as log, _process(settings, secret, log) as child:
        message = _first_message(child, log, ready_s)
        facts = {
            **message["facts"],
            "ready_s": time.monotonic() - began,
            "body": {"ignore_eos": True} if spec.training.data.name in MEANINGLESS else {},
        }
        url = _server.url_of(settings.host, message["port"])
        yield [Endpoint(url=url, model=settings.served, secret=secret, facts=facts)]
        if child.poll() is not None:
            sentence = f"the replica ended{_how(child)} during the load; its last output: {_end_of(log)}"
            sys.stderr.write(f"{sentence}\n")
            if seat.world_size == 1:
                raise LaunchError(sentence)


@contextlib.contextmanager
def _process(settings: Settings, secret: str, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
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
            child.stdin.write(json.dumps({"settings": asdict(settings), "secret": secret}).encode() + b"\n")
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
