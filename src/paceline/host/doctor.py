"""`paceline doctor`: checks whether this machine can run and measure, with a fix for each problem."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.host import links, machine, recommended, trust

GIB = 2**30
PYTHON_NEEDED = (3, 11)
TORCH_NEEDED, TORCH_TRIED = (2, 11), (2, 13)
DISK_NEEDED_BYTES = GIB
SHARED_MEMORY_NEEDED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of `paceline doctor`. ok is None if runs work but something is missing or unknown."""

    name: str
    ok: bool | None
    text: str
    fix: str | None = None


def checks(results: Path | str = "results", environ: Mapping[str, str] = os.environ) -> list[Diagnosis]:
    """All checks, in the order in which a user would fix them. Changes nothing on disk."""
    return [
        *_package_checks(),
        *_gpu_checks(environ),
        Diagnosis("topology", True, links.summary(machine.to_dict(machine.probe())) or "unknown"),
        *_trust_checks(environ),
        *_network_checks(environ),
        *_environment_checks(environ),
        *_storage_checks(Path(results)),
    ]


def _package_checks() -> Iterator[Diagnosis]:
    fix = None if sys.version_info[:3] >= PYTHON_NEEDED else "create a virtual environment with Python 3.11 or newer"
    yield Diagnosis("python", fix is None, ".".join(map(str, sys.version_info[:3])), fix)
    version = machine.version("torch")
    release = tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])
    if version is None:
        yield Diagnosis("torch", False, "not installed", "run `pip install 'torch>=2.11'`")
    elif release < TORCH_NEEDED:
        yield Diagnosis("torch", False, f"{version} is too old", "run `pip install --upgrade 'torch>=2.11'`")
    elif release > TORCH_TRIED:
        text = f"{version} is newer than the versions Paceline was tested with (2.11 to 2.13)"
        yield Diagnosis("torch", None, text, "run `pip install 'torch<2.14'` if a strategy misbehaves")
    else:
        yield Diagnosis("torch", True, version)
    if version := machine.version("deepspeed"):
        yield Diagnosis("deepspeed", True, version)
    else:
        fix = "run `pip install 'paceline[zero]'`"
        yield Diagnosis("deepspeed", None, "not installed: the strategy zero is not available", fix)


def _gpu_checks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    with machine.nvml() as library:
        uuids = machine.host_uuids(library)
    visible, torch = machine.visible(uuids, environ), machine.version("torch") or ""
    if not uuids:
        fix = "install the NVIDIA driver (`nvidia-smi` must list the GPU) or start the container with `--gpus all`"
        yield Diagnosis("gpu", None, "not found: runs use the CPU with gloo", fix)
    elif not visible:
        text = f"{len(uuids)} on this host, but CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES')!r} hides all"
        yield Diagnosis("gpu", None, text, "run `unset CUDA_VISIBLE_DEVICES`")
    elif torch.endswith("+cpu"):
        fix = "install a CUDA build: `pip install torch --index-url https://download.pytorch.org/whl/cu130`"
        yield Diagnosis("gpu", False, f"{len(visible)} visible, but torch {torch} cannot use them", fix)
    else:
        yield Diagnosis("gpu", True, f"{len(visible)} visible of {len(uuids)} on this host")
    if library is not None:
        yield Diagnosis("nvml", True, "works")
    elif uuids:
        fix = "run `pip install nvidia-ml-py`; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Diagnosis("nvml", False, "not working: clocks, power and other GPU processes are unknown", fix)
    else:
        yield Diagnosis("nvml", None, "no driver library and no GPU")
    if library is not None and visible:
        yield from _driver_checks(machine.probe(), [machine.neighbours(index) for index in range(len(visible))])


def _driver_checks(host: machine.Machine, neighbours: list[int | None]) -> Iterator[Diagnosis]:
    unknown = sorted({gpu.name or "a GPU without a name" for gpu in host.gpus if gpu.peak_flops is None})
    text = f"driver {host.driver}, CUDA {host.cuda}, " + ", ".join(sorted({gpu.name or "?" for gpu in host.gpus}))
    if unknown:
        fix = "add a row with its dense peaks and their source to host/gpus.toml; without it MFU is unknown"
        yield Diagnosis("driver", None, f"{text}; no known peak for {', '.join(unknown)}", fix)
    else:
        yield Diagnosis("driver", True, text)
    if busy := ", ".join(str(index) for index, count in enumerate(neighbours) if count):
        fix = f"end the processes that `nvidia-smi` lists on GPU {busy}, or exclude it with CUDA_VISIBLE_DEVICES"
        yield Diagnosis("neighbours", False, f"other processes compute on GPU {busy}", fix)
    elif any(count is None for count in neighbours):
        yield Diagnosis("neighbours", None, "the driver does not report other processes on the GPU")
    else:
        yield Diagnosis("neighbours", True, "no other process on the GPU")


