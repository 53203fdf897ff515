"""Is this machine fit to run and to measure? One diagnosis per question, each with the sentence that fixes it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.host import machine, recommended

GIB = 2**30
PYTHON_NEEDED = (3, 11)
TORCH_NEEDED, TORCH_TRIED = (2, 11), (2, 13)
DISK_NEEDED_BYTES = GIB
SHARED_MEMORY_NEEDED_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One line of `paceline doctor`. ok is None where runs work but something is missing or could not be told."""

    name: str
    ok: bool | None
    text: str
    fix: str | None = None


def checks(results: Path | str = "results", environ: Mapping[str, str] = os.environ) -> list[Diagnosis]:
    """Everything doctor asks, in the order in which a user would put it right. Changes nothing on disk."""
    folder = Path(results)
    return [
        _python(sys.version_info[:3]),
        _torch(machine.version("torch")),
        _deepspeed(machine.version("deepspeed")),
        *_gpu_checks(environ),
        *_network_checks(environ),
        _switches(environ),
        _threads(environ),
        _compiler(environ),
        _loopback(),
        _shared_memory(Path("/dev/shm")),
        _disk(folder),
        _writable(folder),
    ]


def _python(version: tuple[int, ...]) -> Diagnosis:
    text = ".".join(map(str, version))
    fix = None if version >= PYTHON_NEEDED else "make a virtual environment with Python 3.11 or newer"
    return Diagnosis(name="python", ok=fix is None, text=text, fix=fix)


def _torch(version: str | None) -> Diagnosis:
    if version is None:
        return Diagnosis(name="torch", ok=False, text="not installed", fix="run `pip install 'torch>=2.11'`")
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < TORCH_NEEDED:
        return Diagnosis(
            name="torch", ok=False, text=f"{version} is too old", fix="run `pip install --upgrade 'torch>=2.11'`"
        )
    if release > TORCH_TRIED:
        tried = f"{version} is newer than what Paceline was tried with (2.11 to 2.13)"
        return Diagnosis(
            name="torch", ok=None, text=tried, fix="run `pip install 'torch<2.14'` if a strategy misbehaves"
        )
    return Diagnosis(name="torch", ok=True, text=version)


def _deepspeed(version: str | None) -> Diagnosis:
    if version is None:
        fix = "run `pip install 'paceline[zero]'`"
        return Diagnosis(name="deepspeed", ok=None, text="not installed: the zero strategies are unsupported", fix=fix)
    return Diagnosis(name="deepspeed", ok=True, text=version)


def _gpu_checks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    with machine.nvml() as library:
        uuids = machine.host_uuids(library)
    visible = machine.visible(uuids, environ)
    yield _gpu(len(uuids), len(visible), environ.get("CUDA_VISIBLE_DEVICES"), machine.version("torch") or "")
    yield _nvml(library is not None, bool(uuids))
    if library is not None and visible:
        yield _driver(machine.probe())
        yield _neighbours([machine.neighbours(index) for index in range(len(visible))])


def _network_checks(environ: Mapping[str, str], root: Path = Path("/")) -> Iterator[Diagnosis]:
    """The interfaces that variables name, and what is recommended for the GPUs here against what this host has."""
    host, known = machine.probe(), recommended.interconnect(root)
    yield _interfaces(recommended.unmatched(environ, known.interfaces), known)
    names = dict.fromkeys(gpu.name for gpu in host.gpus if gpu.name)
    for profile in dict.fromkeys(filter(None, map(recommended.of, names))):
        yield from (_recommended(profile, recommended.fit(setting, known)) for setting in profile.settings)


def _interfaces(unmatched: Mapping[str, str], known: recommended.Interconnect) -> Diagnosis:
    here = ", ".join(known.interfaces) or "none that the kernel lists"
    if not unmatched:
        return Diagnosis(name="interfaces", ok=True, text=here)
    named = ", ".join(f"{name}={value}" for name, value in unmatched.items())
    return Diagnosis(
        name="interfaces",
        ok=False,
        text=f"{named} names no interface of this host ({here}): ranks would not meet",
        fix=f"run `unset {' '.join(unmatched)}`" + (f", or name {known.default}" if known.default else ""),
    )


def _recommended(profile: recommended.Profile, found: recommended.Fit) -> Diagnosis:
    """Never bad: it is advice, and runs do without it."""
    mind = f"; mind: {found.setting.mind}" if found.setting.mind else ""
    text = f"{found.setting} is recommended for {profile.name}: {found.text}{mind}"
    fits = True if found.fits and not found.setting.mind else None
    return Diagnosis(name="profile", ok=fits, text=text, fix=found.fix)


def _gpu(on_host: int, visible: int, selection: str | None, torch: str) -> Diagnosis:
    if not on_host:
        fix = "install the NVIDIA driver (`nvidia-smi` must list the GPU) or start the container with `--gpus all`"
        return Diagnosis(name="gpu", ok=None, text="none found: runs use the CPU with gloo", fix=fix)
    if not visible:
        text = f"{on_host} on this host, but CUDA_VISIBLE_DEVICES={selection!r} hides all"
        return Diagnosis(name="gpu", ok=None, text=text, fix="run `unset CUDA_VISIBLE_DEVICES`")
    if torch.endswith("+cpu"):
        fix = "install a CUDA build: `pip install torch --index-url https://download.pytorch.org/whl/cu130`"
        return Diagnosis(name="gpu", ok=False, text=f"{visible} visible, but torch {torch} cannot use them", fix=fix)
    return Diagnosis(name="gpu", ok=True, text=f"{visible} visible of {on_host} on this host")


