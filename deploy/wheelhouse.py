"""Build or check the offline bundle: a directory with every wheel that Paceline needs, and hashes (`make wheelhouse`).

python deploy/wheelhouse.py fill DIR     download or build the wheels, then write DIR/requirements.txt
python deploy/wheelhouse.py check DIR    install them offline into a new environment and start Paceline
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
# Needed to build Paceline's own wheel; everything else has a wheel or is built by `fill`.
TOOLS = ("setuptools>=77", "wheel")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("fill", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extras", default=EXTRAS, help="extras of paceline (default: %(default)s)")
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
    # Pin torch exactly: otherwise pip may choose a build with gigabytes of CUDA packages.
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
    # DeepSpeed is distributed as source; without this its build compiles operators and imports torch.
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, torch, f"{ROOT}[{extras}]", *TOOLS], env=env, check=True)
    lock(folder)


def lock(folder: Path) -> None:
    """Write requirements.txt with the wheels. Paceline's own is left out: it is installed from source or by name."""
    wheels = sorted(path for path in folder.glob("*.whl") if not path.name.startswith("paceline-"))
    (folder / "requirements.txt").write_text("".join(requirements(wheels)))


def requirements(wheels: Iterable[Path]) -> Iterable[str]:
    """One line per wheel. Two versions of a package are refused, because pip could choose either."""
    seen: dict[str, Path] = {}
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        known = re.sub(r"[-_.]+", "-", name).lower()
        if known in seen:
            raise SystemExit(f"found two wheels of one package: {seen[known].name} and {wheel.name}")
        seen[known] = wheel
        yield f"{known}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def check(folder: Path) -> None:
    """Install without a network, then start Paceline."""
    with tempfile.TemporaryDirectory(prefix="paceline-wheelhouse-") as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={folder}"]
        # Ignore this host's pip configuration, which could add other sources.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        env["PIP_CONFIG_FILE"] = os.devnull
        locked = str(folder / "requirements.txt")
        subprocess.run([*install, "--require-hashes", "--requirement", locked], env=env, check=True)
        subprocess.run([*install, "--no-deps", "paceline"], env=env, check=True)
        subprocess.run([python, "-m", "pip", "check"], env=env, check=True)
        subprocess.run([python, "-m", "paceline.cli", "--version"], env=env, cwd=scratch, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
