"""vLLM: starts `vllm serve` for each rank on its own devices, and ends it with the run.

A replica that is too large for one node is spread over several (`nodes`): the rank on each starts a part of it, and the
first part answers requests. vLLM itself connects the parts; their ranks only agree on the address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import Endpoint, Seat
from paceline.errors import LaunchError, UnsupportedError, require
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.environment import is_secret
from paceline.host.scratch import own_folder
from paceline.launchers.node import placement, torchrun
from paceline.models import directory
from paceline.models.arithmetic import known_shape
from paceline.models.arithmetic import load as load_shape
from paceline.serving.engines import _server

# It starts servers on the devices of its rank: other processes there are counted before.
STARTS = True
USER_ONLY = {"executable": "which program is started", "arguments": "how that program is started"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PORTS_TRIED = 3
# Options that this engine sets itself, so they may not be given again.
_OURS = re.compile(
    r"--(host|port|api-key|dtype|served-model-name|load-format|tensor-parallel-size|max-model-len|max-num-seqs|seed"
    r"|gpu-memory-utilization|kv-cache-memory-bytes|(no-)?enable-prefix-caching|enforce-eager|generation-config"
    r"|nnodes|node-rank|master-addr|master-port|headless)(=.*)?"
)
# Variables of the rank, which a server would take for its own.
_OF_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PACELINE_SPEC|NCCL_HOSTID"
)
# What vLLM reports about its cache.
_CACHE = ("block_size", "cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_size_tokens")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Options:
    """executable: the program, by path or found in PATH. tensor_parallel: devices of each replica. nodes: nodes that
    serve one replica together, with one rank and the same number of devices on each.

    max_model_len, max_num_seqs, gpu_memory_utilization, kv_cache_bytes: vLLM's own defaults unless given.
    prefix_caching is off, because samples that share a beginning would be answered faster the second time. eager:
    without compiled graphs. ignore_eos: answers continue to the requested length; the default if lengths are synthetic
    or weights random. ready_s: how long it may take to start (default: 80 % of stall_s). arguments: more of `vllm
    serve`.
    """

    executable: str = "vllm"
    tensor_parallel: int = 1
    nodes: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = False
    eager: bool = False
    ignore_eos: bool | None = None
    ready_s: float | None = None
    arguments: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "nodes", "max_model_len", "max_num_seqs", "kv_cache_bytes"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(value is None or whole, f"vllm.{name}", value, "a whole number from 1")
        for name, most in (("gpu_memory_utilization", 1.0), ("ready_s", 86_400.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most
            require(value is None or number, f"vllm.{name}", value, f"a number above 0, at most {most:g}")
        require(self.ignore_eos in (None, True, False), "vllm.ignore_eos", self.ignore_eos, "true or false")
        given = self.arguments
        texts = isinstance(given, list | tuple) and all(isinstance(word, str) for word in given)
        require(given is None or texts, "vllm.arguments", given, "a list of texts")
        for word in given or ():
            # In vLLM, argparse accepts an underscore for a dash.
            ours = _OURS.fullmatch(word.replace("_", "-"))
            require(not ours, "vllm.arguments", word, "an option that this engine does not set itself")


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.engine)
    shape = known_shape(spec.model)
    _server.require_patience(chosen.ready_s, spec.stall_s, "vllm.ready_s")
    if refusal := _server.spread_refusal(spec, chosen.tensor_parallel, chosen.nodes):
        return refusal
    if shape is None:
        return None  # vLLM itself reports at its start whether it supports this architecture
    if shape.heads % chosen.tensor_parallel:
        return f"tensor_parallel {chosen.tensor_parallel} does not divide the {shape.heads} heads of {spec.model_text}"
    return None if "/" in spec.model.name else directory.unservable(shape)


def longest_request(spec: RunSpec) -> tuple[int, str] | None:
    limit = parse_options(Options, spec.engine).max_model_len
    return None if limit is None else (limit, "engine.max_model_len")


def nodes_per_replica(spec: RunSpec) -> int:
    return parse_options(Options, spec.engine).nodes


@contextlib.contextmanager
def open(spec: RunSpec, seat: Seat) -> Iterator[Sequence[Endpoint]]:
    """The replica of this rank; none if this rank serves another part of the replica of an earlier rank."""
    chosen = parse_options(Options, spec.engine)
    program = executable(chosen.executable)
    devices = devices_of(seat, chosen.tensor_parallel // chosen.nodes, os.environ)
    secret = secrets.token_urlsafe(24)
    patience_s = _server.patience_s(chosen.ready_s, spec.stall_s)
    with own_folder(None) as folder, contextlib.ExitStack() as running:
        log = folder / "server.log"
        model = model_folder(spec, folder)
        for left in reversed(range(PORTS_TRIED)):
            part = part_of(spec, seat, chosen.nodes, patience_s)
            env = environment(spec, devices, secret, os.environ, part.own if chosen.nodes > 1 else None)
            argv = [program, *command(spec, chosen, model, part)]
            server = running.enter_context(_server.started("vllm serve", argv, env, log, secret))
            url = _server.url_of(part.address, part.port)
            try:
                # The other parts wait for the first one too: each reports why its own server ended.
                ready_s = server.wait_until_ready(url, patience_s)
                break
            except LaunchError as error:
                # Another process may have taken the free port before the server listened. The ports of a replica on
                # several nodes are known to all its ranks and not exchanged.
                if not left or chosen.nodes > 1 or "ddress already in use" not in str(error):
                    raise
                running.close()
        if part.number:
            yield []
            return
        facts = facts_of(spec, chosen, url, devices) | {"ready_s": ready_s}
        yield [Endpoint(url=url, model=served_name(spec), secret=secret, facts=facts)]
        server.require_alive(url, alone=seat.world_size == chosen.nodes)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank serves of a replica. number: among the parts. own: this node's address. address, port: where the
    first part answers requests; meeting_port: where all parts connect."""

    number: int
    own: str
    address: str
    port: int
    meeting_port: int | None = None