def _nvml(works: bool, has_gpu: bool) -> Diagnosis:
    if works:
        return Diagnosis(name="nvml", ok=True, text="answers")
    if has_gpu:
        fix = "run `pip install nvidia-ml-py`; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Diagnosis(name="nvml", ok=False, text="does not answer: no clocks, power or neighbours", fix=fix)
    return Diagnosis(name="nvml", ok=None, text="no driver library: nothing to ask")


def _driver(host: machine.Machine) -> Diagnosis:
    unknown = sorted({gpu.name or "a GPU without a name" for gpu in host.gpus if gpu.peak_flops is None})
    text = f"driver {host.driver}, CUDA {host.cuda}, " + ", ".join(sorted({gpu.name or "?" for gpu in host.gpus}))
    if unknown:
        fix = "add a row with its dense peaks and their source to data/gpus.toml; without one MFU is not known"
        return Diagnosis(name="driver", ok=None, text=f"{text}; no known peak for {', '.join(unknown)}", fix=fix)
    return Diagnosis(name="driver", ok=True, text=text)


def _neighbours(counts: list[int | None]) -> Diagnosis:
    busy = [index for index, count in enumerate(counts) if count]
    if busy:
        listed = ", ".join(map(str, busy))
        fix = f"end the processes that `nvidia-smi` lists on GPU {listed}, or leave it out with CUDA_VISIBLE_DEVICES"
        return Diagnosis(name="neighbours", ok=False, text=f"other processes compute on GPU {listed}", fix=fix)
    if any(count is None for count in counts):
        return Diagnosis(name="neighbours", ok=None, text="the driver does not say who else uses the GPU")
    return Diagnosis(name="neighbours", ok=True, text="no other process on the GPU")


def _switches(environ: Mapping[str, str]) -> Diagnosis:
    on = machine.debug_switches(environ)
    if not on:
        return Diagnosis(name="debug switches", ok=True, text="all off")
    text = "on, so runs cannot be ranked: " + ", ".join(f"{name}={value}" for name, value in on.items())
    return Diagnosis(name="debug switches", ok=False, text=text, fix=f"run `unset {' '.join(on)}`")


def _threads(environ: Mapping[str, str]) -> Diagnosis:
    value = environ.get("OMP_NUM_THREADS")
    seen = f"OMP_NUM_THREADS={value} here, but the" if value else "the"
    text = f"{seen} launcher gives every process its own number (--launcher local:threads=N, 1 by default)"
    return Diagnosis(name="threads", ok=True, text=text)


def _compiler(environ: Mapping[str, str]) -> Diagnosis:
    found = next(filter(None, map(shutil.which, (environ.get("CXX") or "g++", "g++", "clang++"))), None)
    if found:
        return Diagnosis(name="c++ compiler", ok=True, text=found)
    fix = "run `apt-get install g++` (or set CXX)"
    return Diagnosis(name="c++ compiler", ok=None, text="none found: no torch.compile on the CPU", fix=fix)


def _loopback() -> Diagnosis:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        fix = "bring the loopback interface up: `ip link set lo up`"
        return Diagnosis(name="loopback", ok=False, text=f"cannot listen on 127.0.0.1: {error}", fix=fix)
    return Diagnosis(name="loopback", ok=True, text="127.0.0.1 accepts connections")


def _shared_memory(folder: Path) -> Diagnosis:
    if not folder.is_dir():
        return Diagnosis(name="shared memory", ok=None, text=f"{folder} does not exist here")
    size_bytes = shutil.disk_usage(folder).total
    text = f"{folder} holds {size_bytes / GIB:.1f} GiB"
    if size_bytes < SHARED_MEMORY_NEEDED_BYTES:
        fix = "start the container with `--shm-size=1g` or more (Kubernetes: an emptyDir of medium Memory on /dev/shm)"
        return Diagnosis(name="shared memory", ok=False, text=f"{text}, NCCL may fail", fix=fix)
    return Diagnosis(name="shared memory", ok=True, text=text)


def _disk(results: Path) -> Diagnosis:
    folder = _existing(results)
    free_bytes = shutil.disk_usage(folder).free
    text = f"{free_bytes / GIB:.1f} GiB free under {folder}"
    if free_bytes < DISK_NEEDED_BYTES:
        return Diagnosis(name="disk", ok=False, text=text, fix="free some space or choose another place with --out")
    return Diagnosis(name="disk", ok=True, text=text)


def _writable(results: Path) -> Diagnosis:
    folder = _existing(results)
    absent = "" if results.exists() else f"{results} does not exist yet and "
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        text = f"{absent}would be created in {folder}" if absent else f"{results} can be written"
        return Diagnosis(name="results", ok=True, text=text)
    fix = "choose a folder of your own with `--out DIR`"
    text = f"{absent}cannot be created in {folder}" if absent else f"{results} cannot be written"
    return Diagnosis(name="results", ok=False, text=text, fix=fix)


def _existing(path: Path) -> Path:
    """The path itself or its nearest ancestor that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
