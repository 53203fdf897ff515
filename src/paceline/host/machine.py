"""This machine: hardware probe, GPU table, visible devices, and what would distort a measurement.

Nothing here imports torch: planning and `paceline doctor` must work without it. Unknown values are None.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import platform
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host import processes
from paceline.host.environment import recorded_environment
from paceline.host.files import text_of
from paceline.host.topology import Topology, read_topology

PEAK_DTYPES = ("bf16", "fp16", "fp32", "fp8")

_PACKAGES = (
    "paceline",
    "torch",
    "deepspeed",
    "numpy",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "psutil",
    "nvidia-ml-py",
)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

# How long a program such as nvidia-smi may take, and how much it may print.
ANSWER_S = 10.0
MOST_PRINTED_BYTES = 1 << 20
# Colours of `nvidia-smi topo` are removed where it is parsed.
_CONTROL = re.compile(r"(?!\x1b\[[0-9;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# A switch is on unless it is set to one of _OFF; two others have their own rule in `debug_switches`.
_OFF = ("", "0", "off", "false", "no", "none")
_SWITCH = re.compile(
    r"TORCH_DISTRIBUTED_DEBUG|CUDA_LAUNCH_BLOCKING|(TORCH_)?NCCL_BLOCKING_WAIT|TORCH_NCCL_(DESYNC_DEBUG|ENABLE_TIMING)"
    r"|NCCL_CHECK_POINTERS|PYTORCH_NO_CUDA_MEMORY_CACHING|TORCH_COMPILE_(DEBUG|DISABLE)|TORCHDYNAMO_DISABLE"
    r"|PYTHONDEVMODE|PYTHONTRACEMALLOC|MALLOC_(PERTURB|CHECK)_"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One visible GPU. index is CUDA's (after CUDA_VISIBLE_DEVICES); peaks are dense, by dtype, None if unknown.

    A GPU in MIG mode has no peaks: datasheets do not list those of a slice.
    """

    index: int
    name: str | None
    memory_bytes: int | None
    sm_clock_max_hz: float | None
    power_limit_w: float | None
    ecc: bool | None
    mig: bool | None
    capability: str | None
    pcie_generation: int | None
    pcie_width: int | None
    nvlink_links: int | None
    peak_flops: Mapping[str, float | None] | None
    memory_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host when probed. links: how its GPUs are connected (nvlink or pcie), None for fewer than two GPUs."""

    host: str
    os: str
    cpu: str | None
    cores: int | None
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    links: str | None
    driver: str | None
    cuda: str | None
    versions: Mapping[str, str]
    revision: str | None
    environment: Mapping[str, str]
    topology: Topology


def probe() -> Machine:
    """Describe this host; changes nothing."""
    gpus: tuple[Gpu, ...] = ()
    driver = cuda = links = None
    uuids: list[str] = []
    with nvml() as library:
        if library is not None:
            number = ask(library.nvmlSystemGetCudaDriverVersion)
            cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
            gpus = tuple(_gpu(library, index, handle) for index, handle in enumerate(handles(library)))
            driver = ask(library.nvmlSystemGetDriverVersion)
            uuids = host_uuids(library)
    shown = [uuids.index(uuid) for uuid in visible(uuids, os.environ) if uuid in uuids]
    if len(gpus) > 1:
        links = "nvlink" if all(gpu.nvlink_links for gpu in gpus) else "pcie"
    return Machine(
        host=socket.gethostname(),
        os=platform.platform(),
        cpu=cpu_model(),
        cores=usable_cores(),
        memory_bytes=ask(lambda: int(importlib.import_module("psutil").virtual_memory().total)),
        gpus=gpus,
        links=links,
        driver=driver,
        cuda=cuda,
        versions=_versions(),
        revision=_revision(),
        environment=recorded_environment(os.environ),
        topology=read_topology(_output("nvidia-smi", "topo", "-m") if shown else None, shown),
    )


def to_dict(machine: Machine) -> dict[str, Any]:
    """The machine as JSON-ready values."""
    return dataclasses.asdict(machine)


def fingerprint_diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differences between two machine dicts, by dotted path ("gpus.0.name"); a missing value is None."""
    left, right = dict(_flat(a)), dict(_flat(b))
    paths = [*left, *(path for path in right if path not in left)]
    return {p: (left.get(p), right.get(p)) for p in paths if left.get(p) != right.get(p)}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _flat(inner, f"{path}.{key}" if path else str(key))