def part_of(spec: RunSpec, seat: Seat, nodes: int, timeout_s: float) -> Part:
    """Choose the ports of a replica. With several nodes, the first rank of each replica tells the others."""
    own = _server.own_address(spec.topology.nodes, os.environ)
    if nodes == 1:
        return Part(0, own, own, _server.free_port(own))
    replica, number = divmod(seat.rank, nodes)
    store, key = torchrun.launch_store(timeout_s), f"paceline/vllm/{replica}"
    if number == 0:
        store.set(key, json.dumps([own, _server.free_port(own), _server.free_port(own)]))
    try:
        address, port, meeting_port = json.loads(store.get(key))
    except RuntimeError:
        first = seat.rank - number
        raise LaunchError(f"rank {first} did not start its part of the replica within {timeout_s:.0f} s") from None
    return Part(number, own, address, port, meeting_port)


def executable(given: str) -> str:
    path = shutil.which(given)
    if path is None:
        raise UnsupportedError(
            f"the engine vllm needs the program {given!r}, which is not on {placement.node_name(os.environ)}: install "
            "vLLM (pip install vllm, in an environment of its own) and give engine.executable=/ITS/bin/vllm"
        )
    return path


def model_folder(spec: RunSpec, folder: Path) -> Path:
    """The checkpoint's own directory; for a named shape, a directory without weights in the rank's scratch space."""
    if "/" in spec.model.name:
        return Path(spec.model.name).expanduser().resolve()
    made = folder / served_name(spec)
    made.mkdir()
    directory.write(made, load_shape(spec.model), DTYPES[spec.training.precision.compute])
    return made


def served_name(spec: RunSpec) -> str:
    return spec.model.name.rstrip("/").rpartition("/")[2]


def command(spec: RunSpec, chosen: Options, model: Path, part: Part) -> list[str]:
    """Arguments of `vllm`. The key is not among them: every user of a host can see its command lines."""
    is_first, is_spread = part.number == 0, chosen.nodes > 1
    given: dict[str, object] = {
        "host": part.address if is_first else None,
        "port": part.port if is_first else None,
        "served-model-name": served_name(spec),
        "dtype": DTYPES[spec.training.precision.compute],
        "tensor-parallel-size": chosen.tensor_parallel,
        "seed": spec.seed,
        # Sampling defaults beside the weights would change a greedy answer.
        "generation-config": "vllm",
        "max-model-len": chosen.max_model_len,
        "max-num-seqs": chosen.max_num_seqs,
        "gpu-memory-utilization": chosen.gpu_memory_utilization,
        "kv-cache-memory-bytes": chosen.kv_cache_bytes,
        "load-format": None if "/" in spec.model.name else "dummy",
        "distributed-executor-backend": "mp" if is_spread else None,
        "nnodes": chosen.nodes if is_spread else None,
        "node-rank": part.number if is_spread else None,
        "master-addr": part.address if is_spread else None,
        "master-port": part.meeting_port,
    }
    flags = ["--enable-prefix-caching" if chosen.prefix_caching else "--no-enable-prefix-caching"]
    flags += ["--enforce-eager"] if chosen.eager else []
    # A line for each request costs the server time.
    flags += ["--disable-uvicorn-access-log"] if is_first else ["--headless"]
    pairs = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return ["serve", str(model), *pairs, *flags, *(chosen.arguments or ())]


