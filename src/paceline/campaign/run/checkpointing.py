"""`checkpointing: auto`: the mode that recomputes least and fits the devices, chosen before the runs have ids.

All cells of one model get the same mode, because they are compared: the one that fits the cell that needs most. What
arithmetic shows clearly is not rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.grouping import grouped
from paceline.campaign.run import rehearsed
from paceline.campaign.run.references import runs_here, unsupported
from paceline.errors import RequestError
from paceline.experiment.spec import AUTO_CHECKPOINTING, RunSpec
from paceline.host import machine
from paceline.host.memory_limit import GIB
from paceline.prediction import hardware, memory
from paceline.prediction.runs import setup_of_spec
from paceline.results.memory_components import goal_bytes

# From the least to the most that is computed twice. Selective checkpointing keeps the parts of a block from being
# compiled together, which fine-tuning gains most from.
MODES, TUNING_MODES = ("none", "selective", "full"), ("none", "full")
# Arithmetic is off by less than this factor, so what lies between is rehearsed.
DOUBT = 2.0
REHEARSAL_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether the process that needs most fits its device."""

    fits: bool
    text: str


def chosen(specs: Sequence[RunSpec], notify: Callable[[str], None]) -> list[RunSpec]:
    """The specs with the mode that each is run with. notify gets a line for each model whose mode was to be chosen."""

    def asks(spec: RunSpec) -> bool:
        return spec.training.checkpointing == AUTO_CHECKPOINTING

    modes: dict[str, str] = {}
    for model, members in grouped(filter(asks, specs), lambda spec: str(spec.model)).items():
        modes[model], why = _mode_of(members)
        notify(f"checkpointing of {members[0].model_text}: {modes[model]} ({why})")
    return [_with(spec, modes[str(spec.model)]) if asks(spec) else spec for spec in specs]


def _with(spec: RunSpec, mode: str) -> RunSpec:
    return replace(spec, training=replace(spec.training, checkpointing=mode))


def _mode_of(members: Sequence[RunSpec]) -> tuple[str, str]:
    """The mode of these runs, and why."""
    *modes, last = TUNING_MODES if members[0].tuning is not None else MODES
    why = "no other mode is supported"
    for mode in modes:
        runs = [_with(spec, mode) for spec in members]
        if any(unsupported(run, anywhere=True) for run in runs):
            continue
        fit = _fit(runs)
        if fit is None:
            return last, "the memory of the devices is not known before the runs"
        why = f"{mode} {fit.text}"
        if fit.fits:
            return mode, why
    return last, why


def _fit(runs: Sequence[RunSpec]) -> Fit | None:
    """Whether the run that needs most fits; None if the memory of its device is not known."""
    rooms = [room_bytes(run) for run in runs]
    known = [(needed_bytes(run) or 0.0, room, run) for run, room in zip(runs, rooms, strict=True) if room is not None]
    if len(known) < len(runs):
        return None
    needed, room, run = max(known, key=lambda each: (each[0] / each[1], each[2].run_id))
    goal = goal_bytes(room, None)
    # Without a number by arithmetic, only a rehearsal can tell.
    if needed and not goal / DOUBT < needed <= DOUBT * goal:
        return Fit(fits=needed < goal, text=f"needs {_gib(needed)} of {_gib(room)} by arithmetic")
    one = rehearsed.rehearse_spec(run, _major(run), REHEARSAL_S)
    if one.peak_bytes is None:
        return Fit(fits=False, text=f"may not fit: {one.reason}")
    return Fit(fits=one.peak_bytes <= goal, text=f"needs {_gib(one.peak_bytes)} of {_gib(room)} in a rehearsal")


def needed_bytes(spec: RunSpec) -> float | None:
    """The memory of one process by arithmetic; None where there is none."""
    try:
        device = hardware.ANY_CPU
        if spec.topology.device == "cuda":
            device = hardware.accelerator(next((gpu.name for gpu in machine.probe().gpus if gpu.name), ""))
        setup = setup_of_spec(spec, device)
    except RequestError:
        return None
    return None if setup is None else memory.total(setup)


def room_bytes(spec: RunSpec) -> int | None:
    """The memory that one process of a run may use; None if its device is not known before it starts."""
    limit = spec.workload.options.get("limit_gib")
    if limit is not None:
        return int(float(limit) * GIB)
    if not runs_here(spec):
        return None
    facts, shares = machine.probe(), spec.topology.processes_per_node
    if spec.topology.device == "cpu":
        return facts.memory_bytes and facts.memory_bytes // shares
    whole = min((gpu.memory_bytes for gpu in facts.gpus if gpu.memory_bytes), default=None)
    return whole and whole // (shares if spec.launcher.options.get("shared_gpu") else 1)


def _major(spec: RunSpec) -> int:
    known = [gpu.capability for gpu in machine.probe().gpus if gpu.capability]
    return int(known[0].partition(".")[0]) if spec.topology.device == "cuda" and known else 0


def _gib(size: float) -> str:
    return f"{size / GIB:,.3g} GiB"
