"""What a campaign will take: minutes and USD of each run and in total, predicted before it starts."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.prediction import hardware, runs, stored
from paceline.prediction.hardware import Accelerator
from paceline.prediction.predict import Prediction, predict
from paceline.results.campaign_file import EndedRun, PlannedRun, forecast_s
from paceline.wording import format_duration

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


EARLIER, PREDICTED, TIMEOUTS = "as earlier runs here", "predicted", "their timeouts"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one run will take; its timeout is a bound, not an estimate."""

    seconds: float
    device_s: float
    basis: str

    @property
    def is_bound(self) -> bool:
        return self.basis == TIMEOUTS


def expected(
    specs: Sequence[RunSpec], predicted: Mapping[str, Forecast], ended: Mapping[str, EndedRun]
) -> dict[str, Expected]:
    """Every run that has not ended: as earlier runs of its cell, model or workload took, else as predicted, else its
    timeout."""
    done = [PlannedRun.of(spec) for spec in specs if spec.run_id in ended]
    found = {}
    for spec in specs:
        if spec.run_id in ended:
            continue
        seconds, basis = forecast_s([*done, PlannedRun.of(spec)], ended, None), EARLIER
        if seconds is None and spec.run_id in predicted:
            seconds, basis = predicted[spec.run_id].seconds, PREDICTED
        elif seconds is None:
            seconds, basis = spec.timeout_s, TIMEOUTS
        found[spec.run_id] = Expected(seconds=seconds, device_s=seconds * spec.topology.world_size, basis=basis)
    return found


def total_text(runs: Collection[Expected], usd_per_hour: float | None = None) -> str:
    """`about 12 min 20 s, 3.29 USD (predicted)`; an upper bound if only the timeout of a run is known.

    >>> total_text([Expected(seconds=90.0, device_s=180.0, basis=EARLIER)], usd_per_hour=2.0)
    'about 1 min 30 s, 0.10 USD (as earlier runs here)'
    """
    usd = "" if usd_per_hour is None else f", {sum(run.device_s for run in runs) / 3600 * usd_per_hour:.2f} USD"
    how = "at most" if any(run.is_bound for run in runs) else "about"
    bases = " and ".join(dict.fromkeys(run.basis for run in runs))
    return f"{how} {format_duration(sum(run.seconds for run in runs))}{usd} ({bases})"


def budget_text(runs: Collection[Expected], budget_s: float, usd_per_hour: float | None = None) -> str:
    """The time budget and what it costs at most; the launches before the first verdict may take longer.

    >>> budget_text([Expected(seconds=90.0, device_s=180.0, basis=EARLIER)], 600.0, usd_per_hour=2.0)
    'about 10 min 00 s, 0.67 USD (time budget)'
    """
    devices = max((run.device_s / run.seconds for run in runs if run.seconds), default=0.0)
    usd = "" if usd_per_hour is None else f", {devices * budget_s / 3600 * usd_per_hour:.2f} USD"
    return f"about {format_duration(budget_s)}{usd} (time budget)"


def store(found: Sequence[Forecast], out: Path) -> None:
    """Keep the predictions beside the results, so that the report can show how right they were."""
    if found:
        stored.append(out / found[0].spec.experiment, [stored.to_dict(one.prediction) for one in found], time.time())