def devices_of(seat: Seat, tensor_parallel: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of this rank, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    if seat.device != "cuda":
        return ()
    named = environ.get("CUDA_VISIBLE_DEVICES")
    shown = [str(n) for n in range(machine.device_count())] if named is None else [n for n in named.split(",") if n]
    first = seat.local_rank * tensor_parallel
    own = tuple(shown[first : first + tensor_parallel])
    if len(own) < tensor_parallel:
        raise UnsupportedError(
            f"local rank {seat.local_rank} with tensor_parallel {tensor_parallel} needs {first + tensor_parallel} GPUs "
            f"of its host, which has {len(shown)}: use fewer, or spread each replica over several nodes (vllm.nodes)"
        )
    return own


def environment(
    spec: RunSpec, devices: Sequence[str], secret: str, environ: Mapping[str, str], address: str | None = None
) -> dict[str, str]:
    """The environment of this rank, without variables for ranks; no hub is contacted. address: of this node, if others
    serve parts of the same replica."""
    kept = {name: value for name, value in environ.items() if not _OF_RANKS.fullmatch(name)}
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    ours = {**quiet, "VLLM_API_KEY": secret}
    # vLLM would otherwise use the interface of the default route.
    usual = {} if address is None else {"VLLM_HOST_IP": address}
    if spec.topology.device == "cuda":
        return {**usual, **kept, **ours, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    alone = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if address is None else {}
    # Several servers on one host must not all be bound to its first cores.
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **alone, **usual, **kept, **ours}


def facts_of(spec: RunSpec, chosen: Options, url: str, devices: Sequence[str]) -> dict[str, Any]:
    try:
        reply = json.loads(_read(url, "/version"))
    except ValueError:
        reply = None
    version = reply.get("version") if isinstance(reply, dict) else None
    # Labels of vLLM's own metric about its cache; a version may have none.
    lines = _read(url, "/metrics").splitlines()
    cache = next((dict(_LABEL.findall(line)) for line in lines if line.startswith("vllm:cache_config_info{")), {})
    return {
        "body": {"ignore_eos": True} if ignores_eos(spec, chosen) else {},
        "version": None if version is None else str(version),
        "devices": len(devices) * chosen.nodes or None,
        "tensor_parallel": chosen.tensor_parallel,
        "settings": settings(spec, chosen, cache, os.environ),
    }


def ignores_eos(spec: RunSpec, chosen: Options) -> bool:
    meaningless = spec.training.data.name in _server.MEANINGLESS or "/" not in spec.model.name
    return meaningless if chosen.ignore_eos is None else chosen.ignore_eos


def settings(
    spec: RunSpec, chosen: Options, cache: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str | int | float | bool | None]:
    """What changes speed: as requested, and what vLLM reports about the rest."""
    switches = {name: value for name, value in environ.items() if name.startswith("VLLM_")}
    return {
        "dtype": DTYPES[spec.training.precision.compute],
        "batching": "continuous",
        "max_batch": chosen.max_num_seqs,
        "max_model_len": chosen.max_model_len,
        "prefix_caching": cache.get("enable_prefix_caching", str(chosen.prefix_caching)) == "True",
        "eager": chosen.eager,
        "ignore_eos": ignores_eos(spec, chosen),
        "weights": "checkpoint" if "/" in spec.model.name else "random",
        **({"nodes": chosen.nodes} if chosen.nodes > 1 else {}),
        "arguments": " ".join(chosen.arguments or ()) or None,
        **{name: cache[name] for name in _CACHE if cache.get(name, "None") != "None"},
        **{name: value for name, value in sorted(switches.items()) if not is_secret(name, value)},
    }


def _read(url: str, path: str) -> str:
    """The text of a page; empty if there is none, because no run fails for missing facts."""
    try:
        with urllib.request.urlopen(url + path, timeout=_server.REQUEST_S) as answer:
            return str(answer.read(1 << 20).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return ""
