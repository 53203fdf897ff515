"""The container image: built from the Dockerfile by whichever engine is there, and looked into before it is trusted.

`facts` is asked inside an image and says what it is; `problems` judges that on the host, against the constraints the
image was built from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.errors import LaunchError, RequestError

ENGINES = ("docker", "podman", "buildah")
# What could build something in an image that shall only run: its absence is part of what is verified.
BUILD_TOOLS = ("cc", "gcc", "g++", "clang", "make", "cmake", "ninja", "nvcc", "ld", "git")
# What a node must be able to write to under a read-only root.
NEEDED_FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")
_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,199}(@sha256:[0-9a-f]{64})?")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)


def engine(asked: str | None = None) -> str:
    """The program that builds and runs images here: the one asked for, else the first of those known."""
    if asked is not None and asked not in ENGINES:
        raise RequestError(f"--engine: got {asked!r}, expected {', '.join(ENGINES)}.")
    for name in (asked,) if asked else ENGINES:
        if shutil.which(name) is not None:
            return name
    wanted = asked or ", ".join(ENGINES[:-1]) + f" and {ENGINES[-1]}"
    none = "is not" if asked else "none is"
    raise RequestError(f"image: of {wanted} {none} installed here; install one, or build where one is")


def checked(reference: str) -> str:
    """A name that no engine can take for an option, and that says which version it is."""
    if not _REFERENCE.fullmatch(reference) or reference.endswith(":latest"):
        raise RequestError(f"image: {reference!r} was given; accepted is NAME:TAG or NAME@sha256:..., and not :latest")
    return reference


def build_command(chosen: str, context: Path, tag: str, base: str | None = None) -> list[str]:
    """The engine's command. Version and revision stand in the labels of the image."""
    if not (context / "Dockerfile").is_file():
        raise RequestError(f"--context: {str(context)!r} was given, which has no Dockerfile; accepted is a checkout")
    arguments = {"PACELINE_VERSION": __version__, "PACELINE_REVISION": revision(context)}
    if base is not None:
        arguments["BASE_IMAGE"] = checked(base)
    words = [chosen, "build", "--file", str(context / "Dockerfile"), "--tag", checked(tag)]
    # OCI's own format drops nothing we need, and docker's is what every registry takes.
    words += ["--format", "docker"] if chosen != "docker" else []
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    return [*words, str(context)]


def revision(context: Path) -> str:
    """The commit of a checkout, `-dirty` where it was changed since; `unknown` outside one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(context), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_command(chosen: str, reference: str) -> list[str]:
    """Ask an image what it is as strictly as a cluster would run it: no network, nothing to write to but /tmp."""
    limits = ["--network", "none", "--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "ALL"]
    limits += ["--security-opt", "no-new-privileges"]
    return [chosen, "run", "--rm", *limits, checked(reference), "image", "facts"]


def ask(chosen: str, reference: str) -> dict[str, Any]:
    """What the image says of itself; LaunchError where it cannot be started or says nothing."""
    done = _asked_buildah(reference) if chosen == "buildah" else _output(run_command(chosen, reference))
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise LaunchError(f"the image {reference} says nothing of itself: {words[-1][:300]}") from None
    return found


def _asked_buildah(reference: str) -> subprocess.CompletedProcess[str]:
    """buildah runs containers, not images, and not their entry points."""
    made = _output(["buildah", "from", "--pull=never", checked(reference)])
    if made.returncode:
        return made
    container = made.stdout.strip()
    try:
        return _output(["buildah", "run", container, "--", "python", "-m", "paceline.cli.entry", "image", "facts"])
    finally:
        _output(["buildah", "rm", container])


def _output(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Asked inside: who runs here, what could compile, which versions, and what can be written to."""
    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in metadata.distributions()}
    return {
        "paceline": __version__,
        "uid": os.getuid(),
        "build_tools": [tool for tool in BUILD_TOOLS if shutil.which(tool) is not None],
        "versions": dict(sorted(installed.items())),
        "unwritable": [name for name in NEEDED_FOLDERS if not _can_write(environ.get(name))],
    }


def _can_write(folder: str | None) -> bool:
    if not folder:
        return False
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def pins(constraints: str) -> dict[str, str]:
    return {name.lower().replace("_", "-"): version for name, version in _PIN.findall(constraints)}


def problems(found: Mapping[str, Any], constraints: str) -> list[str]:
    """Sentences for what is wrong with an image; none for one that may be used. A pin that is not in it is no matter:
    linters are pinned too."""
    wrong = []
    if found["uid"] == 0:
        wrong.append("it runs as root; accepted is a user of its own")
    if found["build_tools"]:
        wrong.append(f"it can build: {', '.join(found['build_tools'])} is in it; accepted is none")
    if found["paceline"] != __version__:
        wrong.append(f"it has Paceline {found['paceline']}; accepted is {__version__}")
    if found["unwritable"]:
        wrong.append(f"nothing can be written to {', '.join(found['unwritable'])} under a read-only root")
    if "torch" not in found["versions"]:
        wrong.append("it has no torch")
    for name, version in pins(constraints).items():
        # A build of torch names its CUDA behind the version.
        has = found["versions"].get(name, version).partition("+")[0]
        if has != version:
            wrong.append(f"it has {name} {has}; accepted is {version}")
    return wrong
