"""What a campaign will take: minutes and USD of each run and in total, predicted before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.prediction import hardware, runs, stored
from paceline.prediction.hardware import Accelerator
from paceline.prediction.predict import Prediction, predict

# Process start, model construction, compilation and reports of one run, in seconds; compiling adds the second.
START_S, COMPILE_S = 40.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """One run as predicted. seconds include start and warm-up; low and high follow from the step time."""

    spec: RunSpec
    prediction: Prediction
    seconds: float
    low_s: float
    high_s: float

    def usd(self, usd_per_gpu_hour: float) -> float:
        return self.seconds / 3600 * self.spec.topology.world_size * usd_per_gpu_hour


def gpu_here(name: str | None) -> Accelerator | None:
    """The GPU of this name, or the one kind of GPU of this machine; None if it has none that is known."""
    if name is not None:
        return hardware.accelerator(name)
    seen = {gpu.name for gpu in machine.probe().gpus if gpu.name}
    try:
        return hardware.accelerator(seen.pop()) if len(seen) == 1 else None
    except RequestError:
        return None


def forecast(specs: Sequence[RunSpec], gpu: Accelerator) -> list[Forecast]:
    """Each run that trains on GPUs, in order; the others cannot be predicted."""
    setups = [(spec, setup) for spec in specs if (setup := runs.setup_of_spec(spec, gpu)) is not None]
    found = []
    for (spec, _), one in zip(setups, predict([setup for _, setup in setups]), strict=True):
        start = START_S + (COMPILE_S if spec.training.compile else 0.0)
        seconds = (start + spec.steps * t for t in (one.step_s, one.low_s, one.high_s))
        value, low, high = seconds
        found.append(Forecast(spec=spec, prediction=one, seconds=value, low_s=low, high_s=high))
    return found


def store(found: Sequence[Forecast], out: Path) -> None:
    """Keep the predictions beside the results, so that the report can show how right they were."""
    if found:
        stored.append(out / found[0].spec.experiment, [stored.to_dict(one.prediction) for one in found], time.time())