def cpu_model() -> str | None:
    """The processor's name, from /proc/cpuinfo or, on Arm, from lscpu."""
    text = text_of(Path("/proc/cpuinfo"))
    pattern = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE | re.IGNORECASE)
    match = pattern.search(text) or pattern.search(_output("lscpu") or "")
    return match.group(1).strip() if match else platform.processor() or None


def usable_cores() -> int | None:
    """Logical cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def version(package: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()} | {p: v for p in _PACKAGES if (v := version(p))}
    nccl = next((v for p in _NCCL_PACKAGES if (v := version(p))), None)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        # The one that torch really uses.
        nccl = ".".join(map(str, torch.cuda.nccl.version())) or nccl
    return versions | ({"nccl": nccl} if nccl else {})


def _revision() -> str | None:
    """The commit Paceline runs from, with "-dirty" if files changed since; None outside its own checkout."""
    git = ("git", "-C", str(Path(__file__).parent))
    if _output(*git, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _output(*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


# Programs that did not answer in time once: a probe asks some of them several times, and must end.
_silent: set[str] = set()


def _output(*command: str) -> str | None:
    """Standard output of a short command, or None if it is missing, slow, fails or prints too much. Control characters
    other than colours are replaced: what a driver prints ends on a terminal and in records."""
    if command[0] in _silent or shutil.which(command[0]) is None:
        return None  # Much cheaper than a process that fails to start.
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    printed = processes.printed_by(command, quiet, ANSWER_S, MOST_PRINTED_BYTES)
    if printed is None:
        _silent.add(command[0])
        return None
    code, content = printed
    return _CONTROL.sub("\ufffd", content.decode(errors="replace")).strip() if code == 0 else None


def debug_switches(environ: Mapping[str, str]) -> dict[str, str]:
    """Debug switches that are on and slow runs down: in the environment, and in torch if it is imported."""

    def is_on(name: str, value: str) -> bool:
        if name == "NCCL_DEBUG":
            return value in ("info", "trace")
        if name == "PYTHONMALLOC":
            return "debug" in value
        return bool(_SWITCH.fullmatch(name)) and value not in _OFF

    switches = {name: value for name, value in sorted(environ.items()) if is_on(name, value.strip().lower())}
    torch = sys.modules.get("torch")
    if torch is not None:
        modes = {
            "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
            "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        }
        switches |= {name: "True" for name, on in modes.items() if on}
    return switches


# --- GPUs ---


@functools.cache
def _gpu_table() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))["gpu"]
    return rows


def _normalised(name: str) -> str:
    return " ".join(name.split()).casefold().removeprefix("nvidia ")


def gpu_row(name: str) -> dict[str, Any] | None:
    """The table row of this GPU, with source and date; None for others, even similar ones."""
    return next((row for row in _gpu_table() if _normalised(name) in map(_normalised, row["names"])), None)


def gpu_summaries() -> dict[str, str]:
    """Every GPU of the table with its dense peaks, for `paceline list gpus`."""

    def peaks(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{dtype} {row[dtype] / 1e12:g}" for dtype in PEAK_DTYPES if row.get(dtype))

    return {row["names"][0]: f"{peaks(row)} TFLOP/s dense ({row['source'].partition(',')[0]})" for row in _gpu_table()}


def gpu_peaks(name: str) -> dict[str, float | None] | None:
    """Dense peak FLOP/s by dtype; None for a GPU that is not in the table."""
    row = gpu_row(name)
    return None if row is None else {dtype: row.get(dtype) for dtype in PEAK_DTYPES}


@contextmanager
def nvml() -> Iterator[Any | None]:
    """The pynvml module, initialised; None if it, the library or the driver is missing."""
    library = ask(importlib.import_module, "pynvml")
    if library is None or ask(lambda: library.nvmlInit() or True) is None:
        yield None
        return
    try:
        yield library
    finally:
        ask(library.nvmlShutdown)


def ask(call: Callable[..., Any], *arguments: Any) -> Any | None:
    """The result of a call, or None if this machine, driver or container does not support it."""
    try:
        return call(*arguments)
    except Exception:  # NVMLError, whose module may be missing, or a function that the installed library lacks
        return None


def visible(uuids: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA shows, in its order: CUDA_VISIBLE_DEVICES has numbers, UUIDs or MIG UUIDs.

    As in CUDA, the list ends at the first entry that matches no GPU. All GPUs are assumed to be of one model, for which
    CUDA and the driver use the same order.
    """
    selection = environ.get("CUDA_VISIBLE_DEVICES")
    if selection is None:
        return list(uuids)
    chosen: list[str] = []
    for entry in (part.strip() for part in selection.split(",")):
        matches = [entry] if entry.startswith("MIG-") else [u for u in uuids if entry and u.startswith(entry)]
        if re.fullmatch(r"[0-9]{1,9}", entry):
            matches = list(uuids[int(entry) : int(entry) + 1])
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def host_uuids(library: Any | None) -> list[str]:
    """UUIDs of all GPUs of the host, from NVML or else from nvidia-smi."""
    if library is None:
        return re.findall(r"UUID: (GPU-[\w-]+)", _output("nvidia-smi", "-L") or "")
    handles = [ask(library.nvmlDeviceGetHandleByIndex, i) for i in range(ask(library.nvmlDeviceGetCount) or 0)]
    return [uuid for handle in handles if handle is not None and (uuid := ask(library.nvmlDeviceGetUUID, handle))]


