"""The container image: build it from the Dockerfile with any engine, and verify it before use.

`facts` runs inside the image and describes it. `problems` compares that on the host with the constraints from which the
image was built.
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
# Build tools that must not be in the image.
BUILD_TOOLS = ("cc", "gcc", "g++", "clang", "make", "cmake", "ninja", "nvcc", "ld", "git")
# Variables of directories that must be writable under a read-only root.
NEEDED_FOLDERS = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")
_REFERENCE = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,199}(@sha256:[0-9a-f]{64})?")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)$", re.MULTILINE)


def engine(requested: str | None = None) -> str:
    """Return the program that builds and runs images: the requested one, else the first that is installed."""
    if requested is not None and requested not in ENGINES:
        raise RequestError(f"--engine: got {requested!r}, expected {', '.join(ENGINES)}.")
    for name in (requested,) if requested else ENGINES:
        if shutil.which(name) is not None:
            return name
    wanted = requested or f"{', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
    raise RequestError(f"image: {wanted} is not installed here; install it, or build on another machine")


def checked(reference: str) -> str:
    """Return a reference that no engine can read as an option and that names a version, or raise RequestError."""
    if not _REFERENCE.fullmatch(reference) or reference.endswith(":latest"):
        raise RequestError(f"image: got {reference!r}, expected NAME:TAG or NAME@sha256:..., not :latest.")
    return reference


def build_command(chosen: str, context: Path, tag: str, base: str | None = None) -> list[str]:
    """Return the build command. Version and revision become labels of the image."""
    if not (context / "Dockerfile").is_file():
        raise RequestError(f"--context: got {str(context)!r}, expected a checkout with a Dockerfile.")
    arguments = {"PACELINE_VERSION": __version__, "PACELINE_REVISION": revision(context)}
    if base is not None:
        arguments["BASE_IMAGE"] = checked(base)
    words = [chosen, "build", "--file", str(context / "Dockerfile"), "--tag", checked(tag)]
    # Every registry accepts docker's format.
    words += ["--format", "docker"] if chosen != "docker" else []
    for name, value in arguments.items():
        words += ["--build-arg", f"{name}={value}"]
    return [*words, str(context)]


def revision(context: Path) -> str:
    """Return the commit of a checkout, with `-dirty` if it was modified; `unknown` outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(context), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def ask(chosen: str, reference: str) -> dict[str, Any]:
    """Return the facts of an image. Raises LaunchError if it cannot be started or prints none."""
    if chosen == "buildah":
        # It runs containers instead of images, and ignores entry points.
        done = _output(["buildah", "from", "--pull=never", checked(reference)])
        if done.returncode == 0:
            container, program = done.stdout.strip(), ["python", "-m", "paceline.cli.entry", "image", "facts"]
            try:
                done = _output(["buildah", "run", container, "--", *program])
            finally:
                _output(["buildah", "rm", container])
    else:
        # Restricted as in a cluster: no network, only /tmp.
        limits = ["--network", "none", "--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "ALL"]
        limits += ["--security-opt", "no-new-privileges"]
        done = _output([chosen, "run", "--rm", *limits, checked(reference), "image", "facts"])
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise LaunchError(f"the image {reference} does not report its facts: {lines[-1][:300]}") from None
    return result


def _output(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def facts(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describe the image from inside: user, build tools, versions, and directories that are not writable."""
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


def problems(facts: Mapping[str, Any], constraints: str) -> list[str]:
    """Return sentences about what is wrong with an image. Pinned packages that it does not contain are ignored, because
    linters are pinned too."""
    tools, unwritable, theirs = ", ".join(facts["build_tools"]), ", ".join(facts["unwritable"]), facts["paceline"]
    checks = (
        (facts["uid"] == 0, "it runs as root; expected another user"),
        (tools, f"it contains build tools: {tools}; expected none"),
        (theirs != __version__, f"it has Paceline {theirs}; expected {__version__}"),
        (unwritable, f"{unwritable} cannot be written under a read-only root"),
        ("torch" not in facts["versions"], "it has no torch"),
    )
    wrong = [sentence for is_wrong, sentence in checks if is_wrong]
    for package, version in _PIN.findall(constraints):
        name = package.lower().replace("_", "-")
        # A build of torch appends its CUDA version.
        has = facts["versions"].get(name, version).partition("+")[0]
        if has != version:
            wrong.append(f"it has {name} {has}; expected {version}")
    return wrong