def _trust_checks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """The trust light now: the checks that every run makes before it starts and while it is measured."""
    with machine.nvml() as library:
        uses_gpu = library is not None and bool(machine.visible(machine.host_uuids(library), environ))
    answers = {trust.GREEN: True, trust.AMBER: None, trust.UNKNOWN: None, trust.RED: False}
    for check in trust.before(uses_gpu=uses_gpu).checks:
        fix = check.fix and check.fix[0].lower() + check.fix[1:].removesuffix(".")
        yield Diagnosis(check.name, answers[check.level], check.text, fix)


def _network_checks(environ: Mapping[str, str], root: Path = Path("/")) -> Iterator[Diagnosis]:
    """Interfaces named by variables, and whether the settings recommended for these GPUs suit this host."""
    host, known = machine.probe(), recommended.interconnect(root)
    here = ", ".join(known.interfaces) or "none listed by the kernel"
    if unmatched := recommended.unmatched(environ, known.interfaces):
        settings = ", ".join(f"{name}={value}" for name, value in unmatched.items())
        text = f"{settings} matches no interface of this host ({here}): ranks cannot connect"
        fix = f"run `unset {' '.join(unmatched)}`" + (f", or use {known.default}" if known.default else "")
        yield Diagnosis("interfaces", False, text, fix)
    else:
        yield Diagnosis("interfaces", True, here)
    names = dict.fromkeys(gpu.name for gpu in host.gpus if gpu.name)
    for profile in dict.fromkeys(filter(None, map(recommended.of, names))):
        for setting in profile.settings:
            # This is advice, so it never fails: runs work without it.
            fit = recommended.fit(setting, known)
            note = f"; note: {setting.note}" if setting.note else ""
            text = f"{setting} is recommended for {profile.name}: {fit.text}{note}"
            yield Diagnosis("profile", True if fit.fits and not setting.note else None, text, fit.fix)


def _environment_checks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    if on := machine.debug_switches(environ):
        text = "on, so runs cannot be ranked: " + ", ".join(f"{name}={value}" for name, value in on.items())
        yield Diagnosis("debug switches", False, text, f"run `unset {' '.join(on)}`")
    else:
        yield Diagnosis("debug switches", True, "all off")
    threads = environ.get("OMP_NUM_THREADS")
    ignored = f"OMP_NUM_THREADS={threads} is ignored: the" if threads else "the"
    text = f"{ignored} launcher sets the threads of each process (--launcher local:threads=N, 1 by default)"
    yield Diagnosis("threads", True, text)
    compiler = next(filter(None, map(shutil.which, (environ.get("CXX") or "g++", "g++", "clang++"))), None)
    fix = None if compiler else "run `apt-get install g++` (or set CXX)"
    yield Diagnosis("c++ compiler", bool(compiler) or None, compiler or "not found: no torch.compile on the CPU", fix)
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        fix = "bring the loopback interface up: `ip link set lo up`"
        yield Diagnosis("loopback", False, f"cannot listen on 127.0.0.1: {error}", fix)
    else:
        yield Diagnosis("loopback", True, "127.0.0.1 accepts connections")


def _storage_checks(results: Path) -> Iterator[Diagnosis]:
    fix: str | None
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield Diagnosis("shared memory", None, f"{shared} does not exist here")
    else:
        size_bytes = shutil.disk_usage(shared).total
        is_enough = size_bytes >= SHARED_MEMORY_NEEDED_BYTES
        fix = "start the container with `--shm-size=1g` or more (Kubernetes: an emptyDir of medium Memory on /dev/shm)"
        text = f"{shared} has {size_bytes / GIB:.1f} GiB" + ("" if is_enough else ", NCCL may fail")
        yield Diagnosis("shared memory", is_enough, text, None if is_enough else fix)
    # The directory itself, or its nearest existing ancestor.
    folder = next(path for path in (results.absolute(), *results.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(folder).free
    fix = None if free_bytes >= DISK_NEEDED_BYTES else "free some space or choose another directory with --out"
    yield Diagnosis("disk", fix is None, f"{free_bytes / GIB:.1f} GiB free in {folder}", fix)
    is_writable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if results.exists():
        text = f"{results} is {'' if is_writable else 'not '}writable"
    else:
        can = "will" if is_writable else "cannot"
        text = f"{results} does not exist yet and {can} be created in {folder}"
    yield Diagnosis("results", is_writable, text, None if is_writable else "choose a directory with `--out DIR`")