def handles(library: Any) -> list[Any]:
    """NVML handles of the visible GPUs in CUDA's order."""
    return [ask(library.nvmlDeviceGetHandleByUUID, uuid) for uuid in visible(host_uuids(library), os.environ)]


def device_count() -> int:
    """Number of GPUs that CUDA shows here, without importing torch."""
    with nvml() as library:
        return len(visible(host_uuids(library), os.environ))


def device_kind() -> str:
    """`cuda` if a GPU is visible and the installed torch can use it, else `cpu`."""
    return "cuda" if device_count() and not (version("torch") or "").endswith("+cpu") else "cpu"


def _gpu(library: Any, index: int, handle: Any) -> Gpu:
    name = ask(library.nvmlDeviceGetName, handle)
    mig = ask(lambda: library.nvmlDeviceGetMigMode(handle)[0] == 1)
    row = gpu_row(name) if name and not mig else None
    links = nvlink_states(library, handle)
    return Gpu(
        index=index,
        name=name,
        memory_bytes=ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total)),
        sm_clock_max_hz=ask(lambda: library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_SM) * 1e6),
        power_limit_w=ask(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        ecc=ask(lambda: library.nvmlDeviceGetEccMode(handle)[0] == 1),
        mig=mig,
        capability=ask(lambda: ".".join(map(str, library.nvmlDeviceGetCudaComputeCapability(handle)))),
        pcie_generation=ask(library.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=ask(library.nvmlDeviceGetMaxPcieLinkWidth, handle),
        nvlink_links=sum(state == 1 for state in links.values()) if links else None,
        peak_flops=gpu_peaks(name) if name and row else None,
        memory_bytes_per_s=row.get("memory_bytes_per_s") if row else None,
    )


def nvlink_states(library: Any, handle: Any) -> dict[int, int]:
    """The state of each NVLink of a GPU by number, 1 for active; empty if it has none or does not report them."""
    states = (ask(library.nvmlDeviceGetNvLinkState, handle, link) for link in range(library.NVML_NVLINK_MAX_LINKS))
    return {link: state for link, state in enumerate(states) if state is not None}


def neighbours(gpu_index: int, ours: Collection[int] = ()) -> int | None:
    """Number of other processes computing on that GPU, besides this one and the pids in `ours` (our ranks).

    In a container, NVML may show pids of the host, among which ours cannot be found: then the expected number is
    subtracted. None if NVML does not report processes.
    """
    mine = {os.getpid(), *ours}
    with nvml() as library:
        if library is None or gpu_index >= len(devices := handles(library)):
            return None
        running = ask(library.nvmlDeviceGetComputeRunningProcesses, devices[gpu_index])
    if running is None:
        return None
    pids = {process.pid for process in running}
    if pids & mine or not _uses_gpu():
        return len(pids - mine)
    return len(running) - len(mine) if len(running) >= len(mine) else None


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
