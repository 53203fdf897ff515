"""The offline bundle: every wheel that Paceline needs, in one folder, with hashes (`make wheelhouse`).

python deploy/wheelhouse.py fill DIR     fetch or build the wheels, then write DIR/requirements.txt
python deploy/wheelhouse.py check DIR    install them into a new environment without an index, and start Paceline
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "zero,finetune,kubernetes,ray"
# What building Paceline's own wheel needs; the rest has wheels, or is built while the bundle is filled.
TOOLS = ("setuptools>=77", "wheel")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("fill", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", default=EXTRAS, help="of paceline, by default %(default)s")
    arguments = parser.parse_args(argv[1:])
    if arguments.action == "fill":
        fill(arguments.folder, arguments.extras)
    else:
        check(arguments.folder)
    return 0


def fill(folder: Path, extras: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("requirements.txt")):
        old.unlink()
    constraints = ROOT / "constraints.txt"
    # torch by its exact version, or pip may choose a build with gigabytes of CUDA packages.
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--wheel-dir",
        str(folder),
        "--constraint",
        str(constraints),
    ]
    # DeepSpeed comes as source; without this it would compile, and ask for torch while it is built.
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, torch, f"{ROOT}[{extras}]", *TOOLS], env=env, check=True)
    lock(folder)


def lock(folder: Path) -> None:
    """Write down which wheels these are. Paceline's own is left out: it is installed from its source, or by name."""
    wheels = sorted(path for path in folder.glob("*.whl") if not path.name.startswith("paceline-"))
    (folder / "requirements.txt").write_text("".join(requirements(wheels)))


def requirements(wheels: Iterable[Path]) -> Iterable[str]:
    """One line per wheel; a name in two versions is refused, because pip would take either."""
    seen: dict[str, Path] = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        known = re.sub(r"[-_.]+", "-", name).lower()
        if known in seen:
            raise SystemExit(f"two wheels of one package: {seen[known].name} and {wheel.name}")
        seen[known] = wheel
        yield f"{known}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def check(folder: Path) -> None:
    """Install as a host without a network would, and start what was installed."""
    with tempfile.TemporaryDirectory(prefix="paceline-wheelhouse-") as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={folder}"]
        # What this host's pip is told elsewhere would be found beside the folder.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        env["PIP_CONFIG_FILE"] = os.devnull
        locked = str(folder / "requirements.txt")
        subprocess.run([*install, "--require-hashes", "--requirement", locked], env=env, check=True)
        subprocess.run([*install, "--no-deps", "paceline"], env=env, check=True)
        subprocess.run([python, "-m", "pip", "check"], env=env, check=True)
        subprocess.run([python, "-m", "paceline.cli", "--version"], env=env, cwd=scratch, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
