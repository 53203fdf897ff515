"""Memory of a predicted setup by rehearsal: the real program on fake tensors, in a process with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import yaml

from paceline.errors import RequestError
from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.prediction import experiment_file, hardware
from paceline.prediction.setup import Setup

# Compute capability of each generation, as far as the size of cuBLAS's workspace depends on it.
_MAJOR = {"cpu": 0, "volta": 7, "ampere": 8, "ampere-small": 8, "ada": 8, "hopper": 9, "blackwell": 10}
# Programs that need as much memory as Paceline's own run.
_OWN_PROGRAMS = ("generic", "paceline", "peft")


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """Bytes by component with their peak, or the reason why there is no rehearsal."""

    components: Mapping[str, int] | None
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """As JSON: where the memory of a prediction comes from, and its bytes if it was rehearsed."""
        if self.components is None:
            return {"memory_source": f"arithmetic: {self.reason}"}
        return {"memory_source": "rehearsal", "rehearsed_memory_bytes": dict(self.components)}

    @property
    def peak_bytes(self) -> int | None:
        return None if self.components is None else self.components["peak"]


def refusal(one: Setup) -> str | None:
    """Why a setup cannot be rehearsed; None if it can."""
    if one.software.name not in _OWN_PROGRAMS:
        return f"{one.software.name} is not Paceline's program"
    if one.gpu.generation not in _MAJOR:
        return f"the kernels of {one.gpu.name} are not known"
    if find_spec("torch") is None:
        return "torch is not installed"
    return experiment_file.runnable(one)


def rehearse(model: str, one: Setup, limit_s: float) -> Rehearsed:
    """Rehearse a setup for at most limit_s seconds; without a result the reason says why."""
    reason = refusal(one) if limit_s > 0 else "--rehearse is 0"
    if reason is not None:
        return Rehearsed(components=None, reason=reason)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "setup.yaml"
        document = experiment_file.document(model, [one], "rehearsal", 1)
        document["base"]["device"] = "cpu" if one.gpu.name == hardware.CPU else "cuda"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        try:
            spec = expansion.load(str(path))[0]
        except RequestError as unsupported:
            return Rehearsed(components=None, reason=str(unsupported).rstrip("."))
    return rehearse_spec(spec, _MAJOR[one.gpu.generation], limit_s)


def rehearse_spec(spec: RunSpec, major: int, limit_s: float) -> Rehearsed:
    """Rehearse a run for at most limit_s seconds; without a result the reason says why. major: the first number of the
    GPU's compute capability, 0 for a CPU."""
    command = [sys.executable, "-m", "paceline.workloads.memory.rehearse_spec", str(major)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(spec.to_dict()),
            env=env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Rehearsed(components=None, reason=f"the rehearsal took longer than {limit_s:g} s (--rehearse)")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return Rehearsed(components=None, reason=f"the rehearsal failed: {last[0][:200]}")
    components = {name: size for name, size in json.loads(done.stdout).items() if size is not None}
    return Rehearsed(components=components)
